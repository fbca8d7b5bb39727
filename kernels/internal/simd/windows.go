package simd

import (
	"math"
	"unsafe"
)

// Windows are windows on a plane of pixels, at places that lie in rows. Distances are in elements.
type Windows struct {
	Rows, Columns int   // of places
	Pitch, Stride int   // from a row of places to the next one, and from a place to the next one in its row
	Pixels        []int // of a window: their distances from its first one, which only grow
}

// longestStride is that of windows that vectors read.
const longestStride = 2

// Largest finds the first largest pixel of each window: most[i] is that of place i, in row-major order, and
// at[i] its number among w.Pixels. Pixels below 0 are multiplied by negative, which is 1 or 0, before they
// are compared. NaN is never the largest; without a pixel that is larger than the least finite number, most is that
// number and at is -1. All levels give the same bits.
func Largest[T Float](l Level, most, at, x []T, w *Windows, negative T) {
	if w.Rows == 0 || w.Columns == 0 {
		return
	}
	places, last := w.Rows*w.Columns, (w.Rows-1)*w.Pitch+(w.Columns-1)*w.Stride+w.Pixels[len(w.Pixels)-1]
	most, at, _ = most[:places], at[:places], x[last]
	if l > Go && w.Stride <= longestStride {
		largest(l, &most[0], &at[0], &x[0], w, negative)
		return
	}
	for row := range w.Rows {
		for column := range w.Columns {
			i, from := row*w.Columns+column, x[row*w.Pitch+column*w.Stride:]
			most[i], at[i] = leastFinite[T](), -1
			for k, pixel := range w.Pixels {
				seen := from[pixel]
				if !(seen >= 0) {
					seen *= negative
				}
				if seen > most[i] {
					most[i], at[i] = seen, T(k)
				}
			}
		}
	}
}

// Give adds the gradient dy of each window to that of the pixel that Largest has found, in the order of the
// windows:
//
//	if at[i] >= 0 { dx[pixel] += dy[i] }
//
// Where no pixel is in two windows, the gradients of pixels below 0 are multiplied by negative. dx has as many elements as x,
// and those of pixels in windows are 0 before.
func Give[T Float](l Level, dx, x, dy, at []T, w *Windows, apart bool, negative T) {
	if w.Rows == 0 || w.Columns == 0 {
		return
	}
	last := (w.Rows-1)*w.Pitch + (w.Columns-1)*w.Stride + w.Pixels[len(w.Pixels)-1]
	dy, at, _, _ = dy[:w.Rows*w.Columns], at[:w.Rows*w.Columns], x[last], dx[last]
	if rowPitch, pairs := w.pairs(); l > Go && apart && pairs {
		givePairs(l, &dx[0], &x[0], &dy[0], &at[0], w, rowPitch, negative)
		return
	}
	for row := range w.Rows {
		first, dy, at := row*w.Pitch, dy[row*w.Columns:][:w.Columns], at[row*w.Columns:][:w.Columns]
		for column, k := range at {
			if k >= 0 {
				pixel := first + column*w.Stride + w.Pixels[int(k)]
				if dx[pixel] += dy[column]; apart && !(x[pixel] >= 0) {
					dx[pixel] *= negative
				}
			}
		}
	}
}

// pairs reports whether windows are two pixels wide and lie side by side, and how far their rows are apart.
func (w *Windows) pairs() (rowPitch int, ok bool) {
	n := len(w.Pixels)
	if w.Stride != 2 || n%2 != 0 || w.Pixels[1] != 1 {
		return 0, false
	}
	if n > 2 {
		rowPitch = w.Pixels[2]
	}
	return rowPitch, n == 2 || w.Pixels[3] == rowPitch+1 && w.Pixels[n-1] == (n/2-1)*rowPitch+1
}

// leastFinite returns the least finite number.
func leastFinite[T Float]() T {
	if unsafe.Sizeof(*new(T)) == 4 {
		least := float32(-math.MaxFloat32)
		return T(least)
	}
	least := -math.MaxFloat64
	return T(least)
}
