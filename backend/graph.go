package backend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// GraphQueue is a Queue that can record what is started on it, to be run again and again: a
// CUDA stream, whose records are CUDA graphs. To start all of a graph takes the host about as
// long as one kernel.
//
//	step, err := q.Capture(func() error {
//		if err := forward(q); err != nil {
//			return err
//		}
//		w, err := comm.Start(q, sum, y, x) // recorded, whatever runs it
//		if err != nil {
//			return err
//		}
//		return w.Wait(q)
//	})
//	...
//	for range steps {
//		w, err := step.Launch(nil) // one call of every communicator in it
//	}
type GraphQueue interface {
	Queue
	// Capture records what f starts on the queue; nothing of it runs. Another queue of the device
	// takes part once it waits for an event of a queue that does, or for a Work that was
	// recorded, and f must order the first queue behind it again before it returns: that is how
	// work runs side by side.
	//
	// f starts work and returns. It must not wait for the device, copy to or from memory of Go,
	// or ask a communicator for more than Start: take and share memory before. Operands, and
	// the memory that they are in, must stay as long as the graph. Every rank records the same
	// collectives in the same order.
	Capture(f func() error) (*Graph, error)
	// Recording returns what the queue is recorded into, nil if what is started on it runs.
	Recording() *Recording
}

// Recording is a [Graph] in the making. Communicators whose calls are recorded take part in it.
// The zero Recording is an empty one.
type Recording struct {
	mu       sync.Mutex
	all      []Participant
	before   []func(q Queue) error
	launched []func()
	over     atomic.Bool
}

// Recorded reports whether what is started on a queue is recorded in a graph.
func Recorded(q Queue) bool {
	if q == nil { // what follows takes tens of nanoseconds
		return false
	}
	g, ok := q.(GraphQueue)
	return ok && g.Recording() != nil
}

// Participant is a communicator in a [Graph]: what its calls there have in common.
type Participant interface {
	// Of returns the communicator.
	Of() Communicator
	// Err returns why the communicator has ended, or nil.
	Err() error
	// Complete is called at the end of the capture, and may record on its queue.
	Complete(q Queue) error
	// Made is called with the graph, which the participant closes before the communicator ends:
	// see [Graph.Destroy]. forget is called when the graph is closed before.
	Made(g *Graph) (forget func())
	// Replay starts all recorded calls as one call of the communicator, by launch, which puts them
	// on q. Launch may start calls of other communicators, too. If the communicator has ended, it
	// calls [Graph.DestroyInReplay] before it waits for anything.
	Replay(q Queue, launch func() error) (Work, error)
}

// Participant returns the participant of a communicator, which make makes the first time.
func (r *Recording) Participant(of Communicator, make func() Participant) Participant {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.all {
		if p.Of() == of {
			return p
		}
	}
	p := make()
	r.all = append(r.all, p)
	return p
}

// Follow makes replays come after what runs already: wait orders the queue of the first one after
// that.
func (r *Recording) Follow(wait func(q Queue) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.before = append(r.before, wait)
}

// OnLaunch makes each Launch of the graph call f before it does anything else, in the order of
// these calls. It is for who counts what runs: a capture runs nothing.
func (r *Recording) OnLaunch(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.launched = append(r.launched, f)
}

// Complete is for Queues, before the end of a capture on q.
func (r *Recording) Complete(q Queue) error {
	var errs []error
	for _, p := range r.all {
		errs = append(errs, p.Complete(q))
	}
	return errors.Join(errs...)
}

// End is for Queues: nothing is recorded any more.
func (r *Recording) End() { r.over.Store(true) }

// Ended reports whether nothing is recorded any more.
func (r *Recording) Ended() bool { return r.over.Load() }

// Replayer is what a device makes of a recording.
type Replayer interface {
	// Launch puts all work on a queue of the device.
	Launch(q Queue) error
	// Close frees it. What was launched goes on.
	Close() error
}

// Graph is recorded work, see [GraphQueue].
type Graph struct {
	queue    Queue
	all      []Participant // by the names of their groups
	launched []func()      // see [Recording.OnLaunch]
	forget   []func()

	mu       sync.Mutex            // guards what follows, and is held while a replay is started
	replayer Replayer              // nil once it is freed
	err      error                 // why; there before it is nil
	before   []func(q Queue) error // see [Recording.Follow]
}

// NewGraph is for Queues: it returns the graph of what was recorded on q.
func NewGraph(q Queue, r *Recording, replayer Replayer) *Graph {
	g := &Graph{queue: q, all: r.all, launched: r.launched, before: r.before, replayer: replayer}
	// Replays of several graphs take the locks of communicators in one order.
	slices.SortFunc(g.all, func(a, b Participant) int {
		return cmp.Compare(a.Of().Name(), b.Of().Name())
	})
	g.mu.Lock() // which a communicator that has ended meanwhile waits for
	defer g.mu.Unlock()
	for _, p := range g.all {
		g.forget = append(g.forget, p.Made(g))
	}
	return g
}

