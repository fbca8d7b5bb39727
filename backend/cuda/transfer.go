package cuda

import (
	"fmt"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// ToDevice returns a copy of t, from the host or from the device, in device
// memory that lives until Free: parameters, inputs, and results that must outlive
// the next Reset. A tensor of one element stays on the host.
func (e *Engine) ToDevice(t tensor.Tensor) (*tensor.Dense, error) {
	var y *tensor.Dense
	err := e.on("to device", func() error {
		d, err := e.dense(t)
		if err != nil {
			return err
		}
		s := e.side(elements(d.Shape()))
		if !s.device {
			y, err = e.copied(s, d)
			return err
		}
		return e.keep(&y, d)
	})
	return y, err
}

// keep copies t to its own memory on the device.
func (e *Engine) keep(y **tensor.Dense, t *tensor.Dense) error {
	b, err := e.rows(t)
	if err != nil {
		return err
	}
	bytes, err := e.memory.keep(b.NBytes())
	if err != nil {
		return err
	}
	own := bytes.As(b.DType())
	if err := e.copyBytes(own, b); err != nil {
		return fmt.Errorf("%w (%w)", err, e.memory.free(own.Addr()))
	}
	*y = e.over(own, t.Dtype(), t.Shape())
	return nil
}

// ToHost returns a copy of t in host memory, in row-major order. It waits for
// the queue. If a collective has failed, so does it: see [Engine.TrackWork].
func (e *Engine) ToHost(t tensor.Tensor) (*tensor.Dense, error) {
	var y *tensor.Dense
	err := e.on("to host", func() error {
		d, err := e.dense(t)
		if err != nil {
			return err
		}
		y, err = e.copied(e.host, d)
		return err
	})
	return y, err
}

// copied returns a copy of t in new memory of side s.
func (e *Engine) copied(s side, t *tensor.Dense) (*tensor.Dense, error) {
	src, err := e.rows(t)
	if err != nil {
		return nil, err
	}
	dst, err := s.take(src.DType(), src.Len())
	if err != nil {
		return nil, err
	}
	return e.over(dst, t.Dtype(), t.Shape()), e.copyBytes(dst, src)
}

// Copy copies src to dst, which has as many elements: between any two of host
// and device. It gives a tensor new content without new memory.
func (e *Engine) Copy(dst, src tensor.Tensor) error {
	return e.on("copy", func() error {
		to, err := e.dense(dst)
		if err != nil {
			return err
		}
		from, err := e.dense(src)
		if err != nil {
			return err
		}
		if from.Dtype() != to.Dtype() || elements(from.Shape()) != elements(to.Shape()) {
			return fmt.Errorf("%w: %v %v into %v %v: dtype and number of elements must be the same", backend.ErrArgument, from.Dtype(), from.Shape(), to.Dtype(), to.Shape())
		}
		if !residence.RowMajor(to) {
			return fmt.Errorf("%w: into a view of a tensor: copy into its own tensor", backend.ErrUnsupported)
		}
		b, err := e.rows(from)
		if err != nil {
			return err
		}
		place, err := e.memoryOf(to)
		if err != nil {
			return err
		}
		return e.copyBytes(place.Slice(0, b.Len()), b)
	})
}

// Workspace returns device memory that lasts until Reset. It is not zeroed.
func (e *Engine) Workspace(d backend.DType, n int) (backend.Buffer, error) {
	var b backend.Buffer
	err := e.on("workspace", func() (err error) {
		b, err = e.dev.take(d, n)
		return err
	})
	return b, err
}

// Tensor returns the result of an operation from outside the engine, which wrote
// it into memory from Workspace: a tensor over that memory. One element is
// copied to host memory, which waits for the queue, because Gorgonia reads such
// tensors itself: call Tensor once the queue is ordered after the work.
func (e *Engine) Tensor(b backend.Buffer, dt tensor.Dtype, shape ...int) (*tensor.Dense, error) {
	var y *tensor.Dense
	err := e.on("tensor", func() error {
		d, err := dtype(dt)
		if err != nil {
			return err
		}
		if d != b.DType() || elements(shape) != b.Len() {
			return fmt.Errorf("%w: %d %v as a tensor of %v %v", backend.ErrArgument, b.Len(), b.DType(), dt, shape)
		}
		y, err = e.finish(b, dt, shape)
		return err
	})
	return y, err
}

// Buffer returns the elements of t in row-major order in device memory, to be
// read: t's own memory, or a copy that lasts until Reset where t is a view or is
// on the host.
func (e *Engine) Buffer(t tensor.Tensor) (backend.Buffer, error) {
	var b backend.Buffer
	err := e.on("buffer", func() (err error) {
		b, err = e.read(e.dev, t)
		return err
	})
	return b, err
}

// Adopt returns a tensor over device memory that somebody else owns and frees, such as a
// communicator's.
func (e *Engine) Adopt(b backend.Buffer, dt tensor.Dtype, shape ...int) (*tensor.Dense, error) {
	var y *tensor.Dense
	err := e.on("adopt", func() error {
		d, err := dtype(dt)
		if err != nil {
			return err
		}
		if !b.Device() || b.NBytes() != elements(shape)*d.Size() {
			return fmt.Errorf("%w: %d %v as a tensor of %v %v: use device memory of the same size", backend.ErrArgument, b.Len(), b.DType(), dt, shape)
		}
		y = e.over(b, dt, shape)
		return nil
	})
	return y, err
}
