package read

import (
	"slices"

	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/ops/nn"
)

// ours adds the value of an operation of package nn, by its program. Planning fuses what it is made
// of, and forward and backward pass share what they both need.
func (b *builder) ours(o *nn.Op) ir.ID {
	x := b.args
	if mask, forward := o.Mask(); mask != nil && b.training {
		if forward {
			b.Masks = append(b.Masks, mask)
		}
		x = append(slices.Clone(x), b.random(mask.Random))
	}
	if at := o.Labels(); at >= 0 {
		if n, ok := b.given(b.uncast(b.args[at])); ok && n != nil {
			b.Labels = append(b.Labels, Labels{o, n})
		}
	}
	y := o.Program(&b.Builder, x...)
	if o.Casts() {
		return b.cast(y)
	}
	return y
}

// cast notes that a value is the node's operand, cast.
func (b *builder) cast(id ir.ID) ir.ID {
	if b.casts == nil {
		b.casts = map[ir.ID]ir.ID{}
	}
	b.casts[id] = b.args[0]
	return id
}

// uncast returns what was cast and reshaped to a value.
func (b *builder) uncast(id ir.ID) ir.ID {
	of, ok := b.casts[id]
	if v := b.of(id); v.Op == (ir.Reshape{}) {
		of, ok = v.Args[0], true
	}
	if !ok || of == id {
		return id
	}
	return b.uncast(of)
}

// local is an operation of package ops that may give part of its operand, from index start of an
// axis on, and communicate nothing.
type local interface {
	Local() (axis, start int, ok bool)
}

func (b *builder) local(o local) ir.ID {
	axis, start, ok := o.Local()
	switch x := b.args[0]; {
	case !ok:
		return none
	case b.of(x).Shape == b.shape:
		return x
	default:
		return b.Add(ir.Slice{Axis: axis, Start: start, Step: 1}, b.shape, b.dtype, x)
	}
}

// gatherAxis takes the elements of an axis of x that indices name: the axis becomes those of
// indices.
func (b *builder) gatherAxis(x, indices ir.ID, axis int) ir.ID {
	if v := b.of(x); !v.DType.Float() || v.DType.Size() == 2 || axis >= v.Shape.Len() {
		return none
	}
	return b.Gather(x, indices, axis)
}

// gatherGrad is the gradient of gather by x, which has the shape of the node.
func (b *builder) gatherGrad(dy, indices ir.ID, axis int) ir.ID {
	if !b.of(dy).DType.Float() || axis >= b.shape.Len() {
		return none
	}
	n := b.of(indices).Shape.Size()
	list := b.reshape(indices, ir.Of(n))
	if dy = b.reshape(dy, b.shape.With(axis, n)); dy < 0 {
		return none
	}
	return b.GatherGrad(dy, list, axis, b.shape.At(axis))
}

// scalar adds a number of the node's dtype.
func (b *builder) scalar(number float64) ir.ID {
	return b.Add(ir.ScalarOf(number), ir.Dims{}, b.dtype)
}

// stockPool returns the window of Gorgonia's AveragePool2D, which means nn.AvgPool2D: its own Do
// divides by the width of the image, and begins at the padding of the other sides.
func (b *builder) stockPool() (w program.Window, counted program.Border) {
	w = program.Window{
		Kernel:   [2]int{b.int("h"), b.int("w")},
		Pad:      [2]int{b.int("padNorth"), b.int("padWest")},
		After:    [2]int{b.int("padSouth"), b.int("padEast")},
		Stride:   [2]int{b.int("strideH"), b.int("strideW")},
		Dilation: [2]int{1, 1},
	}
	return w, program.Border{w.Pad[0], w.Pad[1], w.After[0], w.After[1]}
}

func (b *builder) stockAveragePool() ir.ID {
	w, border := b.stockPool()
	return program.AveragePool(&b.Builder, b.args[0], w, border)
}

func (b *builder) stockAveragePoolGrad() ir.ID {
	w, border := b.stockPool()
	return program.AveragePoolGrad(&b.Builder, b.args[2], w, border, b.shape.At(2), b.shape.At(3))
}