// Launch starts the work on a queue of the device, nil for the one that it was recorded on, behind
// what is there. For each communicator in the graph that is one call, behind its calls
// before: ranks that replay other graphs, or the same at another place, get a
// [*MismatchError], and a replay that does not end is found like a call. Join of the Work joins
// all of them.
//
// Launches of graphs, and other calls of the communicators, have the same order on every rank.
//
// Errors: those of Start of each communicator; ErrClosed after Close. Once a communicator in the
// graph has ended, its error: such a graph cannot be launched any more.
func (g *Graph) Launch(q Queue) (Work, error) {
	for _, f := range g.launched { // which may end a communicator, and so the graph
		f()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.replayer == nil {
		return nil, g.err
	}
	for _, p := range g.all {
		if err := p.Err(); err != nil {
			return nil, err
		}
	}
	if q == nil {
		q = g.queue
	}
	if c, ok := q.(GraphQueue); !ok || c.Recording() != nil {
		return nil, fmt.Errorf("%w: a graph cannot be launched on a queue that is being "+
			"recorded, or on a %T", ErrArgument, q)
	}
	for _, wait := range g.before {
		if err := wait(q); err != nil {
			return nil, err
		}
	}
	g.before = nil // later replays come after this one
	works := make(works, 0, len(g.all))
	if err := g.replay(q, g.all, &works); err != nil {
		return nil, err
	}
	if len(works) == 1 {
		return works[0], nil
	}
	if len(works) > 1 {
		return works, nil
	}
	e, err := q.Record()
	return eventWork{e}, err
}

// replay starts the replays of all participants, each inside the one before it.
func (g *Graph) replay(q Queue, all []Participant, works *works) error {
	if len(all) == 0 {
		return g.replayer.Launch(q)
	}
	w, err := all[0].Replay(q, func() error { return g.replay(q, all[1:], works) })
	if err == nil {
		*works = append(*works, w)
	}
	return err
}

// Close frees the graph. What was launched goes on.
func (g *Graph) Close() error {
	err := g.Destroy(fmt.Errorf("%w: the graph", ErrClosed))
	for _, forget := range g.forget {
		forget()
	}
	return err
}

// Destroy is Close by a communicator that ends: later launches return cause.
func (g *Graph) Destroy(cause error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.DestroyInReplay(cause)
}

// DestroyInReplay is Destroy by a participant in its Replay, to which Launch gives the graph.
func (g *Graph) DestroyInReplay(cause error) error {
	if g.replayer == nil {
		return nil
	}
	replayer := g.replayer
	g.replayer, g.err = nil, cause
	return replayer.Close()
}

// works are the works of a replay in which several communicators take part.
type works []Work

func (w works) Wait(q Queue) error {
	var errs []error
	for _, one := range w {
		errs = append(errs, one.Wait(q))
	}
	return errors.Join(errs...)
}

// Join waits for all of them: the buffers are in use until then.
func (w works) Join(ctx context.Context) error {
	var errs []error
	for _, one := range w {
		errs = append(errs, one.Join(ctx))
	}
	return errors.Join(errs...)
}

func (w works) Done() bool {
	return !slices.ContainsFunc(w, func(one Work) bool { return !one.Done() })
}

// eventWork is a replay without communicators.
type eventWork struct{ Event }

func (w eventWork) Wait(q Queue) error { return q.Wait(w.Event) }

// errRecorded is what nobody can wait for.
var errRecorded = fmt.Errorf("%w: this was recorded in a graph, where it orders queues: join the "+
	"Work of the graph's Launch", ErrArgument)

// RecordedEvent is for Queues: an event that was recorded in a graph. It never happens, and an
// event of a Queue adds what it is to be waited for by.
func RecordedEvent() Event { return recordedEvent{} }

type recordedEvent struct{}

func (recordedEvent) Join(context.Context) error { return errRecorded }
func (recordedEvent) Done() bool                 { return true }

// RecordedWork is the Work of a call that was recorded in a graph, with the event behind it
// there: Wait orders a queue behind the call in the graph, during the capture. Join is an
// ErrArgument, at once: the call is joined by the Work of a replay.
func RecordedWork(e Event) Work { return recordedWork{e} }

type recordedWork struct{ end Event }

func (w recordedWork) Wait(q Queue) error         { return q.Wait(w.end) }
func (w recordedWork) Join(context.Context) error { return errRecorded }
func (w recordedWork) Done() bool                 { return true }
