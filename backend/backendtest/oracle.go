package backendtest

import (
	"encoding/binary"
	"math"

	"github.com/x448/float16"

	"github.com/euryale-ml/euryale/backend"
)

// The oracle says what a collective means, from the doc comments of package
// backend and from nothing else: not from its table, nor from package kernels.

// lengths returns how many elements rank r passes, -1 where its buffer is
// ignored. count is the elements of one even chunk, or of the whole operand.
func lengths(c backend.Collective, r, P, count int) (src, dst int) {
	own, all := count, P*count
	if c.Splits != nil && c.Kind != backend.AllToAll {
		own, all = c.Splits[r], total(c.Splits)
	}
	isRoot := func(n int) int {
		if r == c.Root {
			return n
		}
		return -1
	}
	switch c.Kind {
	case backend.AllReduce:
		return held(c, r) * count, count
	case backend.ReduceScatter:
		return all, own
	case backend.AllGather:
		return own, all
	case backend.Broadcast:
		return isRoot(count), count
	case backend.Reduce:
		return count, isRoot(count)
	case backend.Gather:
		return own, isRoot(all)
	case backend.Scatter:
		return isRoot(all), own
	case backend.AllToAll:
		for s := range P {
			src += pair(c, r, s, P, count)
			dst += pair(c, s, r, P, count)
		}
	}
	return src, dst
}

// pair returns how many elements rank s sends to rank r in an AllToAll.
func pair(c backend.Collective, s, r, P, count int) int {
	if c.Splits == nil {
		return count
	}
	return c.Splits[s*P+r]
}

func total(xs []int) (n int) {
	for _, x := range xs {
		n += x
	}
	return n
}

// expected returns what every rank must find in its destination, given what
// every rank passes; nil where the destination is ignored.
func expected(c backend.Collective, P, count int, d backend.DType, srcs [][]byte) [][]byte {
	size := d.Size()
	dsts := make([][]byte, P)
	switch c.Kind {
	case backend.AllReduce:
		fill(dsts, fold(c, d, srcs))
	case backend.Reduce:
		dsts[c.Root] = fold(c, d, srcs)
	case backend.ReduceScatter:
		splitRows(dsts, fold(c, d, srcs), c, P, count, size)
	case backend.AllGather:
		fill(dsts, join(srcs))
	case backend.Gather:
		dsts[c.Root] = join(srcs)
	case backend.Broadcast:
		fill(dsts, srcs[c.Root])
	case backend.Scatter:
		splitRows(dsts, srcs[c.Root], c, P, count, size)
	case backend.AllToAll:
		for s := range P {
			rest := pieces(c, s, P, count, size, srcs[s])
			for r := range P {
				n := size * pair(c, s, r, P, count)
				dsts[r] = append(dsts[r], rest[:n]...)
				rest = rest[n:]
			}
		}
		for r := range P {
			dsts[r] = sideBySide(c, r, P, count, size, dsts[r])
		}
	}
	return dsts
}

// pieces returns the pieces of rank s's operand of an AllToAll one after the other.
func pieces(c backend.Collective, s, P, count, size int, x []byte) []byte {
	if c.Rows == nil {
		return x
	}
	all := make([][]byte, P)
	for rows := c.Rows.Src[s]; len(x) > 0; {
		for r := range P {
			n := size * pair(c, s, r, P, count) / rows
			all[r], x = append(all[r], x[:n]...), x[n:]
		}
	}
	return join(all)
}

// sideBySide is the inverse of pieces for the result y of rank r.
func sideBySide(c backend.Collective, r, P, count, size int, y []byte) (all []byte) {
	if c.Rows == nil {
		return y
	}
	for row := range c.Rows.Dst[r] {
		at := 0
		for s := range P {
			n := size * pair(c, s, r, P, count)
			part := n / c.Rows.Dst[r]
			all = append(all, y[at+row*part:at+(row+1)*part]...)
			at += n
		}
	}
	return all
}

func fill(dsts [][]byte, x []byte) {
	for r := range dsts {
		dsts[r] = x
	}
}

func splitRows(dsts [][]byte, x []byte, c backend.Collective, P, count, size int) {
	for r := range dsts {
		n := count * size
		if c.Splits != nil {
			n = c.Splits[r] * size
		}
		dsts[r], x = x[:n:n], x[n:]
	}
}

