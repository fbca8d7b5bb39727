package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/ops"
)

// BatchedMatMul multiplies the matrices of a and b with the same batch index. If transA or transB
// is set, it first exchanges the last two axes of a or b.
//
//	in   a  [batch..., m, k], [batch..., k, m] with transA
//	     b  [batch..., k, n], [batch..., n, k] with transB
//	out  c  [batch..., m, n]   c = a b
//
// Batches may have any number of axes, including none.
//
// Gradient: da = dc bᵀ and db = aᵀ dc, exchanged likewise.
// Cost: 2*batch*m*k*n operations; backward twice that, without copies of transposed operands.
// Errors: [ops.ErrShape] if a and b have fewer than two axes or do not fit; [ops.ErrDType].
func BatchedMatMul(transA, transB bool, a, b *gorgonia.Node) (*gorgonia.Node, error) {
	return build("BatchedMatMul", "a b", batchedMatMulSpec{transA, transB}, a, b)
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
	return build("OuterProd", "a b", outerProdSpec{}, a, b)
}

// batchedMatMulSpec is [BatchedMatMul] of a and b.
type batchedMatMulSpec struct{ TransA, TransB bool }

// String returns "BatchedMatMul{NT}", with T for an operand that is transposed.
func (s batchedMatMulSpec) String() string {
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

func (s batchedMatMulSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	a, b := in[0], in[1]
	batch := len(a) - 2
	if batch < 0 || len(b) != len(a) || !slices.Equal(a[:batch], b[:batch]) {
		return nil, fmt.Errorf("%w: batches of %v and %v differ, or they are no matrices",
			ops.ErrShape, a, b)
	}
	m, k := size(a, s.TransA)
	also, n := size(b, s.TransB)
	if k != also {
		return nil, fmt.Errorf("%w: %v and %v of %v do not fit: %d columns and %d rows",
			ops.ErrShape, a, b, s, k, also)
	}
	return append(a[:batch].Clone(), m, n), nil
}

// gradients: for c = op(a) op(b), op(a) gets dc op(b)ᵀ, and a that or its transpose.
func (s batchedMatMulSpec) gradients([]tensor.Shape) []gradient {
	da := gradient{batchedMatMulSpec{false, !s.TransB}, []int{dy, 1}}
	if s.TransA {
		da = gradient{batchedMatMulSpec{s.TransB, true}, []int{1, dy}}
	}
	db := gradient{batchedMatMulSpec{!s.TransA, false}, []int{0, dy}}
	if s.TransB {
		db = gradient{batchedMatMulSpec{true, s.TransA}, []int{dy, 0}}
	}
	return []gradient{da, db}
}

func (s batchedMatMulSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return b.MatMul(s.TransA, s.TransB, x[0], x[1])
}

// outerProdSpec is [OuterProd] of a and b.
type outerProdSpec struct{}

// String returns "OuterProd".
func (s outerProdSpec) String() string { return "OuterProd" }

func (s outerProdSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	if len(in[0]) != 1 || len(in[1]) != 1 {
		return nil, fmt.Errorf("%w: operands have shapes %v and %v, want two vectors", ops.ErrShape,
			in[0], in[1])
	}
	return tensor.Shape{in[0][0], in[1][0]}, nil
}

func (s outerProdSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{matVecSpec{false}, []int{dy, 1}}, {matVecSpec{true}, []int{dy, 0}}}
}

func (s outerProdSpec) program(b *program.Builder, x ...program.Value) program.Value {
	m, n := b.Of(x[0]).Shape[0], b.Of(x[1]).Shape[0]
	return b.MatMul(false, false, b.Reshape(x[0], m, 1), b.Reshape(x[1], 1, n))
}

// matVecSpec is the product of a matrix, transposed if Trans is set, and a vector: the gradients of
// [OuterProd].
type matVecSpec struct{ Trans bool }

// String returns "MatVec{N}" or "MatVec{T}".
func (s matVecSpec) String() string { return fmt.Sprintf("MatVec{%s}", letter(s.Trans)) }

func (s matVecSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	rows, columns := size(in[0], s.Trans)
	if len(in[1]) != 1 || in[1][0] != columns {
		return nil, fmt.Errorf("%w: %v of shapes %v and %v", ops.ErrShape, s, in[0], in[1])
	}
	return tensor.Shape{rows}, nil
}

func (s matVecSpec) gradients([]tensor.Shape) []gradient {
	matrix := gradient{outerProdSpec{}, []int{dy, 1}}
	if s.Trans {
		matrix.of = []int{1, dy}
	}
	return []gradient{matrix, {matVecSpec{!s.Trans}, []int{0, dy}}}
}

func (s matVecSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return b.MatMul(s.Trans, false, x[0], b.Reshape(x[1], b.Of(x[1]).Shape[0], 1))
}
