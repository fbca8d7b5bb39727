//go:build gpu

package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	gpukernels "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/spinwait"
)

// Queue is a CUDA stream.
type Queue struct {
	device   *Device
	stream   cu.Stream
	launcher *gpukernels.Stream
	*arithmetic
	workspace backend.Buffer // of kernels for few rows, once these are ready

	closed    atomic.Bool
	recording atomic.Pointer[recording] // nil if what is started runs
	mu        sync.Mutex
	began     Event      // what was started before the recording
	last      uint64     // number of the newest event
	done      uint64     // of one that has happened, and so have those before it
	marks     []mark     // those that may not have happened, in order and without gaps
	idle      []cu.Event // to be recorded again
}

// mark is a recorded event of the driver.
type mark struct {
	number uint64
	event  cu.Event
}

var _ backend.Queue = (*Queue)(nil)

// errQueueClosed is what a closed queue says.
var errQueueClosed = fmt.Errorf("%w: %w: the queue", backend.ErrArgument, backend.ErrClosed)

func (d *Device) newQueue(urgent bool) (*Queue, error) {
	q := &Queue{device: d}
	err := d.on("new queue", func() (err error) {
		priority := 0
		if urgent {
			if _, priority, err = cu.StreamPriorityRange(); err != nil {
				return err
			}
		}
		q.stream, err = cu.MakeStreamWithPriority(priority, cu.NonBlocking)
		return err
	})
	if err != nil {
		return nil, err
	}
	q.launcher = d.kernels.Launcher(q.stream)
	q.arithmetic = newArithmetic(q)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.queues = append(d.queues, q)
	return q, nil
}

// Device returns the queue's device.
func (q *Queue) Device() *Device { return q.device }

// Stream returns the CUstream, for libraries.
func (q *Queue) Stream() uintptr { return uintptr(unsafe.Pointer(q.stream.C())) }

// Record implements [backend.Queue].
func (q *Queue) Record() (backend.Event, error) {
	e, err := q.Mark()
	return e, err
}

// Mark is Record without the allocation of an interface.
func (q *Queue) Mark() (Event, error) {
	if r := q.recording.Load(); r != nil {
		return r.mark(q)
	}
	var e Event
	err := q.device.on("record an event", func() error {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.closed.Load() {
			return errQueueClosed
		}
		event, err := q.event()
		if err != nil {
			return err
		}
		if err := event.Record(q.stream); err != nil {
			q.idle = append(q.idle, event)
			return err
		}
		q.last++
		q.marks = append(q.marks, mark{q.last, event})
		e = Event{queue: q, number: q.last}
		return nil
	})
	return e, err
}

// event returns one of the driver's events that nobody can ask for any more.
// Recorded events are used again once they have happened, so a program needs as
// many as are under way at a time.
func (q *Queue) event() (cu.Event, error) {
	if len(q.idle) == 0 {
		if err := q.collect(); err != nil {
			return cu.Event{}, err
		}
	}
	if n := len(q.idle); n > 0 {
		e := q.idle[n-1]
		q.idle = q.idle[:n-1]
		return e, nil
	}
	return cu.MakeEvent(cu.DisableTiming)
}

// collect finds out how far the queue has got.
func (q *Queue) collect() error {
	n := 0
	for ; n < len(q.marks); n++ {
		m := q.marks[n]
		if m.number > q.done {
			happened, err := query(m.event)
			if err != nil {
				return err
			}
			if !happened {
				break
			}
			q.done = m.number
		}
		q.idle = append(q.idle, m.event)
	}
	q.marks = slices.Delete(q.marks, 0, n)
	return nil
}

func query(e cu.Event) (happened bool, err error) {
	err = e.Query()
	if errors.Is(err, cu.NotReady) {
		return false, nil
	}
	return err == nil, err
}

// Wait implements [backend.Queue]. Events of other kinds of queues are waited
// for by the caller.
func (q *Queue) Wait(e backend.Event) error {
	own, ok := e.(Event)
	if !ok {
		return e.Join(context.Background())
	}
	return q.After(own)
}

