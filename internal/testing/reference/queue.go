package reference

import (
	"context"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/serial"
)

// Device is the memory of the process.
type Device struct{}

// Name returns "memory".
func (Device) Name() string { return "memory" }

// Default returns the queue that runs everything on the caller.
func (Device) Default() backend.Queue { return inline{} }

// NewQueue returns a [Queue].
func (Device) NewQueue() (backend.Queue, error) { return &Queue{queued{tasks: serial.New()}}, nil }

// Alloc returns memory of the Go heap.
func (Device) Alloc(nbytes int) (backend.Buffer, error) {
	if nbytes < 0 {
		return backend.Buffer{}, fmt.Errorf("%w: alloc of %d bytes", backend.ErrArgument, nbytes)
	}
	return backend.Of(make([]byte, nbytes)), nil
}

// Free does nothing.
func (Device) Free(backend.Buffer) error { return nil }

// inline runs everything on the caller.
type inline struct{ kernels.Host }

func (inline) Record() (backend.Event, error) { return past{}, nil }
func (inline) Wait(e backend.Event) error     { return e.Join(context.Background()) }
func (inline) Close() error                   { return nil }

// past is an event that has happened.
type past struct{}

func (past) Join(context.Context) error { return nil }
func (past) Done() bool                 { return true }

// Queue runs tasks in order on its own goroutine.
type Queue struct{ queued }

// start submits a task and returns its Work.
func (q *Queue) start(task func() error) (backend.Work, error) {
	w := &work{event: make(serial.Event)}
	return w, q.submit(func() {
		w.err = task()
		close(w.event)
	})
}

// Record implements [backend.Queue].
func (q *Queue) Record() (backend.Event, error) {
	e := make(serial.Event)
	return e, q.submit(func() { close(e) })
}

// Wait implements [backend.Queue].
func (q *Queue) Wait(e backend.Event) error {
	// Background never ends, so there is no error
	return q.submit(func() { e.Join(context.Background()) })
}

// Close implements [backend.Queue].
func (q *Queue) Close() error {
	q.tasks.Close()
	return nil
}

// work is a collective on a Queue.
type work struct {
	event serial.Event
	err   error // valid once event has happened
}

func (w *work) Wait(q backend.Queue) error {
	if queue, ok := q.(*Queue); ok {
		return queue.Wait(w.event)
	}
	return w.Join(context.Background())
}

func (w *work) Done() bool { return w.event.Done() }

func (w *work) Join(ctx context.Context) error {
	if err := w.event.Join(ctx); err != nil {
		return err
	}
	return w.err
}

// queued is the arithmetic of a Queue.
type queued struct{ tasks *serial.Executor }

func (q queued) submit(task func()) error {
	if !q.tasks.Submit(task) {
		return fmt.Errorf("%w: the queue is closed", backend.ErrArgument)
	}
	return nil
}

// kernel runs on the queue, if its arguments are right.
func (q queued) kernel(kernel func(backend.Arithmetic) error) error {
	if err := kernel(kernels.Check{}); err != nil {
		return err
	}
	return q.submit(func() { kernel(kernels.Host{}) }) // checked above, so it cannot fail
}

func (q queued) Zero(dst backend.Buffer) error {
	return q.kernel(func(k backend.Arithmetic) error { return k.Zero(dst) })
}

func (q queued) Copy(dst, src backend.Buffer) error {
	return q.kernel(func(k backend.Arithmetic) error { return k.Copy(dst, src) })
}

func (q queued) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width,
	rows int) error {
	return q.kernel(func(k backend.Arithmetic) error {
		return k.Copy2D(dst, dstPitch, src, srcPitch, width, rows)
	})
}

func (q queued) Cast(dst, src backend.Buffer) error {
	return q.kernel(func(k backend.Arithmetic) error { return k.Cast(dst, src) })
}

func (q queued) CastScale(dst, src backend.Buffer, factor float64) error {
	return q.kernel(func(k backend.Arithmetic) error { return k.CastScale(dst, src, factor) })
}

func (q queued) Divide(dst, src backend.Buffer, n int) error {
	return q.kernel(func(k backend.Arithmetic) error { return k.Divide(dst, src, n) })
}

func (q queued) Reduce(op backend.ReduceOp, dst backend.Buffer, srcs ...backend.Buffer) error {
	srcs = slices.Clone(srcs)
	return q.kernel(func(k backend.Arithmetic) error { return k.Reduce(op, dst, srcs...) })
}

func (q queued) Move(dst, src backend.Buffer) error {
	return q.kernel(func(k backend.Arithmetic) error { return k.Move(dst, src) })
}

func (q queued) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	shape, strides = slices.Clone(shape), slices.Clone(strides)
	return q.kernel(func(k backend.Arithmetic) error {
		return k.CopyStrided(dst, src, shape, strides)
	})
}
