package kernels

import (
	"fmt"
	"math"

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

// Fill implements [backend.Arithmetic].
func (c Check) Fill(dst backend.Buffer, value float64) error {
	if err := scalar("fill", dst.DType(), value); err != nil {
		return err
	}
	return c.checkDevice("fill", dst)
}

// Unary checks operands of [Host.Unary].
func (c Check) Unary(op backend.UnaryOp, dst, x backend.Buffer) error {
	if err := takes(op, op.Takes, dst.DType()); err != nil {
		return err
	}
	return c.elementwise(op, dst, x)
}

// Binary implements [backend.Arithmetic].
func (c Check) Binary(op backend.BinaryOp, dst, x, y backend.Buffer) error {
	if err := takes(op, op.Takes, dst.DType()); err != nil {
		return err
	}
	if err := c.elementwise(op, dst, x); err != nil {
		return err
	}
	return c.elementwise(op, dst, y)
}

// BinaryScalar implements [backend.Arithmetic].
func (c Check) BinaryScalar(op backend.BinaryOp, dst, x backend.Buffer, s float64, _ bool) error {
	if err := takes(op, op.Takes, dst.DType()); err != nil {
		return err
	}
	if err := scalar(op.String(), dst.DType(), s); err != nil {
		return err
	}
	return c.elementwise(op, dst, x)
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

// elementwise checks dst and one operand of an element-wise function.
func (c Check) elementwise(op fmt.Stringer, dst, x backend.Buffer) error {
	if err := matching(op.String(), dst, x); err != nil {
		return err
	}
	if dst.Addr() != x.Addr() && overlap(dst, x) {
		return fmt.Errorf("%w: %v: the destination overlaps an operand without being the same",
			backend.ErrArgument, op)
	}
	return c.checkDevice(op.String(), dst, x)
}

// takes checks that there is a function for a dtype.
func takes(op interface {
	fmt.Stringer
	Valid() bool
}, ok func(backend.DType) bool, d backend.DType) error {
	switch {
	case !op.Valid():
		return fmt.Errorf("%w: %v is not a function", backend.ErrArgument, op)
	case !d.Valid():
		return fmt.Errorf("%w: %v of %v", backend.ErrArgument, op, d)
	case !ok(d):
		return fmt.Errorf("%w: %v of %v: it is a function of floats", backend.ErrUnsupported, op, d)
	}
	return nil
}

// scalar checks that an integer type holds a value.
func scalar(kernel string, d backend.DType, value float64) error {
	lo, hi := 0.0, 0.0 // hi is one too large
	switch d {
	case backend.U8:
		hi = 1 << 8
	case backend.I32:
		lo, hi = math.MinInt32, 1<<31
	case backend.I64:
		lo, hi = math.MinInt64, 1<<63
	default:
		if !d.Valid() {
			return fmt.Errorf("%w: %s of %v", backend.ErrArgument, kernel, d)
		}
		return nil
	}
	if !(value >= lo && value < hi) || value != math.Trunc(value) {
		return fmt.Errorf("%w: %s with %v, which is not a %v", backend.ErrArgument, kernel,
			value, d)
	}
	return nil
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
