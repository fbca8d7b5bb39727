package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops"
)

// BatchedMatMul multiplies matrices, those of one index of a and b each, with the last two axes of a
// or b exchanged first if transA or transB is set.
//
//	in   a  [batch..., m, k], [batch..., k, m] with transA
//	     b  [batch..., k, n], [batch..., n, k] with transB
//	out  c  [batch..., m, n]   c = a b
//
// Batches may have any number of axes, also none.
//
// Gradient: da = dc bᵀ and db = aᵀ dc, exchanged likewise.
// Cost: 2*batch*m*k*n operations; backward twice that, without copies of transposed operands. These
// are plain loops, slower than the BLAS of gorgonia.BatchedMatMul; package vm multiplies faster.
// Errors: [ops.ErrShape] if a and b have fewer than two axes or do not fit; [ops.ErrDType].
func BatchedMatMul(transA, transB bool, a, b *gorgonia.Node) (*gorgonia.Node, error) {
	return build("BatchedMatMul", "a b", BatchedMatMulSpec{transA, transB}, a, b)
}

// OuterProd multiplies every element of a vector with every element of another.
//
//	in   a  [m]
//	     b  [n]
//	out  c  [m, n]   c[i, j] = a[i] * b[j]
//
// Gradient: da = dc b and db = dcᵀ a.
// Cost: m*n operations; backward twice that.
// Errors: [ops.ErrShape] if a or b is not a vector; [ops.ErrDType].
func OuterProd(a, b *gorgonia.Node) (*gorgonia.Node, error) {
	return build("OuterProd", "a b", OuterProdSpec{}, a, b)
}

// BatchedMatMulSpec is [BatchedMatMul] of a and b.
type BatchedMatMulSpec struct{ TransA, TransB bool }

// String returns "BatchedMatMul{NT}", with T for an operand that is transposed.
func (s BatchedMatMulSpec) String() string {
	return fmt.Sprintf("BatchedMatMul{%s%s}", letter(s.TransA), letter(s.TransB))
}

// letter returns BLAS's letter for a transposition.
func letter(transposed bool) string {
	if transposed {
		return "T"
	}
	return "N"
}

// size returns rows and columns of the last two axes, exchanged if trans is set.
func size(shape tensor.Shape, trans bool) (rows, columns int) {
	rows, columns = shape[len(shape)-2], shape[len(shape)-1]
	if trans {
		return columns, rows
	}
	return rows, columns
}

func (s BatchedMatMulSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	a, b := in[0], in[1]
	batch := len(a) - 2
	if batch < 0 || len(b) != len(a) || !slices.Equal(a[:batch], b[:batch]) {
		return nil, fmt.Errorf("%w: batches of %v and %v differ, or they are no matrices", ops.ErrShape, a, b)
	}
	m, k := size(a, s.TransA)
	also, n := size(b, s.TransB)
	if k != also {
		return nil, fmt.Errorf("%w: %v and %v of %v do not fit: %d columns and %d rows", ops.ErrShape, a, b, s, k, also)
	}
	return append(a[:batch].Clone(), m, n), nil
}

// gradients: for c = op(a) op(b), op(a) gets dc op(b)ᵀ, and a that or its transpose.
func (s BatchedMatMulSpec) gradients([]tensor.Shape) []gradient {
	da := gradient{BatchedMatMulSpec{false, !s.TransB}, []int{dy, 1}}
	if s.TransA {
		da = gradient{BatchedMatMulSpec{s.TransB, true}, []int{1, dy}}
	}
	db := gradient{BatchedMatMulSpec{!s.TransA, false}, []int{0, dy}}
	if s.TransB {
		db = gradient{BatchedMatMulSpec{true, s.TransA}, []int{dy, 0}}
	}
	return []gradient{da, db}
}

func (s BatchedMatMulSpec) f32(c array[float32], x []array[float32]) error {
	return batchedMatMul(s, c, x[0], x[1])
}

func (s BatchedMatMulSpec) f64(c array[float64], x []array[float64]) error {
	return batchedMatMul(s, c, x[0], x[1])
}

