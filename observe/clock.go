package observe

import (
	"context"
	"errors"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// clock knows when a device reached points of its queues.
type clock struct {
	idle []backend.TimedEvent
	// origin is a point whose time since the recorder's epoch is known. The other points are
	// measured from it, so the points of all queues are comparable.
	origin backend.TimedEvent
	at     time.Duration
}

// farthest is how long an origin is used. The device returns the time since then as a float32 of
// milliseconds, whose steps beyond 8 s are coarser than the clock's.
const farthest = 4 * time.Second

// timedPart is a part of a call, on a queue of a device that has a clock.
type timedPart struct {
	name       string
	layer      bool          // it is no part of a call, but of a step that is recorded in a graph
	busy       time.Duration // of a layer: without its waits for calls
	queue      backend.TimedQueue
	start, end backend.TimedEvent // nil without a clock, and after the times are known
}

// TimeParts makes room for n parts of calls (see [backend.Call]) besides the calls, and records
// when device d runs them, by its clock: each costs a queue two timed events. On GPUs, times of one
// rank are comparable to within half a microsecond, and with the host's clock to within some ten
// microseconds. On devices without a clock a part gets the times at which it was started. Call
// TimeParts before the first call, while the device is idle, and Close before the device is closed.
//
// It also records when the device runs calls that are then recorded in graphs: each costs a replay
// three nodes. These have the group's name with the number of the graph.
func (r *Recorder) TimeParts(d backend.Device, n int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.resize(r.keeps + n)
	if r.clock != nil {
		return nil
	}
	q, err := d.NewQueue()
	if err != nil {
		return err
	}
	if timed, ok := q.(backend.TimedQueue); ok {
		r.clock, err = newClock(timed, r.ticks.epoch)
	}
	return errors.Join(err, q.Close())
}

// newClock reads the host's time when an idle queue has reached the origin.
func newClock(q backend.TimedQueue, epoch time.Time) (*clock, error) {
	origin, err := q.NewTimedEvent()
	if err != nil {
		return nil, err
	}
	c := &clock{origin: origin}
	if err := q.RecordTimed(origin); err != nil {
		return c, err
	}
	reached, err := q.Record()
	if err == nil {
		err = reached.Join(context.Background())
	}
	c.at = time.Since(epoch)
	return c, err
}

// record records and returns the point that a queue has reached, nil if it cannot be timed.
func (c *clock) record(q backend.TimedQueue) backend.TimedEvent {
	if len(c.idle) == 0 {
		e, err := q.NewTimedEvent()
		if err != nil {
			return nil
		}
		c.idle = append(c.idle, e)
	}
	e := c.idle[len(c.idle)-1]
	if q.RecordTimed(e) != nil {
		return nil
	}
	c.idle = c.idle[:len(c.idle)-1]
	return e
}

// beginPart returns the timedPart for a call, nil for a whole call. mu is held.
func (r *Recorder) beginPart(c *backend.Call) *timedPart {
	if c.Part == "" {
		return nil
	}
	p := &timedPart{name: c.Part}
	if timed, ok := c.Queue.(backend.TimedQueue); ok && r.clock != nil {
		p.queue, p.start = timed, r.clock.record(timed)
	}
	return p
}

// finish reports whether the device will say when the part ends. mu is held.
func (r *Recorder) finish(p *timedPart, err error) bool {
	if p == nil || p.start == nil {
		return false
	}
	if err == nil {
		p.end = r.clock.record(p.queue)
	}
	if p.end == nil {
		r.clock.reusePart(p)
	}
	return p.end != nil
}

// reusePart makes the events of a part reusable.
func (c *clock) reusePart(p *timedPart) { c.reuse(&p.start, &p.end) }

// reuse makes events reusable.
func (c *clock) reuse(events ...*backend.TimedEvent) {
	for _, e := range events {
		if *e != nil {
			c.idle, *e = append(c.idle, *e), nil
		}
	}
}

// read reads the times of a part that has ended. A part that began long after the origin becomes
// the next origin. mu is held.
func (c *clock) read(this *record) {
	p := this.part
	took, ended, err := p.end.Elapsed(p.start)
	if err == nil && !ended {
		return
	}
	var since time.Duration
	if err == nil {
		since, _, err = p.start.Elapsed(c.origin)
	}
	if err == nil { // otherwise the device is lost, and has no times
		this.from = c.at + since
		this.to = max(this.from+took, 1)
		if since > farthest {
			c.at, c.origin, p.start = this.from, p.start, c.origin
		}
	}
	c.reusePart(p)
}

// readParts reads the times of the parts that have ended.
func (r *Recorder) readParts() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := r.first(); i < r.next; i++ {
		if this := r.record(i); this.part != nil && this.part.end != nil {
			r.clock.read(this)
		}
	}
}

// Close frees what TimeParts has allocated on the device. The recorded calls stay.
func (r *Recorder) Close() error {
	r.readParts()
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.clock
	if c == nil {
		return nil
	}
	for i := range r.records {
		if p := r.records[i].part; p != nil {
			c.reusePart(p)
		}
	}
	for _, p := range r.graphs {
		c.reuse(p.events()...)
	}
	r.graphs = nil
	var errs []error
	for _, e := range append(c.idle, c.origin) {
		errs = append(errs, e.Close())
	}
	r.clock = nil
	return errors.Join(errs...)
}
