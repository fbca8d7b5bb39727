package lower

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// Where the axes of [N, C, H, W] are of tensors with their channels last, and the other way round.
var (
	behind = ir.Of(0, 2, 3, 1)
	second = ir.Of(0, 3, 1, 2)
)

// channelsLast makes convolutions those of tensors that have their channels last, and puts
// element-wise values, reductions and concatenations of these into that order of axes, so that
// nothing is transposed from one convolution to the next. Convolutions in groups stay: there is
// little that is fast for them.
//
//	Convolution(x, w) = Permute(Convolution{ChannelsLast}(Permute(x), Permute(w)))
//	f(Permute(x))     = Permute(f(x))
func channelsLast(p *ir.Program) *ir.Program {
	return rewrite(p, func(n *numbering, _ ir.ID, v ir.Value) ir.ID {
		switch op := v.Op.(type) {
		case ir.Convolution:
			if op.Groups <= 1 && !op.ChannelsLast {
				return n.convolveLast(v, op)
			}
		case ir.MaxPoolGrad:
			if n.isLast(v.Args[0]) { // so does what goes on with it want it
				return n.last(ir.Value{Op: ir.Copy{}, Args: []ir.ID{n.simplest(v)}, Shape: v.Shape,
					DType: v.DType, Name: v.Name})
			}
		case ir.Reduce:
			if id, ok := n.reduceLast(v, op); ok {
				return id
			}
		case ir.Concat:
			if !slices.ContainsFunc(v.Args, func(a ir.ID) bool { return !n.isLast(a) }) {
				op.Axis = second.At(op.Axis)
				v.Op = op
				return n.last(v)
			}
		default:
			_, copies := v.Op.(ir.Copy)
			if ir.Elementwise(v.Op) && !copies && !ir.ReadsPlace(v.Op) &&
				slices.ContainsFunc(v.Args, n.isLast) {
				return n.last(v)
			}
		}
		return n.simplest(v)
	})
}

// isLast reports whether x is a view of a value with its channels last. Gradients of filters are
// none: updates read them as the filters lie.
func (n *numbering) isLast(x ir.ID) bool {
	v := n.of(x)
	op, ok := v.Op.(ir.Permute)
	if !ok || op.Axes != second {
		return false
	}
	c, convolves := n.of(v.Args[0]).Op.(ir.Convolution)
	return !convolves || c.Pass != kernels.FilterGradient
}

// last adds v as a value with its channels last, of operands with theirs, and returns a view of it.
func (n *numbering) last(v ir.Value) ir.ID {
	args := make([]ir.ID, len(v.Args))
	for i, a := range v.Args {
		args[i] = n.toLast(a)
	}
	shape, name, dtype := v.Shape, v.Name, v.DType
	v.Args = args
	v.Shape, _ = ir.Permuted(shape, behind)
	return n.simplest(ir.Value{Op: ir.Permute{Axes: second}, Args: []ir.ID{n.simplest(v)},
		Shape: shape, DType: dtype, Name: name})
}

// toLast returns x with its channels last.
func (n *numbering) toLast(x ir.ID) ir.ID {
	v := n.of(x)
	shape, _ := ir.Permuted(v.Shape, behind)
	switch v.Op.(type) {
	case ir.Scalar:
		v.Shape = shape
		return n.simplest(v)
	case ir.Broadcast:
		v.Args, v.Shape = []ir.ID{n.toLast(v.Args[0])}, shape
		return n.simplest(v)
	}
	return n.simplest(ir.Value{Op: ir.Permute{Axes: behind}, Args: []ir.ID{x}, Shape: shape,
		DType: v.DType, Name: v.Name})
}

// convolveLast adds a convolution with channels last. What reads the gradient of filters of F32
// gets a copy, so that it reads what is dense.
func (n *numbering) convolveLast(v ir.Value, op ir.Convolution) ir.ID {
	op.ChannelsLast = true
	v.Op = op
	x := n.last(v)
	if op.Pass != kernels.FilterGradient || v.DType == backend.BF16 { // a loop widens that
		return x
	}
	return n.simplest(ir.Value{Op: ir.Copy{}, Args: []ir.ID{x}, Shape: v.Shape, DType: v.DType,
		Name: v.Name})
}

// reduceLast adds a reduction of a value with its channels last, if the axes that stay have the
// same order.
func (n *numbering) reduceLast(v ir.Value, op ir.Reduce) (ir.ID, bool) {
	x := v.Args[0]
	if !n.isLast(x) || !op.Axes.Has(1) && !(op.Axes.Has(2) && op.Axes.Has(3)) {
		return 0, false
	}
	var axes []int
	for i, axis := range behind.Slice() {
		if op.Axes.Has(axis) {
			axes = append(axes, i)
		}
	}
	v.Op, v.Args = ir.Reduce{Op: op.Op, Axes: ir.Of(axes...)}, n.of(x).Args
	return n.simplest(v), true
}
