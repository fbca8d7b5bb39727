package main

// mutations are lines whose mistakes have been made, or are easily made: the end of a range, a
// check left out, a comparison the other way round.
var mutations = []mutation{
	{"host", "backend/host/collect.go", "lines := (block.len() + perLine - 1) / perLine",
		"lines := block.len() / perLine", nil},
	{"host", "backend/host/collect.go", "if n, from, to := piece(c.rank, c.rank); n > 0 {",
		"if n, from, to := piece(c.rank, c.rank); n > 1 {", nil},
	{"host", "backend/host/wait.go", ".posted.Load() >= step", ".posted.Load()+1 >= step", nil},
	{"host", "backend/host/comm.go", "stride := (nbytes + page - 1) / page * page",
		"stride := nbytes", nil},

	{"gpu", "internal/gpu/ncclcalls.go", "case d.Float() && P&(P-1) == 0:", "case d.Float():", nil},
	{"gpu", "internal/gpu/ncclcalls.go", "return r * k.count / k.P, (r + 1) * k.count / k.P",
		"return r * (k.count / k.P), (r + 1) * (k.count / k.P)", nil},
	{"gpu", "internal/gpu/ncclcalls.go", "if p == k.rank && out.Addr() == in.Addr() {",
		"if p == k.rank {", nil},
	{"gpu", "internal/gpu/ncclcalls.go", "case k.what.Kind == backend.Reduce && k.rank != " +
		"k.what.Root:", "case k.what.Kind == backend.Reduce && k.rank == k.what.Root:", nil},

	{"group", "internal/group/arbiter.go", "case len(absent) == 0:", "case len(absent) <= 1:",
		nil},
	{"group", "internal/group/arbiter.go", "if p == m.rank || begun >= l.Wants {",
		"if p == m.rank || begun > l.Wants {", nil},
	{"group", "internal/group/memory.go", "theirs.posted.Load()+2*ahead >= seq+ringSlots",
		"theirs.posted.Load() >= seq+ringSlots", nil},
	{"group", "internal/group/report.go", "of.Blames() >= 0", "of.Blames() > 0", nil},

	{"sparse", "backend/compress/sparse/select.go",
		"if m < c.above || m == c.above && c.ties == 0 {", "if m < c.above {", nil},
	{"sparse", "backend/compress/sparse/select.go", "for ; s.coarse[at] < k; at-- {",
		"for ; s.coarse[at] <= k; at-- {", nil},
	{"sparse", "backend/compress/sparse/select.go", "if divisor == 1 {", "if divisor <= 2 {", nil},
	{"sparse", "backend/compress/sparse/message.go", "return (n + unit - 1) / unit * unit",
		"return n / unit * unit", nil},

	{"rendezvous", "rendezvous/frame.go", "if u.bad || n > len(u.rest) {",
		"if u.bad || n > len(u.rest)+1 {", nil},
	{"rendezvous", "rendezvous/handshake.go", "client.rank < 1 || client.rank >= server.size",
		"client.rank < 0 || client.rank >= server.size", nil},
	{"rendezvous", "rendezvous/core.go", "if isSet != (old != nil) || !bytes.Equal(current, old) {",
		"if isSet != isSet || !bytes.Equal(current, old) {", nil},
	{"rendezvous", "rendezvous/join.go", "len(e.Token) < minToken", "len(e.Token) < 1", nil},

	{"nonfinite", "internal/kernels/pools.go", "if m != T(math.Inf(-1)) {", "if m == m {", nil},
	{"nonfinite", "internal/kernels/simd/angle.go", "		eighths++", "",
		[]string{"./kernels/fuse", "./internal/kernels/simd"}},
	{"nonfinite", "internal/kernels/simd/windows.go", "if seen > most[i] || seen != seen {",
		"if seen > most[i] {", nil},
	{"nonfinite", "internal/vm/read/rectify.go", "if !b.rectifiers[mask] {",
		"if !b.rectifiers[mask] || true {", []string{"./vm"}},
	{"nonfinite", "ops/nn/crossentropy.go", "each = b.Do(fuse.Where, t.right, each, t.others)",
		"each = b.Do(fuse.Mul, each, t.right)", []string{"./ops/nn", "./vm"}},
	{"nonfinite", "internal/program/expressions.go", "b.Do(fuse.Sub, variance, variance))",
		"b.Do(fuse.Sub, scale, scale))", []string{"./ops/nn", "./vm"}},

	{"plan", "internal/vm/plan/group.go", "_, _, way := g.search(earlier(a, b))\n\treturn way",
		"return false", []string{"./vm"}},
	{"plan", "internal/vm/plan/group.go", "g.order.moveBehind(aside, a.prev)", "",
		[]string{"./vm"}},
	{"plan", "internal/vm/plan/memory.go", " || b.DType != dst.DType {", " {", []string{"./vm"}},
}
