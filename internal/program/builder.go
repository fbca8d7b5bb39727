package program

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Value names a value of a program.
type Value = ir.ID

// Tensor is the shape and the dtype of a value.
type Tensor struct {
	Shape []int
	DType backend.DType
}

// Builder adds the values of operations to a program. Each primitive returns a new value, which
// depends on its arguments alone. A Builder does not check them: who calls it knows that shapes and
// dtypes fit.
//
// The first primitives compute element by element, and fold. Their operands may differ in axes of
// length 1, which are repeated, and in missing first axes, which have length 1 then. Planning makes
// one loop of neighbours with one shape, and of what has one element for each row of that.
type Builder struct {
	To   *ir.Program
	Name string // of the values, for plans and messages
	// Checked reports whether a run looks at integers before it begins, nil if it does at all.
	Checked func(integers Value) bool
	// Recurs reports whether the device has a kernel for recurrent layers of F32, of so many
	// samples and units. nil is a device that has none.
	Recurs func(batch, size int) bool
}

// Add adds a value.
func (b *Builder) Add(op ir.Op, shape ir.Dims, d backend.DType, x ...Value) Value {
	return b.To.Add(ir.Value{Op: op, Args: slices.Clone(x), Shape: shape, DType: d, Name: b.Name})
}

func (b *Builder) value(x Value) ir.Value { return b.To.Values[x] }

// addValue adds a value with the dtype of its last operand.
func (b *Builder) addValue(op ir.Op, shape ir.Dims, x ...Value) Value {
	return b.Add(op, shape, b.value(x[len(x)-1]).DType, x...)
}

// Of returns the shape and the dtype of a value.
func (b *Builder) Of(x Value) Tensor {
	v := b.value(x)
	return Tensor{Shape: v.Shape.Slice(), DType: v.DType}
}

// InRange reports whether integers, such as lengths, are in range for sure, because they were
// looked at before the run. Others are not known then.
func (b *Builder) InRange(integers Value) bool { return b.Checked == nil || b.Checked(integers) }

// Number is a constant of the dtype of another value, without axes.
func (b *Builder) Number(number float64, like Value) Value {
	return b.Add(ir.ScalarOf(number), ir.Dims{}, b.value(like).DType)
}

// together repeats values to a common shape.
func (b *Builder) together(x []Value) (all []Value, shape ir.Dims) {
	var shapes [][]int
	for _, v := range x {
		shapes = append(shapes, b.value(v).Shape.Slice())
	}
	common := Common(shapes...)
	for i, v := range x {
		for len(shapes[i]) < len(common) {
			shapes[i] = slices.Insert(shapes[i], 0, 1)
		}
		all = append(all, b.Broadcast(b.Reshape(v, shapes[i]...), common...))
	}
	return all, ir.Of(common...)
}

// Common returns the shape that others are repeated to.
func Common(shapes ...[]int) []int {
	var common []int
	for _, s := range shapes {
		if more := len(s) - len(common); more > 0 {
			common = slices.Concat(s[:more], common)
		}
		for i, n := range s {
			if at := len(common) - len(s) + i; n != 1 {
				common[at] = n
			}
		}
	}
	return common
}

// Do is a function of package fuse, with the dtype of the last operand: comparisons give 1 or
// 0 of it. The first operand of Where may have any dtype; other operands have one dtype.
func (b *Builder) Do(f fuse.Op, x ...Value) Value {
	x, shape := b.together(x)
	switch {
	case len(x) == 1:
		return b.addValue(ir.Unary{Op: f}, shape, x...)
	case len(x) == 2:
		return b.addValue(ir.Binary{Op: f}, shape, x...)
	}
	if d := b.value(x[1]).DType; b.value(x[0]).DType != d {
		x[0] = b.Add(ir.Cast{}, shape, d, x[0])
	}
	return b.addValue(ir.Where{}, shape, x...)
}

// Cast is x in another dtype: floats become integers by truncation.
func (b *Builder) Cast(d backend.DType, x Value) Value {
	if b.value(x).DType == d {
		return x
	}
	return b.Add(ir.Cast{}, b.value(x).Shape, d, x)
}

// Locate is, in I64, the place of the element along an axis where x is not 0, and the length of
// the axis elsewhere. x, of any dtype, has the whole axis.
func (b *Builder) Locate(axis int, x Value) Value {
	return b.Add(ir.Locate{Axis: axis}, b.value(x).Shape, backend.I64, x)
}

// Select is x where a label is the place of the element along an axis, and y elsewhere. Labels
// are integers, x and y have one dtype, and at least one of the three has the whole axis.
func (b *Builder) Select(axis int, labels, x, y Value) Value {
	all, shape := b.together([]Value{labels, x, y})
	return b.addValue(ir.Select{Axis: axis}, shape, all...)
}

