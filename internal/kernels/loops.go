package kernels

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
)

// block is how many elements are computed at a time, so that intermediate results stay in the
// first-level cache (8 KiB of float64).
const block = 1024

type number interface {
	float32 | float64 | int32 | int64 | byte
}

func divide[T number](sums []T, n int)       { simd.Divide(sums, n) }
func widenAll[H half](out []float32, x []H)  { simd.Widen(simd.Best(), out, x) }
func narrowAll[H half](out []H, x []float32) { simd.Narrow(simd.Best(), out, x) }

func scaleFloats[T float](dst, src []T, factor T) { simd.Scale(simd.Best(), dst, src, factor) }

// scaleHalf multiplies, or divides, in 32 bits, a block at a time.
func scaleHalf[H half](dst, src backend.Buffer, by float32, divides bool) {
	var scratch [block]float32
	d, s := backend.View[H](dst), backend.View[H](src)
	for lo := 0; lo < len(d); lo += block {
		wide := scratch[:min(block, len(d)-lo)]
		widenAll(wide, s[lo:])
		if divides {
			divideFloats(wide, wide, by)
		} else {
			scaleFloats(wide, wide, by)
		}
		narrowAll(d[lo:lo+len(wide)], wide)
	}
}

func divideFloats[T float](dst, src []T, n T) {
	var by [simd.Repeat]T
	for i := range by {
		by[i] = n
	}
	if !simd.Binary(simd.Best(), simd.Div, dst, src, by[:]) {
		for i := range dst {
			dst[i] = src[i] / n
		}
	}
}

func divideInts[T int32 | int64 | byte](dst, src backend.Buffer, n int) {
	d := backend.View[T](dst)
	copy(d, backend.View[T](src))
	divide(d, n)
}

func scaleInt[T int32 | int64 | byte](dst, src backend.Buffer, factor float64) {
	d, s := backend.View[T](dst), backend.View[T](src)
	for i, x := range s {
		d[i] = T(float64(x) * factor)
	}
}

// cast converts between floats, through float32 where that is exact or right.
func cast(dst, src backend.Buffer) {
	switch src.DType() {
	case backend.F16:
		castHalf[backend.Float16](dst, src)
	case backend.BF16:
		castHalf[backend.BFloat16](dst, src)
	case backend.F32:
		castFloat[float32](dst, src)
	case backend.F64:
		castFloat[float64](dst, src)
	}
}

func castHalf[H half](dst, src backend.Buffer) {
	if dst.DType() == backend.F32 {
		widenAll(backend.View[float32](dst), backend.View[H](src))
		return
	}
	var scratch [block]float32
	for lo := 0; lo < src.Len(); lo += block {
		hi := min(lo+block, src.Len())
		wide := scratch[:hi-lo]
		widenAll(wide, backend.View[H](src)[lo:hi])
		castFloat[float32](dst.Slice(lo, hi), backend.Of(wide))
	}
}

func castFloat[T float](dst, src backend.Buffer) {
	s := backend.View[T](src)
	switch dst.DType() {
	case backend.F16:
		narrowEach(backend.View[backend.Float16](dst), s)
	case backend.BF16:
		narrowEach(backend.View[backend.BFloat16](dst), s)
	case backend.F32:
		convert(backend.View[float32](dst), s)
	case backend.F64:
		convert(backend.View[float64](dst), s)
	}
}

func narrowEach[H half, T float](out []H, x []T) {
	if narrow, ok := any(x).([]float32); ok { // rounded once as it is
		narrowAll(out, narrow)
		return
	}
	var scratch [block]float32
	for lo := 0; lo < len(out); lo += block {
		once := scratch[:min(block, len(out)-lo)]
		for i := range once {
			once[i] = toOdd(float64(x[lo+i]))
		}
		narrowAll(out[lo:lo+len(once)], once)
	}
}

func convert[D, S float](out []D, x []S) {
	for i := range out {
		out[i] = D(x[i])
	}
}
