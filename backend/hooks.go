package backend

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
)

// Hooks are told of every call on a communicator. Traces, counters and metrics are Hooks. See
// [WithHooks].
//
// The goroutines that start and join calls run these methods, also several at once. The time that
// the methods take adds to the call.
type Hooks interface {
	// Start is called for each call, in the order of the calls on a group: before the call starts,
	// or when an [Announcer] says so. It returns an id for the call, which End gets. It must not
	// keep c: the next call reuses its memory.
	Start(c *Call) (id uint64)
	// End is called once for each Start, when the call is known to have ended, with the error of
	// its Start or Join. That is on return from Start if the call ran on the caller or was refused,
	// and otherwise on return from Join: a Work that nobody joins has no End. Nothing may use the
	// call's Work afterwards.
	End(id uint64, err error)
}

// JoinHooks are Hooks whose Join is told when somebody begins to wait for a call.
type JoinHooks interface {
	Hooks
	// Join is called before the wait for a call that may not have ended, with the id from Start.
	// Calls that end on their caller have no Join.
	Join(id uint64)
}

// recordHooks are Hooks that are told of calls in graphs.
type recordHooks interface {
	// Record is called before a call is recorded on its Queue. mark is then called with that queue
	// once the call is recorded, and with each queue that is to be ordered behind the call. A nil
	// mark is not.
	Record(c *Call) (mark func(on Queue))
	// Layer is called where a queue that is being recorded goes on with a layer of a model which
	// trains on a communicator, "" for its end.
	Layer(of Communicator, q Queue, name string)
}

// Chooser is a Communicator that has several algorithms.
type Chooser interface {
	Communicator
	// Chosen names the algorithm, "two-shot" say, that it uses for a call of nbytes bytes, of the
	// larger buffer, if memory is from Alloc. Chosen takes less time than a call.
	Chosen(c *Collective, d DType, nbytes int) string
}

// Call is a call as [Hooks] see it.
type Call struct {
	Comm   Communicator // the group that runs it
	Queue  Queue        // nil is the device's default queue
	Header Header       // Seq counts the calls on Comm that Hooks were told of
	Bytes  int          // of the larger buffer
	// Work lets hooks ask whether the call has ended, before anybody joins it: Done is false until
	// the call is started. Joining it triggers the call's End.
	Work Work
	// Part names a part of the call, "add (slice 2 of 3)". A communicator that is made of others
	// tells hooks of such parts, which it runs on its queues. A part has no Work, and its End comes
	// when all of it is on the Queue. Part is empty for the whole call.
	Part string
}

// Announcer is a CheckedStarter that runs calls on their caller, and says when to tell hooks of a
// call: best while the data that the call has sent is on its way.
type Announcer interface {
	CheckedStarter
	// StartAnnounced is StartChecked on the device's default queue. It calls announce once for each
	// call, even for one that fails, in the order of the calls and before the call waits for
	// another one or for a rank. It returns the id from announce.
	StartAnnounced(announce Announce, c Collective, count int, dst, src Buffer) (id uint64, w Work,
		err error)
}

// Announce tells hooks of a call, and returns an id for it. It must not keep the pointers.
type Announce func(c *Collective, count int, dst, src *Buffer) (id uint64)

// WithHooks returns inner with hooks that are told of its calls, and of those of its parts. It owns
// inner. Hooks are not told of calls with wrong arguments. Of calls recorded in a graph they are
// told if they have a method Record, as an observe.Recorder does.
func WithHooks(inner Communicator, hooks Hooks) Communicator {
	c := &hooked{Base: Wrap(inner), rank: inner.Rank(), size: inner.Size(), hooks: hooks,
		call: Call{Comm: inner}}
	c.announcer, _ = inner.(Announcer)
	c.joins, _ = hooks.(JoinHooks)
	c.records, _ = hooks.(recordHooks)
	c.announce = c.announced // once, because it allocates
	return c
}

type hooked struct {
	Base
	rank  int // inner's, cached because every call asks
	size  int
	hooks Hooks
	joins JoinHooks // hooks, nil if it has no Join

	records recordHooks // hooks, nil if it has no Record

	announcer Announcer  // inner, nil if it is not one
	announce  Announce   // announced
	running   hookedWork // of all calls that inner announces: Done is false, and nobody has it

	mu    sync.Mutex   // guards the fields below; held while hooks are told of starts
	call  Call         // the last one: in place, because it is large
	last  *hookedWork  // its Work, reused by the next call if it is free
	fresh []hookedWork // not used yet

	_ [64]byte // keeps ranks of one process from sharing a cache line
}

// Split implements [Communicator].
func (c *hooked) Split(color, key int) (Communicator, error) {
	part, err := c.Base.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return WithHooks(part, c.hooks), nil
}

// Start implements [Communicator].
func (c *hooked) Start(q Queue, what Collective, dst, src Buffer) (Work, error) {
	count, err := what.check(c.rank, c.size, dst, src)
	if err != nil {
		return nil, Refuse(c, err)
	}
	return c.start(q, &what, count, dst, src)
}

// StartChecked implements [CheckedStarter].
func (c *hooked) StartChecked(q Queue, what Collective, count int, dst, src Buffer) (Work, error) {
	return c.start(q, &what, count, dst, src)
}

// start is StartChecked without a copy of what.
func (c *hooked) start(q Queue, what *Collective, count int, dst, src Buffer) (Work, error) {
	if Recorded(q) {
		return c.record(q, what, count, dst, src) // runs nothing
	}
	if c.announcer != nil && q == nil {
		return c.startAnnounced(what, count, dst, src)
	}
	return c.startTold(q, what, count, dst, src)
}

