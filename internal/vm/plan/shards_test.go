package plan

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// sharded plans exp(x v w), of 16 elements each, for a rank of some, with both gradients in one
// bucket or in two, which are of 5 elements more than the ranks divide.
func sharded(t *testing.T, rank, ranks int, placed bool, change func(*lower.Solver),
	buckets ...int) *Plan {
	t.Helper()
	p, dv, dw := backward()
	of := make([]lower.Shard, 2)
	for i := range of {
		n := 16
		if buckets[0] == buckets[1] {
			n, of[i].First = 32, 16*i
		}
		of[i].Rank, of[i].Ranks, of[i].Chunk, of[i].Placed = rank, ranks, (n+5)/ranks, placed
		of[i].From, of[i].To = own(&of[i], 16)
	}
	updates := []lower.Update{{Input: 1, Gradient: dv, Kept: 1, Bucket: buckets[0], Shard: &of[0],
		Rule: descent}, {Input: 2, Gradient: dw, Kept: 1, Bucket: buckets[1], Shard: &of[1],
		Rule: descent}}
	solver := lower.Solver{Updates: updates}
	if change != nil {
		change(&solver)
	}
	planned := p.trained(t, solver)
	require.NoError(t, require.Err(Plain(&p.Program, solver)))
	return planned
}

// own returns the elements of a variable of n that a rank updates.
func own(s *lower.Shard, n int) (from, to int) {
	at := func(rank int) int { return min(max(rank*s.Chunk-s.First, 0), n) }
	return at(s.Rank), at(s.Rank + 1)
}

// TestShards: a bucket is reduce-scattered, a rank updates its shards with vectors of these alone,
// and all variables are gathered. A bucket in the arena is scattered before the one after the next
// begins.
func TestShards(t *testing.T) {
	const update, both = "update", "update of 2"
	backwards := []string{"matmul NN", "matmul NN", "loop exp", "matmul TN"}
	apart := []string{"reduce-scatter bucket 0", "matmul NT", "matmul TN",
		"reduce-scatter bucket 1"}
	clip := func(s *lower.Solver) { s.Limit, s.Parts = 1, true }
	end := []string{"all-gather bucket 1", "receive shards of bucket 0", "assign",
		"receive shards of bucket 1", "assign"}
	for _, test := range []struct {
		name        string
		rank, ranks int
		placed      bool
		change      func(*lower.Solver)
		buckets     []int
		want        []string
	}{
		{"two buckets", 1, 3, false, nil, []int{2, 1},
			slices.Concat(apart, []string{"receive shard of bucket 0", update,
				"all-gather bucket 0", "receive shard of bucket 1", update}, end)},
		{"two buckets in the arena", 1, 3, true, nil, []int{2, 1},
			slices.Concat(apart, []string{"receive shard of bucket 0", update,
				"all-gather bucket 0", "receive shard of bucket 1", update}, end)},
		{"nothing", 3, 3, true, nil, []int{2, 1},
			slices.Concat(apart, []string{"receive shard of bucket 0", "all-gather bucket 0",
				"receive shard of bucket 1"}, end)},
		{"one bucket", 1, 3, false, nil, []int{1, 1},
			[]string{"matmul NT", "matmul TN", "reduce-scatter bucket 0",
				"receive shard of bucket 0", both, "all-gather bucket 0",
				"receive shards of bucket 0", "assign of 2"}},
		{"one in one bucket", 0, 3, true, nil, []int{1, 1},
			[]string{"matmul NT", "matmul TN", "reduce-scatter bucket 0",
				"receive shard of bucket 0", update, "all-gather bucket 0",
				"receive shards of bucket 0", "assign of 2"}},
		{"clipped", 1, 3, true, clip, []int{1, 1},
			[]string{"matmul NT", "matmul TN", "reduce-scatter bucket 0",
				"receive shard of bucket 0", "squares of 2", "loop norm",
				"sum of the squares of all parts", "loop norm", both, "all-gather bucket 0",
				"receive shards of bucket 0", "assign of 2"}},
		{"clipped, and nothing here", 3, 3, false, clip, []int{1, 1},
			[]string{"matmul NT", "matmul TN", "reduce-scatter bucket 0",
				"receive shard of bucket 0", "loop norm", "sum of the squares of all parts",
				"loop norm", "all-gather bucket 0", "receive shards of bucket 0", "assign of 2"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			planned := sharded(t, test.rank, test.ranks, test.placed, test.change, test.buckets...)
			names := opsOf(planned)
			require.Check(t, slices.Equal(names, append(backwards, test.want...)),
				"the steps are\n%v, want %q", planned, test.want)
			kept, want, beside := 0, 0, 0
			for _, u := range planned.Updates {
				want += 4 * (u.Shard.To - u.Shard.From)
			}
			for _, b := range planned.Buffers {
				switch {
				case b.Kind == State:
					kept += b.Bytes
				case b.Kind == FullBucket || b.Kind == Gradient && b.Within == 0:
					beside += b.Bytes
				}
			}
			require.Check(t, kept == want && beside == 0 == test.placed,
				"the rank keeps %d bytes, want %d, and %d of gradients beside the arena", kept,
				want, beside)
		})
	}
}

