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

// GraphQueue is a Queue that can record the work started on it, to run it again and again: a CUDA
// stream, which records CUDA graphs. Starting a whole graph takes the host about as long as
// starting one kernel.
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
	// Capture records what f starts on the queue; none of it runs. Another queue of the device
	// joins the recording when it waits for an event of a queue that is being recorded, or for a
	// recorded Work. f must order the first queue after it again before f returns. That is how work
	// runs side by side.
	//
	// f starts work and returns. It must not wait for the device, copy to or from memory of Go, or
	// use more of a communicator than Start: allocate and share memory before. Operands and their
	// memory must live as long as the graph. Every rank records the same collectives in the same
	// order.
	Capture(f func() error) (*Graph, error)
	// Recording returns what the queue is being recorded into, nil if its work runs.
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

// Recorded reports whether work started on a queue is recorded in a graph.
func Recorded(q Queue) bool {
	if q == nil { // the rest takes tens of nanoseconds
		return false
	}
	g, ok := q.(GraphQueue)
	return ok && g.Recording() != nil
}

// Participant is a communicator in a [Graph], with what its calls there share.
type Participant interface {
	// Of returns the communicator.
	Of() Communicator
	// Err returns why the communicator has ended, or nil.
	Err() error
	// Complete is called at the end of the capture, and may record on its queue.
	Complete(q Queue) error
	// Made is called with the graph. The participant closes the graph before the communicator ends:
	// see [Graph.Destroy]. forget is called when the graph is closed before that.
	Made(g *Graph) (forget func())
	// Replay starts all recorded calls as one call of the communicator. It calls launch, which puts
	// them on q and may also start calls of other communicators. If the communicator has ended,
	// Replay calls [Graph.DestroyInReplay] before it waits for anything. A nil Work is for one that
	// only watches.
	Replay(q Queue, launch func() error) (Work, error)
}

// Participant returns the participant of a communicator, which make creates on first use.
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

// Follow makes replays come after work that runs already: wait orders the first replay's queue
// after that work.
func (r *Recording) Follow(wait func(q Queue) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.before = append(r.before, wait)
}

// OnLaunch makes each Launch of the graph call f before it does anything else, in the order of the
// OnLaunch calls. It is for code that counts what runs: a capture runs nothing.
func (r *Recording) OnLaunch(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.launched = append(r.launched, f)
}

// Complete is for Queues. They call it before the end of a capture on q.
func (r *Recording) Complete(q Queue) error {
	var errs []error
	for _, p := range r.all {
		errs = append(errs, p.Complete(q))
	}
	return errors.Join(errs...)
}

// End is for Queues: from now on nothing is recorded.
func (r *Recording) End() { r.over.Store(true) }

// Ended reports whether End was called.
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

	mu       sync.Mutex            // guards the fields below; held while a replay is started
	replayer Replayer              // nil once it is freed
	err      error                 // why; set before replayer is nil
	before   []func(q Queue) error // see [Recording.Follow]
}

// NewGraph is for Queues: it returns the graph of what was recorded on q.
func NewGraph(q Queue, r *Recording, replayer Replayer) *Graph {
	g := &Graph{queue: q, all: r.all, launched: r.launched, before: r.before, replayer: replayer}
	// Sorted, so that replays of several graphs lock communicators in the same order.
	slices.SortFunc(g.all, func(a, b Participant) int {
		return cmp.Compare(a.Of().Name(), b.Of().Name())
	})
	g.mu.Lock() // a communicator that has ended meanwhile waits for this lock
	defer g.mu.Unlock()
	for _, p := range g.all {
		g.forget = append(g.forget, p.Made(g))
	}
	return g
}

// Launch starts the work on a queue of the device, after everything there; nil is the queue that
// was recorded. A launch is one call for each communicator in the graph, after its earlier calls.
// Ranks that replay different graphs, or the same one at different places, get a [*MismatchError].
// A replay that does not end is detected like a call. Join of the Work joins all its calls.
//
// Launches of graphs, and other calls of the communicators, have the same order on every rank.
//
// Errors: those of Start of each communicator; ErrClosed after Close. Once a communicator in the
// graph has ended, Launch returns its error: the graph cannot be launched any more.
func (g *Graph) Launch(q Queue) (Work, error) {
	for _, f := range g.launched { // f may end a communicator, and so the graph
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
	works := make(Works, 0, len(g.all))
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
func (g *Graph) replay(q Queue, all []Participant, works *Works) error {
	if len(all) == 0 {
		return g.replayer.Launch(q)
	}
	w, err := all[0].Replay(q, func() error { return g.replay(q, all[1:], works) })
	if err == nil && w != nil {
		*works = append(*works, w)
	}
	return err
}

// Close frees the graph. Launched work goes on.
func (g *Graph) Close() error {
	err := g.Destroy(fmt.Errorf("%w: the graph", ErrClosed))
	for _, forget := range g.forget {
		forget()
	}
	return err
}

// Destroy is Close by a communicator that is ending: later launches return cause.
func (g *Graph) Destroy(cause error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.DestroyInReplay(cause)
}

// DestroyInReplay is Destroy by a participant in its Replay: Launch holds the graph's lock then.
func (g *Graph) DestroyInReplay(cause error) error {
	if g.replayer == nil {
		return nil
	}
	replayer := g.replayer
	g.replayer, g.err = nil, cause
	return replayer.Close()
}

// Works are several calls that are one to who waits, as of a replay with several communicators.
type Works []Work

// Wait implements [Work].
func (w Works) Wait(q Queue) error {
	var errs []error
	for _, one := range w {
		errs = append(errs, one.Wait(q))
	}
	return errors.Join(errs...)
}

// Join waits for all of them: the buffers are in use until then.
func (w Works) Join(ctx context.Context) error {
	var errs []error
	for _, one := range w {
		errs = append(errs, one.Join(ctx))
	}
	return errors.Join(errs...)
}

// Done implements [Work].
func (w Works) Done() bool {
	return !slices.ContainsFunc(w, func(one Work) bool { return !one.Done() })
}

// eventWork is a replay without communicators.
type eventWork struct{ Event }

func (w eventWork) Wait(q Queue) error { return q.Wait(w.Event) }

// errRecorded is the error of waiting for recorded work.
var errRecorded = fmt.Errorf("%w: this was recorded in a graph, where it orders queues: join the "+
	"Work of the graph's Launch", ErrArgument)

// RecordedEvent is for Queues. It returns an event that was recorded in a graph and never happens.
// The Queue's own event type adds what a wait for it needs.
func RecordedEvent() Event { return recordedEvent{} }

type recordedEvent struct{}

func (recordedEvent) Join(context.Context) error { return errRecorded }
func (recordedEvent) Done() bool                 { return true }

// RecordedWork returns the Work of a call that was recorded in a graph. e is the event after the
// call in the graph: during the capture, Wait orders a queue after the call. Join returns an
// ErrArgument at once: join the Work of a replay instead.
func RecordedWork(e Event) Work { return recordedWork{e} }

type recordedWork struct{ end Event }

func (w recordedWork) Wait(q Queue) error         { return q.Wait(w.end) }
func (w recordedWork) Join(context.Context) error { return errRecorded }
func (w recordedWork) Done() bool                 { return true }
