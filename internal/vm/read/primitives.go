package read

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// primitives is a builder as that of programs of operations. Its values are the [ir.ID]s.
type primitives struct{ *builder }

var _ program.Builder = primitives{}

// valuesOf returns the names of values for a program.
func valuesOf(ids []ir.ID) []program.Value {
	var list []program.Value
	for _, id := range ids {
		list = append(list, program.Value(id))
	}
	return list
}

func (p primitives) of(x program.Value) ir.Value { return p.builder.of(ir.ID(x)) }

// as adds a value.
func (p primitives) as(
	d backend.DType, op ir.Op, shape ir.Dims, x ...program.Value,
) program.Value {
	var args []ir.ID
	for _, v := range x {
		args = append(args, ir.ID(v))
	}
	return program.Value(p.add(op, shape, d, args...))
}

// addValue adds a value with the dtype of its last operand.
func (p primitives) addValue(op ir.Op, shape ir.Dims, x ...program.Value) program.Value {
	return p.as(p.of(x[len(x)-1]).DType, op, shape, x...)
}

// Of implements [program.Builder].
func (p primitives) Of(x program.Value) program.Tensor {
	v := p.of(x)
	return program.Tensor{Shape: v.Shape.Slice(), DType: v.DType}
}

// InRange implements [program.Builder].
func (p primitives) InRange(integers program.Value) bool {
	_, ok := p.given(ir.ID(integers))
	return ok
}

// given returns the variable or constant that integers are, nil for a constant: a run looks at them
// before it begins.
func (b *builder) given(id ir.ID) (variable *gorgonia.Node, ok bool) {
	v := b.of(id)
	for v.Op == (ir.Reshape{}) {
		v = b.of(v.Args[0])
	}
	switch op := v.Op.(type) {
	case ir.Constant:
		return nil, true
	case ir.Input:
		variable = b.Inputs[op.Index]
		return variable, !slices.Contains(b.changed, variable)
	}
	return nil, false
}

// Number implements [program.Builder].
func (p primitives) Number(number float64, like program.Value) program.Value {
	return program.Value(p.add(ir.ScalarOf(number), ir.Dims{}, p.of(like).DType))
}

// together repeats values to a common shape.
func (p primitives) together(x []program.Value) (all []program.Value, shape ir.Dims) {
	var shapes [][]int
	for _, v := range x {
		shapes = append(shapes, p.of(v).Shape.Slice())
	}
	common := program.Common(shapes...)
	for i, v := range x {
		for len(shapes[i]) < len(common) {
			shapes[i] = slices.Insert(shapes[i], 0, 1)
		}
		all = append(all, p.Broadcast(p.Reshape(v, shapes[i]...), common...))
	}
	return all, ir.Of(common...)
}

// Do implements [program.Builder].
func (p primitives) Do(f fuse.Op, x ...program.Value) program.Value {
	x, shape := p.together(x)
	switch {
	case len(x) == 1:
		return p.addValue(ir.Unary{Op: f}, shape, x...)
	case len(x) == 2:
		return p.addValue(ir.Binary{Op: f}, shape, x...)
	}
	if d := p.of(x[1]).DType; p.of(x[0]).DType != d {
		x[0] = p.as(d, ir.Cast{}, shape, x[0])
	}
	return p.addValue(ir.Where{}, shape, x...)
}

// Cast implements [program.Builder].
func (p primitives) Cast(d backend.DType, x program.Value) program.Value {
	if p.of(x).DType == d {
		return x
	}
	return p.as(d, ir.Cast{}, p.of(x).Shape, x)
}

// Locate implements [program.Builder].
func (p primitives) Locate(axis int, x program.Value) program.Value {
	return p.as(backend.I64, ir.Locate{Axis: axis}, p.of(x).Shape, x)
}

// Select implements [program.Builder].
func (p primitives) Select(axis int, labels, x, y program.Value) program.Value {
	all, shape := p.together([]program.Value{labels, x, y})
	return p.addValue(ir.Select{Axis: axis}, shape, all...)
}

