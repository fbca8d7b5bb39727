package lower

import (
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// images makes matrix multiplications of patches convolutions, of which devices have some that
// write no patches, and pools of rectified images one operation. Values that nobody needs then are
// left to prune.
//
//	Im2Col(x) wᵀ      = Convolution(x, w)
//	dyᵀ Im2Col(x)     = the gradient of that by w
//	Col2Im(dy w)      = the gradient of that by x
//	MaxPool(Relu(x))  = MaxPool{Rectified}(x)
func images(p *ir.Program) *ir.Program {
	return rewrite(p, func(n *numbering, _ ir.ID, v ir.Value) ir.ID {
		l := &lowering{n, v}
		var id ir.ID
		ok := false
		switch op := v.Op.(type) {
		case ir.MatMul:
			id, ok = l.convolution(op)
		case ir.Col2Im:
			id, ok = l.inputGradient(op)
		case ir.MaxPool:
			id, ok = l.rectifiedPool(op)
		case ir.Where:
			id, ok = l.rectifiedPoolGrad()
		}
		if ok {
			return id
		}
		return n.simplest(v)
	})
}

// lowering adds what takes the place of one value.
type lowering struct {
	*numbering
	of ir.Value
}

func (l *lowering) add(op ir.Op, shape ir.Dims, args ...ir.ID) ir.ID {
	return l.simplest(ir.Value{Op: op, Args: args, Shape: shape, DType: l.of.DType,
		Name: l.of.Name})
}

// convolution is the matrix multiplication of patches [B*OH*OW, C*KH*KW] and the transpose of
// filters [L, C*KH*KW], or the gradient by the filters: that of the transpose of dy [B*OH*OW, L]
// and patches.
func (l *lowering) convolution(op ir.MatMul) (ir.ID, bool) {
	switch {
	case op.TransB && !op.TransA:
		if x, window, places, ok := l.patches(l.of.Args[0]); ok {
			y := l.convolve(kernels.Forward, window, places(l.of.Shape.At(1)), x,
				l.filters(l.of.Args[1], x, window))
			return l.reshape(l.permute(y, 0, 2, 3, 1), l.of.Shape), true
		}
	case op.TransA && !op.TransB:
		if x, window, places, ok := l.patches(l.of.Args[1]); ok {
			filters, channels := l.of.Shape.At(0), l.program.Values[x].Shape.At(1)
			dy := l.planes(l.of.Args[0], places(filters))
			dw := l.convolve(kernels.FilterGradient, window, ir.Of(filters, channels, window.H,
				window.W), x, dy)
			return l.reshape(dw, l.of.Shape), true
		}
	}
	return 0, false
}

// inputGradient is the sum of patches that are dy [B*OH*OW, L] multiplied by filters.
func (l *lowering) inputGradient(op ir.Col2Im) (ir.ID, bool) {
	matmul := l.program.Values[l.unshaped(l.of.Args[0])]
	if by, ok := matmul.Op.(ir.MatMul); !ok || by.TransA || by.TransB ||
		matmul.Shape.Len() != 2 || matmul.Shape.At(1) != l.of.Shape.At(
		1)*op.Window.H*op.Window.W {
		return 0, false
	}
	patches, filters := l.program.Values[l.of.Args[0]].Shape,
		l.program.Values[matmul.Args[1]].Shape.At(0)
	dy := l.planes(matmul.Args[0], ir.Of(patches.At(0), filters, patches.At(1), patches.At(2)))
	w := l.reshape(matmul.Args[1], ir.Of(filters, l.of.Shape.At(1), op.Window.H, op.Window.W))
	return l.convolve(kernels.InputGradient, op.Window, l.of.Shape, dy, w), true
}

// patches returns the images whose patches x is, as a matrix with a row for each, and the shape of
// the results of a number of filters.
func (l *lowering) patches(x ir.ID) (images ir.ID, window ir.Window,
	results func(filters int) ir.Dims, ok bool) {
	v := l.program.Values[l.unshaped(x)]
	op, ok := v.Op.(ir.Im2Col)
	if shape := l.program.Values[x].Shape; !ok || shape.Len() != 2 || shape.At(1) != v.Shape.At(3) {
		return 0, window, nil, false
	}
	results = func(filters int) ir.Dims {
		return ir.Of(v.Shape.At(0), filters, v.Shape.At(1), v.Shape.At(2))
	}
	return v.Args[0], op.Window, results, true
}

// unshaped returns the value that x has, before it was given another shape.
func (l *lowering) unshaped(x ir.ID) ir.ID {
	for l.program.Values[x].Op == (ir.Reshape{}) {
		x = l.program.Values[x].Args[0]
	}
	return x
}

// filters returns a matrix with a filter in each row as filters of images x.
func (l *lowering) filters(w, x ir.ID, window ir.Window) ir.ID {
	return l.reshape(w, ir.Of(l.program.Values[w].Shape.At(0), l.program.Values[x].Shape.At(1),
		window.H, window.W))
}

// planes returns a matrix [B*OH*OW, L] as images of shape [B, L, OH, OW].
func (l *lowering) planes(rows ir.ID, shape ir.Dims) ir.ID {
	return l.permute(l.reshape(rows, ir.Of(shape.At(0), shape.At(2), shape.At(3), shape.At(1))), 0,
		3, 1, 2)
}

func (l *lowering) convolve(pass kernels.Pass, window ir.Window, shape ir.Dims,
	args ...ir.ID) ir.ID {
	return l.add(ir.Convolution{Pass: pass, Window: window}, shape, args...)
}

func (l *lowering) reshape(x ir.ID, shape ir.Dims) ir.ID { return l.add(ir.Reshape{}, shape, x) }

func (l *lowering) permute(x ir.ID, axes ...int) ir.ID {
	shape, _ := ir.Permuted(l.program.Values[x].Shape, ir.Of(axes...))
	return l.add(ir.Permute{Axes: ir.Of(axes...)}, shape, x)
}

// rectifiedPool is the pool of Relu of x.
func (l *lowering) rectifiedPool(op ir.MaxPool) (ir.ID, bool) {
	x, ok := l.rectified(l.of.Args[0])
	if !ok || op.Rectified {
		return 0, false
	}
	op.Rectified = true
	return l.add(op, l.of.Shape, x), true
}

// rectifiedPoolGrad is 0 where x < 0, and the gradient of the pool of Relu of x elsewhere.
func (l *lowering) rectifiedPoolGrad() (ir.ID, bool) {
	below, grad := l.program.Values[l.of.Args[0]], l.program.Values[l.of.Args[2]]
	pool, ok := grad.Op.(ir.MaxPoolGrad)
	compared := below.Op == ir.Binary{Op: fuse.Less} && l.program.Zero(below.Args[1])
	if !ok || pool.Rectified || !compared || !l.program.Zero(l.of.Args[1]) {
		return 0, false
	}
	x, ok := l.rectified(grad.Args[0])
	if !ok || x != below.Args[0] {
		return 0, false
	}
	pool.Rectified = true
	return l.add(pool, l.of.Shape, x, grad.Args[1]), true
}

// rectified returns x if y is Relu of it.
func (l *lowering) rectified(y ir.ID) (x ir.ID, ok bool) {
	v := l.program.Values[y]
	if v.Op != (ir.Unary{Op: fuse.Relu}) {
		return 0, false
	}
	return v.Args[0], true
}
