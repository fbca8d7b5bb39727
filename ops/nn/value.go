package nn

import (
	"fmt"
	"slices"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/ops"
)

// resolve checks an axis of x. A negative one counts from the last.
func resolve(axis int, x *gorgonia.Node) (int, error) {
	if x == nil {
		return 0, fmt.Errorf("%w: x is nil", backend.ErrArgument)
	}
	dims := len(x.Shape())
	if axis < -dims || axis >= dims {
		return 0, fmt.Errorf("%w: axis %d is out of range: x has shape %v", ops.ErrShape, axis,
			x.Shape())
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
		return fmt.Errorf("%w: the value is %v, the graph was built for %v", ops.ErrDType,
			v.Dtype(), dt)
	case !slices.Equal(v.Shape(), want):
		return fmt.Errorf("%w: the value has shape %v, the graph was built for %v", ops.ErrShape,
			v.Shape(), want)
	}
	return nil
}

// elements returns the elements of a value in row-major order. They may be its own memory.
func elements(v gorgonia.Value) (backend.Buffer, error) {
	return residence.Elements(v, dtypeOn(v.Dtype()))
}

// integers returns elements of tensor.Int.
func integers(memory backend.Buffer) []int {
	return unsafe.Slice((*int)(memory.Pointer()), memory.Len())
}

// fresh returns a new value of zeros, and its elements.
func fresh(shape tensor.Shape, dt tensor.Dtype) (v gorgonia.Value, memory backend.Buffer,
	err error) {
	if v = stock.Scalar(dt); len(shape) > 0 {
		v = tensor.New(tensor.Of(dt), tensor.WithShape(shape.Clone()...))
	}
	memory, err = elements(v)
	return v, memory, err
}

// accumulate adds dx to the gradient of a node, whose memory is in row-major order.
func accumulate(n *gorgonia.Node, dx gorgonia.Value) error {
	sum, err := n.Grad()
	if err != nil {
		return err
	}
	if err := check(sum, dx.Shape(), dx.Dtype()); err != nil {
		return fmt.Errorf("the gradient so far: %w", err)
	}
	to, err := elements(sum)
	if err != nil {
		return err
	}
	from, err := elements(dx)
	if err != nil {
		return err
	}
	return kernels.Host{}.Reduce(backend.Sum, to, to, from)
}
