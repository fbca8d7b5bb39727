package simd

import (
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
)

// CopyWidth returns how many columns CopyRows takes at most.
func CopyWidth[T Float]() int { return copiedVectors * vectorBytes / int(unsafe.Sizeof(*new(T))) }

// copiedVectors is how many vectors CopyRows copies of a row, as in gen/gemm, and vectorBytes is
// the size of one: it and TransposeRows use AVX2 at each level above Go, since they wait for
// memory.
const (
	copiedVectors = 4
	vectorBytes   = 32
)

// CopyRows copies a narrow matrix: dst[i*dstPitch+j] = src[i*srcPitch+j]. Before it copies the next
// row, it may also write zeros up to the next multiple of 32 bytes behind a row of dst, which must
// have room for them.
func CopyRows[T Float](l Level, dst, src []T, dstPitch, srcPitch, rows, columns int) {
	if rows == 0 || columns == 0 {
		return
	}
	if l == Go {
		for i := range rows {
			copy(dst[i*dstPitch:][:columns], src[i*srcPitch:][:columns])
		}
		return
	}
	size := int(unsafe.Sizeof(dst[0]))
	lanes := vectorBytes / size
	_, _ = dst[(rows-1)*dstPitch+(columns+lanes-1)/lanes*lanes-1], src[(rows-1)*srcPitch+columns-1]
	copyVectors(&dst[0], &src[0], dstPitch*size, srcPitch*size, rows, columns)
}

// WidenRows is CopyRows of as many columns as one likes, from 16 bits. Behind a row of dst it may
// write anything instead of zeros.
func WidenRows[H half](l Level, dst []float32, src []H, dstPitch, srcPitch, rows, columns int) {
	const lanes = vectorBytes / 4
	vectors, vectored := (columns+lanes-1)/lanes, 0
	if n := len(src) - vectors*lanes; l > Go && columns > 0 && n >= 0 {
		vectored = min(n/max(srcPitch, 1)+1, rows) // rows with enough elements behind them
	}
	if vectored > 0 {
		_ = dst[(vectored-1)*dstPitch+vectors*lanes-1]
		widenRowsVectors(backend.DTypeOf[H](), &dst[0], address(backend.Of(src)), dstPitch*4,
			srcPitch*2, vectored, vectors)
	}
	for i := vectored; i < rows; i++ {
		Widen(l, dst[i*dstPitch:][:columns], src[i*srcPitch:])
	}
}

// TransposeRows transposes a matrix: dst[j*dstPitch+i] = src[i*srcPitch+j], for rows and columns of
// src.
func TransposeRows[T Float](l Level, dst, src []T, dstPitch, srcPitch, rows, columns int) {
	if rows == 0 || columns == 0 {
		return
	}
	size := int(unsafe.Sizeof(dst[0]))
	lanes := vectorBytes / size
	_, _ = dst[(columns-1)*dstPitch+rows-1], src[(rows-1)*srcPitch+columns-1]
	wholeRows, wholeColumns := rows/lanes*lanes, columns/lanes*lanes
	if l == Go || wholeColumns == 0 {
		wholeRows, wholeColumns = 0, 0
	}
	for i := 0; i < wholeRows; i += lanes {
		transposeVectors(&dst[i], &src[i*srcPitch], dstPitch*size, srcPitch*size, wholeColumns)
	}
	transposeGo(dst, src, dstPitch, srcPitch, 0, wholeRows, wholeColumns, columns)
	transposeGo(dst, src, dstPitch, srcPitch, wholeRows, rows, 0, columns)
}

// transposeGo is the loop that defines TransposeRows, over some rows and columns.
func transposeGo[T Float](dst, src []T, dstPitch, srcPitch, row, rows, column, columns int) {
	for i := row; i < rows; i++ {
		for j := column; j < columns; j++ {
			dst[j*dstPitch+i] = src[i*srcPitch+j]
		}
	}
}
