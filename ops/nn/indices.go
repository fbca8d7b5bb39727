package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/internal/terms"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// ByIndices selects elements of an axis. An index may occur any number of times.
//
//	in   x        [d..., n, e...]
//	     indices  [k...]           Int, 0 to n-1
//	out  y        [d..., k..., e...]   y[d, k, e] = x[d, indices[k], e]
//
// A negative axis counts from the last.
//
// Gradient: dy is added to the elements that were selected, in the order of indices, which gives
// bitwise identical results on every run. Indices have none. Cost: a copy of y; backward zeros of x
// and a pass over dy. Errors: [ops.ErrShape] if x has no such axis or indices is a scalar;
// [ops.ErrDType] if indices are not Int; when the graph runs, [backend.ErrArgument] if an index is
// out of range.
func ByIndices(axis int, x, indices *gorgonia.Node) (*gorgonia.Node, error) {
	axis, err := resolve(axis, x)
	if err != nil {
		return nil, fmt.Errorf("nn: ByIndices: %w", err)
	}
	return build("ByIndices", "x indices", byIndicesSpec{axis}, x, indices)
}

// Embedding selects rows of a matrix of weights: [ByIndices] of axis 0.
//
//	in   weights  [n, d]
//	     indices  [k...]      Int, 0 to n-1
//	out  y        [k..., d]   y[k] = weights[indices[k]]
//
// The row of a padding index has no gradient, as with PyTorch's padding_idx. A negative one counts
// from the last row.
//
// Gradient, cost and errors: those of ByIndices, and with padding a further pass over dy;
// [ops.ErrShape] if weights is not a matrix; [backend.ErrArgument] for more than one padding, or
// one that is not -n to n-1.
func Embedding(weights, indices *gorgonia.Node, padding ...int) (*gorgonia.Node, error) {
	if weights != nil && len(weights.Shape()) != 2 {
		return nil, fmt.Errorf("nn: Embedding: %w: weights have shape %v, want a matrix",
			ops.ErrShape, weights.Shape())
	}
	var s spec = byIndicesSpec{0}
	if weights != nil && len(padding) > 0 {
		n, i := weights.Shape()[0], padding[0]
		switch {
		case len(padding) > 1 || i != terms.NoRow && (i < -n || i >= n):
			return nil, fmt.Errorf("nn: Embedding: %w: padding %v of a table of %d rows: give one "+
				"index, -%d to %d", backend.ErrArgument, padding, n, n, n-1)
		case i == terms.NoRow:
			i = n // which no index is
		case i < 0:
			i += n
		}
		s = paddedSpec{byIndicesSpec{0}, i}
	}
	return build("Embedding", "weights indices", s, weights, indices)
}

// paddedSpec is [byIndicesSpec], whose gradient leaves an index out.
type paddedSpec struct {
	byIndicesSpec
	Padding int
}

// String returns "ByIndices{axis 0} without a gradient of index 3".
func (s paddedSpec) String() string {
	return fmt.Sprintf("%v without a gradient of index %d", s.byIndicesSpec, s.Padding)
}

func (s paddedSpec) gradients(in []tensor.Shape) []gradient {
	all := append(s.byIndicesSpec.gradients(in), gradient{exceptSpec{s.Padding}, []int{dy, 1}})
	all[0].of[0] = len(in)
	return all
}

// exceptSpec is the rows of x, [k..., d], with zeros where indices, [k...], are a padding.
type exceptSpec struct{ Padding int }

// String returns "rows except of index 3".
func (s exceptSpec) String() string { return fmt.Sprintf("rows except of index %d", s.Padding) }

func (s exceptSpec) indices() int { return 1 }

func (s exceptSpec) check([]int, []tensor.Shape) error { return nil } // the forward pass does

func (s exceptSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (s exceptSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{s, []int{dy, 1}}, {}}
}

func (s exceptSpec) program(b *program.Builder, x ...program.Value) program.Value {
	padding := program.With(b, fuse.Equal, between(b, x[1], len(b.Of(x[1]).Shape)),
		float64(s.Padding))
	return b.Do(fuse.Where, padding, b.Number(0, x[0]), x[0])
}

// byIndicesSpec is [ByIndices] of x and indices, with an axis that is not negative.
type byIndicesSpec struct{ Axis int }

// String returns "ByIndices{axis 0}".
func (s byIndicesSpec) String() string { return fmt.Sprintf("ByIndices{axis %d}", s.Axis) }

func (s byIndicesSpec) indices() int { return 1 }

func (s byIndicesSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	if len(in[1]) == 0 {
		return nil, fmt.Errorf("%w: indices is a scalar", ops.ErrShape)
	}
	return slices.Concat(in[0][:s.Axis], in[1], in[0][s.Axis+1:]), nil
}

func (s byIndicesSpec) gradients(in []tensor.Shape) []gradient {
	return []gradient{{byIndicesGradSpec{s.Axis, in[0][s.Axis]}, []int{dy, 1}}, {}}
}

func (s byIndicesSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return b.Gather(x[0], x[1], s.Axis)
}

func (s byIndicesSpec) check(indices []int, in []tensor.Shape) error {
	return inRange(indices, in[0][s.Axis])
}

// inRange checks indices of n elements.
func inRange(indices []int, n int) error {
	for k, i := range indices {
		if i < 0 || i >= n {
			return fmt.Errorf("%w: index %d is %d, out of range 0 to %d", backend.ErrArgument, k,
				i, n-1)
		}
	}
	return nil
}

// byIndicesGradSpec is the gradient of [byIndicesSpec] by x, from dy and indices. Length is the
// length of the axis of x.
type byIndicesGradSpec struct{ Axis, Length int }

// String returns "ByIndicesGrad{axis 0, of 50257}".
func (s byIndicesGradSpec) String() string {
	return fmt.Sprintf("ByIndicesGrad{axis %d, of %d}", s.Axis, s.Length)
}

func (s byIndicesGradSpec) indices() int { return 1 }

func (s byIndicesGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	if k := in[1]; len(k) == 0 || len(in[0]) < s.Axis+len(k) || s.Length < 1 ||
		!slices.Equal(in[0][s.Axis:s.Axis+len(k)], k) {
		return nil, fmt.Errorf("%w: x has shape %v and indices %v, for a table of %d rows along "+
			"axis %d", ops.ErrShape, in[0], k, s.Length, s.Axis)
	}
	return slices.Concat(in[0][:s.Axis], tensor.Shape{s.Length}, in[0][s.Axis+len(in[1]):]), nil
}

func (s byIndicesGradSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{byIndicesSpec{s.Axis}, []int{dy, 1}}, {}}
}

func (s byIndicesGradSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return b.GatherGrad(x[0], x[1], s.Axis, s.Length)
}

func (s byIndicesGradSpec) check(indices []int, _ []tensor.Shape) error {
	return inRange(indices, s.Length)
}