// TestShardsBesideTheBackwardPass: a bucket is updated and gathered while the gradients of the ones
// before it are computed. In the arena its variables get their values, and its memory is free, when
// nothing reads them any more.
func TestShardsBesideTheBackwardPass(t *testing.T) {
	p := &program{}
	var weights, hidden, gradients []ir.ID
	h := p.input(0, 4, 4)
	for i := range 4 {
		weights, hidden = append(weights, p.input(1+i, 4, 4)), append(hidden, h)
		h = p.add(ir.MatMul{}, ir.Of(4, 4), h, weights[i])
	}
	for i := 3; i >= 0; i-- {
		gradients = append(gradients, p.add(ir.MatMul{TransA: true}, ir.Of(4, 4), hidden[i], h))
		h = p.add(ir.MatMul{TransB: true}, ir.Of(4, 4), h, weights[i])
	}
	for _, placed := range []bool{false, true} {
		var updates []lower.Update
		for i, gradient := range gradients {
			updates = append(updates, lower.Update{Input: 4 - i, Gradient: gradient, Kept: 1,
				Bucket: 1 + i, Rule: descent, Shard: &lower.Shard{From: 8, To: 16, Chunk: 8,
					Rank: 1, Ranks: 2, Placed: placed}})
		}
		planned := p.planned(t, updates...)
		at := func(name string) int {
			return slices.IndexFunc(planned.Steps, func(s Step) bool {
				return s.Op.String() == name
			})
		}
		for k := range 2 {
			left, begun := at(fmt.Sprint("reduce-scatter bucket ", k+1)), at(fmt.Sprint(
				"all-gather bucket ", k))
			next, back := at(fmt.Sprint("reduce-scatter bucket ", k+2)), at(fmt.Sprint(
				"receive shards of bucket ", k))
			last := at("reduce-scatter bucket 3")
			require.Check(t, begun >= left && begun <= next && (back < last) == (placed &&
				k == 0), "placed %v, bucket %d:\n%v", placed, k, planned)
			if send := planned.Steps[begun].Op.(Send); send.Products == 0 {
				t.Errorf("placed %v: %v is beside no product in\n%v", placed, send, planned)
			}
		}
	}
}

// TestUpdatesBesideTheLastReduceScatter: of as many elements as the last bucket has, updates wait
// for it to leave, and begin their all-gathers behind its reduce-scatter.
func TestUpdatesBesideTheLastReduceScatter(t *testing.T) {
	// the others have 16, the last one 4 for each word
	for words, held := range map[int]int{1: 1, 8: 2, 11: 2, 12: 3} {
		p := &program{}
		hidden := []ir.ID{p.input(0, 4, words)}
		weights := []ir.ID{p.input(1, words, 4)}
		for i := 1; i < 4; i++ {
			hidden = append(hidden, p.add(ir.MatMul{}, ir.Of(4, 4), hidden[i-1], weights[i-1]))
			weights = append(weights, p.input(1+i, 4, 4))
		}
		h, updates := p.add(ir.MatMul{}, ir.Of(4, 4), hidden[3], weights[3]), []lower.Update(nil)
		for i := 3; i >= 0; i-- {
			rows := 4
			if i == 0 {
				rows = words
			}
			gradient := p.add(ir.MatMul{TransA: true}, ir.Of(rows, 4), hidden[i], h)
			updates = append(updates, lower.Update{Input: 1 + i, Gradient: gradient, Kept: 1,
				Bucket: 4 - i, Rule: descent, Shard: &lower.Shard{From: 2 * rows, To: 4 * rows,
					Chunk: 2 * rows, Rank: 1, Ranks: 2}})
			if i > 0 {
				h = p.add(ir.MatMul{TransB: true}, ir.Of(4, 4), h, weights[i])
			}
		}
		planned := p.planned(t, updates...)
		var behind []string
		for _, s := range planned.Steps {
			switch op := s.Op.(type) {
			case Send:
				if behind != nil || op.String() == "reduce-scatter bucket 3" {
					behind = append(behind, op.String())
				}
			}
		}
		want := []string{"reduce-scatter bucket 3"}
		for bucket := 3 - held; bucket < 4; bucket++ {
			want = append(want, fmt.Sprint("all-gather bucket ", bucket))
		}
		require.Check(t, slices.Equal(behind, want), "a last bucket of %d: %q, want %q, in\n%v",
			4*words, behind, want, planned)
	}
}

