package ops

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// place is where one run of an operation works: in memory that the communicator
// can use, on one queue, in order.
type place interface {
	worker
	// read returns the elements of v in row-major order. v is never written to.
	read(v gorgonia.Value) (backend.Buffer, error)
	// fresh returns memory for a new value, with anything in it, and what makes
	// the value once everything that writes the memory is started.
	fresh(dt tensor.Dtype, shape tensor.Shape) (backend.Buffer, func() (gorgonia.Value, error), error)
	// leave ends the operation, also after an error.
	leave() error
}

// worker is what computes a result in memory that is there.
type worker interface {
	kernels() backend.Arithmetic
	// scratch returns memory for the operation, with anything in it.
	scratch(d backend.DType, n int) (backend.Buffer, error)
	// run runs a collective, in the order of the queue.
	run(c backend.Collective, dst, src backend.Buffer) error
}

// engine is what a tensor's Engine offers for operations to work on the device
// where the tensor is: the Engine of package cuda does.
type engine interface {
	Device() backend.Device
	Queue() backend.Queue
	// Buffer returns the elements of a tensor in row-major order on the device.
	Buffer(tensor.Tensor) (backend.Buffer, error)
	// Workspace returns device memory that lasts as long as results do.
	Workspace(d backend.DType, n int) (backend.Buffer, error)
	// TrackWork tells of a collective that was started on Queue: copies of values to the
	// host wait for it, and fail if it has.
	TrackWork(comm backend.Communicator, w backend.Work)
	// Tensor returns a result in memory from Workspace.
	Tensor(b backend.Buffer, dt tensor.Dtype, shape ...int) (*tensor.Dense, error)
}

// owner is a device that can tell its addresses from the host's.
type owner interface {
	Owns(addr uintptr) bool
}

// pool is a queue with memory for what is computed on the way, in its order: it
// is not zeroed, and costs nothing where memory of the size was freed before.
type pool interface {
	Alloc(nbytes int) (backend.Buffer, error)
	Free(backend.Buffer) error
}

// at runs f in the place of the inputs.
func at(comm backend.Communicator, inputs []gorgonia.Value, f func(place) (gorgonia.Value, error)) (gorgonia.Value, error) {
	unbind, err := residence.Bind(comm.Device())
	if err != nil {
		return nil, err
	}
	defer unbind()
	p, err := placeOf(comm, inputs)
	if err != nil {
		return nil, err
	}
	v, err := f(p)
	if left := p.leave(); left != nil {
		err = errors.Join(err, left)
	}
	if err != nil {
		return nil, err
	}
	return v, nil
}

// placeOf returns the place for an operation on inputs: with the engine of one
// that has one, else on the host or, where the communicator is of a device,
// staged.
func placeOf(comm backend.Communicator, inputs []gorgonia.Value) (place, error) {
	device := comm.Device()
	for _, v := range inputs {
		e := residence.Engine[engine](v)
		if e == nil {
			continue
		}
		if at, has := e.Device().Name(), device.Name(); at != has {
			return nil, fmt.Errorf("%w: the value is on the device %s, and %s communicates on %s: connect with a backend for %s, or copy the value to the host",
				backend.ErrUnsupported, at, comm.Name(), has, at)
		}
		return &onDevice{comm: comm, engine: e}, nil
	}
	host := onHost{comm, device.Default()}
	if memory, ok := host.queue.(pool); ok { // which the host's has not
		return &staged{onHost: host, device: device, memory: memory}, nil
	}
	staging := &staged{onHost: host, device: device, memory: device}
	probe, err := staging.alloc(backend.U8, 1)
	if err != nil || probe.Device() {
		return staging, err
	}
	return host, staging.free()
}

// onHost is host memory.
type onHost struct {
	comm  backend.Communicator
	queue backend.Queue
}

func (p onHost) kernels() backend.Arithmetic { return p.queue }

func (p onHost) read(v gorgonia.Value) (backend.Buffer, error) {
	memory, err := memoryOf(v)
	if err != nil {
		return memory, err
	}
	return rowMajor(p, memory, v)
}

func (onHost) scratch(d backend.DType, n int) (backend.Buffer, error) { return scratch(d, n), nil }

func (onHost) fresh(dt tensor.Dtype, shape tensor.Shape) (backend.Buffer, func() (gorgonia.Value, error), error) {
	v, memory, err := fresh(dt, shape)
	return memory, func() (gorgonia.Value, error) { return v, nil }, err
}

func (p onHost) run(c backend.Collective, dst, src backend.Buffer) error {
	return backend.Run(p.comm, c, dst, src)
}

func (p onHost) leave() error { return p.drain() }

// drain waits for the queue.
func (p onHost) drain() error {
	done, err := p.queue.Record()
	if err != nil {
		return err
	}
	return done.Join(context.Background())
}