// Dropout implements [program.Builder].
func (p primitives) Dropout(
	probability float64, seed, op uint32, x, step, first program.Value,
) program.Value {
	all, shape := p.together([]program.Value{x, step, first})
	return p.as(p.of(x).DType, ir.Dropout{P: probability, Seed: seed, Op: op}, shape, all...)
}

// Reduce implements [program.Builder].
func (p primitives) Reduce(op backend.ReduceOp, x program.Value, axes ...int) program.Value {
	kept := p.of(x).Shape
	for _, axis := range axes {
		kept = kept.With(axis, 1)
	}
	return program.Value(p.reshape(p.reduceAxes(op, ir.ID(x), axes...), kept))
}

// Reshape implements [program.Builder].
func (p primitives) Reshape(x program.Value, shape ...int) program.Value {
	return program.Value(p.reshape(ir.ID(x), ir.Of(shape...)))
}

// Permute implements [program.Builder].
func (p primitives) Permute(x program.Value, axes ...int) program.Value {
	return program.Value(p.permute(ir.ID(x), axes...))
}

// Broadcast implements [program.Builder].
func (p primitives) Broadcast(x program.Value, shape ...int) program.Value {
	return program.Value(p.broadcast(ir.ID(x), ir.Of(shape...)))
}

// Slice implements [program.Builder].
func (p primitives) Slice(x program.Value, axis, start, step, n int) program.Value {
	shape := p.of(x).Shape.With(axis, n)
	return p.addValue(ir.Slice{Axis: axis, Start: start, Step: step}, shape, x)
}

// Unslice implements [program.Builder].
func (p primitives) Unslice(x program.Value, axis, start, step, n int) program.Value {
	shape := p.of(x).Shape.With(axis, n)
	return p.addValue(ir.Unslice{Axis: axis, Start: start, Step: step}, shape, x)
}

// Concat implements [program.Builder].
func (p primitives) Concat(axis int, x ...program.Value) program.Value {
	if len(x) == 1 {
		return x[0]
	}
	n := 0
	for _, v := range x {
		n += p.of(v).Shape.At(axis)
	}
	return p.addValue(ir.Concat{Axis: axis}, p.of(x[0]).Shape.With(axis, n), x...)
}

// Gather implements [program.Builder].
func (p primitives) Gather(x, list program.Value, axis int) program.Value {
	v, indices := p.of(x), p.of(list).Shape
	n := indices.Size()
	shape := v.Shape.With(axis, n)
	taken := p.as(v.DType, ir.Gather{Axis: axis}, shape, x, p.Reshape(list, n))
	whole := slices.Concat(shape.Slice()[:axis], indices.Slice(), shape.Slice()[axis+1:])
	return p.Reshape(taken, whole...)
}

// GatherGrad implements [program.Builder].
func (p primitives) GatherGrad(dy, list program.Value, axis, n int) program.Value {
	v, indices := p.of(dy), p.of(list).Shape
	before, behind := v.Shape.Slice()[:axis], v.Shape.Slice()[axis+indices.Len():]
	rows := p.Reshape(dy, slices.Concat(before, []int{indices.Size()}, behind)...)
	whole := ir.Of(slices.Concat(before, []int{n}, behind)...)
	return p.as(v.DType, ir.GatherGrad{Axis: axis}, whole, rows, p.Reshape(list, indices.Size()))
}

// Put implements [program.Builder].
func (p primitives) Put(x, list, rows program.Value, axis int) program.Value {
	v, n := p.of(x), p.of(list).Shape.Size()
	rows = p.Reshape(rows, v.Shape.With(axis, n).Slice()...)
	return p.as(v.DType, ir.Put{Axis: axis}, v.Shape, x, p.Reshape(list, n), rows)
}

// MatMul implements [program.Builder].
func (p primitives) MatMul(transA, transB bool, a, b program.Value) program.Value {
	return program.Value(p.matMul(ir.MatMul{TransA: transA, TransB: transB}, ir.ID(a), ir.ID(b)))
}

// Attention implements [program.Builder].
func (p primitives) Attention(o program.Attention, x ...program.Value) (y, lse program.Value) {
	of, shape := p.of(x[0]), p.of(x[0]).Shape
	y = p.as(of.DType, ir.Attention(o), shape.With(3, p.of(x[2]).Shape.At(3)), x...)
	return y, p.as(ir.Statistics(of.DType), ir.Result{Index: 1}, shape.Without(3), y)
}

