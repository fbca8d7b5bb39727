package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/serial"
	"github.com/euryale-ml/euryale/internal/shm"
)

// Device is the host's memory and cores.
type Device struct{}

var _ backend.Device = Device{}

// Name returns "host".
func (Device) Name() string { return "host" }

// Default returns the queue that runs everything on the caller.
func (Device) Default() backend.Queue { return inline{} }

// NewQueue returns a queue with its own goroutine.
func (Device) NewQueue() (backend.Queue, error) { return newQueue(), nil }

// Alloc returns zeroed memory of the Go heap, aligned to a cache line. A request for more than the
// machine has is an error, because the Go runtime would end the process.
func (Device) Alloc(nbytes int) (backend.Buffer, error) {
	most, err := shm.Total()
	if err != nil {
		return backend.Buffer{}, fmt.Errorf("alloc of %d bytes: %w", nbytes, err)
	}
	if nbytes < 0 || uint64(nbytes) > most {
		return backend.Buffer{}, fmt.Errorf("%w: alloc of %d bytes: this machine has %d bytes of "+
			"memory", backend.ErrArgument, nbytes, most)
	}
	mem := make([]byte, nbytes+lineBytes-1)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(mem))) % lineBytes
	return backend.Of(mem[skip : int(skip)+nbytes]), nil
}

// Free does nothing: the garbage collector frees the memory.
func (Device) Free(backend.Buffer) error { return nil }

// inline is the queue of the calling goroutine: everything started on it is
// done when the call returns.
type inline struct{ kernels.Host }

func (inline) Record() (backend.Event, error) { return happened{}, nil }
func (inline) Wait(e backend.Event) error     { return e.Join(context.Background()) }
func (inline) Close() error                   { return nil }

// happened is an event in the past.
type happened struct{}

func (happened) Join(context.Context) error { return nil }
func (happened) Done() bool                 { return true }

// errQueueClosed is the error of a closed queue.
var errQueueClosed = errors.New("the queue is closed")

// Queue runs tasks in order on its own goroutine.
type Queue struct{ queued }

var _ backend.TimedQueue = (*Queue)(nil)

func newQueue() *Queue { return &Queue{queued{serial.New()}} }

// QueueOf returns the queue that q stands for: nil is the queue of the calling goroutine. A queue
// of another device is an ErrArgument. It is for other communicators of host memory.
func QueueOf(q backend.Queue) (backend.Queue, error) {
	switch q.(type) {
	case nil:
		return inline{}, nil
	case inline, *Queue:
		return q, nil
	}
	return nil, fmt.Errorf("%w: a %T is not a queue of the host", backend.ErrArgument, q)
}

// Start submits a collective and returns its Work.
func (q *Queue) Start(run func() error) (backend.Work, error) { return q.start(run) }

func (q *Queue) start(run func() error) (*work, error) {
	w := &work{event: make(serial.Event)}
	err := q.submit(func() {
		w.err = run()
		close(w.event)
	})
	if err != nil {
		return nil, err
	}
	return w, nil
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

// timedEvent is the time at which a queue reached a point.
type timedEvent struct {
	mu    sync.Mutex
	round int       // of RecordTimed
	at    time.Time // zero until then
}

// NewTimedEvent implements [backend.TimedQueue].
func (q *Queue) NewTimedEvent() (backend.TimedEvent, error) { return &timedEvent{}, nil }

// RecordTimed implements [backend.TimedQueue].
func (q *Queue) RecordTimed(e backend.TimedEvent) error {
	own, err := hostEvent(e)
	if err != nil {
		return err
	}
	own.mu.Lock()
	defer own.mu.Unlock()
	own.round, own.at = own.round+1, time.Time{}
	round := own.round
	return q.submit(func() { own.reached(round) })
}

// reached notes the time, unless the event was recorded again since.
func (e *timedEvent) reached(round int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.round == round {
		e.at = time.Now()
	}
}

func (e *timedEvent) when() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.at
}

// hostEvent refuses events of other devices.
func hostEvent(e backend.TimedEvent) (*timedEvent, error) {
	own, ok := e.(*timedEvent)
	if !ok {
		return nil, fmt.Errorf("%w: a %T is not a timed event of the host", backend.ErrArgument, e)
	}
	return own, nil
}

// Elapsed implements [backend.TimedEvent].
func (e *timedEvent) Elapsed(since backend.TimedEvent) (t time.Duration, happened bool, err error) {
	own, err := hostEvent(since)
	if err != nil {
		return 0, false, err
	}
	from, to := own.when(), e.when()
	return to.Sub(from), !from.IsZero() && !to.IsZero(), nil
}

// Close implements [backend.TimedEvent].
func (e *timedEvent) Close() error { return nil }

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
	q, err := QueueOf(q)
	if err != nil {
		return err
	}
	if q == (inline{}) {
		return w.Join(context.Background())
	}
	return q.Wait(w.event)
}

func (w *work) Done() bool { return w.event.Done() }

func (w *work) Join(ctx context.Context) error {
	if err := w.event.Join(ctx); err != nil {
		return err
	}
	return w.err
}
