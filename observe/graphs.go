package observe

import (
	"fmt"
	"slices"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/observe/internal/straggler"
)

// replays are the calls in a graph, and when the device last ran them. The graph notes the times:
// the host, which starts it as a whole, sees none of them.
type replays struct {
	backend.Participant // none: the methods below are all that is called
	recorder            *Recorder
	of                  *inGraph
	number              int // of the graphs of the rank, from 1
	calls               []*inReplay
	layers              []layerMark
	layerOf             backend.Communicator
	layerOn             int // the queue
	comms               map[backend.Communicator]*inGraph

	count      uint64             // replays
	begin, end backend.TimedEvent // before and after a replay
	launched   time.Duration      // since the epoch, by the host's clock
	pending    bool               // nobody has read its times
}

// inReplay is a call in a graph.
type inReplay struct {
	record
	on          backend.Queue
	start, end  backend.TimedEvent
	waited      backend.TimedEvent // when another queue came to wait for the call, nil for none
	waitedByOwn bool               // its own queue waits for it
	bucket      *stepPart          // nil for none
}

// inGraph is a communicator with another name, for calls in a graph.
type inGraph struct {
	backend.Base
	name string
}

// Name implements [backend.Communicator].
func (c *inGraph) Name() string { return c.name }

// Record is told of calls that are recorded in graphs: see [backend.WithHooks]. It does nothing
// before TimeParts.
func (r *Recorder) Record(c *backend.Call) (mark func(on backend.Queue)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, start := r.stamp(c.Comm, c.Queue)
	if start == nil {
		return nil
	}
	call := &inReplay{on: c.Queue, start: start}
	call.comm, call.queue, call.bytes = p.named(c.Comm), r.number(c.Queue), c.Bytes
	call.header = c.Header
	if o := c.Header.Origin; o != nil {
		own := *o // which the caller may use again
		call.header.Origin = &own
		if o.Purpose == backend.ForSync {
			call.bucket = r.partOf("", int(o.Ordinal))
		}
	}
	p.calls = append(p.calls, call)
	return func(on backend.Queue) { r.mark(call, on) }
}

// stamp records the point that a queue has reached in a graph; nil if it cannot be timed. mu is
// held.
func (r *Recorder) stamp(of backend.Communicator, q backend.Queue) (*replays, backend.TimedEvent) {
	graph, ok := q.(backend.GraphQueue)
	timed, isTimed := q.(backend.TimedQueue)
	if !ok || !isTimed || r.clock == nil {
		return nil, nil
	}
	at := r.clock.record(timed)
	if at == nil {
		return nil, nil
	}
	if r.self == nil {
		r.self = &inGraph{backend.Wrap(of), of.Name()}
	}
	return graph.Recording().Participant(r.self, r.newReplays).(*replays), at
}

// newReplays returns what a recorder keeps of a new graph. mu is held.
func (r *Recorder) newReplays() backend.Participant {
	r.recorded++
	p := &replays{recorder: r, of: r.self, number: r.recorded,
		comms: map[backend.Communicator]*inGraph{}}
	r.graphs = append(r.graphs, p)
	return p
}

// named returns a communicator with the graph in its name. Calls are numbered within that.
func (p *replays) named(comm backend.Communicator) backend.Communicator {
	if p.comms[comm] == nil {
		p.comms[comm] = &inGraph{backend.Wrap(comm), fmt.Sprintf("%s, graph %d", comm.Name(),
			p.number)}
	}
	return p.comms[comm]
}

// mark notes the end of a call on its queue, and later where queues wait for it.
func (r *Recorder) mark(call *inReplay, on backend.Queue) {
	timed, ok := on.(backend.TimedQueue)
	if !ok || !backend.Recorded(on) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.clock == nil:
	case call.end == nil:
		call.end = r.clock.record(timed)
	case on == call.on:
		call.waitedByOwn = true
	case call.waited == nil:
		call.waited = r.clock.record(timed)
	}
}

// Of implements [backend.Participant].
func (p *replays) Of() backend.Communicator { return p.of }

// Err implements [backend.Participant]: the communicators of the calls say that themselves.
func (p *replays) Err() error { return nil }

// Complete implements [backend.Participant].
func (p *replays) Complete(backend.Queue) error { return nil }

// Made implements [backend.Participant].
func (p *replays) Made(*backend.Graph) (forget func()) {
	return func() {
		r := p.recorder
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.clock != nil {
			r.read(p)
			r.clock.reuse(p.events()...)
		}
		r.graphs = slices.DeleteFunc(r.graphs, func(one *replays) bool { return one == p })
	}
}

// events lists all that the graph has.
func (p *replays) events() []*backend.TimedEvent {
	all := []*backend.TimedEvent{&p.begin, &p.end}
	for _, c := range p.calls {
		all = append(all, &c.start, &c.end, &c.waited)
	}
	for i := range p.layers {
		all = append(all, &p.layers[i].at)
	}
	return all
}

