package nn

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// Where chooses between two tensors, element by element.
//
//	in   condition  [a...]   of any dtype: what is not 0 is true
//	     x, y       [b...], [c...]
//	out  z          [d...]   x where the condition is true, y elsewhere
//
// Shapes are broadcast as in ONNX and NumPy: an axis of length 1 is repeated, and so is a missing
// first axis. Conditions come from [gorgonia.Gt] and its like, whose results are Bool or the
// operands' dtype, and from [And], [Or], [Xor] and [Not]. x and y may be integers.
//
// Gradient: dy where the operand was chosen, 0 elsewhere, added up along axes that were repeated.
// An element that was not chosen gets 0 even where it or its gradient is not finite. Conditions
// have none.
// Cost: one pass; backward one for each of x and y.
// Errors: [ops.ErrShape] if shapes cannot be broadcast; [ops.ErrDType] if x and y differ.
func Where(condition, x, y *gorgonia.Node) (*gorgonia.Node, error) {
	return build("Where", "condition x y", whereSpec{}, condition, x, y)
}

// MaskedFill returns x, with a number where a mask is true: [Where] with a number.
//
//	in   x     [a...]
//	     mask  [b...]   of any dtype: what is not 0 is true; broadcast to the shape of x
//	out  y     [a...]
//
// Gradient: dy where the mask is not true, 0 elsewhere.
// Cost and errors: those of Where.
func MaskedFill(x, mask *gorgonia.Node, number float64) (*gorgonia.Node, error) {
	var constant any = number
	if x != nil && x.Dtype() == tensor.Float32 {
		constant = float32(number)
	}
	y, err := build("MaskedFill", "mask number x", whereSpec{}, mask,
		gorgonia.NewConstant(constant), x)
	if err == nil && !y.Shape().Eq(x.Shape()) {
		return nil, fmt.Errorf("nn: MaskedFill: %w: a mask of shape %v cannot be broadcast to %v",
			ops.ErrShape, mask.Shape(), x.Shape())
	}
	return y, err
}

// broadcast returns the shape that operands are repeated to.
func broadcast(in ...tensor.Shape) (tensor.Shape, error) {
	shapes := make([][]int, len(in))
	for i, s := range in {
		shapes[i] = s
	}
	common := tensor.Shape(program.Common(shapes...))
	for _, s := range in {
		for i, n := range s {
			if n != 1 && n != common[len(common)-len(s)+i] {
				return nil, fmt.Errorf("%w: shapes %v cannot be broadcast together", ops.ErrShape,
					in)
			}
		}
	}
	return common, nil
}

// sumTo adds up what broadcasting has repeated of an operand with a shape.
func sumTo(b *program.Builder, x program.Value, shape []int) program.Value {
	var axes []int
	of := b.Of(x).Shape
	for i, n := range of {
		if at := i - len(of) + len(shape); n > 1 && (at < 0 || shape[at] == 1) {
			axes = append(axes, i)
		}
	}
	if axes != nil {
		x = program.Sum(b, x, axes...)
	}
	return b.Reshape(x, shape...)
}

// truth is 1 where x is not 0, and 0 elsewhere.
func truth(b *program.Builder, x program.Value) program.Value {
	return program.With(b, fuse.NotEqual, x, 0)
}

// whereSpec is [Where] of a condition, x and y.
type whereSpec struct{}

// String returns "Where".
func (s whereSpec) String() string { return "Where" }

func (s whereSpec) dtype(in []tensor.Dtype) (tensor.Dtype, error) {
	if _, err := anything.alike(in[:1], -1); err != nil {
		return in[0], err
	}
	return anyNumber.alike(in, 0)
}

func (s whereSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return broadcast(in...) }

func (s whereSpec) gradients(in []tensor.Shape) []gradient {
	all := gradientsOf(s, in, 3)
	all[0] = gradient{}
	return all
}

func (s whereSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return b.Do(fuse.Where, truth(b, x[0]), x[1], x[2])
}

func (s whereSpec) back(b *program.Builder, i int, x []program.Value, _, dy program.Value,
) program.Value {
	chosen, other := dy, b.Number(0, dy)
	if i == 2 {
		chosen, other = other, chosen
	}
	return sumTo(b, b.Do(fuse.Where, truth(b, x[0]), chosen, other), b.Of(x[i]).Shape)
}