// AttentionGrad implements [program.Builder].
func (p primitives) AttentionGrad(o program.Attention,
	x ...program.Value) (dq, dk, dv program.Value) {
	dq = p.as(p.of(x[0]).DType, ir.AttentionGrad(o), p.of(x[0]).Shape, x...)
	dk = p.addValue(ir.Result{Index: 1}, p.of(x[1]).Shape, dq)
	dv = p.addValue(ir.Result{Index: 2}, p.of(x[2]).Shape, dq)
	return dq, dk, dv
}

// LSTM implements [program.Builder].
func (p primitives) LSTM(reverse bool, input, h0, c0, weights program.Value) (all,
	kept program.Value, ok bool) {
	v, shape := p.of(h0), p.of(h0).Shape
	batch, size := shape.At(0), shape.At(1)
	steps := p.of(input).Shape.At(0) / max(batch, 1)
	if p.recurs == nil || v.DType != backend.F32 || steps < 1 || !p.recurs(batch, size) {
		return 0, 0, false
	}
	all = p.addValue(ir.LSTM{Reverse: reverse}, ir.Of(steps+2, batch, size), input, h0, c0, weights)
	return all, p.addValue(ir.Result{Index: 1}, ir.Of(steps, 5, batch, size), all), true
}

// LSTMGrad implements [program.Builder].
func (p primitives) LSTMGrad(reverse bool, all, kept, dy, dc, weights program.Value) program.Value {
	shape := p.of(all).Shape
	gates := ir.Of((shape.At(0)-1)*shape.At(1), 4*shape.At(2))
	return p.addValue(ir.LSTM{Grad: true, Reverse: reverse}, gates, all, kept, dy, dc, weights)
}

func windowOf(w program.Window) ir.Window {
	return ir.Window{
		H: w.Kernel[0], W: w.Kernel[1], PadH: w.Pad[0], PadW: w.Pad[1],
		MoreH: w.After[0] - w.Pad[0], MoreW: w.After[1] - w.Pad[1],
		StrideH: w.Stride[0], StrideW: w.Stride[1], DilationH: w.Dilation[0],
		DilationW: w.Dilation[1],
	}
}

// Patches implements [program.Builder].
func (p primitives) Patches(w program.Window, images program.Value) program.Value {
	s := p.of(images).Shape
	rows, columns := w.Places(s.At(2), s.At(3))
	shape := ir.Of(s.At(0), rows, columns, s.At(1)*w.Kernel[0]*w.Kernel[1])
	return p.addValue(ir.Im2Col{Window: windowOf(w)}, shape, images)
}

// Images implements [program.Builder].
func (p primitives) Images(w program.Window, patches program.Value, height,
	width int) program.Value {
	s := p.of(patches).Shape
	planes := s.At(3) / (w.Kernel[0] * w.Kernel[1])
	shape := ir.Of(s.At(0), planes, height, width)
	return p.addValue(ir.Col2Im{Window: windowOf(w)}, shape, patches)
}

// Convolve implements [program.Builder].
func (p primitives) Convolve(c program.Convolution, x, y program.Value) program.Value {
	shape := c.Shape(p.of(x).Shape.Slice(), p.of(y).Shape.Slice())
	op := ir.Convolution{Pass: c.Pass, Window: windowOf(c.Window), Groups: c.Groups}
	return p.addValue(op, ir.Of(shape...), x, y)
}

// MaxPool implements [program.Builder].
func (p primitives) MaxPool(w program.Window, images program.Value) program.Value {
	s := p.of(images).Shape
	rows, columns := w.Places(s.At(2), s.At(3))
	return p.addValue(ir.MaxPool{Window: windowOf(w)}, s.With(2, rows).With(3, columns), images)
}

// MaxPoolGrad implements [program.Builder].
func (p primitives) MaxPoolGrad(w program.Window, images, dy program.Value) program.Value {
	return p.addValue(ir.MaxPoolGrad{Window: windowOf(w)}, p.of(images).Shape, images, dy)
}
