package hierarchy

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
)

// Start implements [backend.Communicator].
//
// A call that is started while an earlier one is under way overlaps it if both
// are hierarchical, are on different queues, and have no memory in common; to
// the caller they still happen in order, since each ends after those before it.
func (c *Communicator) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	return what.Start(c, q, dst, src)
}

// StartChecked implements [backend.CheckedStarter].
func (c *Communicator) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	defer backend.AbortOnPanic(c, &what)
	if !c.layered() {
		w, err := c.Pass(q, what, count, dst, src)
		if err == nil {
			c.passed.Add(1)
		}
		return w, err
	}
	if q == nil {
		q = c.Device().Default()
	}
	if d := what.DType(dst, src); what.Association == backend.Tree &&
		!slices.Contains(c.Base.Capabilities().Tree, d) {
		return nil, backend.RefuseTree(c, what, d)
	}
	if what.Rows != nil {
		return nil, backend.RefuseRows(c, what)
	}
	if backend.Recorded(q) {
		return nil, backend.Refuse(c, fmt.Errorf("%w: %v among several nodes cannot be recorded "+
			"in a graph, since the host watches its phases: start it beside the graph",
			backend.ErrUnsupported, what))
	}
	if what.Kind == backend.Broadcast && c.Rank() != what.Root {
		src = backend.Buffer{} // whatever it is
	}
	k := &call{c: c, what: what, count: count, dtype: what.DType(dst, src), dst: dst, src: src}
	if k.cut = c.plan.Choose(what, k.dtype, max(dst.Len(), src.Len())); !k.cut.Hierarchical {
		return c.startFlat(q, k)
	}
	if c.misplaced(dst) || c.misplaced(src) {
		// Whether a call is hierarchical must not depend on where one rank has its operands.
		if c.onHost {
			return nil, fmt.Errorf("%w: %s: %v was given memory of a device that a queue of %s "+
				"cannot reach", backend.ErrArgument, backend.RankOf(c), what, c.Device().Name())
		}
		return group.Staged(c, q, dst, src, func(dst, src backend.Buffer) (backend.Work, error) {
			return c.Start(q, what, dst, src)
		})
	}
	if err := c.startLayered(q, k); err != nil {
		return nil, err
	}
	// Without the lock: a queue that runs on the caller waits for peers here.
	if err := q.Wait(k.end); err != nil {
		return nil, c.abandon(k, fmt.Errorf("the caller's queue cannot wait for the call: %w", err))
	}
	return k, nil
}

// abandon ends everything because a call has begun that nobody will join, and waits for it: then
// the caller owns its memory again.
func (c *Communicator) abandon(k *call, err error) error {
	err = c.fail(k, k.at, err)
	for _, b := range k.works {
		b.work.Join(context.Background()) // it ends with its communicator, whose error is err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(err, c.drain())
}

// misplaced finds memory that the kernels of the device cannot reach.
func (c *Communicator) misplaced(b backend.Buffer) bool {
	return b.Len() > 0 && b.Device() == c.onHost
}

// startFlat passes a call to flat.
func (c *Communicator) startFlat(q backend.Queue, k *call) (backend.Work, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.numberCall(k); err != nil {
		return nil, err
	}
	if err := c.recent.order(q, extentOf(k.dst), extentOf(k.src), true); err != nil {
		return nil, err
	}
	w, err := c.Pass(q, k.what, k.count, k.dst, k.src)
	if err != nil {
		return nil, c.seen(err, k.header.String())
	}
	k.dropOperands()
	c.seq++
	c.stats.Flat++
	at := slicePhase{phase: remainderPhase}
	k.works = append(k.works, begun{at, w})
	c.recent.calls = append(c.recent.calls[:0], earlier{call: k, flat: true})
	if !c.onHost {
		return k, nil
	}
	if w.Done() {
		c.recent.calls = c.recent.calls[:0] // it ran on the caller
		err := w.Join(context.Background())
		if err == nil {
			return backend.Finished(nil), nil
		}
		return backend.Finished(c.fail(k, at, err)), nil
	}
	// For its errors: nobody may join it.
	if err := c.after(c.queues[unpackPhase], k, at, w); err != nil {
		err = c.fail(k, at, err)
		w.Join(context.Background()) // it ends with flat, and leaves the caller's memory alone
		return nil, err
	}
	return k, nil
}

// startLayered starts the phases of a call. If that fails on the way, peers have
// begun what this rank will not take part in, so all communicators end.
func (c *Communicator) startLayered(q backend.Queue, k *call) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.numberCall(k); err != nil {
		return err
	}
	if err := c.recent.order(q, extentOf(k.dst), extentOf(k.src), false); err != nil {
		return err
	}
	ready, err := q.Record()
	if err != nil {
		return err
	}
	c.seq++
	if err := k.launch(ready); err != nil {
		return errors.Join(c.fail(k, k.at, err), c.drain())
	}
	c.recent.calls = append(c.recent.calls, earlier{dst: extentOf(k.dst), src: extentOf(k.src),
		call: k})
	k.dropOperands()
	c.stats.Calls++
	return nil
}

