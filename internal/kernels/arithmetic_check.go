package kernels

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

var _ backend.Arithmetic = Check{}

// Move implements [backend.Arithmetic].
func (c Check) Move(dst, src backend.Buffer) error {
	if !c.Device {
		return c.alike("move", dst, src)
	}
	return matching("move", dst, src)
}

// CopyStrided implements [backend.Arithmetic].
func (c Check) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	if dst.DType() != src.DType() || !dst.DType().Valid() {
		return fmt.Errorf("%w: copystrided from %v to %v: the dtypes must be the same",
			backend.ErrArgument, src.DType(), dst.DType())
	}
	if len(shape) != len(strides) || len(shape) > backend.MaxAxes {
		return fmt.Errorf("%w: copystrided of shape %v by strides %v: one stride for each axis, "+
			"of at most %d axes",
			backend.ErrArgument, shape, strides, backend.MaxAxes)
	}
	n, last := 1, 0
	for axis, d := range shape {
		if d < 0 || strides[axis] < 0 {
			return fmt.Errorf("%w: copystrided of shape %v by strides %v: nothing may be negative",
				backend.ErrArgument, shape, strides)
		}
		n *= d
		last += (d - 1) * strides[axis]
	}
	switch {
	case n != dst.Len():
		return fmt.Errorf("%w: copystrided of shape %v into %d elements", backend.ErrArgument,
			shape, dst.Len())
	case n > 0 && last >= src.Len():
		return fmt.Errorf("%w: copystrided of shape %v by strides %v reads element %d, the "+
			"source has %d",
			backend.ErrArgument, shape, strides, last, src.Len())
	case n > 0 && overlap(dst, src):
		return fmt.Errorf("%w: copystrided: the destination overlaps the source",
			backend.ErrArgument)
	}
	return c.checkDevice("copystrided", dst, src)
}

// overlap reports whether two buffers share a byte.
func overlap(a, b backend.Buffer) bool {
	return a.NBytes() > 0 && b.NBytes() > 0 &&
		a.Addr() < b.Addr()+uintptr(b.NBytes()) && b.Addr() < a.Addr()+uintptr(a.NBytes())
}

// matching checks that two buffers have one dtype and length.
func matching(kernel string, dst, src backend.Buffer) error {
	if dst.Len() != src.Len() || dst.DType() != src.DType() || !dst.DType().Valid() {
		return fmt.Errorf("%w: %s of %d %v into %d %v: length and dtype must be the same",
			backend.ErrArgument, kernel, src.Len(), src.DType(), dst.Len(), dst.DType())
	}
	return nil
}
