package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"unsafe"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// dense returns t as the only kind of tensor there is on a device.
func dense(t tensor.Tensor) (*tensor.Dense, error) {
	d, ok := t.(*tensor.Dense)
	if !ok || d == nil {
		return nil, fmt.Errorf("%w: a %T: use a *tensor.Dense", backend.ErrUnsupported, t)
	}
	if len(d.Mask()) > 0 {
		return nil, fmt.Errorf("%w: a masked tensor", backend.ErrUnsupported)
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

// memoryOf returns the memory of a tensor in the order that it has there. What
// the registry does not know is the host's, whatever engine the tensor carries.
func (e *Engine) memoryOf(t *tensor.Dense, how access) (backend.Buffer, error) {
	d, err := DType(t.Dtype())
	if err != nil {
		return backend.Buffer{}, err
	}
	b, err := e.bytes(t.Raw, how)
	return b.As(d), err
}

// bytes returns the buffer of a slice whose memory may be a device's. The slice
// is never looked into.
func (e *Engine) bytes(raw []byte, how access) (backend.Buffer, error) {
	start := unsafe.Pointer(unsafe.SliceData(raw))
	addr := uintptr(start)
	device, err := e.memory.locate(addr, len(raw), how)
	if err != nil {
		return backend.OnDevice(backend.U8, addr, len(raw)), err
	}
	if device {
		if how == writing {
			e.watches.change(addr, len(raw))
		}
		return backend.OnDevice(backend.U8, addr, len(raw)), nil
	}
	if o, ok := e.device.(owner); ok && o.Owns(addr) {
		return backend.OnDevice(backend.U8, addr, len(raw)), fmt.Errorf("%w: device memory that the engine does not know: make tensors with ToDevice, Tensor or Adopt of this engine", backend.ErrArgument)
	}
	return backend.Host(backend.U8, start, len(raw)), nil
}

// rows returns the elements of t in row-major order, on the side where they are:
// t's own memory if it is that, otherwise a copy.
func (e *Engine) rows(t *tensor.Dense) (backend.Buffer, error) {
	b, err := e.memoryOf(t, reading)
	if err != nil {
		return b, err
	}
	return rowMajor(e.at(b), b, t.Shape(), t.Strides())
}

// read returns the elements of t in row-major order on side s.
func (e *Engine) read(s side, t tensor.Tensor) (backend.Buffer, error) {
	d, err := dense(t)
	if err != nil {
		return backend.Buffer{}, err
	}
	b, err := e.rows(d)
	if err != nil || b.Device() == s.device || b.Len() == 0 {
		return b, err
	}
	return e.bring(s, b)
}

// rowMajor goes by the strides alone: what package tensor says of a view's order
// is not always right.
func rowMajor(s side, b backend.Buffer, shape, strides []int) (backend.Buffer, error) {
	n := elements(shape)
	if contiguous(shape, strides) {
		if n > b.Len() {
			return b, fmt.Errorf("%w: a tensor of shape %v has memory for %d elements", backend.ErrArgument, shape, b.Len())
		}
		return b.Slice(0, n), nil
	}
	copied, err := s.take(b.DType(), n)
	if err != nil {
		return b, err
	}
	return copied, copyStrided(s, copied, b, shape, strides)
}

// copyStrided copies a strided tensor of any number of axes into row-major
// order, row by row where it has more than the device takes.
func copyStrided(s side, dst, src backend.Buffer, shape, strides []int) error {
	if len(shape) <= backend.MaxAxes {
		err := s.CopyStrided(dst, src, shape, strides)
		if len(shape) <= 1 || !errors.Is(err, backend.ErrUnsupported) {
			return err
		}
	}
	row := dst.Len() / shape[0]
	for i := range shape[0] {
		err := copyStrided(s, dst.Slice(i*row, (i+1)*row), src.Slice(i*strides[0], src.Len()), shape[1:], strides[1:])
		if err != nil {
			return err
		}
	}
	return nil
}

// contiguous reports whether elements are in row-major order without gaps. The
// stride of an axis of length 1 does not matter, and vectors may have one stride
// for two axes.
func contiguous(shape, strides []int) bool {
	if elements(shape) <= 1 {
		return true
	}
	if len(strides) != len(shape) {
		return len(strides) == 1 && strides[0] == 1
	}
	step := 1
	for axis, d := range slices.Backward(shape) {
		if d != 1 && strides[axis] != step {
			return false
		}
		step *= d
	}
	return true
}

// bring copies elements to the other side.
func (e *Engine) bring(s side, src backend.Buffer) (backend.Buffer, error) {
	dst, err := s.take(src.DType(), src.Len())
	if err != nil {
		return dst, err
	}
	if value, ok := uniform(src); ok {
		if src.Len() > 1 {
			e.fills.Add(1)
		}
		return dst, s.Fill(dst, value)
	}
	return dst, e.move(dst, src)
}

// uniform returns the value that all elements of host memory have.
func uniform(b backend.Buffer) (float64, bool) {
	raw, size := b.Bytes(), b.DType().Size()
	if len(raw) == 0 || !bytes.Equal(raw[size:], raw[:len(raw)-size]) {
		return 0, false
	}
	return number(b)
}

// number returns the first element of host memory, if it is a float64.
func number(b backend.Buffer) (float64, bool) {
	switch b.DType() {
	case backend.F32:
		return float64(backend.View[float32](b)[0]), true
	case backend.F64:
		return backend.View[float64](b)[0], true
	case backend.I32:
		return float64(backend.View[int32](b)[0]), true
	case backend.I64:
		return exactly(backend.View[int64](b)[0])
	case backend.U8:
		return float64(backend.View[byte](b)[0]), true
	}
	return 0, false
}

// exactly converts an integer to the float64 that it is, if there is one.
func exactly(x int64) (float64, bool) {
	const limit = 1 << 53
	return float64(x), -limit <= x && x <= limit
}

// move copies between host and device, counts that, and waits: the host may use
// its memory again. What it copies to the host is of collectives that are well.
func (e *Engine) move(dst, src backend.Buffer) error {
	switch {
	case dst.Len() == 0:
		return nil
	case dst.NBytes() <= 8:
		e.scalars.Add(1)
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

// result returns a new tensor on side s and its memory. It ends with the run.
func (e *Engine) result(s side, dt tensor.Dtype, shape tensor.Shape) (*tensor.Dense, backend.Buffer, error) {
	d, err := DType(dt)
	if err != nil {
		return nil, backend.Buffer{}, err
	}
	b, err := s.take(d, elements(shape))
	if err != nil {
		return nil, b, err
	}
	return e.over(b, dt, shape), b, nil
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

// rebind gives t other memory. Results that the tape machine allocated itself
// arrive in host memory; this is how they come to the device.
func (e *Engine) rebind(t *tensor.Dense, b backend.Buffer) {
	tensor.FromMemory(b.Addr(), uintptr(b.NBytes()))(t)
	tensor.WithEngine(e)(t)
	runtime.KeepAlive(b) // until t keeps it
}

// target prepares t to be overwritten with n elements of dtype dt on side s.
func (e *Engine) target(s side, t tensor.Tensor, dt tensor.Dtype, shape tensor.Shape) (*tensor.Dense, backend.Buffer, error) {
	dst, err := dense(t)
	if err != nil {
		return nil, backend.Buffer{}, err
	}
	n := elements(shape)
	if dst.Dtype() != dt || elements(dst.Shape()) != n {
		return nil, backend.Buffer{}, fmt.Errorf("%w: a result of %v %v does not fit into a tensor of %v %v",
			backend.ErrArgument, dt, shape, dst.Dtype(), dst.Shape())
	}
	b, err := e.memoryOf(dst, writing)
	if err != nil {
		return nil, b, err
	}
	if !contiguous(dst.Shape(), dst.Strides()) || b.Device() != s.device && dst.IsView() {
		return nil, b, fmt.Errorf("%w: writing into a view of a tensor: write into its own tensor", backend.ErrUnsupported)
	}
	if b.Device() != s.device {
		if b, err = s.take(b.DType(), n); err != nil {
			return nil, b, err
		}
		e.rebind(dst, b)
	}
	if !slices.Equal(dst.Shape(), shape) {
		if err := dst.Reshape(shape.Clone()...); err != nil {
			return nil, b, err
		}
	}
	return dst, b.Slice(0, n), nil
}