// numberCall gives a call its number. If the call is refused, another one gets the number.
func (c *Communicator) numberCall(k *call) error {
	k.header = k.what.Header(c.seq+1, k.count, k.dtype)
	if c.member.Err() == nil {
		return nil
	}
	return c.member.Failure(k.header.String())
}

// call is one call of a rank.
type call struct {
	c        *Communicator
	what     backend.Collective
	header   backend.Header
	count    int
	dtype    backend.DType
	dst, src backend.Buffer // until it is started
	cut      Choice

	ready backend.Event // the caller's queue has got here
	works []begun
	end   backend.Event // of everything; nil for a flat call

	// For the watchdog alone: it has seen the end of the call, or at least of this many works.
	over   bool
	looked int
	told   bool // the group was told of its failure

	// What follows is of the slice that is being started.
	at   slicePhase
	work backend.Work // the last one on the stream of at; nil if kernels came last
}

// begun is a collective of a phase.
type begun struct {
	at   slicePhase
	work backend.Work
}

var _ backend.Work = (*call)(nil)

// dropOperands lets go of the operands.
func (k *call) dropOperands() { k.dst, k.src = backend.Buffer{}, backend.Buffer{} }

// Wait implements [backend.Work].
func (k *call) Wait(q backend.Queue) error {
	if q == nil {
		q = k.c.Device().Default()
	}
	if k.end == nil {
		return k.works[0].work.Wait(q)
	}
	return q.Wait(k.end)
}

// Join implements [backend.Work]. Any phase of any slice that failed makes the
// whole call fail.
func (k *call) Join(ctx context.Context) error {
	for _, b := range k.works {
		if err := b.work.Join(ctx); err != nil {
			return k.outcome(ctx, b.at, err)
		}
	}
	if k.end == nil {
		return nil
	}
	if err := k.end.Join(ctx); err != nil {
		return k.outcome(ctx, k.at, err)
	}
	return nil
}

// Done implements [backend.Work].
func (k *call) Done() bool {
	if k.end != nil && !k.end.Done() {
		return false
	}
	return !slices.ContainsFunc(k.works, func(b begun) bool { return !b.work.Done() })
}

// outcome is the error of a Join. Unless its context has ended, all phases have ended, but those
// that compute may still be running.
func (k *call) outcome(ctx context.Context, at slicePhase, err error) error {
	if stopped := ctx.Err(); stopped != nil && errors.Is(err, stopped) {
		return err
	}
	err = k.c.fail(k, at, err)
	if k.end != nil {
		k.end.Join(ctx) // if ctx ends first, the call has failed all the same
	}
	return err
}

// fingerprint hashes a header, so that flat, comparing the headers of its own calls, compares
// that one too.
func fingerprint(h backend.Header) uint64 {
	return h.Put(new([backend.HeaderSize]byte))
}

// recent are the calls that may be under way, the last one last.
type recent struct{ calls []earlier }

// earlier is a call that may be under way.
type earlier struct {
	dst, src extent
	flat     bool
	call     *call
}

// extent is where memory begins and ends. It does not keep the memory alive.
type extent struct{ lo, hi uintptr }

func extentOf(b backend.Buffer) extent {
	if b.Len() == 0 {
		return extent{}
	}
	return extent{b.Addr(), b.Addr() + uintptr(b.NBytes())}
}

func (e extent) overlaps(f extent) bool { return e.lo < f.hi && f.lo < e.hi }

// maxRecent is how many calls may overlap: beyond four to eight buckets there is
// no gain (fairring's measurements on 64 GPUs).
const maxRecent = 8

// order orders q after the earlier calls that a call must not overlap. Calls end in order, so q
// waits only for the last of these, or for the call that leaves the list if that is later. The list
// keeps calls that q has waited for: other queues have not.
func (r *recent) order(q backend.Queue, dst, src extent, flat bool) error {
	last := len(r.calls) - maxRecent
	for i, e := range r.calls {
		if e.flat != flat || e.dst.overlaps(dst) || e.dst.overlaps(src) || e.src.overlaps(dst) {
			last = max(last, i)
		}
	}
	if last < 0 {
		return nil
	}
	if err := r.calls[last].call.Wait(q); err != nil {
		return err
	}
	r.calls = append(r.calls[:0], r.calls[max(0, len(r.calls)-maxRecent+1):]...)
	return nil
}
