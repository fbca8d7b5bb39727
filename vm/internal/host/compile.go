package host

import (
	"fmt"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
	"github.com/euryale-ml/euryale/vm/internal/plan"
)

type float interface{ float32 | float64 }

// gemm is c = alpha op(a) op(b) + beta c, row-major, as BLAS has it.
type gemm[T float] func(tA, tB blas.Transpose, m, n, k int, alpha T, a []T, lda int, b []T, ldb int, beta T, c []T, ldc int)

// compile sets the function that runs a step.
func (e *Executor) compile(s *step) (err error) {
	switch op := s.Op.(type) {
	case plan.Loop:
		s.run, err = loop(s, op)
	case ir.Concat:
		s.run, err = concat(s, op)
	case ir.Unslice:
		s.run, err = unslice(s, op)
	case ir.Opaque:
		s.run, err = call(s, e.opaque(op.Index))
	default:
		switch s.Dsts[0].DType {
		case backend.F32:
			s.run, err = compile[float32](s, gonum.Implementation{}.Sgemm)
		case backend.F64:
			s.run, err = compile[float64](s, gonum.Implementation{}.Dgemm)
		default:
			err = fmt.Errorf("not for %v", s.Dsts[0].DType)
		}
	}
	return err
}

// compile returns the function of an operation on floats.
func compile[T float](s *step, multiply gemm[T]) (func() error, error) {
	x := s.Args[0].Shape
	switch op := s.Op.(type) {
	case ir.MatMul:
		return matMul(s, op, multiply), nil
	case ir.SoftMax:
		rows := rowsOf(x, op.Axis)
		return unary(s, func(y, x []T) { softmax(y, x, rows, op.Log) }), nil
	case ir.SoftMaxGrad:
		rows := rowsOf(x, op.Axis)
		return binary(s, func(dx, y, dy []T) { softmaxGrad(dx, y, dy, rows, op.Log) }), nil
	case ir.Im2Col:
		i := imagesOf(x, s.Dsts[0].Shape.At(1), s.Dsts[0].Shape.At(2), op.Window)
		return unary(s, func(y, x []T) { im2col(y, x, i) }), nil
	case ir.Col2Im:
		i := imagesOf(s.Dsts[0].Shape, x.At(1), x.At(2), op.Window)
		return unary(s, func(y, x []T) { col2im(y, x, i) }), nil
	case ir.MaxPool:
		i := imagesOf(x, s.Dsts[0].Shape.At(2), s.Dsts[0].Shape.At(3), op.Window)
		return unary(s, func(y, x []T) { maxPool(y, x, i) }), nil
	case ir.MaxPoolGrad:
		dy := s.Args[1].Shape
		i := imagesOf(x, dy.At(2), dy.At(3), op.Window)
		return binary(s, func(dx, x, dy []T) { maxPoolGrad(dx, x, dy, i) }), nil
	}
	return nil, fmt.Errorf("the host does not implement %T", s.Op)
}

func unary[T float](s *step, f func(y, x []T)) func() error {
	return func() error {
		f(view[T](s.dsts[0]), view[T](s.args[0]))
		return nil
	}
}

func binary[T float](s *step, f func(z, x, y []T)) func() error {
	return func() error {
		f(view[T](s.dsts[0]), view[T](s.args[0]), view[T](s.args[1]))
		return nil
	}
}

// view returns the elements of a buffer.
func view[T float](b backend.Buffer) []T { return backend.View[T](b) }

// loop returns the function of a fused loop.
func loop(s *step, op plan.Loop) (func() error, error) {
	run, err := fuse.Host(op.Program)
	if err != nil {
		return nil, err
	}
	return func() error { return run.Run(s.dsts, s.args, backend.Buffer{}) }, nil
}

// copies returns the loop that copies r to elements with other strides.
func copies(r plan.Ref, strides ir.Dims) (fuse.Loop, error) {
	p := &fuse.Program{Shape: r.Shape.Slice()}
	p.Store(p.Load(r.DType, r.Strides.Slice()...), r.DType, strides.Slice()...)
	return fuse.Host(p)
}

// concat copies each operand to its part of the result.
func concat(s *step, op ir.Concat) (func() error, error) {
	var loops []fuse.Loop
	var offsets []int
	dst, offset := s.Dsts[0], 0
	for _, a := range s.Args {
		l, err := copies(a, dst.Strides)
		if err != nil {
			return nil, err
		}
		loops, offsets = append(loops, l), append(offsets, offset)
		offset += a.Shape.At(op.Axis) * dst.Strides.At(op.Axis)
	}
	to := make([]backend.Buffer, 1)
	return func() error {
		for i, l := range loops {
			to[0] = s.dsts[0].Slice(offsets[i], s.dsts[0].Len())
			if err := l.Run(to, s.args[i:i+1], backend.Buffer{}); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// unslice copies its operand to some elements of the result, and zeroes the others.
func unslice(s *step, op ir.Unslice) (func() error, error) {
	dst := s.Dsts[0]
	stride := dst.Strides.At(op.Axis)
	l, err := copies(s.Args[0], dst.Strides.With(op.Axis, op.Step*stride))
	if err != nil {
		return nil, err
	}
	to := make([]backend.Buffer, 1)
	return func() error {
		clear(s.dsts[0].Bytes())
		to[0] = s.dsts[0].Slice(op.Start*stride, s.dsts[0].Len())
		return l.Run(to, s.args, backend.Buffer{})
	}, nil
}

// matrix is how BLAS reads one operand: as it lies, or transposed.
type matrix struct {
	trans blas.Transpose
	ld    int
	batch ir.Dims // strides of the axes before the last two

}

// matrixOf returns how BLAS reads op(r), of which layout has made sure.
func matrixOf(r plan.Ref, transposed bool) matrix {
	n := r.Shape.Len()
	rows, columns := r.Shape.At(n-2), r.Shape.At(n-1)
	row, column := r.Strides.At(n-2), r.Strides.At(n-1)
	m := matrix{trans: blas.NoTrans, ld: max(row, columns), batch: r.Strides.Without(n - 1).Without(n - 2)}
	if byRows := (column == 1 || columns == 1) && (row >= columns || rows == 1); !byRows {
		transposed, m.ld = !transposed, max(column, rows)
	}
	if transposed {
		m.trans = blas.Trans
	}
	return m
}

// matMul multiplies each pair of matrices.
func matMul[T float](s *step, op ir.MatMul, multiply gemm[T]) func() error {
	a, b, dst := matrixOf(s.Args[0], op.TransA), matrixOf(s.Args[1], op.TransB), s.Dsts[0]
	n := dst.Shape.Len()
	rows, columns, inner := dst.Shape.At(n-2), dst.Shape.At(n-1), s.Args[0].Shape.At(n-1)
	if op.TransA {
		inner = s.Args[0].Shape.At(n - 2)
	}
	batch := dst.Shape.Without(n - 1).Without(n - 2)
	return func() error {
		x, y, z := view[T](s.args[0]), view[T](s.args[1]), view[T](s.dsts[0])
		for i := range batch.Size() {
			multiply(a.trans, b.trans, rows, columns, inner,
				1, x[place(i, batch, a.batch):], a.ld, y[place(i, batch, b.batch):], b.ld,
				0, z[i*rows*columns:], columns)
		}
		return nil
	}
}

// place returns where entry i of a shape, in row-major order, is with the strides.
func place(i int, shape, strides ir.Dims) int {
	at := 0
	for axis := shape.Len() - 1; axis >= 0; axis-- {
		at += i % shape.At(axis) * strides.At(axis)
		i /= shape.At(axis)
	}
	return at
}