// And is 1 where both operands are true, and 0 elsewhere.
//
//	in   x, y  [a...], [b...]   of one dtype, any: what is not 0 is true
//	out  z     [c...]           of that dtype: Bool of Bool, 1 and 0 of numbers
//
// Shapes are broadcast as by [Where].
//
// Gradient: none. Cost: one pass. Errors: [ops.ErrShape] if shapes cannot be broadcast;
// [ops.ErrDType] if dtypes differ.
func And(x, y *gorgonia.Node) (*gorgonia.Node, error) {
	return build("And", "x y", logicSpec{fuse.Mul}, x, y)
}

// Or is like [And], but 1 where one or both operands are true.
func Or(x, y *gorgonia.Node) (*gorgonia.Node, error) {
	return build("Or", "x y", logicSpec{fuse.Maximum}, x, y)
}

// Xor is like [And], but 1 where one operand is true, not both.
func Xor(x, y *gorgonia.Node) (*gorgonia.Node, error) {
	return build("Xor", "x y", logicSpec{fuse.NotEqual}, x, y)
}

// Not is 1 where x is 0, and 0 elsewhere, in the dtype of x: see [And].
func Not(x *gorgonia.Node) (*gorgonia.Node, error) {
	return build("Not", "x", logicSpec{fuse.Equal}, x)
}

// logicSpec is [And], [Or] or [Xor] of two operands, by the function of their truths, or [Not].
type logicSpec struct{ Op fuse.Op }

// String returns "Logic{mul}".
func (s logicSpec) String() string { return fmt.Sprintf("Logic{%v}", s.Op) }

func (s logicSpec) dtype(in []tensor.Dtype) (tensor.Dtype, error) { return anything.alike(in, -1) }

func (s logicSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return broadcast(in...) }

func (s logicSpec) gradients(in []tensor.Shape) []gradient { return make([]gradient, len(in)) }

func (s logicSpec) program(b *program.Builder, x ...program.Value) program.Value {
	if len(x) == 1 {
		return program.With(b, s.Op, x[0], 0)
	}
	return b.Do(s.Op, truth(b, x[0]), truth(b, x[1]))
}

// Cast converts x to another dtype. Floats become integers by truncation, NaN the least one (0 of
// Uint8), and numbers other than 0 become true. In package vm a variable of floats that is cast to
// labels must have whole numbers.
//
//	in   x  [d...]   Float32, Float64, Int, Int64, Int32, Bool or Uint8
//	out  y  [d...]   of dtype to, one of these
//
// x may also be a variable of [backend.BFloat16] or [backend.Float16], such as weights that nothing
// trains: package tensor knows these dtypes as those of Go types. A machine of vm in the same
// precision reads them as they are.
//
// Gradient: between floats, dy in the dtype of x; otherwise none, nor for floats of 16 bits.
// Cost: one pass.
// Errors: [ops.ErrDType].
func Cast(to tensor.Dtype, x *gorgonia.Node) (*gorgonia.Node, error) {
	if !anything.has(to) {
		return nil, fmt.Errorf("nn: Cast: %w: to %v: %v", ops.ErrDType, to, anything)
	}
	return build("Cast", "x", castSpec{to, x != nil && residence.Half(x.Dtype())}, x)
}

// castSpec is [Cast] of x.
type castSpec struct {
	To   tensor.Dtype
	Half bool // x is of 16 bits
}

// String returns "Cast{int}".
func (s castSpec) String() string { return fmt.Sprintf("Cast{%v}", s.To) }

func (s castSpec) dtype(in []tensor.Dtype) (tensor.Dtype, error) {
	if s.Half {
		return s.To, nil
	}
	_, err := anything.alike(in, -1)
	return s.To, err
}

func (s castSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (s castSpec) gradients(in []tensor.Shape) []gradient {
	if s.Half || !isFloat(s.To) {
		return []gradient{{}}
	}
	return gradientsOf(s, in, 1)
}

func (s castSpec) program(b *program.Builder, x ...program.Value) program.Value {
	if s.To == tensor.Bool {
		return b.Cast(backend.U8, truth(b, x[0]))
	}
	return program.Cast(b, dtypeOn(s.To), x[0])
}

func (s castSpec) back(b *program.Builder, _ int, x []program.Value, _, dy program.Value,
) program.Value {
	return b.Cast(b.Of(x[0]).DType, dy)
}
