package kernels

import "github.com/euryale-ml/euryale/backend"

var _ backend.Arithmetic = Host{}

// Move implements [backend.Arithmetic].
func (h Host) Move(dst, src backend.Buffer) error { return h.Copy(dst, src) }

// CopyStrided implements [backend.Arithmetic].
func (Host) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	if err := (Check{}).CopyStrided(dst, src, shape, strides); err != nil || dst.Len() == 0 {
		return err
	}
	switch dst.DType().Size() { // elements are only moved
	case 1:
		copyStrided(backend.View[byte](dst), backend.View[byte](src), shape, strides)
	case 2:
		copyStrided(backend.View[backend.Float16](dst), backend.View[backend.Float16](src), shape,
			strides)
	case 4:
		copyStrided(backend.View[float32](dst), backend.View[float32](src), shape, strides)
	case 8:
		copyStrided(backend.View[float64](dst), backend.View[float64](src), shape, strides)
	}
	return nil
}
