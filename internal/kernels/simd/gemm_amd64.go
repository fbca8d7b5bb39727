package simd

import "unsafe"

// multiply computes a tile.
func (t *tile[T]) multiply(l Level) {
	size := int(unsafe.Sizeof(*t.c))
	aRow, aStep, bStep, cPitch := t.aRow*size, t.aStep*size, t.bStep*size, t.cPitch*size
	a, b, c := unsafe.Pointer(t.a), unsafe.Pointer(t.b), unsafe.Pointer(t.c)
	switch {
	case l == Go:
		t.multiplyGo()
	case l == AVX512 && size == 4:
		tileF32AVX512((*float32)(a), (*float32)(b), (*float32)(c), aRow, aStep, bStep, cPitch, t.k,
			t.rows, t.columns, float32(t.alpha), float32(t.beta))
	case l == AVX512:
		tileF64AVX512((*float64)(a), (*float64)(b), (*float64)(c), aRow, aStep, bStep, cPitch, t.k,
			t.rows, t.columns, float64(t.alpha), float64(t.beta))
	case size == 4:
		tileF32AVX2((*float32)(a), (*float32)(b), (*float32)(c), aRow, aStep, bStep, cPitch, t.k,
			t.rows, t.columns, float32(t.alpha), float32(t.beta))
	default:
		tileF64AVX2((*float64)(a), (*float64)(b), (*float64)(c), aRow, aStep, bStep, cPitch, t.k,
			t.rows, t.columns, float64(t.alpha), float64(t.beta))
	}
}

// copyVectors copies rows, of which the last vector is filled up with zeros. Pitches are in bytes.
func copyVectors[T Float](dst, src *T, dstPitch, srcPitch, rows, columns int) {
	d, s := unsafe.Pointer(dst), unsafe.Pointer(src)
	if unsafe.Sizeof(*dst) == 4 {
		copyF32AVX2((*float32)(d), (*float32)(s), dstPitch, srcPitch, rows, columns)
	} else {
		copyF64AVX2((*float64)(d), (*float64)(s), dstPitch, srcPitch, rows, columns)
	}
}

// transposeSquares transposes as many rows as a vector has elements. Pitches are in bytes.
func transposeSquares[T Float](dst, src *T, dstPitch, srcPitch, columns int) {
	d, s := unsafe.Pointer(dst), unsafe.Pointer(src)
	if unsafe.Sizeof(*dst) == 4 {
		transposeF32AVX2((*float32)(d), (*float32)(s), dstPitch, srcPitch, columns)
	} else {
		transposeF64AVX2((*float64)(d), (*float64)(s), dstPitch, srcPitch, columns)
	}
}