// record is start of a call that is recorded in a graph.
func (c *hooked) record(q Queue, what *Collective, count int, dst, src Buffer) (Work, error) {
	if c.records == nil {
		return c.Pass(q, *what, count, dst, src)
	}
	call := Call{Comm: c.call.Comm, Queue: q, Bytes: max(dst.NBytes(), src.NBytes())}
	call.Header.Set(what, 0, count, what.dtype(&dst, &src))
	mark := c.records.Record(&call)
	w, err := c.Pass(q, *what, count, dst, src)
	if err != nil || mark == nil {
		return w, err
	}
	mark(q)
	end, err := q.Record() // behind the mark, which must be joined, too
	if err != nil {
		return nil, err
	}
	return markedWork{RecordedWork(end), mark}, nil
}

// Layer is what a machine finds by [As], to tell hooks of layers.
func (c *hooked) Layer(q Queue, name string) {
	if c.records != nil && Recorded(q) {
		c.records.Layer(c.call.Comm, q, name)
	}
}

// markedWork is a call that is recorded, and marked.
type markedWork struct {
	Work
	mark func(on Queue)
}

// Wait implements [Work].
func (w markedWork) Wait(q Queue) error {
	w.mark(q)
	return w.Work.Wait(q)
}

// startTold is start of a call that hooks are told of beforehand.
func (c *hooked) startTold(q Queue, what *Collective, count int, dst, src Buffer) (Work, error) {
	defer AbortOnPanic(c, what)
	w := c.beginCall(q, what, count, dst, src)
	inner, err := c.Pass(q, *what, count, dst, src)
	if err != nil {
		c.endCall(w, err)
		return nil, err
	}
	if _, ok := inner.(well); ok {
		c.endCall(w, nil)
		return inner, nil
	}
	// on a device it has not ended, and asking takes time
	if !dst.Device() && !src.Device() && inner.Done() {
		c.endCall(w, inner.Join(context.Background()))
		return inner, nil
	}
	w.inner = inner
	w.state.Store(started)
	return w, nil
}

// startAnnounced is start of a call that inner runs on its caller, and announces.
func (c *hooked) startAnnounced(what *Collective, count int, dst, src Buffer) (Work, error) {
	id, w, err := c.announcer.StartAnnounced(c.announce, *what, count, dst, src)
	end := err
	if _, ok := w.(well); !ok && err == nil {
		end = w.Join(context.Background()) // it has ended
	}
	c.hooks.End(id, end)
	return w, err
}

// announced tells the hooks of a call that inner announces.
func (c *hooked) announced(what *Collective, count int, dst, src *Buffer) (id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.call.Work = &c.running
	return c.started(nil, what, count, dst, src)
}

// started tells the hooks of a new call. mu is held.
func (c *hooked) started(q Queue, what *Collective, count int, dst, src *Buffer) (id uint64) {
	c.call.Queue, c.call.Bytes = q, max(dst.NBytes(), src.NBytes())
	c.call.Header.Set(what, c.call.Header.Seq+1, count, what.dtype(dst, src))
	return c.hooks.Start(&c.call)
}

// callsAtOnce is how many calls are allocated together, so that most calls allocate nothing.
const callsAtOnce = 64

// beginCall tells the hooks of a new call, and returns its Work.
func (c *hooked) beginCall(q Queue, what *Collective, count int, dst, src Buffer) *hookedWork {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.last
	if w == nil || w.state.Load() != free {
		w = c.newWork()
	} else {
		w.state.Store(starting)
	}
	c.call.Work = w
	w.id = c.started(q, what, count, &dst, &src)
	return w
}

// newWork returns a Work that nothing refers to yet. mu is held.
func (c *hooked) newWork() *hookedWork {
	if len(c.fresh) == 0 {
		c.fresh = make([]hookedWork, callsAtOnce)
	}
	w := &c.fresh[0]
	c.fresh = c.fresh[1:]
	w.comm = c
	c.last = w
	return w
}

// endCall ends a call that ended within Start. Nobody else has its Work.
func (c *hooked) endCall(w *hookedWork, err error) {
	c.hooks.End(w.id, err)
	w.state.Store(free)
}

// hookedWork is the Work of a call whose end hooks are told of. It is small, because each is
// written to memory that the processor has not touched for long.
type hookedWork struct {
	inner Work
	comm  *hooked
	id    uint64
	state atomic.Uint32
}

// The states of a hookedWork.
const (
	starting uint32 = iota
	started         // inner is set, and somebody may join the call
	ended           // hooks were told
	free            // nobody has it
)

// Wait implements [Work].
func (w *hookedWork) Wait(q Queue) error { return w.inner.Wait(q) }

// Done implements [Work].
func (w *hookedWork) Done() bool {
	state := w.state.Load()
	return (state == started || state == ended) && w.inner.Done()
}

// Join implements [Work].
func (w *hookedWork) Join(ctx context.Context) error {
	if w.comm.joins != nil && w.state.Load() == started {
		w.comm.joins.Join(w.id)
	}
	err := w.inner.Join(ctx)
	if stopped := ctx.Err(); stopped == nil || !errors.Is(err, stopped) {
		if w.state.CompareAndSwap(started, ended) {
			w.comm.hooks.End(w.id, err)
		}
	}
	return err
}
