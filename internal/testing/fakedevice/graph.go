package fakedevice

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

// recording is a graph in the making: nodes, and what each one comes after. A replay runs them
// in the order that least looks like that of the capture, so that a missing order of
// queues shows.
type recording struct {
	backend.Recording

	mu    sync.Mutex
	nodes []node
	ends  map[*queue][]int // the nodes that the next one of a queue comes after
	freed []func()         // see Machine.OnFree
}

type node struct {
	run   func(on backend.Queue) error // starts it on a queue of the host
	after []int
}

// captured is an event of a recording.
type captured struct {
	backend.Event // that of what is captured: nobody can join it
	in            *recording
	after         []int
}

var _ backend.GraphQueue = (*queue)(nil)

// Recording implements [backend.GraphQueue].
func (q *queue) Recording() *backend.Recording {
	if r := q.recording.Load(); r != nil {
		return &r.Recording
	}
	return nil
}

// Capture implements [backend.GraphQueue].
func (q *queue) Capture(f func() error) (*backend.Graph, error) {
	r := &recording{ends: map[*queue][]int{}}
	if err := r.add(q); err != nil {
		return nil, err
	}
	err := f()
	if err == nil {
		err = r.Complete(q)
	}
	r.endCapture()
	x := &graph{device: q.device, recording: r}
	if err == nil {
		x.order, err = r.order(q)
	}
	if err != nil {
		x.Close() // which has no error
		return nil, err
	}
	return backend.NewGraph(q, &r.Recording, x), nil
}

// add records a queue, too, from now on.
func (r *recording) add(q *queue) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !q.recording.CompareAndSwap(nil, r) {
		return fmt.Errorf("fakedevice: %w: the queue is being recorded already",
			backend.ErrArgument)
	}
	r.ends[q] = nil
	return nil
}

// endCapture ends the capture for its queues.
func (r *recording) endCapture() {
	r.End()
	r.mu.Lock()
	defer r.mu.Unlock()
	for q := range r.ends {
		q.recording.Store(nil)
	}
}

// start records a node.
func (r *recording) start(q *queue, run func(on backend.Queue) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nodes = append(r.nodes, node{run, r.ends[q]})
	r.ends[q] = []int{len(r.nodes) - 1}
	return nil
}

// Record implements [backend.Queue].
func (q *queue) Record() (backend.Event, error) {
	r := q.recording.Load()
	if r == nil {
		e, err := q.Queue.Record()
		if busy := q.device.Busy; busy != nil && err == nil {
			e = late{e, busy}
		}
		return e, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return captured{backend.RecordedEvent(), r, r.ends[q]}, nil
}

// Wait implements [backend.Queue].
func (q *queue) Wait(e backend.Event) error {
	c, ok := e.(captured)
	if !ok {
		return q.start(func(on backend.Queue) error { return on.Wait(e) })
	}
	switch r := q.recording.Load(); {
	case c.in.Ended():
		return c.Join(context.Background())
	case r == nil:
		if err := c.in.add(q); err != nil {
			return err
		}
	case r != c.in:
		return fmt.Errorf("fakedevice: %w: the queue is being recorded into another graph",
			backend.ErrArgument)
	}
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	c.in.ends[q] = append(slices.Clip(c.in.ends[q]), c.after...)
	return nil
}

// NewTimedEvent implements [backend.TimedQueue].
func (q *queue) NewTimedEvent() (e backend.TimedEvent, err error) {
	err = q.device.timed(q.Queue, func(on backend.TimedQueue) error {
		e, err = on.NewTimedEvent()
		return err
	})
	return e, err
}

// RecordTimed implements [backend.TimedQueue].
func (q *queue) RecordTimed(e backend.TimedEvent) error {
	return q.start(func(on backend.Queue) error {
		return q.device.timed(on, func(on backend.TimedQueue) error { return on.RecordTimed(e) })
	})
}

// timed runs f with a queue that has times: the host's default one runs all on its caller, and has
// none, so another takes its place until f's work has happened.
func (d *Device) timed(on backend.Queue, f func(backend.TimedQueue) error) error {
	if q, ok := on.(backend.TimedQueue); ok {
		return f(q)
	}
	other, err := d.host.NewQueue()
	if err != nil {
		return err
	}
	err = f(other.(backend.TimedQueue))
	if err == nil {
		var done backend.Event
		if done, err = other.Record(); err == nil {
			err = done.Join(context.Background())
		}
	}
	return errors.Join(err, other.Close())
}

// start starts work on the queue, or records it.
func (q *queue) start(run func(on backend.Queue) error) error {
	if r := q.recording.Load(); r != nil {
		return r.start(q, run)
	}
	return run(q.Queue)
}

// joined reports for each node whether the next one of a queue comes after it. mu is held, or
// nothing is recorded any more.
func (r *recording) joined(q *queue) []bool {
	joined := make([]bool, len(r.nodes))
	var join func(nodes []int)
	join = func(nodes []int) {
		for _, i := range nodes {
			if !joined[i] {
				joined[i] = true
				join(r.nodes[i].after)
			}
		}
	}
	join(r.ends[q])
	return joined
}

// Joined reports whether what is recorded on the queue from now on comes after an event.
func (q *queue) Joined(e backend.Event) bool {
	c, ok := e.(captured)
	r := q.recording.Load()
	if !ok || c.in != r {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	joined := r.joined(q)
	return !slices.ContainsFunc(c.after, func(i int) bool { return !joined[i] })
}

// order returns the order of a replay: of those nodes that may come next, the one that was
// recorded last. All queues must have been ordered before the end of the one that the graph was
// recorded on.
func (r *recording) order(origin *queue) ([]int, error) {
	if slices.Contains(r.joined(origin), false) {
		return nil, fmt.Errorf("fakedevice: %w: the capture ends while another queue that it has "+
			"forked to is not joined", backend.ErrArgument)
	}
	var order []int
	done := make([]bool, len(r.nodes))
	for len(order) < len(r.nodes) {
		for i := len(r.nodes) - 1; i >= 0; i-- {
			if !done[i] && !slices.ContainsFunc(r.nodes[i].after, func(k int) bool {
				return !done[k]
			}) {
				done[i] = true
				order = append(order, i)
				break
			}
		}
	}
	return order, nil
}

// graph is what is made of a recording.
type graph struct {
	device    *Device
	recording *recording
	order     []int

	mu     sync.Mutex
	under  int // replays that have not ended
	closed bool
}

// Launch implements [backend.Replayer].
func (g *graph) Launch(on backend.Queue) error {
	host, err := g.device.inner(on)
	if err != nil {
		return err
	}
	g.count(1)
	for _, i := range g.order {
		if err := g.recording.nodes[i].run(host); err != nil {
			g.count(-1)
			return err
		}
	}
	return host.Wait(then(func() { g.count(-1) }))
}

// then is an event that happens by a call.
type then func()

func (then) Done() bool { return false }

func (t then) Join(context.Context) error { t(); return nil }

// Close implements [backend.Replayer].
func (g *graph) Close() error {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.count(0)
	return nil
}

// count counts replays under way, and frees what others have in a graph that is closed once there
// are none.
func (g *graph) count(more int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.under += more
	if g.under > 0 || !g.closed {
		return
	}
	for _, f := range g.recording.freed {
		f()
	}
	g.recording.freed = nil
}
