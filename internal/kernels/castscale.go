package kernels

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// CastScale implements [backend.Arithmetic].
func (c Check) CastScale(dst, src backend.Buffer, _ float64) error {
	from, to := src.DType(), dst.DType()
	if dst.Len() != src.Len() || from != backend.F16 && from != backend.BF16 || to != backend.F32 &&
		to != backend.F64 {
		return fmt.Errorf("%w: castscale of %d %v to %d %v: 16-bit floats to f32 or f64, of the "+
			"same length",
			backend.ErrArgument, src.Len(), from, dst.Len(), to)
	}
	return c.checkDevice("castscale", dst, src)
}

// CastScale implements [backend.Arithmetic].
func (h Host) CastScale(dst, src backend.Buffer, factor float64) error {
	if err := (Check{}).CastScale(dst, src, factor); err != nil {
		return err
	}
	for lo := 0; lo < dst.Len(); lo += block {
		part := dst.Slice(lo, min(lo+block, dst.Len()))
		cast(part, src.Slice(lo, lo+part.Len()))
		if err := h.Scale(part, part, factor); err != nil {
			return err
		}
	}
	return nil
}