// Dropout is x / (1-p) where the random number of the element is at least p, and 0 elsewhere.
// The numbers come from fuse.Uniform for the key (seed, op), the step, the first sample plus
// the place along the first axis, and the element of the sample.
func (b *Builder) Dropout(p float64, seed, op uint32, x, step, first Value) Value {
	all, shape := b.together([]Value{x, step, first})
	return b.Add(ir.Dropout{P: p, Seed: seed, Op: op}, shape, b.value(x).DType, all...)
}

// Reduce folds axes by Sum, Max or Min. They stay, with length 1.
func (b *Builder) Reduce(op backend.ReduceOp, x Value, axes ...int) Value {
	if len(axes) == 0 {
		return x
	}
	v := b.value(x)
	kept := v.Shape
	for _, axis := range axes {
		kept = kept.With(axis, 1)
	}
	shape, _ := ir.Reduced(v.Shape, ir.Of(axes...))
	return b.Reshape(b.addValue(ir.Reduce{Op: op, Axes: ir.Of(axes...)}, shape, x), kept.Slice()...)
}

// Reshape has the elements of x in row-major order.
func (b *Builder) Reshape(x Value, shape ...int) Value {
	if to := ir.Of(shape...); b.value(x).Shape != to {
		return b.addValue(ir.Reshape{}, to, x)
	}
	return x
}

// Permute makes axis i of axis axes[i] of x.
func (b *Builder) Permute(x Value, axes ...int) Value {
	from := b.value(x).Shape
	to := from
	for i, axis := range axes {
		to = to.With(i, from.At(axis))
	}
	return b.addValue(ir.Permute{Axes: ir.Of(axes...)}, to, x)
}

// Broadcast repeats axes of length 1.
func (b *Builder) Broadcast(x Value, shape ...int) Value {
	if to := ir.Of(shape...); b.value(x).Shape != to {
		return b.addValue(ir.Broadcast{}, to, x)
	}
	return x
}

// Slice takes n elements of an axis: start, start+step, ...
func (b *Builder) Slice(x Value, axis, start, step, n int) Value {
	shape := b.value(x).Shape.With(axis, n)
	return b.addValue(ir.Slice{Axis: axis, Start: start, Step: step}, shape, x)
}

// Unslice is the gradient of Slice: zeros with n elements along the axis, among them those of
// x.
func (b *Builder) Unslice(x Value, axis, start, step, n int) Value {
	shape := b.value(x).Shape.With(axis, n)
	return b.addValue(ir.Unslice{Axis: axis, Start: start, Step: step}, shape, x)
}

// Concat joins values along an axis.
func (b *Builder) Concat(axis int, x ...Value) Value {
	if len(x) == 1 {
		return x[0]
	}
	n := 0
	for _, v := range x {
		n += b.value(v).Shape.At(axis)
	}
	return b.addValue(ir.Concat{Axis: axis}, b.value(x[0]).Shape.With(axis, n), x...)
}

// Gather takes the elements of an axis that a list of integers names.
func (b *Builder) Gather(x, list Value, axis int) Value {
	v, indices := b.value(x), b.value(list).Shape
	n := indices.Size()
	shape := v.Shape.With(axis, n)
	taken := b.Add(ir.Gather{Axis: axis}, shape, v.DType, x, b.Reshape(list, n))
	whole := slices.Concat(shape.Slice()[:axis], indices.Slice(), shape.Slice()[axis+1:])
	return b.Reshape(taken, whole...)
}

// GatherGrad is the gradient of Gather: zeros with n elements along the axis, to which those of
// dy are added in the order of the list.
func (b *Builder) GatherGrad(dy, list Value, axis, n int) Value {
	v, indices := b.value(dy), b.value(list).Shape
	before, behind := v.Shape.Slice()[:axis], v.Shape.Slice()[axis+indices.Len():]
	rows := b.Reshape(dy, slices.Concat(before, []int{indices.Size()}, behind)...)
	whole := ir.Of(slices.Concat(before, []int{n}, behind)...)
	return b.Add(ir.GatherGrad{Axis: axis}, whole, v.DType, rows, b.Reshape(list, indices.Size()))
}

// Put is x with other elements of an axis, those that a list of integers names: rows, in the
// order of the list.
func (b *Builder) Put(x, list, rows Value, axis int) Value {
	v, n := b.value(x), b.value(list).Shape.Size()
	rows = b.Reshape(rows, v.Shape.With(axis, n).Slice()...)
	return b.Add(ir.Put{Axis: axis}, v.Shape, v.DType, x, b.Reshape(list, n), rows)
}
