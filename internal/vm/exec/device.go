package exec

import (
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Device is what plans need of a device. What is started on it happens in order.
type Device interface {
	// Host reports whether the device's memory is the host's, and everything is done when
	// the call that starts it returns.
	Host() bool
	// Alloc returns nbytes bytes, as U8, and Free gives them back.
	Alloc(nbytes int) (backend.Buffer, error)
	Free(backend.Buffer) error
	// Copies has what its machines share: copies of host memory, but not on the host, and what is
	// computed once.
	Copies() *residence.Copies
	// AllocHost returns nbytes bytes of host memory that the device copies from and to fast,
	// as U8, and FreeHost gives them back.
	AllocHost(nbytes int) (backend.Buffer, error)
	FreeHost(backend.Buffer) error
	Zero(dst backend.Buffer) error
	// Move copies between memory of the device and of the host. Host memory is in use until
	// Join.
	Move(dst, src backend.Buffer) error
	// Fuse makes a program ready to run.
	Fuse(p *fuse.Program) (fuse.Loop, error)
	products
	Kernels
	// Capture records what f starts, as [backend.GraphQueue] does. It is ErrUnsupported if the
	// device has no graphs.
	Capture(f func() error) (*backend.Graph, error)
	// Main returns the queue of what is started, nil for the host.
	Main() backend.Queue
	// NewQueue returns another queue, nil on the host.
	NewQueue() (backend.Queue, error)
	// Join waits until everything that was started is done.
	Join() error
	// Close frees what the device holds for itself.
	Close() error
}

// Kernels are the operations of package kernels on images, on rows that indices name, and
// attention.
type Kernels interface {
	Im2Col(dst, src backend.Buffer, i kernels.Images) error
	Col2Im(dst, src backend.Buffer, i kernels.Images) error
	MaxPool(dst, src backend.Buffer, i kernels.Images) error
	MaxPoolGrad(dx, x, dy backend.Buffer, i kernels.Images) error
	TakeRows(dst, src, indices backend.Buffer, r kernels.Rows) error
	AddRows(dst, src, indices backend.Buffer, r kernels.Rows) error
	PutRows(dst, src, indices backend.Buffer, r kernels.Rows) error
	Attention(kernels.Attention) error
	AttentionGrad(kernels.AttentionGrad) error
}

// queued is a Device over a queue of package backend.
type queued struct {
	fuse.Queue
	Kernels
	products
	device backend.Device
	copies *residence.Copies
}

// readier is what has code to load for operations. The executor asks for all that a plan has before
// the plan runs: later, other ranks may wait for what runs on the device, or a graph is being
// captured.
type readier interface{ ready(op ir.Op) error }

// ready makes a device ready for an operation.
func (q *queued) ready(op ir.Op) error {
	if r, ok := q.products.(readier); ok {
		return r.ready(op)
	}
	return nil
}

// products multiplies matrices and convolves images, in the order of a queue.
type products interface {
	// Multiply multiplies matrices.
	Multiply(kernels.Product) error
	// ConvolutionScratch returns how many bytes of memory a convolution needs for intermediate
	// results, and makes ready what cannot be made while a graph is captured.
	ConvolutionScratch(kernels.Convolution) (int, error)
	// Convolve computes a convolution: see [kernels.Host.Convolve].
	Convolve(c kernels.Convolution, dst, a, b, scratch backend.Buffer) error
}

// On returns the Device over a new queue of d.
//
// Errors: ErrUnsupported if the queues of d do not run programs of package fuse, or have no
// matrix multiplications, convolutions and [Kernels].
func On(d backend.Device) (Device, error) {
	q, err := d.NewQueue()
	if err != nil {
		return nil, err
	}
	run, ok := q.(fuse.Queue)
	if !ok {
		return nil, errors.Join(fmt.Errorf("vm: %w: the queues of %s run no fused loops",
			backend.ErrUnsupported, d.Name()), q.Close())
	}
	kernels, ok := q.(Kernels)
	if !ok {
		return nil,
			errors.Join(fmt.Errorf("vm: %w: the queues of %s have no kernels for images, rows "+
				"and attention", backend.ErrUnsupported, d.Name()), q.Close())
	}
	multiply, err := productsOf(q)
	if err != nil {
		return nil, errors.Join(err, q.Close())
	}
	copies := &residence.Copies{}
	if shared, ok := d.(interface{ Copies() *residence.Copies }); ok {
		copies = shared.Copies()
		_ = copies.CloseAbandoned() // an error is the device's, of which this executor hears, too
	}
	return &queued{run, kernels, multiply, d, copies}, nil
}

// multiplies returns the queue itself if it multiplies and convolves.
func multiplies(q backend.Queue) (products, error) {
	if p, ok := q.(products); ok {
		return p, nil
	}
	return nil, fmt.Errorf("vm: %w: a %T multiplies no matrices, or convolves no images",
		backend.ErrUnsupported, q)
}

// Host implements [Device].
func (*queued) Host() bool { return false }

// Alloc implements [Device].
func (q *queued) Alloc(nbytes int) (backend.Buffer, error) { return q.device.Alloc(nbytes) }

// Free implements [Device].
func (q *queued) Free(b backend.Buffer) error { return q.device.Free(b) }

// Copies implements [Device].
func (q *queued) Copies() *residence.Copies { return q.copies }

// pinned is a device that has host memory which it copies from and to fast.
type pinned interface {
	AllocHost(nbytes int) (backend.Buffer, error)
	FreeHost(backend.Buffer) error
}

// AllocHost implements [Device].
func (q *queued) AllocHost(nbytes int) (backend.Buffer, error) {
	if p, ok := q.device.(pinned); ok {
		return p.AllocHost(nbytes)
	}
	return Host{}.Alloc(nbytes)
}

// FreeHost implements [Device].
func (q *queued) FreeHost(b backend.Buffer) error {
	if p, ok := q.device.(pinned); ok {
		return p.FreeHost(b)
	}
	return nil
}

// Capture implements [Device].
func (q *queued) Capture(f func() error) (*backend.Graph, error) {
	if g, ok := q.Queue.(backend.GraphQueue); ok {
		return g.Capture(f)
	}
	return nil, fmt.Errorf("vm: %w: a %T records no graphs", backend.ErrUnsupported, q.Queue)
}

// Main implements [Device].
func (q *queued) Main() backend.Queue { return q.Queue }

// NewQueue implements [Device].
func (q *queued) NewQueue() (backend.Queue, error) { return q.device.NewQueue() }

// Join implements [Device].
func (q *queued) Join() error { return drain(q.Queue) }

// Close implements [Device].
func (q *queued) Close() error {
	var err error
	if c, ok := q.products.(interface{ Close() error }); ok && any(q.products) != any(q.Queue) {
		err = c.Close()
	}
	return errors.Join(err, q.Queue.Close())
}