// After is Wait for an event of a queue of any GPU of this process.
func (q *Queue) After(e Event) error {
	if e.captured != nil {
		return q.join(e)
	}
	if e.queue == nil || e.queue == q {
		return nil
	}
	if err := q.usable(); err != nil {
		return err
	}
	if r := q.recording.Load(); r != nil {
		r.Follow(func(q backend.Queue) error { return q.Wait(e) })
		return nil
	}
	return q.device.on("wait for an event", func() error {
		e.queue.mu.Lock()
		defer e.queue.mu.Unlock()
		m, pending := e.queue.find(e.number)
		if !pending {
			return nil
		}
		return q.stream.Wait(m.event, 0)
	})
}

// find returns the mark of an event that may not have happened.
func (q *Queue) find(number uint64) (m mark, pending bool) {
	if number <= q.done || q.closed.Load() || len(q.marks) == 0 {
		return mark{}, false
	}
	return q.marks[number-q.marks[0].number], true
}

// follow orders q after everything started on other so far.
func (q *Queue) follow(other *Queue) error {
	e, err := other.Mark()
	if err != nil {
		return err
	}
	return q.After(e)
}

// drain waits for everything started so far.
func (q *Queue) drain() error {
	e, err := q.Mark()
	if err != nil {
		return err
	}
	return e.Join(context.Background())
}

// Close implements [backend.Queue].
func (q *Queue) Close() error {
	if q == q.device.main {
		return q.drain()
	}
	if q.usable() != nil {
		return nil
	}
	return q.device.on("close a queue", q.close)
}

// usable returns an error once the queue is closed.
func (q *Queue) usable() error {
	if q.closed.Load() {
		return errQueueClosed
	}
	return nil
}

// close waits and frees. If the context is broken, there is nothing to wait for.
func (q *Queue) close() error {
	errs := []error{q.drain()}
	if q.workspace.Len() > 0 {
		errs = append(errs, q.Free(q.workspace))
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed.Store(true)
	q.done = q.last
	for _, m := range q.marks {
		q.idle = append(q.idle, m.event)
	}
	for i := range q.idle {
		errs = append(errs, cu.DestroyEvent(&q.idle[i]))
	}
	q.marks, q.idle = nil, nil
	errs = append(errs, q.stream.Destroy())
	d := q.device
	d.mu.Lock()
	defer d.mu.Unlock()
	d.queues = slices.DeleteFunc(d.queues, func(other *Queue) bool { return other == q })
	return errors.Join(errs...)
}

// Event is a point in a [Queue]. The zero Event has happened.
type Event struct {
	queue    *Queue
	number   uint64
	captured *captured // nil unless it was recorded into a graph
}

var _ backend.Event = Event{}

// Join implements [backend.Event]. It keeps no thread: it looks, at growing
// intervals of up to a millisecond.
func (e Event) Join(ctx context.Context) error {
	for wait := (spinwait.Wait{}); ; wait.Pause() {
		happened, err := e.happened()
		if err != nil || happened {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// Done implements [backend.Event].
func (e Event) Done() bool {
	happened, err := e.happened()
	return happened || err != nil
}

// happened asks the driver.
func (e Event) happened() (bool, error) {
	q := e.queue
	if q == nil {
		return true, nil
	}
	if e.captured != nil {
		return false, backend.RecordedEvent().Join(context.Background())
	}
	q.mu.Lock()
	_, pending := q.find(e.number)
	q.mu.Unlock()
	if !pending {
		return true, nil
	}
	var happened bool
	err := q.device.on("look for an event", func() error {
		q.mu.Lock()
		defer q.mu.Unlock()
		m, pending := q.find(e.number)
		if !pending {
			happened = true
			return nil
		}
		var err error
		if happened, err = query(m.event); happened {
			q.done = max(q.done, e.number)
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("%w: work that was started before failed, and the device cannot "+
			"be used any more by this process", err)
	}
	return happened, nil
}

// The cache sees a queue as a line of points.

func (q *Queue) point() (point, error) {
	if q.recording.Load() != nil {
		q.mu.Lock()
		defer q.mu.Unlock()
		return q.began, nil // what is recorded does not run
	}
	return q.Mark()
}
func (q *Queue) after(p point) error { return q.After(p.(Event)) }
func (e Event) over() (bool, error)  { return e.happened() }
