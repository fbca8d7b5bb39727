package simd

import "unsafe"

// largest is Largest by vectors, of strides up to longestStride.
func largest[T Float](l Level, most, at, x *T, w *Windows, least T) {
	pixels, count, pitch, two := &w.Pixels[0], len(w.Pixels), w.Pitch*int(unsafe.Sizeof(*x)),
		w.Stride == 2
	switch x := any(x).(type) {
	case *float32:
		most, at, least := any(most).(*float32), any(at).(*float32), float32(least)
		switch {
		case l == AVX512 && two:
			largest2F32AVX512(most, at, x, pixels, count, w.Rows, w.Columns, pitch, least)
		case l == AVX512:
			largest1F32AVX512(most, at, x, pixels, count, w.Rows, w.Columns, pitch, least)
		case two:
			largest2F32AVX2(most, at, x, pixels, count, w.Rows, w.Columns, pitch, least)
		default:
			largest1F32AVX2(most, at, x, pixels, count, w.Rows, w.Columns, pitch, least)
		}
	case *float64:
		most, at, least := any(most).(*float64), any(at).(*float64), float64(least)
		switch {
		case l == AVX512 && two:
			largest2F64AVX512(most, at, x, pixels, count, w.Rows, w.Columns, pitch, least)
		case l == AVX512:
			largest1F64AVX512(most, at, x, pixels, count, w.Rows, w.Columns, pitch, least)
		case two:
			largest2F64AVX2(most, at, x, pixels, count, w.Rows, w.Columns, pitch, least)
		default:
			largest1F64AVX2(most, at, x, pixels, count, w.Rows, w.Columns, pitch, least)
		}
	}
}

// givePairs is Give by vectors, of windows that are two pixels wide and apart.
func givePairs[T Float](l Level, dx, x, dy, at *T, w *Windows, rowPitch int, least T) {
	size := int(unsafe.Sizeof(*x))
	pitch, height := w.Pitch*size, len(w.Pixels)/2
	rowPitch *= size
	switch x := any(x).(type) {
	case *float32:
		dx, dy, at, least := any(dx).(*float32), any(dy).(*float32), any(at).(*float32),
			float32(least)
		if l == AVX512 {
			givePairsF32AVX512(dx, x, dy, at, w.Rows, w.Columns, pitch, height, rowPitch, least)
		} else {
			givePairsF32AVX2(dx, x, dy, at, w.Rows, w.Columns, pitch, height, rowPitch, least)
		}
	case *float64:
		dx, dy, at, least := any(dx).(*float64), any(dy).(*float64), any(at).(*float64),
			float64(least)
		if l == AVX512 {
			givePairsF64AVX512(dx, x, dy, at, w.Rows, w.Columns, pitch, height, rowPitch, least)
		} else {
			givePairsF64AVX2(dx, x, dy, at, w.Rows, w.Columns, pitch, height, rowPitch, least)
		}
	}
}
