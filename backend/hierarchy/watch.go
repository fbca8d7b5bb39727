package hierarchy

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// stopwatch times the phases of a stream.
type stopwatch interface {
	// timed runs f, which starts a phase on the stream. c.mu is held.
	timed(s Span, f func() error) error
	// read adds the phases that have ended to the spans. c.mu is held.
	read()
	// close is called when the queue is closed.
	close() error
}

// maxPending is how many phases of a stream may wait to be timed; those beyond are
// left out, because the program must not wait for the one who watches it.
const maxPending = 1024

// newStopwatch returns one that suits the queue, nil if nothing is timed.
func newStopwatch(q backend.Queue, s *spans) stopwatch {
	if s.keep == 0 {
		return nil
	}
	if timed, ok := q.(backend.TimedQueue); ok {
		return &meter{queue: timed, spans: s}
	}
	return newObserver(q, s)
}

// meter times by the device's clock. It costs the queue two stamps for each phase, and
// nobody looks for the device: times are read when somebody asks for spans, and when
// stamps are needed again.
type meter struct {
	queue   backend.TimedQueue
	spans   *spans
	pending []stamped // in order
	idle    []backend.TimedEvent
}

// stamped is a phase whose times the device knows, or will know.
type stamped struct {
	span       Span
	start, end backend.TimedEvent
}

func (m *meter) timed(s Span, f func() error) error {
	p, ok, err := m.stamped(s)
	if err != nil {
		return err
	}
	if !ok {
		return f()
	}
	if err = m.queue.RecordTimed(p.start); err == nil {
		err = f()
	}
	if err == nil {
		err = m.queue.RecordTimed(p.end)
	}
	if err != nil {
		m.idle = append(m.idle, p.start, p.end)
		return err
	}
	m.pending = append(m.pending, p)
	return nil
}

// stamped gives a phase its stamps; false if there are none for it.
func (m *meter) stamped(s Span) (p stamped, ok bool, err error) {
	if len(m.idle) < 2 {
		m.read()
	}
	if len(m.pending) == maxPending {
		return p, false, nil
	}
	for len(m.idle) < 2 {
		one, err := m.queue.NewTimedEvent()
		if err != nil {
			return p, false, err
		}
		m.idle = append(m.idle, one)
	}
	n := len(m.idle)
	p = stamped{s, m.idle[n-2], m.idle[n-1]}
	m.idle = m.idle[:n-2]
	return p, true, nil
}

func (m *meter) read() {
	n := 0
	for ; n < len(m.pending); n++ {
		p := &m.pending[n]
		took, ended, err := p.end.Elapsed(p.start)
		if err == nil && !ended {
			break
		}
		if err == nil && m.spans.origin.place(p) == nil { // else the device is lost, and has no times
			p.span.End = p.span.Start.Add(took)
			m.spans.add(p.span)
		}
		m.idle = append(m.idle, p.start, p.end)
	}
	m.pending = append(m.pending[:0], m.pending[n:]...)
}

func (m *meter) close() error {
	m.read()
	var errs []error
	for _, p := range m.pending {
		errs = append(errs, p.start.Close(), p.end.Close())
	}
	for _, s := range m.idle {
		errs = append(errs, s.Close())
	}
	m.pending, m.idle = nil, nil
	return errors.Join(errs...)
}

// origin is a point of the device whose time on the host's clock is known, so that times
// of all streams are comparable.
type origin struct {
	stamp backend.TimedEvent // nil if the device has no clock
	at    time.Time
}

// farthest is how long an origin is used: the device's times since then are a float32 of
// milliseconds, which beyond 8 s has coarser steps than the clock.
const farthest = 4 * time.Second

// newOrigin takes the host's time when an idle queue has got to a stamp.
func newOrigin(q backend.Queue) (o origin, err error) {
	timed, ok := q.(backend.TimedQueue)
	if !ok {
		return o, nil
	}
	if o.stamp, err = timed.NewTimedEvent(); err != nil {
		return o, err
	}
	if err := timed.RecordTimed(o.stamp); err != nil {
		return o, err
	}
	reached, err := q.Record()
	if err != nil {
		return o, err
	}
	err = reached.Join(context.Background())
	o.at = time.Now()
	return o, err
}

// place tells a phase that has ended when it began. One that began long after the origin
// is the next origin.
func (o *origin) place(p *stamped) error {
	since, _, err := p.start.Elapsed(o.stamp)
	if err != nil {
		return err
	}
	p.span.Start = o.at.Add(since)
	if since > farthest {
		o.stamp, p.start = p.start, o.stamp
		o.at = p.span.Start
	}
	return nil
}

func (o *origin) close() error {
	if o.stamp == nil {
		return nil
	}
	return o.stamp.Close()
}

// observer times what the host sees of a queue without a clock.
type observer struct {
	queue    backend.Queue
	spans    *spans
	watching sync.WaitGroup
	pending  chan observed
}

// observed is a phase that was started.
type observed struct {
	span       Span
	start, end backend.Event
}

func newObserver(q backend.Queue, s *spans) *observer {
	o := &observer{queue: q, spans: s, pending: make(chan observed, maxPending)}
	o.watching.Go(o.watch)
	return o
}

// watch sees when phases begin and end, in order.
func (o *observer) watch() {
	for p := range o.pending {
		if p.start.Join(context.Background()) != nil {
			continue // the device is lost, and has no times
		}
		p.span.Start = time.Now()
		if p.end.Join(context.Background()) == nil {
			p.span.End = time.Now()
			o.spans.add(p.span)
		}
	}
}

func (o *observer) timed(s Span, f func() error) error {
	start, err := o.queue.Record()
	if err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	end, err := o.queue.Record()
	if err != nil {
		return err
	}
	select {
	case o.pending <- observed{s, start, end}:
	default:
	}
	return nil
}

// read does nothing: phases are added when they are seen to end.
func (o *observer) read() {}

func (o *observer) close() error {
	close(o.pending)
	o.watching.Wait()
	return nil
}
