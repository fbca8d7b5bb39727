package kernels

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Check checks the arguments of kernels and computes nothing. A queue calls it when it starts a
// kernel that will run later. Every implementation uses it, so all return the same errors.
type Check struct {
	// Device says that buffers must be device memory; otherwise, host memory.
	Device bool
}

var _ backend.Arithmetic = Check{}

// Zero implements [backend.Arithmetic].
func (c Check) Zero(dst backend.Buffer) error { return c.checkDevice("zero", dst) }

// Copy implements [backend.Arithmetic].
func (c Check) Copy(dst, src backend.Buffer) error { return c.alike("copy", dst, src) }

// Copy2D implements [backend.Arithmetic].
func (c Check) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width,
	rows int) error {
	if dst.DType() != src.DType() || !dst.DType().Valid() {
		return fmt.Errorf("%w: copy2d from %v to %v: the dtypes must be the same",
			backend.ErrArgument, src.DType(), dst.DType())
	}
	if width < 0 || rows < 0 || dstPitch < width || srcPitch < width {
		return fmt.Errorf("%w: copy2d of %d rows of %d elements with pitches %d and %d: a pitch "+
			"must be at least the width, nothing negative",
			backend.ErrArgument, rows, width, dstPitch, srcPitch)
	}
	if width == 0 || rows == 0 {
		return nil
	}
	if need := (rows-1)*dstPitch + width; dst.Len() < need {
		return fmt.Errorf("%w: copy2d writes %d elements, the destination has %d",
			backend.ErrArgument, need, dst.Len())
	}
	if need := (rows-1)*srcPitch + width; src.Len() < need {
		return fmt.Errorf("%w: copy2d reads %d elements, the source has %d", backend.ErrArgument,
			need, src.Len())
	}
	return c.checkDevice("copy2d", dst, src)
}

// Cast implements [backend.Arithmetic].
func (c Check) Cast(dst, src backend.Buffer) error {
	return c.floats("cast", dst, src)
}

// Divide implements [backend.Arithmetic].
func (c Check) Divide(dst, src backend.Buffer, n int) error {
	if n < 1 {
		return fmt.Errorf("%w: divide by %d: the divisor must be positive", backend.ErrArgument, n)
	}
	return c.alike("divide", dst, src)
}

// Scale checks operands of [Host.Scale].
func (c Check) Scale(dst, src backend.Buffer, _ float64) error { return c.alike("scale", dst, src) }

// Reduce implements [backend.Arithmetic].
func (c Check) Reduce(op backend.ReduceOp, dst backend.Buffer, srcs ...backend.Buffer) error {
	if !op.Valid() || len(srcs) == 0 {
		return fmt.Errorf("%w: reduce by %v of %d sources", backend.ErrArgument, op, len(srcs))
	}
	for i := range srcs {
		if src := &srcs[i]; !c.fit(&dst, src) {
			return c.alike("reduce", dst, *src)
		}
	}
	return nil
}

// floats checks that two buffers are of floats and have one length.
func (c Check) floats(kernel string, dst, src backend.Buffer) error {
	if dst.Len() != src.Len() || !dst.DType().Float() || !src.DType().Float() {
		return fmt.Errorf("%w: %s of %d %v to %d %v: both must be floats, of the same length",
			backend.ErrArgument, kernel, src.Len(), src.DType(), dst.Len(), dst.DType())
	}
	return c.checkDevice(kernel, dst, src)
}

// alike checks that two buffers have one dtype and length.
func (c Check) alike(kernel string, dst, src backend.Buffer) error {
	switch {
	case c.fit(&dst, &src):
		return nil
	case dst.Len() != src.Len() || dst.DType() != src.DType() || !dst.DType().Valid():
		return fmt.Errorf("%w: %s of %d %v into %d %v: length and dtype must be the same",
			backend.ErrArgument, kernel, src.Len(), src.DType(), dst.Len(), dst.DType())
	}
	return c.checkDevice(kernel, dst, src)
}

// fit reports whether alike finds no error.
func (c Check) fit(dst, src *backend.Buffer) bool {
	return dst.Len() == src.Len() && dst.DType() == src.DType() && dst.DType().Valid() &&
		c.reaches(dst) && c.reaches(src)
}

// reaches reports whether the kernel runs where b is.
func (c Check) reaches(b *backend.Buffer) bool { return b.Len() == 0 || b.Device() == c.Device }

// checkDevice checks that the buffers are where the kernel runs.
func (c Check) checkDevice(kernel string, buffers ...backend.Buffer) error {
	for i := range buffers {
		if !c.reaches(&buffers[i]) {
			return fmt.Errorf("%w: %s: buffer is host memory where device memory is needed, or "+
				"the other way round: use the kernels of a queue of that memory's device",
				backend.ErrArgument, kernel)
		}
	}
	return nil
}