// gathering plans a perceptron of n layers, of which a rank of three has a shard each, the last one
// none.
func gathering(t *testing.T, n, rank int, a lower.Accumulation) *Plan {
	t.Helper()
	p := &program{}
	var weights, hidden []ir.ID
	solver := lower.Solver{Accumulation: a}
	h := p.input(0, 4, 4)
	for i := range n {
		weights, hidden = append(weights, p.input(1+i, 4, 4)), append(hidden, h)
		h = p.unary(fuse.Tanh, p.add(ir.MatMul{}, ir.Of(4, 4), h, weights[i]))
	}
	p.Results = []ir.ID{h}
	for i := n - 1; i >= 0; i-- {
		gradient := p.add(ir.MatMul{TransA: true}, ir.Of(4, 4), hidden[i], h)
		h = p.add(ir.MatMul{TransB: true}, ir.Of(4, 4), h, weights[i])
		s := &lower.Shard{Chunk: 8, Rank: rank, Ranks: 3, Placed: !a.Several(), FullyShard: true}
		s.From, s.To = own(s, 16)
		solver.Updates = append(solver.Updates, lower.Update{Input: 1 + i, Gradient: gradient,
			Kept: 1, Bucket: n - i, Rule: descent, Shard: s})
	}
	planned := p.trained(t, solver)
	require.NoError(t, require.Err(Plain(&p.Program, solver)))
	return planned
}

// TestShardsOfVariables: variables are gathered before they are read, forward and backward, one
// behind the other without a break, two stay, and a rank has its shards of them alone.
func TestShardsOfVariables(t *testing.T) {
	const n = 6
	for _, a := range []lower.Accumulation{{}, {Runs: 3}} {
		for rank := range 3 {
			planned := gathering(t, n, rank, a)
			broken := *planned
			broken.Steps = slices.Clone(planned.Steps)
			for i, s := range broken.Steps {
				if s.Op.String() == "pack" && i > 0 { // of the first variable that is gathered
					broken.Steps[i].Args = planned.Steps[0].Args
				}
			}
			if err := Verify(&broken); (err == nil || !strings.Contains(err.Error(),
				"is not")) && rank < 2 {
				t.Errorf("rank %d: %v in\n%v", rank, err, &broken)
			}
			gathers, last, bytes := 0, 0, 0
			for i, s := range planned.Steps {
				if send, ok := s.Op.(Send); ok && send.Kind == backend.AllGather {
					gathers, last = gathers+1, i
				}
			}
			under, most := 0, 0
			for i, s := range planned.Steps[:last] {
				if send, ok := s.Op.(Send); ok && send.Kind == backend.AllGather {
					under++
				} else if of, ok := s.Op.(Receive); ok && of.Kind == backend.AllGather {
					under--
				}
				if most = max(most, under); most > 0 && under == 0 || under > prefetchedBuckets {
					t.Errorf("rank %d: %d gathers are under way behind step %d of\n%v", rank, under,
						i, planned)
				}
			}
			for _, b := range planned.Buffers {
				if b.Kind == Input && b.Index > 0 {
					bytes += b.Bytes
				}
			}
			// 6 forward, of which 2 stay, and those of the first input's gradient need none
			if want := planned.Updates[0].Shard; gathers != n+n-2-1 && gathers != n+n-2 ||
				bytes != n*4*(want.To-want.From) || planned.Steps[last].Runs != 0 {
				t.Errorf("rank %d has %d bytes of variables, and %d gathers:\n%v", rank, bytes,
					gathers, planned)
			}
		}
	}
}

