package simd

import (
	"math"
	"unsafe"
)

// Windows are windows on a plane of pixels, at places that lie in rows. Distances are in elements.
type Windows struct {
	Rows, Columns int // of places
	// from a row of places to the next one, and from a place to the next one in its row
	Pitch, Stride int
	Pixels        []int // of a window: their distances from its first one, which only grow
}

// Largest finds the largest pixel of each window: most[i] is the pixel of place i, in row-major
// order, and at[i] its number among w.Pixels. NaN is the largest of all. Of several that are the
// largest the first one counts, but the last NaN, as in PyTorch. Pixels below least, which is -Inf
// or 0, are least. All levels give bitwise identical results, except those of a NaN.
func Largest[T Float](l Level, most, at, x []T, w *Windows, least T) {
	if w.Rows == 0 || w.Columns == 0 {
		return
	}
	places, last := w.Rows*w.Columns, (w.Rows-1)*w.Pitch+(w.Columns-1)*w.Stride+w.Pixels[len(
		w.Pixels)-1]
	most, at, _ = most[:places], at[:places], x[last]
	pixels, count, size := &w.Pixels[0], len(w.Pixels), int(unsafe.Sizeof(least))
	switch {
	case l > Go && w.Stride == 1:
		largest1Vectors(l, &most[0], &at[0], &x[0], pixels, count, w.Rows, w.Columns, w.Pitch*size,
			least)
		return
	case l > Go && w.Stride == 2:
		largest2Vectors(l, &most[0], &at[0], &x[0], pixels, count, w.Rows, w.Columns, w.Pitch*size,
			least)
		return
	}
	for row := range w.Rows {
		for column := range w.Columns {
			i, from := row*w.Columns+column, x[row*w.Pitch+column*w.Stride:]
			most[i], at[i] = T(math.Inf(-1)), 0
			for k, pixel := range w.Pixels {
				seen := from[pixel]
				if seen < least {
					seen = least
				}
				if seen > most[i] || seen != seen {
					most[i], at[i] = seen, T(k)
				}
			}
		}
	}
}

// Give adds the gradient dy of each window to that of the pixel that Largest has found, in the
// order of the windows:
//
//	dx[pixel] += dy[i]
//
// Where no pixel is in two windows, the gradients of pixels below least are 0. dx has as many
// elements as x, and those of pixels in windows are 0 before.
func Give[T Float](l Level, dx, x, dy, at []T, w *Windows, apart bool, least T) {
	if w.Rows == 0 || w.Columns == 0 {
		return
	}
	last := (w.Rows-1)*w.Pitch + (w.Columns-1)*w.Stride + w.Pixels[len(w.Pixels)-1]
	dy, at, _, _ = dy[:w.Rows*w.Columns], at[:w.Rows*w.Columns], x[last], dx[last]
	if rowPitch, pairs := w.pairs(); l > Go && apart && pairs {
		size := int(unsafe.Sizeof(least))
		givePairsVectors(l, &dx[0], &x[0], &dy[0], &at[0], w.Rows, w.Columns, w.Pitch*size,
			len(w.Pixels)/2, rowPitch*size, least)
		return
	}
	for row := range w.Rows {
		first, dy, at := row*w.Pitch, dy[row*w.Columns:][:w.Columns], at[row*w.Columns:][:w.Columns]
		for column, k := range at {
			pixel := first + column*w.Stride + w.Pixels[int(k)]
			if dx[pixel] += dy[column]; apart && x[pixel] < least {
				dx[pixel] = 0
			}
		}
	}
}

// pairs reports whether windows are two pixels wide and lie side by side, and how far their rows
// are apart.
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
