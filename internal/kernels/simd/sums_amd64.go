package simd

import "github.com/euryale-ml/euryale/backend"

// mostSources is how many addresses of sources are kept on the stack. Reductions of more run in Go.
// fewSources is enough for most calls, and takes less time to clear than mostSources.
const (
	mostSources = 64
	fewSources  = 4
)

// reduceVector is Reduce by vector instructions. It reports whether it was done.
func reduceVector(l Level, op backend.ReduceOp, to backend.Buffer, from []backend.Buffer) bool {
	switch {
	case l == Go || len(from) > mostSources:
		return false
	case len(from) <= fewSources:
		var sources [fewSources]*byte
		for i, src := range from {
			sources[i] = address(src)
		}
		reduceAddresses(l, op, to, &sources[0], len(from))
	default:
		var sources [mostSources]*byte
		for i, src := range from {
			sources[i] = address(src)
		}
		reduceAddresses(l, op, to, &sources[0], len(from))
	}
	return true
}

// reduceAddresses is Reduce of count sources at addresses by the vector instructions of l.
func reduceAddresses(l Level, op backend.ReduceOp, to backend.Buffer, srcs **byte, count int) {
	o, dst, n := int(op), address(to), to.Len()
	if l == AVX512 {
		switch to.DType() {
		case backend.F16:
			reduceF16AVX512(o, dst, srcs, count, n)
		case backend.BF16:
			reduceBF16AVX512(o, dst, srcs, count, n)
		case backend.F32:
			reduceF32AVX512(o, dst, srcs, count, n)
		case backend.F64:
			reduceF64AVX512(o, dst, srcs, count, n)
		case backend.I32:
			reduceI32AVX512(o, dst, srcs, count, n)
		case backend.I64:
			reduceI64AVX512(o, dst, srcs, count, n)
		case backend.U8:
			reduceU8AVX512(o, dst, srcs, count, n)
		}
		return
	}
	switch to.DType() {
	case backend.F16:
		reduceF16AVX2(o, dst, srcs, count, n)
	case backend.BF16:
		reduceBF16AVX2(o, dst, srcs, count, n)
	case backend.F32:
		reduceF32AVX2(o, dst, srcs, count, n)
	case backend.F64:
		reduceF64AVX2(o, dst, srcs, count, n)
	case backend.I32:
		reduceI32AVX2(o, dst, srcs, count, n)
	case backend.I64:
		reduceI64AVX2(o, dst, srcs, count, n)
	case backend.U8:
		reduceU8AVX2(o, dst, srcs, count, n)
	}
}

func address(b backend.Buffer) *byte { return (*byte)(b.Pointer()) }

// widenVector is Widen by vector instructions. It reports whether it was done.
func widenVector[H half](l Level, to []float32, from []H) bool {
	if l == Go || len(to) == 0 {
		return false
	}
	dst, src, n := address(backend.Of(to)), address(backend.Of(from)), len(to)
	switch f16 := backend.DTypeOf[H]() == backend.F16; {
	case f16 && l == AVX512:
		widenF16AVX512(dst, src, n)
	case f16:
		widenF16AVX2(dst, src, n)
	case l == AVX512:
		widenBF16AVX512(dst, src, n)
	default:
		widenBF16AVX2(dst, src, n)
	}
	return true
}

// narrowVector is Narrow by vector instructions. It reports whether it was done.
func narrowVector[H half](l Level, to []H, from []float32) bool {
	if l == Go || len(to) == 0 {
		return false
	}
	dst, src, n := address(backend.Of(to)), address(backend.Of(from)), len(to)
	switch f16 := backend.DTypeOf[H]() == backend.F16; {
	case f16 && l == AVX512:
		narrowF16AVX512(dst, src, n)
	case f16:
		narrowF16AVX2(dst, src, n)
	case l == AVX512:
		narrowBF16AVX512(dst, src, n)
	default:
		narrowBF16AVX2(dst, src, n)
	}
	return true
}

// scaleVector is Scale by vector instructions. It reports whether it was done.
func scaleVector[T float32 | float64](l Level, to, from []T, factor T) bool {
	if l == Go || len(to) == 0 {
		return false
	}
	dst, src, n := address(backend.Of(to)), address(backend.Of(from)), len(to)
	switch single := backend.DTypeOf[T]() == backend.F32; {
	case single && l == AVX512:
		scaleF32AVX512(dst, src, n, float32(factor))
	case single:
		scaleF32AVX2(dst, src, n, float32(factor))
	case l == AVX512:
		scaleF64AVX512(dst, src, n, float64(factor))
	default:
		scaleF64AVX2(dst, src, n, float64(factor))
	}
	return true
}
