package simd

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

func TestPackedIsTheLoop(t *testing.T) {
	for _, level := range Levels() {
		t.Run(fmt.Sprint("f32/", level), func(t *testing.T) { packedIsTheLoop[float32](t, level) })
		t.Run(fmt.Sprint("f64/", level), func(t *testing.T) { packedIsTheLoop[float64](t, level) })
	}
}

func TestWidenRowsIsTheLoop(t *testing.T) {
	for _, level := range Levels() {
		for rows := range 19 {
			for columns := range 33 {
				checkWidened(t, level, rows, columns, backend.BFloat16(0x3f80))
				checkWidened(t, level, rows, columns, backend.Float16(0x3c00))
			}
		}
	}
}

// checkWidened widens powers of two, which begin with one, into rows that follow each other.
func checkWidened[H half](t *testing.T, level Level, rows, columns int, one H) {
	t.Helper()
	pitch := columns + guard
	src, want := make([]H, rows*pitch), make([]float32, rows*pitch)
	step := H(0x80)
	if one == 0x3c00 {
		step = 0x400
	}
	for i := range src {
		src[i], want[i] = one+H(i%7)*step, float32(int(1)<<(i%7))
	}
	dst := make([]float32, rows*columns+vectorBytes/4)
	WidenRows(level, dst, src, columns, pitch, rows, columns)
	for i, x := range dst[:rows*columns] {
		if want := want[i/columns*pitch+i%columns]; x != want {
			t.Fatalf("%v: element %d of %d x %d %v is %v, want %v", level, i, rows, columns,
				backend.DTypeOf[H](), x, want)
		}
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
