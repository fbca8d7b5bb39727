package nn

import (
	"fmt"
	"slices"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/ops"
)

// float are the types that operations compute with.
type float interface{ float32 | float64 }

// array is an operand or a result on the host: elements in row-major order. One of indices has ints
// and no data.
type array[T float] struct {
	shape tensor.Shape
	data  []T
	ints  []int
}

// around returns how many elements are before, along and behind an axis: element (i, k, j) is at
// (i*along + k)*behind + j.
func around(shape tensor.Shape, axis int) (before, along, behind int) {
	return product(shape[:axis]), shape[axis], product(shape[axis+1:])
}

// product returns the number of elements of a shape, 1 for a scalar's.
func product(shape tensor.Shape) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// resolve checks an axis of x. A negative one counts from the last.
func resolve(axis int, x *gorgonia.Node) (int, error) {
	if x == nil {
		return 0, fmt.Errorf("%w: x is nil", backend.ErrArgument)
	}
	dims := len(x.Shape())
	if axis < -dims || axis >= dims {
		return 0, fmt.Errorf("%w: axis %d is out of range: x has shape %v", ops.ErrShape, axis, x.Shape())
	}
	if axis < 0 {
		axis += dims
	}
	return axis, nil
}

// check checks that v is what the graph was built for.
func check(v gorgonia.Value, want tensor.Shape, dt tensor.Dtype) error {
	switch {
	case v == nil:
		return fmt.Errorf("%w: it has no value", backend.ErrArgument)
	case v.Dtype() != dt:
		return fmt.Errorf("%w: the value is %v, the graph was built for %v", ops.ErrDType, v.Dtype(), dt)
	case !slices.Equal(v.Shape(), want):
		return fmt.Errorf("%w: the value has shape %v, the graph was built for %v", ops.ErrShape, v.Shape(), want)
	}
	return nil
}

// elements returns the elements of a value in row-major order. They may be its own memory.
func elements[T float | int](v gorgonia.Value) ([]T, error) {
	d, _ := residence.DType(v.Dtype()) // which check has compared
	memory, err := residence.Elements(v, d)
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(memory.Bytes()))), memory.Len()), err
}

// fresh returns a new value of zeros, and its elements.
func fresh[T float](shape tensor.Shape, dt tensor.Dtype) (gorgonia.Value, []T, error) {
	var v gorgonia.Value
	switch {
	case len(shape) > 0:
		v = tensor.New(tensor.Of(dt), tensor.WithShape(shape.Clone()...))
	case dt == tensor.Float32:
		v = gorgonia.NewF32(0)
	default:
		v = gorgonia.NewF64(0)
	}
	memory, err := elements[T](v)
	return v, memory, err
}

// accumulate adds dx to the gradient of a node.
func accumulate(n *gorgonia.Node, dx gorgonia.Value) error {
	sum, err := n.Grad()
	if err != nil {
		return err
	}
	if dx.Dtype() == tensor.Float32 {
		return add[float32](sum, dx)
	}
	return add[float64](sum, dx)
}

// add adds the elements of x to those of sum, whose memory is in row-major order.
func add[T float](sum, x gorgonia.Value) error {
	if err := check(sum, x.Shape(), x.Dtype()); err != nil {
		return fmt.Errorf("the gradient so far: %w", err)
	}
	to, err := elements[T](sum)
	if err != nil {
		return err
	}
	from, err := elements[T](x)
	if err != nil {
		return err
	}
	for i, v := range from {
		to[i] += v
	}
	return nil
}
