package nn

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// ArgMax returns the place of the largest element along an axis, the first one of several. NaN is
// the largest of all.
//
//	in   x  [d..., n, e...]
//	out  y  [d..., e...], or [d..., 1, e...] if keepDims   Int
//
// A negative axis counts from the last.
//
// Gradient: none.
// Cost: one pass over x.
// Errors: [ops.ErrShape] if x has no such axis; [ops.ErrDType].
func ArgMax(axis int, keepDims bool, x *gorgonia.Node) (*gorgonia.Node, error) {
	return arg("ArgMax", false, axis, keepDims, x)
}

// ArgMin is [ArgMax] for the smallest element; NaN is the smallest of all.
func ArgMin(axis int, keepDims bool, x *gorgonia.Node) (*gorgonia.Node, error) {
	return arg("ArgMin", true, axis, keepDims, x)
}

func arg(name string, least bool, axis int, keep bool, x *gorgonia.Node) (*gorgonia.Node, error) {
	axis, err := resolve(axis, x)
	if err != nil {
		return nil, fmt.Errorf("nn: %s: %w", name, err)
	}
	return build(name, "x", topKSpec{Axis: axis, K: 1, Least: least, Drop: !keep}, x)
}

// TopK returns the k largest elements along an axis, the largest first, and their places. Equal
// elements stay in order, as in ONNX, and NaN is the largest of all.
//
//	in   x        [d..., n, e...]
//	out  values   [d..., k, e...]
//	     indices  [d..., k, e...]   Int
//
// A negative axis counts from the last. indices can be an operand of [GatherElements], [ByIndices],
// [Embedding] and [ScatterAdd].
//
// Gradient: values have the gradient of [GatherElements], indices none.
// Cost: k passes over x, or one if rows fit into a loop: meant for a k of up to a few dozen. Values
// cost a GatherElements.
// Errors: [ops.ErrShape] if x has no such axis, or the axis has fewer than k elements;
// [ops.ErrDType].
func TopK(axis, k int, x *gorgonia.Node) (values, indices *gorgonia.Node, err error) {
	if axis, err = resolve(axis, x); err == nil && (k < 1 || k > x.Shape()[axis]) {
		err = fmt.Errorf("%w: the %d largest along axis %d of shape %v", ops.ErrShape, k, axis,
			x.Shape())
	}
	if err != nil {
		return nil, nil, fmt.Errorf("nn: TopK: %w", err)
	}
	if indices, err = build("TopK", "x", topKSpec{Axis: axis, K: k}, x); err != nil {
		return nil, nil, err
	}
	values, err = build("TopK", "x indices", gatherElementsSpec{axis}, x, indices)
	return values, indices, err
}

// topKSpec are the places of the K largest elements along an axis, or of the K smallest. Drop
// leaves the axis out.
type topKSpec struct {
	Axis, K     int
	Least, Drop bool
}

// String returns "TopK{axis 1, 2}".
func (s topKSpec) String() string {
	name := "TopK"
	if s.Least {
		name = "BottomK"
	}
	return fmt.Sprintf("%s{axis %d, %d}", name, s.Axis, s.K)
}

func (s topKSpec) dtype(in []tensor.Dtype) (tensor.Dtype, error) {
	_, err := floats.alike(in, -1)
	return tensor.Int, err
}

func (s topKSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	shape := in[0].Clone()
	if s.Drop {
		return append(shape[:s.Axis], shape[s.Axis+1:]...), nil
	}
	shape[s.Axis] = s.K
	return shape, nil
}

func (s topKSpec) gradients([]tensor.Shape) []gradient { return []gradient{{}} }

// program finds the first of the largest elements that are not taken yet, K times.
func (s topKSpec) program(b *program.Builder, x ...program.Value) program.Value {
	of := x[0]
	if s.Least {
		of = b.Do(fuse.Neg, of)
	}
	one, least := b.Number(1, of), b.Number(math.Inf(-1), of)
	var left program.Value // 1 where an element is not taken; none is before the second round
	var places []program.Value
	for k := range s.K {
		rest := of
		if k > 0 {
			rest = b.Do(fuse.Where, left, of, least)
		}
		most := b.Reduce(backend.Max, rest, s.Axis)
		largest := b.Do(fuse.Maximum, b.Do(fuse.Equal, rest, most), b.Do(fuse.NotEqual, rest, rest))
		if k > 0 {
			largest = b.Do(fuse.Mul, largest, left)
		}
		place := b.Reduce(backend.Min, b.Locate(s.Axis, largest), s.Axis)
		places = append(places, b.Cast(dtypeOn(tensor.Int), place))
		if k == 0 {
			left = b.Do(fuse.Where, of, one, one)
		}
		left = b.Select(s.Axis, place, b.Number(0, of), left)
	}
	y := b.Concat(s.Axis, places...)
	if s.Drop {
		shape := b.Of(y).Shape
		y = b.Reshape(y, append(shape[:s.Axis], shape[s.Axis+1:]...)...)
	}
	return y
}