func join(xs [][]byte) (all []byte) {
	for _, x := range xs {
		all = append(all, x...)
	}
	return all
}

// fold combines the ranks' operands, of the same length, in the order of the call's association.
func fold(c backend.Collective, d backend.DType, xs [][]byte) []byte {
	op := c.Op
	if inBranches(c) {
		var all [][]byte
		for r, x := range xs {
			n := len(x) / held(c, r)
			for i := range held(c, r) {
				all = append(all, x[i*n:(i+1)*n])
			}
		}
		xs = all
	}
	switch d {
	case backend.F16, backend.BF16:
		return encode(d, foldFloats(c, decodeAll(d, xs)))
	case backend.F32:
		return encode(d, foldFloats(c, decodeAll(d, xs)))
	case backend.F64:
		wide := make([][]float64, len(xs))
		for s, x := range xs {
			for ; len(x) > 0; x = x[8:] {
				wide[s] = append(wide[s], math.Float64frombits(binary.LittleEndian.Uint64(x)))
			}
		}
		var out []byte
		for _, v := range foldFloats(c, wide) {
			out = binary.LittleEndian.AppendUint64(out, math.Float64bits(v))
		}
		return out
	case backend.I32:
		return foldInts(op, xs, 4, func(b []byte) int32 {
			return int32(binary.LittleEndian.Uint32(b))
		},
			func(b []byte, v int32) []byte {
				return binary.LittleEndian.AppendUint32(b,
					uint32(v))
			})
	case backend.I64:
		return foldInts(op, xs, 8, func(b []byte) int64 {
			return int64(binary.LittleEndian.Uint64(b))
		},
			func(b []byte, v int64) []byte {
				return binary.LittleEndian.AppendUint64(b,
					uint64(v))
			})
	default:
		return foldInts(op, xs, 1, func(b []byte) uint8 { return b[0] },
			func(b []byte, v uint8) []byte { return append(b, v) })
	}
}

// foldFloats is the meaning of [backend.ReduceOp] and of [backend.Association] on floats.
//
//go:norace
func foldFloats[T float32 | float64](c backend.Collective, xs [][]T) []T {
	op, ranks := c.Op, len(xs)
	switch {
	case inBranches(c):
		xs = [][]T{addBranches(c.Splits, xs)}
	case c.Association == backend.Tree:
		xs = [][]T{addNeighbours(xs)}
	}
	out := append([]T(nil), xs[0]...)
	for _, x := range xs[1:] {
		for i, v := range x {
			switch op {
			case backend.Prod:
				out[i] *= v
			case backend.Min:
				out[i] = lesser(out[i], v)
			case backend.Max:
				out[i] = -lesser(-out[i], -v)
			default:
				out[i] += v
			}
		}
	}
	if op == backend.Avg {
		for i := range out {
			out[i] /= T(ranks)
		}
	}
	return out
}

// inBranches reports whether ranks pass several operands of a sum.
func inBranches(c backend.Collective) bool { return c.Kind == backend.AllReduce && c.Splits != nil }

// held returns how many operands rank r passes to an AllReduce.
func held(c backend.Collective, r int) int {
	if !inBranches(c) {
		return 1
	}
	return walk(c.Splits, func(of int) int {
		if of == r {
			return 1
		}
		return 0
	}, func(x, y int) int { return x + y })
}

// walk visits the tree over all terms, of which rank r has splits[r]: it takes the branches whose
// terms are all of one rank, and adds others.
func walk[V any](splits []int, take func(r int) V, add func(x, y V) V) V {
	all := total(splits)
	var visit func(lo, size int) V
	visit = func(lo, size int) V {
		r, end := 0, splits[0]
		for end <= lo {
			r++
			end += splits[r]
		}
		if end >= min(lo+size, all) {
			return take(r)
		}
		x := visit(lo, size/2)
		if lo+size/2 >= all {
			return x
		}
		return add(x, visit(lo+size/2, size/2))
	}
	size := 1
	for size < all {
		size *= 2
	}
	return visit(0, size)
}

