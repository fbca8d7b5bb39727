package ops

import (
	"fmt"
	"reflect"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
)

// bufferDType returns the backend's name for a dtype of Gorgonia.
func bufferDType(dt tensor.Dtype) (backend.DType, error) {
	if d, ok := residence.DType(dt); ok && !residence.Half(dt) {
		return d, nil
	}
	return 0, fmt.Errorf("%w: %v: collectives are for Float64, Float32, Int, Int64, Int32 and Byte",
		ErrDType, dt)
}

// operand is a value that the operations can read: elements in row-major order.
type operand struct {
	backend.Buffer
	shape tensor.Shape
}

// check checks that v is what the graph was built for.
func check(v gorgonia.Value, want tensor.Shape, dt tensor.Dtype) error {
	switch {
	case v == nil:
		return fmt.Errorf("%w: the operand has no value", backend.ErrArgument)
	case v.Dtype() != dt:
		return fmt.Errorf("%w: the value is %v, the graph was built for %v", ErrDType,
			v.Dtype(), dt)
	case !slices.Equal(v.Shape(), want):
		return fmt.Errorf("%w: the value has shape %v, the graph was built for %v", ErrShape,
			v.Shape(), want)
	}
	return nil
}

// read returns v as an operand. A value whose memory is not in row-major order (a transposed
// tensor, a slice of columns) is copied into that order; v itself is never written to.
func read(v gorgonia.Value) (operand, error) {
	memory, err := memoryOf(v)
	if err == nil {
		memory, err = rowMajor(memory, v)
	}
	if err != nil {
		return operand{}, err
	}
	return operand{memory.Slice(0, product(v.Shape())), v.Shape()}, nil
}

// memoryOf returns the host memory of a value, in the order that it has there.
func memoryOf(v gorgonia.Value) (backend.Buffer, error) {
	d, err := bufferDType(v.Dtype())
	if err != nil {
		return backend.Buffer{}, err
	}
	return residence.Memory(v, d)
}

// rowMajor returns the elements of v, whose memory is x, in row-major order: x itself if they are,
// otherwise a copy.
func rowMajor(x backend.Buffer, v gorgonia.Value) (backend.Buffer, error) {
	dense, ok := v.(*tensor.Dense)
	if !ok || residence.RowMajor(dense) {
		return x, nil
	}
	shape, strides := dense.Shape(), dense.Strides()
	if err := residence.Within(x.Len(), shape, strides); err != nil {
		return backend.Buffer{}, err
	}
	y := residence.Zeros(x.DType(), product(shape))
	return y, residence.CopyStrided(kernels.Host{}, y, x, shape, strides)
}

// fresh returns a new value, zero, and its memory: a scalar for a
// scalar's shape, otherwise a tensor.
func fresh(dt tensor.Dtype, shape tensor.Shape) (gorgonia.Value, backend.Buffer, error) {
	var v gorgonia.Value
	switch {
	case len(shape) == 0:
		v = stock.Scalar(dt)
	case product(shape) == 0:
		// Package tensor can hold a tensor without elements, but not make one.
		empty := reflect.MakeSlice(reflect.SliceOf(dt.Type), 0, 0).Interface()
		v = tensor.New(tensor.WithShape(shape.Clone()...), tensor.WithBacking(empty))
	default:
		v = tensor.New(tensor.Of(dt), tensor.WithShape(shape.Clone()...))
	}
	memory, err := memoryOf(v)
	return v, memory, err
}

// accumulate adds x to the gradient dx, in place, on the host.
func accumulate(dx, x gorgonia.Value) error {
	if dense, ok := dx.(*tensor.Dense); ok {
		if product(dense.Shape()) == 0 {
			return nil
		}
		_, err := tensor.Add(dense, x, tensor.UseUnsafe())
		return err
	}
	dst, err := memoryOf(dx)
	if err != nil {
		return err
	}
	src, err := memoryOf(x)
	if err != nil {
		return err
	}
	if dst.DType() != src.DType() {
		return fmt.Errorf("%w: a gradient of %v is to be added to one of %v", ErrDType, x.Dtype(),
			dx.Dtype())
	}
	addScalar(dst, src)
	return nil
}

// addScalar adds one element.
func addScalar(dst, src backend.Buffer) {
	switch dst.DType() {
	case backend.F64:
		backend.View[float64](dst)[0] += backend.View[float64](src)[0]
	case backend.F32:
		backend.View[float32](dst)[0] += backend.View[float32](src)[0]
	case backend.I64:
		backend.View[int64](dst)[0] += backend.View[int64](src)[0]
	case backend.I32:
		backend.View[int32](dst)[0] += backend.View[int32](src)[0]
	case backend.U8:
		backend.View[byte](dst)[0] += backend.View[byte](src)[0]
	}
}
