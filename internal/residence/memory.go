package residence

import (
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// Memory returns the memory of a value of the host as elements of type d, in the order that it has
// there.
//
// Errors: ErrUnsupported for a tensor in the memory of a device, ErrArgument for a value of another
// type.
func Memory(v any, d backend.DType) (backend.Buffer, error) {
	switch v := v.(type) {
	case *tensor.Dense:
		if !v.IsNativelyAccessible() {
			return backend.Buffer{},
				fmt.Errorf("%w: the value is in the memory of a device (engine %T): copy it to "+
					"the host", backend.ErrUnsupported, v.Engine())
		}
		return backend.Host(d, unsafe.Pointer(unsafe.SliceData(v.Raw)), len(v.Raw)/d.Size()), nil
	case interface{ Pointer() unsafe.Pointer }: // *gorgonia.F64 and the other scalars
		return backend.Host(d, v.Pointer(), 1), nil
	}
	return backend.Buffer{}, fmt.Errorf("%w: the value is a %T: use *tensor.Dense and Gorgonia's "+
		"scalars", backend.ErrArgument, v)
}

// Elements is Memory in row-major order: the value's own memory, or a copy if it has another order
// there.
func Elements(v any, d backend.DType) (backend.Buffer, error) {
	memory, err := Memory(v, d)
	t, ok := v.(*tensor.Dense)
	if err != nil || !ok {
		return memory, err
	}
	n := t.Shape().TotalSize()
	if RowMajor(t) && n <= memory.Len() {
		return memory.Slice(0, n), nil
	}
	copied := Zeros(d, n)
	return copied, InRowOrder(copied, memory, t)
}

// Floats returns the memory of a value of float32 or float64. dense says whether its elements are
// contiguous there, in row-major order.
func Floats(v interface{ Dtype() tensor.Dtype }) (memory backend.Buffer, dense bool, err error) {
	d, _ := DType(v.Dtype())
	if d != backend.F32 && d != backend.F64 {
		return memory, false, fmt.Errorf("is a tensor of %v: float32 and float64 are supported",
			v.Dtype())
	}
	if memory, err = Memory(v, d); err != nil {
		return memory, false, fmt.Errorf("cannot be read: %w", err)
	}
	t, ok := v.(*tensor.Dense)
	if !ok {
		return memory, true, nil
	}
	n := t.Shape().TotalSize()
	if dense = RowMajor(t) && n <= memory.Len(); dense {
		memory = memory.Slice(0, n)
	}
	return memory, dense, nil
}

// Zeros returns n zeros in host memory, aligned for every dtype.
func Zeros(d backend.DType, n int) backend.Buffer {
	return backend.Of(make([]float64, (n*d.Size()+7)/8)).As(d).Slice(0, n)
}

// Clone returns a copy of host memory.
func Clone(b backend.Buffer) backend.Buffer {
	c := Zeros(b.DType(), b.Len())
	copy(c.Bytes(), b.Bytes())
	return c
}

// InRowOrder copies the elements of a tensor of the host, of which src is the memory, to dst in
// row-major order.
func InRowOrder(dst, src backend.Buffer, t *tensor.Dense) error {
	shape, strides := t.Shape(), t.Strides()
	if err := Within(src.Len(), shape, strides); err != nil {
		return err
	}
	to, from, size := dst.Bytes(), src.Bytes(), dst.DType().Size()
	index := make([]int, len(shape))
	for len(to) > 0 {
		at := 0
		for axis, i := range index {
			at += i * strides[axis]
		}
		to = to[copy(to[:size], from[at*size:]):]
		for axis := len(shape) - 1; axis >= 0; axis-- {
			if index[axis]++; index[axis] < shape[axis] {
				break
			}
			index[axis] = 0
		}
	}
	return nil
}

// Within returns an error if the strides of a tensor reach past its n elements.
func Within(n int, shape, strides []int) error {
	last := 0 // the place of the last element
	for axis, d := range shape {
		if axis < len(strides) {
			last += (d - 1) * strides[axis]
		}
	}
	if len(strides) < len(shape) || last >= n {
		return fmt.Errorf("%w: the value of shape %v has the strides %v, which reach past its %d "+
			"elements", backend.ErrArgument, shape, strides, n)
	}
	return nil
}

// CopyStrided is k.CopyStrided of a tensor with any number of axes: row by row where it has more
// than the device takes.
func CopyStrided(k backend.Arithmetic, dst, src backend.Buffer, shape, strides []int) error {
	if len(shape) <= backend.MaxAxes {
		err := k.CopyStrided(dst, src, shape, strides)
		if len(shape) <= 1 || !errors.Is(err, backend.ErrUnsupported) {
			return err
		}
	}
	row := dst.Len() / shape[0]
	for i := range shape[0] {
		err := CopyStrided(k, dst.Slice(i*row, (i+1)*row), src.Slice(i*strides[0], src.Len()),
			shape[1:], strides[1:])
		if err != nil {
			return err
		}
	}
	return nil
}
