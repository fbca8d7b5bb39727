package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/kernels"
)

// Engine keeps tensors in the memory of one device, and is the tensor.Engine that they carry. See
// the package's documentation for how long memory lives.
type Engine struct {
	none

	device   backend.Device
	queue    backend.Queue
	owns     func(addr uintptr) bool // whether memory is a device's
	dev      side                    // the device
	host     side
	memory   memory
	inFlight inFlight

	mu    sync.Mutex
	small [][]byte // host memory from Alloc, reachable until Reset

	uploads, downloads atomic.Int64
}

// owner is a [backend.Device] that tells its memory from the host's.
type owner interface {
	Owns(addr uintptr) bool
}

// side is where elements are: its arithmetic and its memory.
type side struct {
	backend.Arithmetic
	device bool
	take   func(d backend.DType, n int) (backend.Buffer, error)
}

// NewEngine returns an engine that starts everything on q (nil: the device's
// default queue), in order.
//
// Errors: ErrUnsupported for a device that has no separate memory, such as the host.
func NewEngine(d backend.Device, q backend.Queue) (*Engine, error) {
	if err := backend.Given("cuda.NewEngine", "d", d); err != nil {
		return nil, err
	}
	o, ok := d.(owner)
	if !ok {
		return nil, fmt.Errorf("cuda: %w: an engine of %s, which has no separate memory: use tensors of the host", backend.ErrUnsupported, d.Name())
	}
	if q == nil {
		q = d.Default()
	}
	e := &Engine{device: d, queue: q, owns: o.Owns, memory: memory{device: d, tensors: map[uintptr]backend.Buffer{}}}
	e.dev = side{q, true, func(d backend.DType, n int) (backend.Buffer, error) {
		b, err := e.memory.take(n * d.Size())
		return b.As(d), err
	}}
	e.host = side{kernels.Host{}, false, func(d backend.DType, n int) (backend.Buffer, error) {
		return backend.Of(make([]float64, (n*d.Size()+7)/8)).As(d).Slice(0, n), nil
	}}
	return e, nil
}

// Device returns the device.
func (e *Engine) Device() backend.Device { return e.device }

// Queue returns the queue that everything is started on. Work on another queue
// with tensors of the engine must be ordered after it.
func (e *Engine) Queue() backend.Queue { return e.queue }

// Reserve makes room for nbytes of results. Memory is otherwise taken from the
// device when it is needed first, which may stall a device that others wait
// for: reserve before collectives start.
func (e *Engine) Reserve(nbytes int) error {
	return e.on("reserve", func() error { return e.memory.reserve(nbytes) })
}

// Reset recycles the memory of all results, and clears a collective's error that was
// returned. Call it between the steps of a program.
func (e *Engine) Reset() {
	e.memory.rewind()
	e.inFlight.reset()
	e.mu.Lock()
	e.small = e.small[:0]
	e.mu.Unlock()
}

// Close waits for the queue and frees all memory. Tensors of the engine are dangling then.
func (e *Engine) Close() error {
	return e.on("close", func() error { return errors.Join(e.drain(), e.memory.close()) })
}

// Stats count what went between host and device since the engine was made.
type Stats struct {
	// Uploads and Downloads are tensors that were copied to the device and to the
	// host, except those of one element.
	Uploads, Downloads int64
	// ArenaBytes are the device memory that is held for results.
	ArenaBytes int64
}

// Stats returns the counters.
func (e *Engine) Stats() Stats {
	e.memory.mu.Lock()
	defer e.memory.mu.Unlock()
	return Stats{e.uploads.Load(), e.downloads.Load(), int64(e.memory.arenaBytes())}
}

// on runs one operation with the device bound to the thread, and names the operation in
// errors.
func (e *Engine) on(operation string, f func() error) error {
	if err := residence.Bound(e.device, f); err != nil {
		return fmt.Errorf("cuda: %s: %w", operation, err)
	}
	return nil
}

// drain waits for the queue.
func (e *Engine) drain() error {
	done, err := e.queue.Record()
	if err != nil {
		return err
	}
	return done.Join(context.Background())
}

// side returns where tensors of n elements are.
func (e *Engine) side(n int) side {
	if residence.OnHost(n) {
		return e.host
	}
	return e.dev
}

// at returns the side where memory is.
func (e *Engine) at(b backend.Buffer) side {
	if b.Device() {
		return e.dev
	}
	return e.host
}

// dtype returns the backend's name for a dtype of package tensor.
func dtype(dt tensor.Dtype) (backend.DType, error) {
	if d, ok := residence.DType(dt); ok {
		return d, nil
	}
	return 0, fmt.Errorf("%w: a tensor of %v: use Float32, Float64, Int, Int32, Int64 or Byte", backend.ErrUnsupported, dt)
}