// TestShardsOfRandomProgramsAreProven: of each kind, also with as little memory as possible, which
// is then enough; and all ranks exchange in the same order, also where they have other numbers of
// runs.
func TestShardsOfRandomProgramsAreProven(t *testing.T) {
	const ranks = 3
	for seed := range uint64(150) {
		var order []string
		for rank := range ranks {
			r := rand.New(rand.NewPCG(seed, 5))
			p := random(r, 13)
			solver := randomShards(r, p,
				lower.Shard{Rank: rank, Ranks: ranks, FullyShard: r.IntN(3) > 0,
					Mirrored: r.IntN(3) == 0})
			planned, err := Trained(&p.Program, solver)
			limits := Standard()
			if limits.Memory = -1; err == nil {
				err = planned.Doubt
			}
			least, other := limits.New(prove, &p.Program, solver)
			if err == nil && other == nil {
				limits.Memory = least.occupied()
				least, err = limits.New(prove, &p.Program, solver)
				if err == nil && (least.Doubt != nil || least.occupied() > limits.Memory) {
					err = fmt.Errorf("%w in %d bytes: %v", least.Doubt, limits.Memory, least)
				}
			} else {
				err = errors.Join(err, other)
			}
			require.That(t, err == nil, "program %d, rank %d: %v in\n%v", seed, rank, err, planned)
			for _, s := range slices.Concat(planned.Steps, least.Steps) {
				gathers := regexp.MustCompile("pack|gather|shards of").MatchString(s.Op.String())
				if idle := s.Runs.Has(ir.Idle); idle != (gathers && solver.Accumulation.Idles) {
					t.Errorf("program %d: %v is in idle runs: %v", seed, s.Op, idle)
				}
			}
			exchanges := slices.Concat(planned.Common(), least.Common())
			require.That(t, rank <= 0 || slices.Equal(exchanges, order),
				"program %d: %q on rank %d, %q before", seed, exchanges, rank, order)
			order = exchanges
		}
	}
}

// randomShards are updates of the variables of a random program by random gradients, in buckets of
// which ranks have shards.
func randomShards(r *rand.Rand, p *program, of lower.Shard) (solver lower.Solver) {
	a := lower.Accumulation{Runs: r.IntN(4)}
	if of.Mirrored { // ranks run 2, 2 and 1
		a = lower.Accumulation{First: 2 * of.Rank, Runs: min(2, 5-2*of.Rank), All: 5, Tree: true,
			Apart: true, Idles: of.FullyShard}
	}
	of.Placed = !of.Mirrored && !a.Several() && (of.FullyShard || r.IntN(2) == 0)
	of.Persistent = of.FullyShard && !of.Mirrored && r.IntN(4) == 0
	limit, pad, n := float64(r.IntN(2)), r.IntN(4), p.Values[0].Shape.Size()
	end := []int{0} // by bucket
	for i := range 3 {
		if i > 0 && r.IntN(3) > 0 {
			end = append(end, 0)
		}
		gradient := ir.ID(r.IntN(len(p.Values)))
		if p.Values[gradient].Shape.Size() != n {
			gradient = ir.ID(i)
		}
		s, b := of, len(end)
		s.First, end[b-1] = end[b-1], end[b-1]+n
		solver.Updates = append(solver.Updates, lower.Update{Input: i, Gradient: gradient, Kept: 1,
			Rule: descent, Bucket: b, Shard: &s})
	}
	solver.Accumulation, solver.Limit, solver.Parts = a, limit, limit > 0
	for _, u := range solver.Updates {
		u.Shard.Chunk = (end[u.Bucket-1] + pad + of.Ranks - 1) / of.Ranks
		u.Shard.From, u.Shard.To = own(u.Shard, n)
	}
	return solver
}

