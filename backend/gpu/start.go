package gpu

import (
	"context"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/spinwait"
)

// Start implements [backend.Communicator].
func (c *comm) Start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	count, err := what.Check(c.rank, c.size, dst, src)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", backend.RankOf(c), err)
	}
	s, err := c.stream(q)
	if err != nil {
		return nil, fmt.Errorf("%s: %v: %w", backend.RankOf(c), what, err)
	}
	k := call{what: what, count: count, dtype: what.DType(dst, src), rank: c.rank, P: c.size, dst: dst, src: src}
	if c.member.Err() != nil { // and memory may be nobody's since
		return nil, c.ended(c.member.Failure(""), what.String())
	}
	if k.reads() && !c.holds(src) || k.writes() && !c.holds(dst) {
		return nil, fmt.Errorf("%w: %s: %v of memory that is not of this rank's device, %s: copy it there first, or allocate it there", backend.ErrArgument, backend.RankOf(c), what, c.dev.Name())
	}
	if k.onHost() {
		return c.staged(s, k)
	}
	w, err := c.start(s, k)
	if err != nil {
		return nil, c.ended(err, what.String())
	}
	return w, nil
}

// holds reports whether memory is not of another device than this rank's.
func (c *comm) holds(b backend.Buffer) bool {
	return b.Len() == 0 || !b.Device() || c.dev.Holds(b.Addr())
}

// Carry starts a call whose kernels launch puts on the queue, in NCCL's place. It is
// numbered, compared, ordered, watched and joined like any other. The caller has checked
// it (count is what [backend.Collective.Check] has returned), and its operands are memory
// of the device. launch is called at once, or not at all; it must put on the queue all
// that it starts, and behind that the driver's event, or nothing, and nothing that
// outlasts [comm.Ended] for long. The device need not be bound for it. Join of a call that has
// ended well returns what outcome says of it.
func (c *comm) Carry(q backend.Queue, what backend.Collective, count int, dst, src backend.Buffer, launch func(q backend.Queue, event uintptr) error, outcome func(backend.Header) error) (backend.Work, error) {
	s, err := c.stream(q)
	if err != nil {
		return nil, fmt.Errorf("%s: %v: %w", backend.RankOf(c), what, err)
	}
	w, err := c.carry(s, &what, count, what.DType(dst, src), launch)
	if err != nil {
		return nil, c.ended(err, what.String())
	}
	w.outcome = outcome
	return w, nil
}

func (c *comm) carry(q Stream, what *backend.Collective, count int, d backend.DType, launch func(q backend.Queue, event uintptr) error) (*work, error) {
	c.order.Lock()
	defer c.order.Unlock()
	w, event, err := c.begin(q, what, count, d)
	if err != nil {
		return nil, err
	}
	if err := c.follow(q); err != nil {
		return nil, c.member.Broken(err)
	}
	if err := launch(q, event); err != nil {
		return nil, c.member.Broken(err)
	}
	c.started.Store(w.header.Seq)
	return w, nil
}

// Ended is closed once the group has failed, or this rank has closed it: what Carry has
// left on a queue must end then.
func (c *comm) Ended() <-chan struct{} { return c.member.Over() }

// stream resolves nil and refuses queues of other kinds.
func (c *comm) stream(q backend.Queue) (Stream, error) {
	if q == nil {
		q = c.dev.Default()
	}
	s, ok := q.(Stream)
	if !ok {
		return nil, fmt.Errorf("%w: a %T is not a stream of %s", backend.ErrArgument, q, c.dev.Name())
	}
	return s, nil
}

// start posts a call and starts it. Errors are sticky ones, reports, or
// ErrUnsupported.
func (c *comm) start(q Stream, what call) (*work, error) {
	c.order.Lock()
	defer c.order.Unlock()
	c.call = what
	k := &c.call
	way := k.route()
	w, event, err := c.begin(q, &k.what, k.count, k.dtype)
	if err != nil {
		return nil, err
	}
	unbind, err := c.dev.Bind()
	if err != nil {
		return nil, c.member.Broken(err)
	}
	defer unbind()
	if err := c.follow(q); err != nil {
		return nil, c.member.Broken(err)
	}
	if err := c.launch(q, k, way, event); err != nil {
		return nil, c.member.Broken(err)
	}
	c.started.Store(w.header.Seq)
	return w, nil
}

