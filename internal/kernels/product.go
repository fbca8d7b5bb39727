package kernels

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Product is a batch of matrix multiplications (GEMM):
//
//	for b < Batch, i < M, j < N {
//		sum := 0
//		for k < K { sum += A[b](i, k) * B[b](k, j) }
//		C[b](i, j) = Alpha*sum + Beta*C[b](i, j)
//	}
//
// A and B have the same dtype, a float. C has that dtype, or is f32 if they have 16 bits. The sum
// is in f64 if A and B are, otherwise in f32, and is rounded once to the dtype of C. If Beta is 0,
// C is only written: its old content, even NaN, does not matter. Each implementation adds in its
// own order, with or without fused multiply-adds, and gives bitwise identical results in every run;
// all agree where the sums are exact. [Host.Multiply] may add up terms of Alpha*A in parts.
type Product struct {
	Batch   int // how many products; 0 stands for 1
	M, N, K int // A is M x K, B is K x N, C is M x N
	A, B, C Matrix
	Alpha   float64
	Beta    float64

	// TF32 permits a device to round f32 operands to 10 bits of mantissa, for its tensor cores.
	TF32 bool

	// Epilogue, if it is not nil, runs after the product, on the host only.
	Epilogue Epilogue
}

// Epilogue is a loop over the elements of the result of a product or a convolution, such as bias
// and activation. If parts have whole rows or images, it runs on what a part has just finished,
// while that is still in a cache. Products of few columns have such parts. Elements are numbered in
// row-major order.
type Epilogue interface {
	// Divides reports whether it may run in this many parts, each of a multiple of n elements, and
	// would not divide into more parts by itself.
	Divides(parts, n int) bool
	// Elements runs it from element lo up to hi on a worker of the pool.
	Elements(lo, hi, worker int)
	// All runs it on all elements, outside of a task.
	All()
}

// Matrix is an operand of a [Product]. Its rows are contiguous in memory.
type Matrix struct {
	Buffer backend.Buffer
	Pitch  int // elements from the start of a row in memory to the next
	Stride int // elements from one matrix of the batch to the next; 0 if all read the same one

	// Transposed says that memory holds the transpose: of A, K rows of M elements. Not for C.
	Transposed bool
}

// Steps returns the distances in memory, in elements, of neighbours in a column and in a row.
func (m Matrix) Steps() (row, column int) {
	if m.Transposed {
		return 1, m.Pitch
	}
	return m.Pitch, 1
}

// batch returns the number of products.
func (p *Product) batch() int { return max(p.Batch, 1) }

// Empty reports whether there is nothing to write.
func (p *Product) Empty() bool { return p.M == 0 || p.N == 0 }

// Multiply checks a product.
func (c Check) Multiply(p Product) error {
	if p.Batch < 0 || p.M < 0 || p.N < 0 || p.K < 0 {
		return fmt.Errorf("%w: multiply %d x [%d,%d] by [%d,%d]: nothing may be negative",
			backend.ErrArgument, p.Batch, p.M, p.K, p.K, p.N)
	}
	in, out := p.A.Buffer.DType(), p.C.Buffer.DType()
	if p.B.Buffer.DType() != in || !in.Float() || out != in && (out != backend.F32 ||
		in.Size() != 2) {
		return fmt.Errorf("%w: multiply %v by %v into %v: operands are floats of one dtype, and "+
			"so is the result, or f32 for operands of 16 bits",
			backend.ErrArgument, in, p.B.Buffer.DType(), out)
	}
	if p.C.Transposed {
		return fmt.Errorf("%w: multiply into a transposed matrix: swap the operands and "+
			"transpose both instead", backend.ErrArgument)
	}
	if p.Empty() {
		return nil
	}
	for _, o := range []struct {
		name          string
		m             Matrix
		rows, columns int
	}{{"A", p.A, p.M, p.K}, {"B", p.B, p.K, p.N}, {"C", p.C, p.M, p.N}} {
		if err := o.m.fits(o.name, p.batch(), o.rows, o.columns); err != nil {
			return err
		}
	}
	if one := (p.M-1)*p.C.Pitch + p.N; p.batch() > 1 && p.C.Stride < one {
		return fmt.Errorf("%w: multiply: the results of a batch are %d elements apart and take "+
			"%d each: they would overlap", backend.ErrArgument, p.C.Stride, one)
	}
	if p.K == 0 {
		return c.checkDevice("multiply", p.C.Buffer)
	}
	return c.checkDevice("multiply", p.C.Buffer, p.A.Buffer, p.B.Buffer)
}

// fits checks that a matrix lies within its buffer.
func (m Matrix) fits(name string, batch, rows, columns int) error {
	if m.Transposed {
		rows, columns = columns, rows
	}
	if m.Pitch < columns || m.Stride < 0 {
		return fmt.Errorf("%w: multiply: rows of %s have %d elements, and a pitch of %d, in "+
			"matrices %d apart", backend.ErrArgument, name, columns, m.Pitch, m.Stride)
	}
	if rows == 0 || columns == 0 {
		return nil
	}
	if need := (batch-1)*m.Stride + (rows-1)*m.Pitch + columns; m.Buffer.Len() < need {
		return fmt.Errorf("%w: multiply: %s takes %d elements, its buffer has %d",
			backend.ErrArgument, name, need, m.Buffer.Len())
	}
	return nil
}
