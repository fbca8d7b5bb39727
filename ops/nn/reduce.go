package nn

import (
	"fmt"
	"math/bits"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// ReduceMax returns the largest element along axes, or of all elements if axes is empty.
//
//	in   x  [d...]
//	out  y  [e...]   without the axes, or with length 1 along them if keepDims
//
// Negative axes count from the last. The largest of numbers and a NaN is NaN.
//
// Gradient: dy in equal parts to all elements that are the largest.
// Cost: one pass over x; backward two.
// Errors: [ops.ErrShape] if x has no such axis, or an axis occurs twice; [ops.ErrDType].
func ReduceMax(axes []int, keepDims bool, x *gorgonia.Node) (*gorgonia.Node, error) {
	return reduce(reduceSpec{Kind: "ReduceMax", Keep: keepDims}, axes, x)
}

// ReduceMin is [ReduceMax] for the smallest element.
func ReduceMin(axes []int, keepDims bool, x *gorgonia.Node) (*gorgonia.Node, error) {
	return reduce(reduceSpec{Kind: "ReduceMin", Keep: keepDims}, axes, x)
}

// ReduceProd is the product of the elements along axes, with the shapes of [ReduceMax].
//
// Gradient: dy times the product of all other elements, even where elements are 0.
// Cost: a pass over x for each doubling of the number of elements; backward two.
// Errors: those of ReduceMax.
func ReduceProd(axes []int, keepDims bool, x *gorgonia.Node) (*gorgonia.Node, error) {
	return reduce(reduceSpec{Kind: "ReduceProd", Keep: keepDims}, axes, x)
}

// LogSumExp is log(sum(exp(x))) along axes, with the shapes of [ReduceMax]. The largest element is
// subtracted first, so no exponential overflows.
//
// Gradient: dx = dy * exp(x - y).
// Cost: a pass over x; backward one.
// Errors: those of ReduceMax.
func LogSumExp(axes []int, keepDims bool, x *gorgonia.Node) (*gorgonia.Node, error) {
	return reduce(reduceSpec{Kind: "LogSumExp", Keep: keepDims}, axes, x)
}

func reduce(s reduceSpec, axes []int, x *gorgonia.Node) (*gorgonia.Node, error) {
	for _, axis := range axes {
		at, err := resolve(axis, x)
		if err == nil && s.Axes&(1<<at) != 0 {
			err = fmt.Errorf("%w: axis %d occurs twice in %v", ops.ErrShape, at, axes)
		}
		if err != nil {
			return nil, fmt.Errorf("nn: %s: %w", s.Kind, err)
		}
		s.Axes |= 1 << at
	}
	if len(axes) == 0 && x != nil {
		s.Axes = 1<<len(x.Shape()) - 1
	}
	return build(s.Kind, "x", s, x)
}

// reduceSpec reduces the axes whose bits are set.
type reduceSpec struct {
	Kind string
	Axes uint
	Keep bool
}

// String returns "ReduceMin{axes [0 2]}".
func (s reduceSpec) String() string { return fmt.Sprintf("%s{axes %v}", s.Kind, s.list()) }

func (s reduceSpec) list() (axes []int) {
	for left := s.Axes; left != 0; left &= left - 1 {
		axes = append(axes, bits.TrailingZeros(left))
	}
	return axes
}

// kept is a shape with length 1 along the axes.
func (s reduceSpec) kept(x []int) []int {
	shape := slices.Clone(x)
	for _, axis := range s.list() {
		shape[axis] = 1
	}
	return shape
}

func (s reduceSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	y := tensor.Shape(s.kept(in[0]))
	if !s.Keep {
		for _, axis := range slices.Backward(s.list()) {
			y = slices.Delete(y, axis, axis+1)
		}
	}
	return y, nil
}

func (s reduceSpec) gradients(in []tensor.Shape) []gradient { return gradientsOf(s, in, 1) }

func (s reduceSpec) program(b *program.Builder, x ...program.Value) program.Value {
	of := x[0]
	shape, _ := s.shape([]tensor.Shape{b.Of(of).Shape})
	var y program.Value
	switch s.Kind {
	case "ReduceMax":
		y = b.Reduce(backend.Max, of, s.list()...)
	case "ReduceMin":
		y = b.Reduce(backend.Min, of, s.list()...)
	case "ReduceProd":
		y = s.products(b, of)[len(s.list())]
	default: // of infinities, exp(x) itself
		most := b.Reduce(backend.Max, of, s.list()...)
		finite := program.With(b, fuse.Equal, b.Do(fuse.Sub, most, most), 0)
		most = b.Do(fuse.Where, finite, most, b.Number(0, most))
		sum := program.Sum(b, b.Do(fuse.Exp, b.Do(fuse.Sub, of, most)), s.list()...)
		y = b.Do(fuse.Add, b.Do(fuse.Log, sum), most)
	}
	return b.Reshape(y, shape...)
}

// products are x, and the products along the first axes of the list, one axis more each time.
func (s reduceSpec) products(b *program.Builder, x program.Value) []program.Value {
	all := []program.Value{x}
	for _, axis := range s.list() {
		n := b.Of(x).Shape[axis]
		x = b.Slice(scan(b, fuse.Mul, x, axis, false), axis, n-1, 1, 1)
		all = append(all, x)
	}
	return all
}

func (s reduceSpec) back(b *program.Builder, _ int, x []program.Value, y, dy program.Value,
) program.Value {
	of, axes, kept := x[0], s.list(), s.kept(b.Of(x[0]).Shape)
	y, dy = b.Reshape(y, kept...), b.Reshape(dy, kept...)
	switch s.Kind {
	case "ReduceMax", "ReduceMin":
		same := b.Do(fuse.Equal, of, y)
		return b.Do(fuse.Mul, same, b.Do(fuse.Div, dy, program.Sum(b, same, axes...)))
	case "ReduceProd": // what is multiplied with an element: those before it and those behind it
		all := s.products(b, of)
		for i, axis := range slices.Backward(axes) {
			before := shifted(b, scan(b, fuse.Mul, all[i], axis, false), axis, 1, false)
			behind := shifted(b, scan(b, fuse.Mul, all[i], axis, true), axis, 1, true)
			dy = b.Do(fuse.Mul, b.Do(fuse.Mul, before, behind), dy)
		}
		return dy
	}
	return b.Do(fuse.Mul, dy, b.Do(fuse.Exp, b.Do(fuse.Sub, of, y)))
}

// scan folds each element with those before it along an axis, or with those behind it, in as many
// rounds as the length of the axis has doublings.
func scan(b *program.Builder, f fuse.Op, x program.Value, axis int, reverse bool) program.Value {
	n := b.Of(x).Shape[axis]
	for step := 1; step < n; step *= 2 {
		low, high := b.Slice(x, axis, 0, 1, n-step), b.Slice(x, axis, step, 1, n-step)
		both := b.Do(f, low, high)
		if reverse {
			x = b.Concat(axis, both, b.Slice(x, axis, n-step, 1, step))
		} else {
			x = b.Concat(axis, b.Slice(x, axis, 0, 1, step), both)
		}
	}
	return x
}

// shifted moves elements by one place along an axis, towards its end or, reversed, its start. The
// free place gets the number.
func shifted(b *program.Builder, x program.Value, axis int, number float64, reverse bool,
) program.Value {
	shape := b.Of(x).Shape
	n := shape[axis]
	shape[axis] = 1
	free := b.Reshape(b.Number(number, x), slices.Repeat([]int{1}, len(shape))...)
	free = b.Broadcast(free, shape...)
	switch {
	case n == 1:
		return free
	case reverse:
		return b.Concat(axis, b.Slice(x, axis, 1, 1, n-1), free)
	}
	return b.Concat(axis, free, b.Slice(x, axis, 0, 1, n-1))
}

// CumSumOptions say what [CumSum] adds up.
type CumSumOptions struct {
	Exclusive bool // only the elements before the place, without its own
	Reverse   bool // from the end of the axis on
}

// CumSum adds up the elements along an axis up to each place.
//
//	in   x  [d..., n, e...]   floats or integers
//	out  y  [d..., n, e...]   y[d, i, e] = x[d, 0, e] + ... + x[d, i, e]
//
// A negative axis counts from the last. Sums are made of sums of halves, in the dtype of x.
//
// Gradient: CumSum of dy from the other end.
// Cost: a pass over x for each doubling of n.
// Errors: [ops.ErrShape] if x has no such axis; [ops.ErrDType].
func CumSum(axis int, o CumSumOptions, x *gorgonia.Node) (*gorgonia.Node, error) {
	axis, err := resolve(axis, x)
	if err != nil {
		return nil, fmt.Errorf("nn: CumSum: %w", err)
	}
	return build("CumSum", "x", cumSumSpec{axis, o}, x)
}

// cumSumSpec is [CumSum] of x.
type cumSumSpec struct {
	Axis int
	CumSumOptions
}

// String returns "CumSum{axis 1, exclusive false, reverse true}".
func (s cumSumSpec) String() string {
	return fmt.Sprintf("CumSum{axis %d, exclusive %v, reverse %v}", s.Axis, s.Exclusive, s.Reverse)
}

func (s cumSumSpec) dtype(in []tensor.Dtype) (tensor.Dtype, error) {
	return anyNumber.alike(in, -1)
}

func (s cumSumSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (s cumSumSpec) gradients([]tensor.Shape) []gradient {
	s.Reverse = !s.Reverse
	return []gradient{{s, []int{dy}}}
}

func (s cumSumSpec) program(b *program.Builder, x ...program.Value) program.Value {
	y := scan(b, fuse.Add, x[0], s.Axis, s.Reverse)
	if s.Exclusive {
		y = shifted(b, y, s.Axis, 0, s.Reverse)
	}
	return y
}
