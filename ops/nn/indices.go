package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
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
// Gradient: dy is added to the elements that were selected, in the order of indices, which gives the
// same bits on every run. Indices have none.
// Cost: a copy of y; backward zeros of x and a pass over dy.
// Errors: [ops.ErrShape] if x has no such axis or indices is a scalar; [ops.ErrDType] if indices are
// not Int; when the graph runs, [backend.ErrArgument] if an index is out of range.
func ByIndices(axis int, x, indices *gorgonia.Node) (*gorgonia.Node, error) {
	axis, err := resolve(axis, x)
	if err != nil {
		return nil, fmt.Errorf("nn: ByIndices: %w", err)
	}
	return build("ByIndices", "x indices", ByIndicesSpec{axis}, x, indices)
}

// Embedding selects rows of a matrix of weights: [ByIndices] of axis 0.
//
//	in   weights  [n, d]
//	     indices  [k...]      Int, 0 to n-1
//	out  y        [k..., d]   y[k] = weights[indices[k]]
//
// Gradient, cost and errors: those of ByIndices; [ops.ErrShape] if weights is not a matrix.
func Embedding(weights, indices *gorgonia.Node) (*gorgonia.Node, error) {
	if weights != nil && len(weights.Shape()) != 2 {
		return nil, fmt.Errorf("nn: Embedding: %w: weights have shape %v, want a matrix", ops.ErrShape, weights.Shape())
	}
	return build("Embedding", "weights indices", ByIndicesSpec{0}, weights, indices)
}

// ByIndicesSpec is [ByIndices] of x and indices, with an axis that is not negative.
type ByIndicesSpec struct{ Axis int }

// String returns "ByIndices{axis 0}".
func (s ByIndicesSpec) String() string { return fmt.Sprintf("ByIndices{axis %d}", s.Axis) }

func (s ByIndicesSpec) indices() int { return 1 }

func (s ByIndicesSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	if len(in[1]) == 0 {
		return nil, fmt.Errorf("%w: indices is a scalar", ops.ErrShape)
	}
	return slices.Concat(in[0][:s.Axis], in[1], in[0][s.Axis+1:]), nil
}

func (s ByIndicesSpec) gradients(in []tensor.Shape) []gradient {
	return []gradient{{ByIndicesGradSpec{s.Axis, in[0][s.Axis]}, []int{dy, 1}}, {}}
}

func (s ByIndicesSpec) f32(y array[float32], x []array[float32]) error {
	return byIndices(s, y, x[0], x[1].ints)
}

func (s ByIndicesSpec) f64(y array[float64], x []array[float64]) error {
	return byIndices(s, y, x[0], x[1].ints)
}

func byIndices[T float](s ByIndicesSpec, y, x array[T], indices []int) error {
	before, along, behind := around(x.shape, s.Axis)
	if err := inRange(indices, along); err != nil {
		return err
	}
	for i := range before {
		for k, index := range indices {
			from := (i*along + index) * behind
			copy(y.data[(i*len(indices)+k)*behind:][:behind], x.data[from:from+behind])
		}
	}
	return nil
}

// inRange checks indices of n elements.
func inRange(indices []int, n int) error {
	for k, i := range indices {
		if i < 0 || i >= n {
			return fmt.Errorf("%w: index %d is %d, out of range 0 to %d", backend.ErrArgument, k, i, n-1)
		}
	}
	return nil
}

// ByIndicesGradSpec is the gradient of [ByIndicesSpec] by x, from dy and indices. Length is the length of
// the axis of x.
type ByIndicesGradSpec struct{ Axis, Length int }

// String returns "ByIndicesGrad{axis 0, of 50257}".
func (s ByIndicesGradSpec) String() string {
	return fmt.Sprintf("ByIndicesGrad{axis %d, of %d}", s.Axis, s.Length)
}

func (s ByIndicesGradSpec) indices() int { return 1 }

func (s ByIndicesGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return slices.Concat(in[0][:s.Axis], tensor.Shape{s.Length}, in[0][s.Axis+len(in[1]):]), nil
}

func (s ByIndicesGradSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{ByIndicesSpec{s.Axis}, []int{dy, 1}}, {}}
}

func (s ByIndicesGradSpec) f32(dx array[float32], x []array[float32]) error {
	return byIndicesGrad(s, dx, x[0], x[1].ints)
}

func (s ByIndicesGradSpec) f64(dx array[float64], x []array[float64]) error {
	return byIndicesGrad(s, dx, x[0], x[1].ints)
}

func byIndicesGrad[T float](s ByIndicesGradSpec, dx, dy array[T], indices []int) error {
	before, along, behind := around(dx.shape, s.Axis)
	if err := inRange(indices, along); err != nil {
		return err
	}
	for i := range before {
		for k, index := range indices {
			to, from := (i*along+index)*behind, (i*len(indices)+k)*behind
			for j := range behind {
				dx.data[to+j] += dy.data[from+j]
			}
		}
	}
	return nil
}
