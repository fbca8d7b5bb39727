package simd

import "github.com/euryale-ml/euryale/backend"

// block is how many elements the loops in Go combine at a time, so that the running result stays in
// the first-level cache (8 KiB of float64).
const block = 1024

// number is a type whose arithmetic is Go's own.
type number interface {
	float32 | float64 | int32 | int64 | byte
}

// Reduce is dst[i] = srcs[0][i] op srcs[1][i] op ..., in this order, with the meaning given at
// [backend.ReduceOp]; 16-bit floats are computed in 32 bits and rounded once. It reads all sources
// in one pass. All buffers have one dtype and length, and dst may be one of the sources.
func Reduce(l Level, op backend.ReduceOp, dst backend.Buffer, srcs []backend.Buffer) {
	switch {
	case dst.Len() == 0:
		return
	case len(srcs) == 1:
		copy(dst.Bytes(), srcs[0].Bytes())
		return
	// vectors of integers have no division
	case (op != backend.Avg || dst.DType().Float()) && reduceVector(l, op, dst, srcs):
		return
	}
	switch dst.DType() {
	case backend.F16:
		reduceHalves[backend.Float16](l, op, dst, srcs)
	case backend.BF16:
		reduceHalves[backend.BFloat16](l, op, dst, srcs)
	case backend.F32:
		reduce[float32](l, op, dst, srcs)
	case backend.F64:
		reduce[float64](l, op, dst, srcs)
	case backend.I32:
		reduce[int32](l, op, dst, srcs)
	case backend.I64:
		reduce[int64](l, op, dst, srcs)
	case backend.U8:
		reduce[byte](l, op, dst, srcs)
	}
}

// reduce combines the sources in order, a block at a time. It writes the result of a block to dst
// last, so that dst may be one of the sources.
func reduce[T number](l Level, op backend.ReduceOp, dst backend.Buffer, srcs []backend.Buffer) {
	if op == backend.Avg && !dst.DType().Float() {
		Reduce(l, backend.Sum, dst, srcs)
		Divide(backend.View[T](dst), len(srcs))
		return
	}
	var scratch [block]T
	d := backend.View[T](dst)
	for lo := 0; lo < len(d); lo += block {
		hi := min(lo+block, len(d))
		acc := scratch[:hi-lo]
		copy(acc, backend.View[T](srcs[0])[lo:hi])
		for _, src := range srcs[1:] {
			combine(op, acc, acc, backend.View[T](src)[lo:hi])
		}
		if op == backend.Avg {
			Divide(acc, len(srcs))
		}
		copy(d[lo:hi], acc)
	}
}

// reduceHalves is reduce in 32 bits, rounded once at the end.
func reduceHalves[H half](l Level, op backend.ReduceOp, dst backend.Buffer, srcs []backend.Buffer) {
	var scratch, wide [block]float32
	d := backend.View[H](dst)
	for lo := 0; lo < len(d); lo += block {
		hi := min(lo+block, len(d))
		acc, next := scratch[:hi-lo], wide[:hi-lo]
		Widen(l, acc, backend.View[H](srcs[0])[lo:hi])
		for _, src := range srcs[1:] {
			Widen(l, next, backend.View[H](src)[lo:hi])
			combine(op, acc, acc, next)
		}
		if op == backend.Avg {
			Divide(acc, len(srcs))
		}
		Narrow(l, d[lo:hi], acc)
	}
}

// combine is one step of a reduction: dst[i] = op(x[i], y[i]). dst may be x or y.
func combine[T number](op backend.ReduceOp, dst, x, y []T) {
	switch op {
	case backend.Sum, backend.Avg:
		pairs(dst, x, y, func(x, y T) T { return x + y })
	case backend.Prod:
		pairs(dst, x, y, func(x, y T) T { return x * y })
	case backend.Min:
		pairs(dst, x, y, func(x, y T) T { return min(x, y) }) // Go's min: NaN wins, -0 before +0
	case backend.Max:
		pairs(dst, x, y, func(x, y T) T { return max(x, y) })
	}
}

// Divide divides sums by the number of sources, to averages.
func Divide[T number](x []T, n int) {
	// A byte cannot hold every n; no sum of bytes reaches n then.
	if T(n) == 0 || int(T(n)) != n {
		clear(x)
		return
	}
	for i := range x {
		x[i] /= T(n)
	}
}

// Scale is dst[i] = src[i] * factor. dst may be src.
func Scale[T float32 | float64](l Level, dst, src []T, factor T) {
	src = src[:len(dst)]
	if l > Go && len(dst) > 0 {
		scaleVectors(l, address(backend.Of(dst)), address(backend.Of(src)), len(dst), factor)
		return
	}
	for i, x := range src {
		dst[i] = x * factor
	}
}

// mostSources is how many addresses of sources are kept on the stack. Reductions of more run in Go.
// fewSources is enough for most calls, and takes less time to clear than mostSources.
const (
	mostSources = 64
	fewSources  = 4
)

// reduceVector is Reduce by vector instructions. It reports whether it was done. Both lists of
// addresses are filled here: a function that fills them would make operands escape to the heap.
func reduceVector(l Level, op backend.ReduceOp, to backend.Buffer, from []backend.Buffer) bool {
	d, o, dst, n := to.DType(), int(op), address(to), to.Len()
	switch {
	case l == Go || len(from) > mostSources:
		return false
	case len(from) <= fewSources:
		var sources [fewSources]*byte
		for i, src := range from {
			sources[i] = address(src)
		}
		reduceVectors(l, d, o, dst, &sources[0], len(from), n)
	default:
		var sources [mostSources]*byte
		for i, src := range from {
			sources[i] = address(src)
		}
		reduceVectors(l, d, o, dst, &sources[0], len(from), n)
	}
	return true
}

func address(b backend.Buffer) *byte { return (*byte)(b.Pointer()) }
