package simd

import (
	"fmt"
	"testing"
)

func TestPackedIsTheLoop(t *testing.T) {
	for _, level := range Levels() {
		t.Run(fmt.Sprint("f32/", level), func(t *testing.T) { packedIsTheLoop[float32](t, level) })
		t.Run(fmt.Sprint("f64/", level), func(t *testing.T) { packedIsTheLoop[float64](t, level) })
	}
}

func packedIsTheLoop[T Float](t *testing.T, level Level) {
	for rows := range 19 {
		for columns := range CopyWidth[T]() + 1 {
			checkCopied[T](t, level, rows, columns)
			checkTransposed[T](t, level, rows, columns)
		}
	}
}

// numbered is a matrix whose elements all differ, and the distance of its rows.
func numbered[T Float](rows, columns int) (x []T, pitch int) {
	x = make([]T, rows*(columns+guard)+1)
	for i := range x {
		x[i] = T(i + 1)
	}
	return x, columns + guard
}

func checkCopied[T Float](t *testing.T, level Level, rows, columns int) {
	t.Helper()
	src, from := numbered[T](rows, columns)
	pitch := (columns+7)/8*8 + guard
	dst := make([]T, rows*pitch)
	CopyRows(level, dst, src, pitch, from, rows, columns)
	for i := range dst {
		row, column := i/pitch, i%pitch
		if column < columns && dst[i] != src[row*from+column] || column >= columns && dst[i] != 0 {
			t.Fatalf("element %d of the copy of %d x %d is %v", i, rows, columns, dst[i])
		}
	}
}

func checkTransposed[T Float](t *testing.T, level Level, rows, columns int) {
	t.Helper()
	src, from := numbered[T](rows, columns)
	pitch := rows + guard
	dst := make([]T, columns*pitch)
	TransposeRows(level, dst, src, pitch, from, rows, columns)
	for i := range dst {
		row, column := i/pitch, i%pitch
		if column < rows && dst[i] != src[column*from+row] || column >= rows && dst[i] != 0 {
			t.Fatalf("element %d of the transpose of %d x %d is %v", i, rows, columns, dst[i])
		}
	}
}