// Replay implements [backend.Participant].
func (p *replays) Replay(q backend.Queue, launch func() error) (backend.Work, error) {
	timed := p.ready(q)
	err := launch()
	if timed != nil && err == nil {
		p.started(timed)
	}
	return nil, err
}

// ready reads the times of the replay before, which are lost if it still runs, and notes the
// beginning of this one. It returns nil if there will be no times.
func (p *replays) ready(q backend.Queue) backend.TimedQueue {
	timed, ok := q.(backend.TimedQueue)
	r := p.recorder
	r.mu.Lock()
	defer r.mu.Unlock()
	r.read(p)
	p.count++
	if p.pending = false; !ok || r.clock == nil {
		return nil
	}
	r.clock.reuse(&p.begin, &p.end)
	p.launched = time.Since(r.ticks.epoch)
	if p.begin = r.clock.record(timed); p.begin == nil {
		return nil
	}
	return timed
}

// started notes the end of a replay.
func (p *replays) started(q backend.TimedQueue) {
	r := p.recorder
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.clock != nil && p.begin != nil {
		p.end = r.clock.record(q)
		p.pending = p.end != nil
	}
}

// readReplays reads the times of replays that have ended.
func (r *Recorder) readReplays() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.graphs {
		r.read(p)
	}
}

// read records the calls of a replay that has ended. mu is held.
func (r *Recorder) read(p *replays) {
	if !p.pending || r.clock == nil {
		return
	}
	took, ended, err := p.end.Elapsed(p.begin)
	if err == nil && !ended {
		return
	}
	p.pending = false
	var since time.Duration
	if err == nil {
		since, _, err = p.begin.Elapsed(r.clock.origin)
	}
	if err != nil {
		return // the device is lost, and has no times
	}
	from := r.clock.between(since, took, p.launched, time.Since(r.ticks.epoch))
	exposed, tick := time.Duration(0), r.ticks.scale()
	var waits [][2]time.Duration // since the begin
	for i, c := range p.calls {
		at, blocked, ok := c.times(p.begin)
		if !ok {
			continue
		}
		this := r.fresh()
		*this = c.record
		this.header.Seq = (p.count-1)*uint64(len(p.calls)) + uint64(i) + 1
		this.from, this.to = from+at[0], max(from+at[1], 1)
		this.end = 1 // it has one
		if c.bucket != nil {
			c.bucket.spent += at[1] - at[0]
		}
		waits = append(waits, [2]time.Duration{at[1] - blocked, at[1]})
		if exposed += blocked; r.totals.kinds != nil {
			r.totals.add(this, tick.stamps(blocked))
		}
		r.advance()
	}
	r.readLayers(p, from, waits)
	r.computed += max(took-exposed, 0)
	if since > farthest {
		r.clock.at, r.clock.origin, p.begin = from, p.begin, r.clock.origin
	}
}

// times returns when a call began and ended after begin, and for how long a queue waited for its
// end.
func (c *inReplay) times(begin backend.TimedEvent) (at [2]time.Duration, blocked time.Duration,
	ok bool) {
	if c.start == nil || c.end == nil {
		return at, 0, false
	}
	var err error
	for i, e := range []backend.TimedEvent{c.start, c.end} {
		if at[i], _, err = e.Elapsed(begin); err != nil {
			return at, 0, false
		}
	}
	switch {
	case c.waited != nil:
		waited, _, err := c.waited.Elapsed(begin)
		if err != nil {
			return at, 0, false
		}
		blocked = max(at[1]-max(waited, at[0]), 0)
	case c.waitedByOwn:
		blocked = at[1] - at[0]
	}
	return at, blocked, true
}

// between returns when something began that took so long, and which the host knows to have happened
// between two points of the host's clock. The clocks drift apart, so that the device's follows.
func (c *clock) between(since, took, after, before time.Duration) time.Duration {
	from := c.at + since
	switch {
	case from+took > before:
		c.at += before - took - from
	case from < after:
		c.at += after - from
	}
	return c.at + since
}

// takeComputed returns for how long the device has run replays since the call before, less the time
// in which it was blocked in their collectives, and what takes longer than it did.
func (r *Recorder) takeComputed() (d time.Duration, s straggler.Slower) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if d, r.computed = r.computed, 0; d == 0 {
		return d, s
	}
	s.GPU = r.usual.Add(d)
	for _, p := range r.parts {
		more := p.usual.Add(p.spent)
		switch p.spent = 0; {
		case p.bucket > 0 && more > s.OfIt:
			s.Bucket, s.OfIt = p.bucket, more
		case p.bucket == 0 && more > s.InIt:
			s.Layer, s.InIt = numberOf(p.name), more
		}
	}
	return d, s
}