// TestVerifyFindsGathersThatMeet: one that comes back twice, two in one place, one that nobody
// waits for.
func TestVerifyFindsGathersThatMeet(t *testing.T) {
	planned := gathering(t, 6, 2, lower.Accumulation{})
	var gathers, ends []int
	for i, s := range planned.Steps {
		if send, ok := s.Op.(Send); ok && send.Kind == backend.AllGather {
			gathers = append(gathers, i)
		} else if of, ok := s.Op.(Receive); ok && of.Kind == backend.AllGather {
			ends = append(ends, i)
		}
	}
	for what, damage := range map[string]func(p *Plan){
		"twice: written over": func(p *Plan) {
			p.Steps = slices.Insert(p.Steps, ends[0]+1, p.Steps[ends[0]])
		},
		"in one place: written over": func(p *Plan) {
			p.Buffers[p.Steps[gathers[1]].Dsts[0].Buffer].Offset =
				p.Buffers[p.Steps[gathers[0]].Dsts[0].Buffer].Offset
		},
		"begun twice: has been sent": func(p *Plan) {
			p.Steps = slices.Insert(p.Steps, gathers[0]+1, p.Steps[gathers[0]])
		},
		"in the end: nobody waits": func(p *Plan) {
			p.Steps = append(p.Steps, p.Steps[gathers[len(gathers)-1]])
		},
	} {
		broken := *planned
		broken.Steps, broken.Buffers = slices.Clone(planned.Steps), slices.Clone(planned.Buffers)
		damage(&broken)
		to := make([]int, len(planned.Steps)) // where steps are now
		for i := range broken.Steps {
			s := &broken.Steps[i]
			s.Dsts, s.Args = slices.Clone(s.Dsts), slices.Clone(s.Args)
			for k := range s.Args {
				if before := s.Args[k].Step; before >= 0 {
					s.Args[k].Step = to[before]
				}
			}
			for k := range s.Dsts {
				to[s.Dsts[k].Step], s.Dsts[k].Step = i, i
			}
		}
		broken.Results = slices.Clone(broken.Results)
		for k := range broken.Results {
			broken.Results[k].Step = to[broken.Results[k].Step]
		}
		_, want, _ := strings.Cut(what, ": ")
		require.Fails(t, what, Verify(&broken), want)
	}
}

// TestVariablesAreGatheredInBF16: those that nothing reads in F32 are, once in a run if they stay,
// and the others in F32. A small bucket stays, too.
func TestVariablesAreGatheredInBF16(t *testing.T) {
	const n = 4
	p := &program{Program: ir.Program{Precision: ir.BF16}}
	var weights, hidden []ir.ID
	h, bias := p.input(0, 32, 32), p.input(1+n, 1, 32)
	for i := range n {
		weights, hidden = append(weights, p.input(1+i, 32, 32)), append(hidden, h)
		h = p.binary(fuse.Add, p.add(ir.MatMul{}, ir.Of(32, 32), h, weights[i]),
			p.add(ir.Broadcast{}, ir.Of(32, 32), bias))
		h = p.unary(fuse.Tanh, h)
	}
	p.Results = []ir.ID{h}
	shard := func(size int) *lower.Shard {
		return &lower.Shard{To: size / 2, Chunk: size / 2, Ranks: 2, FullyShard: true}
	}
	var updates []lower.Update
	for i := n - 1; i >= 0; i-- {
		gradient := p.add(ir.MatMul{TransA: true}, ir.Of(32, 32), hidden[i], h)
		h = p.add(ir.MatMul{TransB: true}, ir.Of(32, 32), h, weights[i])
		updates = append(updates, lower.Update{Input: 1 + i, Gradient: gradient, Kept: 1,
			Bucket: n - i, Rule: descent, Shard: shard(1024)})
	}
	sum := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)}, ir.Of(32), h)
	updates = append(updates, lower.Update{Input: 1 + n,
		Gradient: p.add(ir.Reshape{}, ir.Of(1, 32), sum), Kept: 1, Bucket: n + 1,
		Rule: descent, Shard: shard(32)})
	var inputs []int
	var gradients []ir.ID
	for _, u := range updates {
		inputs, gradients = append(inputs, u.Input), append(gradients, u.Gradient)
	}
	halved := lower.Halved(&p.Program, inputs, gradients...)
	want := []bool{true, true, true, true, false}
	require.That(t, slices.Equal(halved, want), "%v, want %v", halved, want)
	for _, stays := range []bool{false, true} {
		for i := range updates {
			updates[i].Shard.Half, updates[i].Shard.Persistent = halved[i], halved[i] && stays
		}
		planned := p.planned(t, updates...)
		require.NoError(t, require.Err(Plain(&p.Program, lower.Solver{Updates: updates})))
		gathers := map[bool]int{}
		for _, s := range planned.Steps {
			if send, ok := s.Op.(Send); ok && send.Kind == backend.AllGather {
				gathers[send.Half]++
			}
		}
		if want := (n + n - 2); gathers[false] != 1 || stays && gathers[true] != n ||
			!stays && gathers[true] != want && gathers[true] != want-1 {
			t.Errorf("stays %v: %v gathers in\n%v", stays, gathers, planned)
		}
		for i, s := range planned.Steps {
			send, ok := s.Op.(Send)
			if !ok || !send.Half {
				continue
			}
			broken := *planned
			broken.Steps = slices.Clone(planned.Steps)
			send.Half = false
			broken.Steps[i].Op = send
			require.Fails(t, "Verify", Verify(&broken), "in BF16")
		}
	}
	updates[n].Shard.Half = true // although a loop reads it
	require.Fails(t, "New", require.Err(New(&p.Program, updates...)), "gather in BF16")
}

