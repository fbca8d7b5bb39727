package kernels

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Widener is a Cast and a Scale in one pass over memory. A Queue's Kernels may be
// one.
type Widener interface {
	// Widen: for i { dst[i] = T(src[i]) * factor }, of 16-bit floats to F32 or F64,
	// with the bits of a Cast and a Scale.
	Widen(dst, src backend.Buffer, factor float64) error
}

// Widen checks what implementations need not check again.
func (c Check) Widen(dst, src backend.Buffer, _ float64) error {
	from, to := src.DType(), dst.DType()
	if dst.Len() != src.Len() || from != backend.F16 && from != backend.BF16 || to != backend.F32 && to != backend.F64 {
		return fmt.Errorf("%w: widen %d %v to %d %v: 16-bit floats to f32 or f64, of the same length",
			backend.ErrArgument, src.Len(), from, dst.Len(), to)
	}
	return c.place("widen", dst, src)
}

var _ Widener = Host{}

// Widen implements [Widener].
func (h Host) Widen(dst, src backend.Buffer, factor float64) error {
	if err := (Check{}).Widen(dst, src, factor); err != nil {
		return err
	}
	if err := h.Cast(dst, src); err != nil {
		return err
	}
	return h.Scale(dst, dst, factor)
}

// Widen starts a Widen, as a Cast and a Scale where the kernels are no [Widener].
func Widen(k backend.Kernels, dst, src backend.Buffer, factor float64) error {
	if w, ok := k.(Widener); ok {
		return w.Widen(dst, src, factor)
	}
	if err := k.Cast(dst, src); err != nil || factor == 1 {
		return err
	}
	return k.Scale(dst, dst, factor)
}