// begin gives a call its number, posts it, and finds the event that marks its
// end. order is held.
func (c *comm) begin(q Stream, what *backend.Collective, count int, d backend.DType) (w *work, event uintptr, err error) {
	if c.member.Err() != nil {
		return nil, 0, c.member.Failure(what.Header(c.seq.Load()+1, count, d).String())
	}
	w = c.newWork()
	seq := c.seq.Add(1)
	w.c, w.queue = c, q
	w.header.Set(what, seq, count, d)
	c.post(&w.header)
	if seq > c.past+eventSlots {
		if err := c.room(&w.header); err != nil {
			return nil, 0, err
		}
	}
	if c.events == nil {
		return nil, 0, c.member.Failure(w.header.String())
	}
	return w, c.events[seq%eventSlots], nil
}

// post tells the other ranks of the next call. order is held.
func (c *comm) post(h *backend.Header) {
	c.board.Post(h, c.verify.Load())
}

// room waits until the event of a call is not in use. It looks for a later call
// first: if that is done, so are many, and the next calls need not ask.
func (c *comm) room(h *backend.Header) error {
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
func (c *comm) follow(q Stream) error {
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
		return c.lib.after(q.Stream(), c.events[started%eventSlots])
	})
}

// launch starts a call on a bound device.
func (c *comm) launch(q Stream, k *call, way route, event uintptr) error {
	switch way {
	case composed:
		if err := c.compose(q, k); err != nil {
			return err
		}
		return c.run(q, nil, event)
	case divided:
		if err := c.sumAndDivide(q, k); err != nil {
			return err
		}
		return c.run(q, nil, event)
	default:
		c.steps = k.steps(c.steps[:0])
		return c.run(q, c.steps, event)
	}
}

// run hands steps to NCCL, unless the group has ended: whoever ends it waits only so long
// for a call that is being started, and then takes the engine away.
func (c *comm) run(q Stream, steps []step, event uintptr) error {
	if c.member.Err() != nil {
		return c.member.Failure("")
	}
	return c.engine.run(q.Stream(), steps, event)
}

// sumAndDivide is Avg where NCCL's has other bits.
func (c *comm) sumAndDivide(q Stream, k *call) error {
	k.what.Op = backend.Sum
	c.steps = k.steps(c.steps[:0])
	if err := c.run(q, c.steps, 0); err != nil {
		return err
	}
	if k.what.Kind == backend.Reduce && k.rank != k.what.Root || k.dst.Len() == 0 {
		return nil
	}
	return q.BinaryScalar(backend.Div, k.dst, k.dst, float64(k.P), false)
}

// compose is a composed reduction.
func (c *comm) compose(q Stream, k *call) error {
	n := c.scratch.Len() / k.dtype.Size() / k.P
	for off, longest := 0, k.longest(); off < longest; off += n {
		b := block{k, off, n, c.scratch.As(k.dtype)}
		c.steps = b.collect(c.steps[:0])
		if err := c.run(q, c.steps, 0); err != nil {
			return err
		}
		if lo, hi := b.span(k.rank); lo < hi {
			c.operands = b.operands(c.operands[:0])
			if err := q.Reduce(k.what.Op, b.result(), c.operands...); err != nil {
				return err
			}
		}
		c.steps = b.spread(c.steps[:0])
		if err := c.run(q, c.steps, 0); err != nil {
			return err
		}
	}
	return nil
}

// work is a call that was started.
type work struct {
	c       *comm
	queue   Stream
	header  backend.Header
	outcome func(backend.Header) error // of a call that was carried
}

// newWork allocates many at once, so that a call allocates nothing most of the
// time.
func (c *comm) newWork() *work {
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
	if s == w.queue && c.member.Err() == nil {
		return nil // what is started on it later is behind the call anyway
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
	return c.lib.after(s.Stream(), c.events[seq%eventSlots])
}

// Join implements [backend.Work]. The call is done when the device has done it
// and every rank has posted the same.
func (w *work) Join(ctx context.Context) error {
	if err := w.join(ctx); err != nil || w.outcome == nil {
		return err
	}
	return w.outcome(w.header)
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
func (c *comm) settled(seq uint64) (bool, error) {
	if done, err := c.happened(seq); !done || err != nil {
		return false, err
	}
	return c.compared(seq)
}

// happened reports whether a call is done on the device.
func (c *comm) happened(seq uint64) (bool, error) {
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
	ok, err := c.lib.happened(c.dev, c.events[seq%eventSlots])
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
func (c *comm) compared(seq uint64) (bool, error) {
	n, d := c.board.Compare(seq)
	if d != nil {
		return false, d.Differs()
	}
	return n >= seq, nil
}