// staged is device memory for values that are on the host: scalars always are.
// They are copied to the device, and results back.
type staged struct {
	onHost
	device backend.Device
	memory pool             // the queue, or else the device
	taken  []backend.Buffer // to be freed
}

func (p *staged) alloc(d backend.DType, n int) (backend.Buffer, error) {
	b, err := p.memory.Alloc(n * d.Size())
	if err != nil {
		return b, err
	}
	p.taken = append(p.taken, b)
	return b.As(d), nil
}

func (p *staged) free() error {
	var all error
	for _, b := range p.taken {
		all = errors.Join(all, p.memory.Free(b))
	}
	p.taken = nil
	return all
}

// move copies between host and device.
func (p *staged) move(dst, src backend.Buffer) error {
	if src.Len() == 0 {
		return nil
	}
	return errors.Join(p.queue.Move(dst, src), p.drain())
}

func (p *staged) read(v gorgonia.Value) (backend.Buffer, error) {
	if t, ok := v.(*tensor.Dense); ok && p.owns(t) {
		return backend.Buffer{}, fmt.Errorf("%w: the value is in the memory of the device %s, but has lost its engine, as in a machine of Gorgonia: run the graph by vm.New, with tensors of the host", backend.ErrArgument, p.device.Name())
	}
	memory, err := memoryOf(v)
	if err != nil {
		return memory, err
	}
	copied, err := p.scratch(memory.DType(), memory.Len())
	if err != nil {
		return copied, err
	}
	if err := p.move(copied, memory); err != nil {
		return copied, err
	}
	return rowMajor(p, copied, v)
}

// owns reports whether t is known to be in the device's memory.
func (p *staged) owns(t *tensor.Dense) bool {
	o, ok := p.device.(owner)
	return ok && o.Owns(uintptr(unsafe.Pointer(unsafe.SliceData(t.Raw))))
}

func (p *staged) scratch(d backend.DType, n int) (backend.Buffer, error) {
	if n == 0 {
		return backend.Host(d, nil, 0), nil
	}
	return p.alloc(d, n)
}

func (p *staged) fresh(dt tensor.Dtype, shape tensor.Shape) (backend.Buffer, func() (gorgonia.Value, error), error) {
	v, memory, err := fresh(dt, shape)
	if err != nil {
		return memory, nil, err
	}
	b, err := p.scratch(memory.DType(), memory.Len())
	return b, func() (gorgonia.Value, error) { return v, p.move(memory, b) }, err
}

func (p *staged) leave() error { return errors.Join(p.drain(), p.free()) }

// onDevice is the memory of an engine. The host does not wait: results are
// values whose content is still to come, in the order of the engine's queue.
type onDevice struct {
	comm   backend.Communicator
	engine engine
}

func (p *onDevice) kernels() backend.Arithmetic { return p.engine.Queue() }

func (p *onDevice) read(v gorgonia.Value) (backend.Buffer, error) {
	t, ok := v.(tensor.Tensor)
	if !ok {
		return backend.Buffer{}, fmt.Errorf("%w: the value is a %T, and another operand is on a device", backend.ErrArgument, v)
	}
	return p.engine.Buffer(t)
}

func (p *onDevice) scratch(d backend.DType, n int) (backend.Buffer, error) {
	return p.engine.Workspace(d, n)
}

func (p *onDevice) fresh(dt tensor.Dtype, shape tensor.Shape) (backend.Buffer, func() (gorgonia.Value, error), error) {
	if product(shape) == 0 {
		v, memory, err := fresh(dt, shape) // the engine has no tensors without elements
		return memory, func() (gorgonia.Value, error) { return v, nil }, err
	}
	d, err := bufferDType(dt)
	if err != nil {
		return backend.Buffer{}, nil, err
	}
	b, err := p.scratch(d, product(shape))
	return b, func() (gorgonia.Value, error) { return p.value(b, dt, shape) }, err
}

func (p *onDevice) value(b backend.Buffer, dt tensor.Dtype, shape tensor.Shape) (gorgonia.Value, error) {
	t, err := p.engine.Tensor(b, dt, shape...)
	if err != nil { // not as a nil tensor in an interface
		return nil, err
	}
	return t, nil
}

// run does not wait: an error that is not known at once comes with the first copy of
// a value to the host, or of the next call, because communication errors are sticky.
func (p *onDevice) run(c backend.Collective, dst, src backend.Buffer) error {
	q := p.engine.Queue()
	w, err := p.comm.Start(q, c, dst, src)
	if err != nil {
		return err
	}
	p.engine.TrackWork(p.comm, w)
	return w.Wait(q)
}

func (*onDevice) leave() error { return nil }
