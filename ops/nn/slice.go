package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/ops"
)

// Slice returns elements start, start+step, ... below end of an axis. The axis stays, even with
// length 1.
//
//	in   x  [d..., n, e...]
//	out  y  [d..., m, e...]   y[..., k, ...] = x[..., start + k*step, ...],
//	                          m = ceil((end-start)/step)
//
// A negative axis counts from the last. gorgonia.Slice merges slices whose bounds differ by a
// multiple of 256, and drops the last element where step does not divide the length.
//
// x may be Float32, Float64, Int, Int64 or Int32, as labels are.
//
// Gradient: dy at the elements that were taken, zeros elsewhere. Integers have none.
// Cost: a copy of y; backward a copy of x.
// Errors: [ops.ErrShape] if x has no such axis or no such elements; [ops.ErrDType].
func Slice(axis, start, end, step int, x *gorgonia.Node) (*gorgonia.Node, error) {
	axis, err := resolve(axis, x)
	if err != nil {
		return nil, fmt.Errorf("nn: Slice: %w", err)
	}
	return build("Slice", "x", sliceSpec{axis, start, end, step}, x)
}

// Split cuts x along an axis into parts of the given lengths, in order. The axis stays.
//
//	in   x     [d..., n, e...]           n = sum of lengths
//	out  y[k]  [d..., lengths[k], e...]
//
// A negative axis counts from the last. [Concat] is the inverse.
//
// Dtypes, gradient and cost: those of [Slice], for each part. Errors: [ops.ErrShape] if x has no
// such axis, a length is less than 1 or they do not add up to that of x; [ops.ErrDType].
func Split(axis int, lengths []int, x *gorgonia.Node) (gorgonia.Nodes, error) {
	axis, err := resolve(axis, x)
	if err != nil {
		return nil, fmt.Errorf("nn: Split: %w", err)
	}
	total := 0
	for k, n := range lengths {
		if n < 1 {
			return nil, fmt.Errorf("nn: Split: %w: lengths %v: part %d would have %d elements "+
				"along axis %d: "+
				"use at least 1, and leave empty parts out", ops.ErrShape, lengths, k, n, axis)
		}
		total += n
	}
	if total != x.Shape()[axis] {
		return nil, fmt.Errorf("nn: Split: %w: lengths %v add up to %d, but axis %d of shape %v "+
			"has length %d", ops.ErrShape, lengths, total, axis, x.Shape(), x.Shape()[axis])
	}
	var parts gorgonia.Nodes
	start := 0
	for _, n := range lengths {
		part, err := build("Split", "x", sliceSpec{axis, start, start + n, 1}, x)
		if err != nil {
			return nil, err
		}
		parts, start = append(parts, part), start+n
	}
	return parts, nil
}

// Concat joins nodes along an axis.
//
//	in   x[k]  [d..., n[k], e...]
//	out  y     [d..., sum of n, e...]
//
// A negative axis counts from the last. [Split] is the inverse. All x have one dtype of [Slice].
//
// Gradient: the part of dy that came from x[k]. Integers have none.
// Cost: a copy of y; backward a copy of dy.
// Errors: [ops.ErrShape] if there is no node, no such axis, or other lengths differ;
// [ops.ErrDType].
func Concat(axis int, x ...*gorgonia.Node) (*gorgonia.Node, error) {
	if len(x) == 0 {
		return nil, fmt.Errorf("nn: Concat: %w: there is nothing to join", backend.ErrArgument)
	}
	axis, err := resolve(axis, x[0])
	if err != nil {
		return nil, fmt.Errorf("nn: Concat: %w", err)
	}
	return build("Concat", "x", concatSpec{axis}, x...)
}

// sliceSpec is [Slice] with an axis that is not negative.
type sliceSpec struct{ Axis, Start, End, Step int }

// String returns "Slice{axis 1, 256:512}", with the step if it is not 1.
func (s sliceSpec) String() string {
	if s.Step != 1 {
		return fmt.Sprintf("Slice{axis %d, %d:%d:%d}", s.Axis, s.Start, s.End, s.Step)
	}
	return fmt.Sprintf("Slice{axis %d, %d:%d}", s.Axis, s.Start, s.End)
}

func (s sliceSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	n := in[0][s.Axis]
	if s.Start < 0 || s.Start >= s.End || s.End > n {
		return nil, fmt.Errorf("%w: elements %d to %d of axis %d, whose length is %d", ops.ErrShape,
			s.Start, s.End, s.Axis, n)
	}
	if s.Step < 1 {
		return nil, fmt.Errorf("%w: the step is %d: use at least 1", backend.ErrArgument, s.Step)
	}
	out := in[0].Clone()
	out[s.Axis] = (s.End - s.Start + s.Step - 1) / s.Step
	return out, nil
}

func (s sliceSpec) gradients(in []tensor.Shape) []gradient {
	return []gradient{{unsliceSpec{s.Axis, s.Start, s.Step, in[0][s.Axis]}, []int{dy}}}
}

func (s sliceSpec) moves() {}

func (s sliceSpec) program(b *program.Builder, x ...program.Value) program.Value {
	n := (s.End - s.Start + s.Step - 1) / s.Step
	return b.Slice(x[0], s.Axis, s.Start, s.Step, n)
}

// unsliceSpec is the gradient of [Slice]: zeros with Length elements along Axis, and x at elements
// Start, Start+Step, ... of them.
type unsliceSpec struct{ Axis, Start, Step, Length int }

// String returns "Unslice{axis 1, from 256, of 768}", with the step if it is not 1.
func (s unsliceSpec) String() string {
	if s.Step != 1 {
		return fmt.Sprintf("Unslice{axis %d, from %d by %d, of %d}", s.Axis, s.Start, s.Step,
			s.Length)
	}
	return fmt.Sprintf("Unslice{axis %d, from %d, of %d}", s.Axis, s.Start, s.Length)
}

func (s unsliceSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	out := in[0].Clone()
	out[s.Axis] = s.Length
	return out, nil
}

func (s unsliceSpec) gradients(in []tensor.Shape) []gradient {
	end := s.Start + (in[0][s.Axis]-1)*s.Step + 1
	return []gradient{{sliceSpec{s.Axis, s.Start, end, s.Step}, []int{dy}}}
}

func (s unsliceSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return b.Unslice(x[0], s.Axis, s.Start, s.Step, s.Length)
}

// concatSpec is [Concat] with an axis that is not negative.
type concatSpec struct{ Axis int }

// String returns "Concat{axis 1}".
func (s concatSpec) String() string { return fmt.Sprintf("Concat{axis %d}", s.Axis) }

func (s concatSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	out := in[0].Clone()
	out[s.Axis] = 0
	for i, shape := range in {
		same := len(shape) == len(out)
		if same {
			out[s.Axis] += shape[s.Axis]
			same = slices.Equal(shape[:s.Axis], in[0][:s.Axis]) && slices.Equal(shape[s.Axis+1:],
				in[0][s.Axis+1:])
		}
		if !same {
			return nil, fmt.Errorf("%w: operand %d has shape %v, which does not fit %v along "+
				"axis %d", ops.ErrShape, i, shape, in[0], s.Axis)
		}
	}
	return out, nil
}

func (s concatSpec) gradients(in []tensor.Shape) []gradient {
	g := make([]gradient, len(in))
	start := 0
	for i, shape := range in {
		end := start + shape[s.Axis]
		g[i] = gradient{sliceSpec{s.Axis, start, end, 1}, []int{dy}}
		start = end
	}
	return g
}

func (s concatSpec) moves() {}

func (s concatSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return b.Concat(s.Axis, x...)
}
