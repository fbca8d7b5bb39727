package gpu

import (
	"context"
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/spinwait"
)

// Start implements [backend.Communicator]. Once a kernel has given up waiting for another
// rank, it is an error that names the rank.
func (c *Communicator) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	return what.Start(c, q, dst, src)
}

// StartChecked implements [backend.CheckedStarter].
func (c *Communicator) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	defer backend.AbortOnPanic(c, &what)
	k := call{what: what, count: count, rank: c.rank, P: c.size, dst: dst, src: src}
	s, err := c.admit(q, &k)
	if err != nil {
		return nil, err
	}
	return c.startAdmitted(s, &k)
}

// startAdmitted starts a call that was admitted.
func (c *Communicator) startAdmitted(s stream, k *call) (backend.Work, error) {
	if into := s.Recording(); into != nil {
		return c.capture(s, into, k)
	}
	if k.onHost() {
		return c.staged(s, k)
	}
	w, err := c.start(s, k)
	if err != nil {
		return nil, c.ended(err, k.what.String())
	}
	return w, nil
}

// startBy is Start by an algorithm that is not chosen, for operands on the device.
func (c *Communicator) startBy(q backend.Queue, use Algorithm, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	count, err := what.Check(c.rank, c.size, dst, src)
	if err != nil {
		return nil, backend.Refuse(c, err)
	}
	k := call{what: what, count: count, rank: c.rank, P: c.size, dst: dst, src: src}
	s, err := c.admit(q, &k)
	if err != nil {
		return nil, err
	}
	k.use = use
	return c.startAdmitted(s, &k)
}

// admit finds out whether a call can be started, and chooses its algorithm.
func (c *Communicator) admit(q backend.Queue, k *call) (s stream, err error) {
	if s, err = c.stream(q); err != nil {
		return nil, fmt.Errorf("%s: %v: %w", backend.RankOf(c), k.what, err)
	}
	if c.member.Err() != nil { // and memory may be nobody's since
		if err := c.gaveUp(k.what.String()); err != nil {
			return nil, err
		}
		return nil, c.ended(c.member.Failure(""), k.what.String())
	}
	if !c.holdsOperands(k) {
		return nil, fmt.Errorf("%w: %s: %v of memory that is not of this rank's device, %s: copy "+
			"it there first, or allocate it there", backend.ErrArgument, backend.RankOf(c), k.what,
			c.dev.Name())
	}
	k.dtype = k.what.DType(k.dst, k.src)
	if k.count <= math.MaxInt/k.dtype.Size() {
		k.use = c.choose(&k.what, k.dtype, k.count*k.dtype.Size())
	}
	if inTree(&k.what, c.size) && c.roundsInTree(k.dtype) {
		return nil, backend.RefuseTree(c, k.what, k.dtype)
	}
	if k.what.Rows != nil && k.use == byNCCL {
		return nil, backend.RefuseRows(c, k.what)
	}
	return s, nil
}

// holdsOperands reports whether what the rank reads and writes is not of another device than
// its own.
func (c *Communicator) holdsOperands(k *call) bool {
	if k.dst.Addr() == k.src.Addr() { // and it does one of the two
		return c.holds(k.src)
	}
	return (!k.reads() || c.holds(k.src)) && (!k.writes() || c.holds(k.dst))
}

// holds reports whether memory is not of another device than this rank's.
func (c *Communicator) holds(b backend.Buffer) bool {
	return b.Len() == 0 || !b.Device() || c.dev.Holds(b.Addr())
}

// stream resolves nil and refuses queues of other kinds.
func (c *Communicator) stream(q backend.Queue) (stream, error) {
	if q == nil {
		if c.main != nil {
			return c.main, nil
		}
		q = c.dev.Default()
	}
	s, ok := q.(stream)
	if !ok {
		return nil, fmt.Errorf("%w: a %T is not a stream of %s", backend.ErrArgument, q,
			c.dev.Name())
	}
	return s, nil
}

// start posts a call and starts it by its algorithm. Errors are sticky ones or reports.
func (c *Communicator) start(q stream, k *call) (*work, error) {
	c.order.Lock()
	defer c.order.Unlock()
	w, event, err := c.beginCall(q, &k.what, k.count, k.dtype)
	if err != nil {
		return nil, err
	}
	c.chooseAgain(k, false)
	w.kernel = k.use != byNCCL
	c.call = *k
	if err := c.follow(q); err != nil {
		return nil, c.member.Broken(err)
	}
	if err := c.launch(q, &c.call, event); err != nil {
		return nil, c.member.Broken(err)
	}
	c.started.Store(w.header.Seq)
	c.used[k.use].Add(1)
	return w, nil
}

// beginCall gives a call its number, posts it, and finds the event that marks its
// end. order is held.
func (c *Communicator) beginCall(q stream, what *backend.Collective, count int,
	d backend.DType) (w *work, event uintptr, err error) {
	if c.member.Err() != nil {
		return nil, 0, c.member.Failure(what.Header(c.seq.Load()+1, count, d).String())
	}
	w = c.newWork()
	w.header.Set(what, c.seq.Add(1), count, d)
	event, err = c.posted(w, q)
	return w, event, err
}