// TestShardsAccumulate: sums of runs stay whole until the last one.
func TestShardsAccumulate(t *testing.T) {
	planned := sharded(t, 1, 3, false, func(s *lower.Solver) {
		s.Accumulation, s.Scale = lower.Accumulation{Runs: 3}, 0.5
	}, 2, 1)
	for _, s := range planned.Steps {
		switch s.Op.(type) {
		case Send, Receive, Joined:
			require.Check(t, s.Runs == 1<<2, "%v in the runs %b", s.Op, s.Runs)
		}
	}
}

// TestVerifyShards: what a plan of shards may not do is found.
func TestVerifyShards(t *testing.T) {
	for _, placed := range []bool{false, true} {
		planned := sharded(t, 1, 3, placed, nil, 2, 1)
		at := func(name string) int {
			return slices.IndexFunc(planned.Steps, func(s Step) bool {
				return s.Op.String() == name
			})
		}
		scatter, shard := at("reduce-scatter bucket 0"), at("receive shard of bucket 0")
		gather, shards := at("all-gather bucket 0"), at("receive shards of bucket 0")
		for what, damage := range map[string]func(p *Plan, s []Step){
			"the ranks divide": func(_ *Plan, s []Step) {
				s[scatter].Op = Send{Bucket: 1, Kind: backend.AllReduce}
				s[scatter].Dsts = s[scatter].Dsts[:1]
			},
			"come back": func(_ *Plan, s []Step) {
				s[scatter].Op = Send{Bucket: 1, Kind: backend.AllReduce}
				s[scatter].Args = nil
			},
			"nothing has been sent": func(_ *Plan, s []Step) {
				s[shards].Op = Receive{3, s[shards].Op.(Receive).Kind}
			},
			"nothing has been sent in this memory": func(_ *Plan, s []Step) {
				s[shards].Args = s[at("receive shards of bucket 1")].Args
			},
			"does not exchange all": func(_ *Plan, s []Step) { s[shards].Dsts = nil },
			"1 chunks of 7":         func(p *Plan, _ []Step) { p.Updates[1].Shard.Ranks = 1 },
			"of the updates [1]": func(p *Plan, _ []Step) {
				p.Updates[1].Shard.From, p.Updates[1].Shard.To = 6, 13
			},
			"of the updates": func(p *Plan, s []Step) { // where another rank's are
				p.Buffers[s[gather].Args[0].Buffer].At += 4
				p.Buffers[s[gather].Args[0].Buffer].Offset += 4
			},
			"written over": func(_ *Plan, s []Step) { // the update reads what has left
				s[shard+1].Args[0] = s[scatter].Args[0]
				s[shard+1].Args[0].Shape, s[shard+1].Args[0].Strides = ir.Of(7), ir.Of(1)
			},
			"is not what it must be": func(p *Plan, s []Step) { // of other elements
				for k, a := range s[shard+1].Args {
					if p.Buffers[a.Buffer].Kind == Input {
						s[shard+1].Args[k].Offset--
					}
				}
			},
			fmt.Sprintf("but step %d has written", scatter+1): func(_ *Plan, s []Step) {
				full := s[scatter].Args[0].Buffer // while it is exchanged
				s[scatter+1].Dsts[0].Buffer, s[scatter+2].Args[1].Buffer = full, full
			},
		} {
			broken := *planned
			broken.Steps, broken.Buffers = slices.Clone(planned.Steps),
				slices.Clone(planned.Buffers)
			broken.Updates = slices.Clone(planned.Updates)
			for i, u := range broken.Updates {
				shard := *u.Shard
				broken.Updates[i].Shard = &shard
			}
			for i := range broken.Steps {
				broken.Steps[i].Dsts, broken.Steps[i].Args = slices.Clone(broken.Steps[i].Dsts),
					slices.Clone(broken.Steps[i].Args)
			}
			damage(&broken, broken.Steps)
			require.Fails(t, fmt.Sprintf("placed %v", placed), Verify(&broken), what)
		}
	}
}
