package nn

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// GatherElements takes k elements along an axis, different ones for each place of the other axes:
// ONNX's GatherElements, PyTorch's gather.
//
//	in   x        [d..., n, e...]
//	     indices  [d..., k, e...]   Int, 0 to n-1
//	out  y        [d..., k, e...]   y[d, k, e] = x[d, indices[d, k, e], e]
//
// A negative axis counts from the last. [ByIndices] takes the same elements for all places.
//
// Gradient: dy is added to the elements that were taken, in the order of k. Indices have none.
// Cost: k passes over x in one loop, and backward the same, without other memory: meant for short
// axes, such as the experts among which tokens are routed, or a small k.
// Errors: [ops.ErrShape] if shapes differ in more than the axis; [ops.ErrDType] if indices are not
// Int; when the graph runs, [backend.ErrArgument] if an index is out of range.
func GatherElements(axis int, x, indices *gorgonia.Node) (*gorgonia.Node, error) {
	axis, err := resolve(axis, x)
	if err != nil {
		return nil, fmt.Errorf("nn: GatherElements: %w", err)
	}
	return build("GatherElements", "x indices", gatherElementsSpec{axis}, x, indices)
}

// gatherElementsSpec is [GatherElements] of x and indices.
type gatherElementsSpec struct{ Axis int }

// String returns "GatherElements{axis 1}".
func (s gatherElementsSpec) String() string {
	return fmt.Sprintf("GatherElements{axis %d}", s.Axis)
}

func (s gatherElementsSpec) indices() int { return 1 }

func (s gatherElementsSpec) check(indices []int, in []tensor.Shape) error {
	return inRange(indices, in[0][s.Axis])
}

func (s gatherElementsSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	want := in[1].Clone()
	if len(want) > s.Axis {
		want[s.Axis] = in[0][s.Axis]
	}
	if !slices.Equal(want, in[0]) || len(want) == backend.MaxAxes {
		return nil, fmt.Errorf("%w: x has shape %v and indices %v: they may differ in axis %d "+
			"alone, and have at most %d axes", ops.ErrShape, in[0], in[1], s.Axis,
			backend.MaxAxes-1)
	}
	return in[1].Clone(), nil
}

func (s gatherElementsSpec) gradients(in []tensor.Shape) []gradient { return gradientsOf(s, in, 1) }

// program compares every index with every place: one of them has it.
func (s gatherElementsSpec) program(b *program.Builder, x ...program.Value) program.Value {
	of, list := between(b, x[0], s.Axis), between(b, x[1], s.Axis+1)
	y := program.Sum(b, b.Select(s.Axis+1, list, of, b.Number(0, of)), s.Axis+1)
	inside := s.inside(b, x[1], b.Of(x[0]).Shape[s.Axis])
	y = b.Reshape(y, b.Of(x[1]).Shape...)
	return b.Do(fuse.Where, inside, y, b.Number(math.NaN(), y))
}

// inside is 1 where indices are in range of n elements, else 0.
func (s gatherElementsSpec) inside(b *program.Builder, indices program.Value, n int) program.Value {
	return b.Do(fuse.Mul, program.With(b, fuse.GreaterEqual, indices, 0),
		program.With(b, fuse.Less, indices, float64(n)))
}

// between is x with an axis of length 1 before an axis.
func between(b *program.Builder, x program.Value, axis int) program.Value {
	return b.Reshape(x, slices.Insert(b.Of(x).Shape, axis, 1)...)
}

func (s gatherElementsSpec) back(b *program.Builder, _ int, x []program.Value, _,
	dy program.Value) program.Value {
	given, list := between(b, dy, s.Axis+1), between(b, x[1], s.Axis+1)
	whole := between(b, x[0], s.Axis)
	zero := b.Do(fuse.Where, b.Number(0, whole), whole, b.Number(0, whole))
	// what is out of range could have been any element along the axis
	inside := s.inside(b, list, b.Of(x[0]).Shape[s.Axis])
	zero = b.Do(fuse.Where, inside, zero, b.Number(math.NaN(), zero))
	sum := program.Sum(b, b.Select(s.Axis+1, list, given, zero), s.Axis)
	return b.Reshape(sum, b.Of(x[0]).Shape...)
}

// ScatterAdd adds up rows in a table of n rows of zeros: PyTorch's index_add, and the gradient of
// [ByIndices] as a separate operation.
//
//	in   x        [d..., k..., e...]
//	     indices  [k...]              Int, 0 to n-1
//	out  y        [d..., n, e...]     y[d, i, e] = sum of x[d, k, e] where indices[k] = i
//
// Gradient: dx is [ByIndices] of dy. Indices have none.
// Cost: zeros of y and a pass over x.
// Errors: [ops.ErrShape] if x does not have the axes of indices from axis on, or n is below 1;
// [ops.ErrDType] if indices are not Int; when the graph runs, [backend.ErrArgument] if an index is
// out of range.
func ScatterAdd(axis, n int, x, indices *gorgonia.Node) (*gorgonia.Node, error) {
	axis, err := resolve(axis, x)
	if err != nil {
		return nil, fmt.Errorf("nn: ScatterAdd: %w", err)
	}
	return build("ScatterAdd", "x indices", byIndicesGradSpec{axis, n}, x, indices)
}