// posted posts a call that has its header. order is held.
func (c *Communicator) posted(w *work, q stream) (event uintptr, err error) {
	w.c, w.stream = c, q.Stream()
	c.post(&w.header)
	seq := w.header.Seq
	if seq > c.past+eventSlots {
		if err := c.room(&w.header); err != nil {
			return 0, err
		}
	}
	if c.events == nil {
		return 0, c.member.Failure(w.header.String())
	}
	return c.events[seq%eventSlots], nil
}

// post tells the other ranks of the next call. order is held.
func (c *Communicator) post(h *backend.Header) {
	c.board.Post(h, c.verify.Load())
}

// room waits until the event of a call is not in use. It looks for a later call
// first: if that is done, so are many, and the next calls need not ask.
func (c *Communicator) room(h *backend.Header) error {
	if ok, err := c.happened(h.Seq - eventSlots/2); ok || err != nil {
		if ok {
			c.past = h.Seq - eventSlots/2
		}
		return err
	}
	for wait := (spinwait.Wait{}); ; wait.Pause() {
		if ok, err := c.happened(h.Seq - eventSlots); ok || err != nil {
			return err
		}
		if err := c.member.Failure(h.String()); err != nil {
			return err
		}
	}
}

// follow orders q after the queue that the last call was started on. It binds the device
// itself.
func (c *Communicator) follow(q stream) error {
	if c.last == q {
		return nil
	}
	before := c.last
	c.last = q
	started := c.started.Load()
	if before == nil || started == 0 {
		return nil
	}
	return c.bound(func() error {
		c.state.Lock()
		defer c.state.Unlock()
		if started <= c.done {
			return nil
		}
		return c.dev.WaitEvent(q.Stream(), c.events[started%eventSlots])
	})
}

// work is a call that was started.
type work struct {
	c      *Communicator
	stream uintptr // what it was started on
	header backend.Header
	kernel bool // one of ours runs it, which may give up waiting
}

// newWork allocates many at once, so that a call allocates nothing most of the
// time.
func (c *Communicator) newWork() *work {
	if len(c.works) == 0 {
		c.works = make([]work, worksAtOnce)
	}
	w := &c.works[0]
	c.works = c.works[1:]
	return w
}

// Wait implements [backend.Work].
func (w *work) Wait(q backend.Queue) error {
	c, seq := w.c, w.header.Seq
	s, err := c.stream(q)
	if err != nil {
		return w.Join(context.Background()) // a queue of the host
	}
	if s.Stream() == w.stream && c.member.Err() == nil {
		return nil // what is started on it later is behind the call anyway
	}
	if into := s.Recording(); into != nil {
		into.Follow(w.Wait)
		return nil
	}
	unbind, err := c.dev.Bind()
	if err != nil {
		return err
	}
	defer unbind()
	c.state.Lock()
	defer c.state.Unlock()
	switch {
	case seq <= c.done || seq+eventSlots <= c.started.Load():
		return nil
	case c.member.Err() != nil:
		return c.member.Failure(w.header.String())
	}
	return c.dev.WaitEvent(s.Stream(), c.events[seq%eventSlots])
}

// Join implements [backend.Work]. The call is done when the device has done it
// and every rank has posted the same.
func (w *work) Join(ctx context.Context) error {
	err := w.join(ctx)
	if !w.kernel {
		return err
	}
	// A kernel that gives up ends like any other, and the watchdog may have seen it first.
	if late := w.c.gaveUp(w.header.String()); late != nil {
		return late
	}
	return err
}

// Done implements [backend.Work].
func (w *work) Done() bool {
	done, err := w.c.settled(w.header.Seq)
	return done || err != nil || w.c.member.Check(w.c.wants()) != nil
}

func (w *work) join(ctx context.Context) error {
	c, seq := w.c, w.header.Seq
	for wait := (spinwait.Wait{}); ; wait.Pause() {
		done, err := c.settled(seq)
		if done {
			return nil
		}
		if err == nil {
			err = c.member.Check(c.wants())
		}
		if err != nil {
			err = c.ended(err, w.header.String())
			// The group may have ended between the two looks, after the call.
			if done, _ := c.settled(seq); done {
				return nil
			}
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// settled reports whether a call is done, and the same on every rank.
func (c *Communicator) settled(seq uint64) (bool, error) {
	if done, err := c.happened(seq); !done || err != nil {
		return false, err
	}
	return c.compared(seq)
}

// happened reports whether a call is done on the device.
func (c *Communicator) happened(seq uint64) (bool, error) {
	c.state.Lock()
	defer c.state.Unlock()
	switch {
	case seq <= c.done:
		return true, nil
	case c.fixed:
		return false, c.member.Failure("")
	case seq > c.started.Load():
		return false, nil
	}
	ok, err := c.dev.EventDone(c.events[seq%eventSlots])
	if err != nil {
		return false, c.member.Broken(err)
	}
	if ok {
		c.done = seq
	}
	return ok, nil
}

// compared reports whether every rank has posted the calls up to seq, and the
// same.
func (c *Communicator) compared(seq uint64) (bool, error) {
	n, d := c.board.Compare(seq)
	if d != nil {
		return false, d.Differs()
	}
	return n >= seq, nil
}