// batchedMatMul reads rows of b in order: each is multiplied with one element of a, or, if b is
// transposed, with a row of a.
func batchedMatMul[T float](s BatchedMatMulSpec, c, a, b array[T]) error {
	m, k := size(a.shape, s.TransA)
	_, n := size(b.shape, s.TransB)
	step, next := steps(k, m, s.TransA)
	sums, row := make([]float64, n), make([]float64, k)
	for batch := range len(c.data) / (m * n) {
		left, right := a.data[batch*m*k:][:m*k], b.data[batch*k*n:][:k*n]
		for i := range m {
			for p := range row {
				row[p] = float64(left[i*step+p*next])
			}
			if s.TransB {
				dots(sums, row, right)
			} else {
				addRows(sums, row, right)
			}
			round(c.data[(batch*m+i)*n:][:n], sums)
		}
	}
	return nil
}

// dots sets each sum to the product of x and a row of b.
func dots[T float](sums, x []float64, b []T) {
	for j := range sums {
		sum := 0.0
		for p, v := range b[j*len(x):][:len(x)] {
			sum += x[p] * float64(v)
		}
		sums[j] = sum
	}
}

// addRows sets the sums to the rows of b, multiplied with the elements of x.
func addRows[T float](sums, x []float64, b []T) {
	clear(sums)
	for p, v := range x {
		for j, w := range b[p*len(sums):][:len(sums)] {
			sums[j] += v * float64(w)
		}
	}
}

// steps returns the distance between rows and between columns of a matrix, as it is used.
func steps(columns, rows int, trans bool) (row, column int) {
	if trans {
		return 1, rows
	}
	return columns, 1
}

// OuterProdSpec is [OuterProd] of a and b.
type OuterProdSpec struct{}

// String returns "OuterProd".
func (s OuterProdSpec) String() string { return "OuterProd" }

func (s OuterProdSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	if len(in[0]) != 1 || len(in[1]) != 1 {
		return nil, fmt.Errorf("%w: operands have shapes %v and %v, want two vectors", ops.ErrShape, in[0], in[1])
	}
	return tensor.Shape{in[0][0], in[1][0]}, nil
}

func (s OuterProdSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{MatVecSpec{false}, []int{dy, 1}}, {MatVecSpec{true}, []int{dy, 0}}}
}

func (s OuterProdSpec) f32(c array[float32], x []array[float32]) error { return outer(c, x[0], x[1]) }
func (s OuterProdSpec) f64(c array[float64], x []array[float64]) error { return outer(c, x[0], x[1]) }

func outer[T float](c, a, b array[T]) error {
	for i, v := range a.data {
		for j, w := range b.data {
			c.data[i*len(b.data)+j] = v * w
		}
	}
	return nil
}

// MatVecSpec is the product of a matrix, transposed if Trans is set, and a vector: the gradients of
// [OuterProd].
type MatVecSpec struct{ Trans bool }

// String returns "MatVec{N}" or "MatVec{T}".
func (s MatVecSpec) String() string { return fmt.Sprintf("MatVec{%s}", letter(s.Trans)) }

func (s MatVecSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	rows, columns := size(in[0], s.Trans)
	if len(in[1]) != 1 || in[1][0] != columns {
		return nil, fmt.Errorf("%w: %v of shapes %v and %v", ops.ErrShape, s, in[0], in[1])
	}
	return tensor.Shape{rows}, nil
}

func (s MatVecSpec) gradients([]tensor.Shape) []gradient {
	matrix := gradient{OuterProdSpec{}, []int{dy, 1}}
	if s.Trans {
		matrix.of = []int{1, dy}
	}
	return []gradient{matrix, {MatVecSpec{!s.Trans}, []int{0, dy}}}
}

func (s MatVecSpec) f32(y array[float32], x []array[float32]) error { return matVec(s, y, x[0], x[1]) }
func (s MatVecSpec) f64(y array[float64], x []array[float64]) error { return matVec(s, y, x[0], x[1]) }

func matVec[T float](s MatVecSpec, y, m, v array[T]) error {
	rows, columns := size(m.shape, s.Trans)
	row, column := steps(columns, rows, s.Trans)
	for i := range rows {
		sum := 0.0
		for k, x := range v.data {
			sum += float64(m.data[i*row+k*column]) * float64(x)
		}
		y.data[i] = T(sum)
	}
	return nil
}