// addBranches adds the operands that ranks pass to a sum of branches.
//
//go:norace
func addBranches[T float32 | float64](splits []int, xs [][]T) []T {
	return walk(splits, func(int) []T {
		x := xs[0]
		xs = xs[1:]
		return x
	}, func(x, y []T) []T {
		sum := append([]T(nil), x...)
		for i, v := range y {
			sum[i] += v
		}
		return sum
	})
}

// addNeighbours adds pairs of neighbours until one operand is left.
//
//go:norace
func addNeighbours[T float32 | float64](xs [][]T) []T {
	for len(xs) > 1 {
		var sums [][]T
		for i := 0; i < len(xs); i += 2 {
			sum := append([]T(nil), xs[i]...)
			if i+1 < len(xs) {
				for j, v := range xs[i+1] {
					sum[j] += v
				}
			}
			sums = append(sums, sum)
		}
		xs = sums
	}
	return xs[0]
}

// lesser returns NaN if there is one, and takes -0 for less than +0.
//
//go:norace
func lesser[T float32 | float64](x, y T) T {
	switch {
	case x != x:
		return x
	case y != y:
		return y
	case x == 0 && y == 0 && math.Signbit(float64(y)):
		return y
	case y < x:
		return y
	}
	return x
}

// foldInts is the meaning of [backend.ReduceOp] on integers, which wrap.
//
//go:norace
func foldInts[T int32 | int64 | uint8](op backend.ReduceOp, xs [][]byte, size int,
	get func([]byte) T, put func([]byte, T) []byte) []byte {
	var out []byte
	for at := 0; at < len(xs[0]); at += size {
		acc := get(xs[0][at:])
		for _, x := range xs[1:] {
			v := get(x[at:])
			switch {
			case op == backend.Prod:
				acc *= v
			case op == backend.Min:
				acc = min(acc, v)
			case op == backend.Max:
				acc = max(acc, v)
			default:
				acc += v
			}
		}
		if op == backend.Avg {
			acc = T(int64(acc) / int64(len(xs)))
		}
		out = put(out, acc)
	}
	return out
}

// decodeAll widens the ranks' operands of 16 or 32 bits to float32.
func decodeAll(d backend.DType, xs [][]byte) [][]float32 {
	out := make([][]float32, len(xs))
	for s, x := range xs {
		out[s] = decode(d, x)
	}
	return out
}

//go:norace
func decode(d backend.DType, x []byte) []float32 {
	out := make([]float32, 0, len(x)/d.Size())
	for ; len(x) > 0; x = x[d.Size():] {
		switch d {
		case backend.F16:
			out = append(out, float16.Frombits(binary.LittleEndian.Uint16(x)).Float32())
		case backend.BF16:
			out = append(out, math.Float32frombits(uint32(binary.LittleEndian.Uint16(x))<<16))
		default:
			out = append(out, math.Float32frombits(binary.LittleEndian.Uint32(x)))
		}
	}
	return out
}

// encode rounds to nearest even where d has 16 bits.
//
//go:norace
func encode(d backend.DType, x []float32) []byte {
	out := make([]byte, 0, len(x)*d.Size())
	for _, v := range x {
		switch d {
		case backend.F16:
			out = binary.LittleEndian.AppendUint16(out, float16.Fromfloat32(v).Bits())
		case backend.BF16:
			out = binary.LittleEndian.AppendUint16(out, bfloat(v))
		default:
			out = binary.LittleEndian.AppendUint32(out, math.Float32bits(v))
		}
	}
	return out
}

// bfloat rounds to the upper half of a float32, to nearest even.
//
//go:norace
func bfloat(v float32) uint16 {
	b := math.Float32bits(v)
	if v != v {
		return uint16(b>>16) | 0x40 // stays a NaN
	}
	half := uint32(0x7fff) + b>>16&1
	return uint16((b + half) >> 16)
}

// isNaN reports whether the element at the start of x is a NaN.
func isNaN(d backend.DType, x []byte) bool {
	switch d {
	case backend.F16, backend.BF16, backend.F32:
		v := decode(d, x[:d.Size()])[0]
		return v != v
	case backend.F64:
		return math.IsNaN(math.Float64frombits(binary.LittleEndian.Uint64(x)))
	}
	return false
}
