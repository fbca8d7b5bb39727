package cuda

import (
	"fmt"
	"runtime"
	"unsafe"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// dense returns t as the only kind of tensor there is on a device.
func (e *Engine) dense(t tensor.Tensor) (*tensor.Dense, error) {
	d, ok := t.(*tensor.Dense)
	if !ok || d == nil {
		return nil, fmt.Errorf("%w: a %T: use a *tensor.Dense", backend.ErrUnsupported, t)
	}
	if len(d.Mask()) > 0 {
		return nil, fmt.Errorf("%w: a masked tensor", backend.ErrUnsupported)
	}
	if other := residence.Engine[*Engine](d); other != nil && other.device.Name() != e.device.Name() {
		return nil, fmt.Errorf("%w: the tensor is on the device %s, and the engine is of %s", backend.ErrArgument, other.device.Name(), e.device.Name())
	}
	return d, nil
}

// elements returns how many elements a shape has, 1 for a scalar's.
func elements(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// memoryOf returns the memory of a tensor in the order that it has there.
func (e *Engine) memoryOf(t *tensor.Dense) (backend.Buffer, error) {
	d, err := dtype(t.Dtype())
	if err != nil {
		return backend.Buffer{}, err
	}
	return e.bytes(t.Raw).As(d), nil
}

// bytes returns the buffer of a slice whose memory may be a device's. The slice
// is never looked into.
func (e *Engine) bytes(raw []byte) backend.Buffer {
	start := unsafe.Pointer(unsafe.SliceData(raw))
	if addr := uintptr(start); e.owns(addr) {
		return backend.OnDevice(backend.U8, addr, len(raw))
	}
	return backend.Host(backend.U8, start, len(raw))
}

// rows returns the elements of t in row-major order, on the side where they are:
// t's own memory if it is that, otherwise a copy.
func (e *Engine) rows(t *tensor.Dense) (backend.Buffer, error) {
	b, err := e.memoryOf(t)
	if err != nil {
		return b, err
	}
	n, s := elements(t.Shape()), e.at(b)
	if residence.RowMajor(t) {
		if n > b.Len() {
			return b, fmt.Errorf("%w: a tensor of shape %v has memory for %d elements", backend.ErrArgument, t.Shape(), b.Len())
		}
		return b.Slice(0, n), nil
	}
	copied, err := s.take(b.DType(), n)
	if err != nil {
		return b, err
	}
	return copied, residence.CopyStrided(s, copied, b, t.Shape(), t.Strides())
}

// read returns the elements of t in row-major order on side s.
func (e *Engine) read(s side, t tensor.Tensor) (backend.Buffer, error) {
	d, err := e.dense(t)
	if err != nil {
		return backend.Buffer{}, err
	}
	b, err := e.rows(d)
	if err != nil || b.Device() == s.device || b.Len() == 0 {
		return b, err
	}
	return e.bring(s, b)
}

// bring copies elements to the other side.
func (e *Engine) bring(s side, src backend.Buffer) (backend.Buffer, error) {
	dst, err := s.take(src.DType(), src.Len())
	if err != nil {
		return dst, err
	}
	return dst, e.move(dst, src)
}

// move copies between host and device, counts that, and waits: the host may use
// its memory again. What it copies to the host is of collectives that are well.
func (e *Engine) move(dst, src backend.Buffer) error {
	switch {
	case dst.Len() == 0:
		return nil
	case dst.NBytes() <= wordBytes:
	case dst.Device():
		e.uploads.Add(1)
	default:
		e.downloads.Add(1)
	}
	if !dst.Device() {
		if err := e.inFlight.join(); err != nil {
			return fmt.Errorf("a collective that values on the device come from has failed, and they are worth nothing: %w", err)
		}
	}
	if err := e.dev.Move(dst, src); err != nil {
		return err
	}
	err := e.drain()
	runtime.KeepAlive(src)
	return err
}

// finish returns a result as a tensor, on the side where it belongs.
func (e *Engine) finish(b backend.Buffer, dt tensor.Dtype, shape tensor.Shape) (*tensor.Dense, error) {
	if s := e.side(elements(shape)); s.device != b.Device() {
		var err error
		if b, err = e.bring(s, b); err != nil {
			return nil, err
		}
	}
	return e.over(b, dt, shape), nil
}

// over returns a tensor with given memory.
func (e *Engine) over(b backend.Buffer, dt tensor.Dtype, shape tensor.Shape) *tensor.Dense {
	options := []tensor.ConsOpt{tensor.FromMemory(b.Addr(), uintptr(b.NBytes()))}
	if b.Device() {
		options = append(options, tensor.WithEngine(e))
	}
	t := tensor.NewDense(dt, shape.Clone(), options...)
	runtime.KeepAlive(b) // until t keeps it
	return t
}
