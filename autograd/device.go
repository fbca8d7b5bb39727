package autograd

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// engine is what the Engine of a parameter's tensor offers if the parameter is on
// a device: the Engine of package cuda does.
type engine interface {
	Device() backend.Device
	Queue() backend.Queue
	// Buffer returns the elements of a tensor in row-major order on the device. If the
	// tensor's memory has that order, it is that memory.
	Buffer(tensor.Tensor) (backend.Buffer, error)
	// Adopt returns a tensor over memory of others.
	Adopt(b backend.Buffer, dt tensor.Dtype, shape ...int) (*tensor.Dense, error)
	ToHost(tensor.Tensor) (*tensor.Dense, error)
}

// onDevice returns the memory of a tensor on the device of e, which must be
// contiguous.
func onDevice(e engine, t *tensor.Dense) (backend.Buffer, error) {
	memory, err := e.Buffer(t)
	if err != nil {
		return memory, err
	}
	if memory.Addr() != uintptr(unsafe.Pointer(unsafe.SliceData(t.Raw))) {
		return memory, fmt.Errorf("is in host memory, or a view: move it to %s with the engine's ToDevice first", e.Device().Name())
	}
	return memory, floats(memory.DType(), memory.DType())
}

// onHost reports whether the memory of a device is the host's.
func onHost(d backend.Device) (bool, error) {
	b, err := d.Alloc(1)
	if err != nil {
		return false, err
	}
	return !b.Device(), d.Free(b)
}

// arithmeticOf returns the arithmetic of e's device, or of the host if e is nil.
func arithmeticOf(e engine) backend.Arithmetic {
	if e == nil {
		return kernels.Host{}
	}
	return e.Queue()
}

// drain waits for q.
func drain(q backend.Queue) error {
	done, err := q.Record()
	if err != nil {
		return err
	}
	return done.Join(context.Background())
}

// follow orders q after everything that was started on the queue before.
func follow(q, before backend.Queue) error {
	done, err := before.Record()
	if err != nil {
		return err
	}
	return q.Wait(done)
}

// exchange runs a collective on host memory. If the communicator is on another device it
// stages the operands there.
func exchange(comm backend.Communicator, c backend.Collective, dst, src backend.Buffer) error {
	device := comm.Device()
	far, err := device.Alloc(dst.NBytes() + src.NBytes())
	if err != nil {
		return err
	}
	if !far.Device() {
		return errors.Join(backend.Run(comm, c, dst, src), device.Free(far))
	}
	err = exchangeBy(comm, c, dst, src, far)
	return errors.Join(err, drain(device.Default()), device.Free(far))
}

func exchangeBy(comm backend.Communicator, c backend.Collective, dst, src, far backend.Buffer) error {
	q := comm.Device().Default()
	farDst := far.Slice(0, dst.NBytes()).As(dst.DType())
	farSrc := far.Slice(dst.NBytes(), far.Len()).As(src.DType())
	if err := q.Move(farSrc, src); err != nil {
		return err
	}
	if err := backend.Run(comm, c, farDst, farSrc); err != nil {
		return err
	}
	return q.Move(dst, farDst)
}
