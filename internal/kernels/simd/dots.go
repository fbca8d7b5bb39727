package simd

import (
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
)

// Dots is a product of at most FewRows rows of A with columns of B, C = Alpha*A*B + Beta*C, where
// all are contiguous, and C is only written if Beta is 0. Distances are in elements.
type Dots[T Float] struct {
	M, N, K       int            // A is M x K, B is K x N, C is M x N
	A, B          backend.Buffer // of one type, which is T or has 16 bits
	ARow, BColumn int            // from a row of A and a column of B to the next one
	C             []T
	CPitch        int // from a row of C to the next one
	Alpha, Beta   T
}

// dotColumns is how many columns of B are read at a time, except where AVX2 has too few registers,
// as in gen/gemm.
const dotColumns = 4

// Multiply computes the product. It reads B once.
func (d *Dots[T]) Multiply(l Level) {
	most := dotColumns
	if l == AVX2 && d.M > 1 {
		most = 2
	}
	for j, columns := 0, 0; j < d.N; j += columns {
		if columns = most; d.N-j < most {
			columns = 1
		}
		d.multiply(l, j, columns)
	}
}

// multiply computes some columns of C: whole vectors of both operands by one loop, and what is left
// by another.
func (d *Dots[T]) multiply(l Level, column, columns int) {
	var sums [FewRows * dotColumns]T
	whole, size := 0, d.A.DType().Size()
	if l > Go { // halves are loaded as two vectors
		whole = d.K - d.K%(lanes[T](l)*int(unsafe.Sizeof(sums[0]))/size)
	}
	if whole > 0 {
		dotsVectors(l, d.A.DType(), address(d.A), address(d.B.Slice(column*d.BColumn, d.B.Len())),
			address(backend.Of(sums[:])), d.ARow*size, d.BColumn*size, whole, d.M, columns)
	}
	for k := whole; k < d.K; k += dotBlock {
		d.rest(sums[:], k, min(dotBlock, d.K-k), column, columns)
	}
	for i := range d.M {
		for j, sum := range sums[i*columns:][:columns] {
			c := &d.C[i*d.CPitch+column+j]
			if sum *= d.Alpha; d.Beta != 0 {
				sum += d.Beta * *c
			}
			*c = sum
		}
	}
}

// dotBlock is how many elements the loop in Go widens at a time.
const dotBlock = 64

// rest adds n products from k.
func (d *Dots[T]) rest(sums []T, k, n, column, columns int) {
	var left, right [dotBlock]T
	for i := range d.M {
		load(left[:n], d.A, i*d.ARow+k)
		for j := range columns {
			load(right[:n], d.B, (column+j)*d.BColumn+k)
			for x := range n {
				sums[i*columns+j] += left[x] * right[x]
			}
		}
	}
}

// load is dst[i] = src[from+i]. src has elements T, or of 16 bits.
func load[T Float](dst []T, src backend.Buffer, from int) {
	switch wide, _ := any(dst).([]float32); src.DType() {
	case backend.BF16:
		Widen(Go, wide, backend.View[backend.BFloat16](src)[from:])
	case backend.F16:
		Widen(Go, wide, backend.View[backend.Float16](src)[from:])
	default:
		copy(dst, backend.View[T](src)[from:])
	}
}
