package backend

import (
	"context"
	"time"
)

// Device is where buffers live and queues run: the host, or one GPU.
type Device interface {
	// Name identifies the device in messages: "host", "cuda:0".
	Name() string
	// Default returns the queue that stands for a nil Queue. On the host it runs
	// everything on the calling goroutine before it returns.
	Default() Queue
	// NewQueue returns a new queue, which the caller closes.
	NewQueue() (Queue, error)
	// Alloc returns nbytes bytes of the device's memory, as U8, zeroed.
	Alloc(nbytes int) (Buffer, error)
	// Free gives back memory from Alloc.
	Free(Buffer) error
}

// UrgentQueue returns a new queue of a device. Where the device supports it, the queue's kernels
// run before those that other queues have ready. So an exchange goes on beside the kernels of a
// backward pass; otherwise each of these would begin first.
func UrgentQueue(d Device) (Queue, error) {
	if err := Given("backend.UrgentQueue", "d", d); err != nil {
		return nil, err
	}
	if urgent, ok := d.(interface{ NewUrgentQueue() (Queue, error) }); ok {
		return urgent.NewUrgentQueue()
	}
	return d.NewQueue()
}

// Queue runs work in the order in which it was started: a CUDA stream or a host executor. Several
// goroutines may call its methods, in any order.
type Queue interface {
	Arithmetic
	// Record returns an event that happens once everything started on the queue
	// so far is done.
	Record() (Event, error)
	// Wait orders everything that is started later on this queue after e. It does not block the
	// host, unless the queue runs on the host itself.
	Wait(e Event) error
	// Close waits for the queue to drain and frees it.
	Close() error
}

// Event is a point in a queue.
type Event interface {
	// Join blocks the calling goroutine until the event has happened. If ctx ends first, it returns
	// ctx's error, and the queue goes on.
	Join(ctx context.Context) error
	// Done reports whether the event has happened, or never will: Join then does
	// not wait.
	Done() bool
}

// TimedQueue is a Queue of a device that has a clock.
type TimedQueue interface {
	Queue
	// NewTimedEvent returns an event for RecordTimed on the queues of this device. Close
	// it before the device.
	NewTimedEvent() (TimedEvent, error)
	// RecordTimed moves e to the point after everything started on the queue so far, as Record
	// does; e forgets its earlier point. It costs the queue more than Record. If the queue is being
	// recorded, each replay of the graph moves e.
	RecordTimed(e TimedEvent) error
}

// TimedEvent is a point of a queue at which the device notes the time.
type TimedEvent interface {
	// Elapsed returns the time from another event of the device to this one, by the device's clock;
	// false while one of them has not happened. GPUs measure it as a float32 of milliseconds, by a
	// clock with steps of half a microsecond.
	Elapsed(since TimedEvent) (t time.Duration, happened bool, err error)
	Close() error
}

// Work is a started collective.
type Work interface {
	// Wait orders what is started on q later after the collective. It does not block the host,
	// unless q runs on the host itself.
	Wait(q Queue) error
	// Join blocks the calling goroutine until the collective is done and returns its error. If ctx
	// ends first, Join returns ctx's error and the collective goes on: the buffers stay in use.
	Join(ctx context.Context) error
	// Done reports whether the collective has ended: Join then does not wait, and returns its error
	// whatever the context.
	Done() bool
}

// Finished returns a Work that has ended: with err, or successfully if err is nil.
func Finished(err error) Work {
	if err == nil {
		return well{} // without an allocation
	}
	return failed{err}
}

type well struct{}

func (well) Wait(Queue) error           { return nil }
func (well) Join(context.Context) error { return nil }
func (well) Done() bool                 { return true }

type failed struct{ err error }

func (f failed) Wait(Queue) error           { return f.err }
func (f failed) Join(context.Context) error { return f.err }
func (f failed) Done() bool                 { return true }
