package plan

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// lower returns the program with layers as reductions and element-wise values, of which
// grouping makes loops: one, if the layer is along the last axis.
func lower(p *ir.Program) *ir.Program {
	return rewrite(p, func(n *numbering, v ir.Value) ir.ID {
		l := &lowering{n, v}
		switch op := v.Op.(type) {
		case ir.SoftMax:
			return l.softmax(v.Args[0], op)
		case ir.SoftMaxGrad:
			return l.softmaxGrad(v.Args[0], v.Args[1], op)
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
	return l.simplest(ir.Value{Op: op, Args: args, Shape: shape, DType: l.of.DType, Name: l.of.Name})
}

func (l *lowering) unary(f fuse.Op, x ir.ID) ir.ID {
	return l.add(ir.Unary{Op: f}, l.program.Values[x].Shape, x)
}

func (l *lowering) binary(f fuse.Op, x, y ir.ID) ir.ID {
	return l.add(ir.Binary{Op: f}, l.of.Shape, x, y)
}

// reduce combines the elements along an axis.
func (l *lowering) reduce(f backend.ReduceOp, x ir.ID, axis int) ir.ID {
	return l.add(ir.Reduce{Op: f, Axes: ir.Of(axis)}, l.of.Shape.Without(axis), x)
}

// along repeats what reduce gives along the axis.
func (l *lowering) along(x ir.ID, axis int) ir.ID {
	return l.add(ir.Broadcast{}, l.of.Shape, l.add(ir.Reshape{}, l.of.Shape.With(axis, 1), x))
}

// softmax is exp(x-max) / sum(exp(x-max)), or x - max - log(sum(exp(x-max))).
func (l *lowering) softmax(x ir.ID, op ir.SoftMax) ir.ID {
	d := l.binary(fuse.Sub, x, l.along(l.reduce(backend.Max, x, op.Axis), op.Axis))
	e := l.unary(fuse.Exp, d)
	sum := l.reduce(backend.Sum, e, op.Axis)
	if op.Log {
		return l.binary(fuse.Sub, d, l.along(l.unary(fuse.Log, sum), op.Axis))
	}
	return l.binary(fuse.Div, e, l.along(sum, op.Axis))
}

// softmaxGrad is y (dy - sum(dy y)), or dy - exp(y) sum(dy) for the logarithm.
func (l *lowering) softmaxGrad(y, dy ir.ID, op ir.SoftMaxGrad) ir.ID {
	if op.Log {
		return l.binary(fuse.Sub, dy, l.binary(fuse.Mul, l.unary(fuse.Exp, y), l.along(l.reduce(backend.Sum, dy, op.Axis), op.Axis)))
	}
	sum := l.reduce(backend.Sum, l.binary(fuse.Mul, dy, y), op.Axis)
	return l.binary(fuse.Mul, y, l.binary(fuse.Sub, dy, l.along(sum, op.Axis)))
}
