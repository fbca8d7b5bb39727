package hierarchy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// A failure of one communicator must end all of them on every rank, also where
// ranks are idle or wait in another one. So the first rank that fails puts a
// report into the world's store, and a goroutine of every rank waits for one.
// The first report wins: all ranks name the same cause, and not each the one
// that the end of its own phase had.

// report is what the first rank that fails tells the others.
type report struct {
	group.Report
	By int // who reports; Rank is the one that has failed
}

// encoded returns a header as it is in a report.
func encoded(h backend.Header) (b [backend.HeaderSize]byte) {
	h.Put(b[:])
	return b
}

// end records the first error of this rank, and reports whether it was.
func (c *Communicator) end(peer int, cause error) bool {
	return c.err.CompareAndSwap(nil, &backend.Error{Comm: c.Name(), Members: c.ranks, Rank: c.Rank(), Peer: peer, Cause: cause})
}

// failure returns the sticky error as that of a call, or nil.
func (c *Communicator) failure(call string) error {
	err := c.err.Load()
	if err == nil {
		return nil
	}
	named := *err
	named.Call = call
	return &named
}

// seen returns the error of something that flat did alone. If that has ended
// flat, the others end with it.
func (c *Communicator) seen(err error, what string) error {
	var e *backend.Error
	if !c.layered() || !errors.As(err, &e) {
		return err
	}
	return c.failAs(what, nil, step{phase: Remainder}, err)
}

// fail ends all communicators because a phase of call k ended with err, and
// returns the error of the call.
func (c *Communicator) fail(k *call, at step, err error) error {
	return c.failAs(k.header.String(), &k.header, at, err)
}

// failAs is fail for a call that is no collective if h is nil. It returns when all
// communicators have ended, whoever has ended them: a admission must not open before.
func (c *Communicator) failAs(what string, h *backend.Header, at step, err error) error {
	c.ending.Lock()
	defer c.ending.Unlock()
	if c.err.Load() != nil {
		return c.failure(what)
	}
	r := c.describe(at, err)
	c.yield(r, at.phase, err)
	if f := c.world.Failure(); f != nil && r.Reason == group.Aborted {
		r, err = c.losing(f), f
	}
	if r.Reason == group.Mismatch {
		c.translate(&r, h)
	}
	cause := fmt.Errorf("%v: %w", at, bare(err))
	if r.Reason == group.Aborted && !errors.Is(err, backend.ErrAborted) {
		cause = fmt.Errorf("%w: %w", backend.ErrAborted, cause)
	}
	if first := c.publish(r); first.By != c.Rank() || r.Reason == group.Mismatch {
		r, cause = first, first.Cause(c.ranks)
	}
	c.end(r.Peer, cause)
	c.abort(c.failure("")) // which says whom it blames
	return c.failure(what)
}

// describe makes the report of an error of a phase.
func (c *Communicator) describe(at step, err error) report {
	r := report{By: c.Rank(), Report: group.Report{Rank: c.Rank(), Peer: -1, Text: fmt.Sprintf("%v, on %s: %v", at, c.ranks.Rank(c.Rank()), bare(err))}}
	var e *backend.Error
	if errors.As(err, &e) && e.Peer >= 0 {
		r.Peer = c.rankOf(at.phase, e.Peer)
	}
	var f *rendezvous.Failure
	var m *backend.MismatchError
	switch {
	case errors.As(err, &f):
		r = c.losing(f)
		r.By = c.Rank()
	case errors.As(err, &m):
		r.Reason, r.Rank, r.Peer = group.Mismatch, c.rankOf(at.phase, m.Rank), c.rankOf(at.phase, m.Peer)
		r.Mine, r.Theirs = encoded(m.Mine), encoded(m.Theirs)
	case errors.Is(err, backend.ErrTimeout):
		r.Reason = group.TimedOut
	case errors.Is(err, backend.ErrClosed):
		r.Reason = group.Closed
	default:
		r.Reason = group.Aborted
	}
	return r
}

// bare returns what an error of a phase's communicator says of its cause, without the
// rank and the call, which are those of the phase.
func bare(err error) error {
	var e *backend.Error
	if errors.As(err, &e) {
		return e.Cause
	}
	return err
}

// rankOf returns the rank here of a rank of a phase's communicator.
func (c *Communicator) rankOf(p Phase, rank int) int {
	switch p {
	case Reduce, Gather:
		return c.plan.Layout.Rank(c.place.machine, rank)
	case Exchange, Broadcast:
		return c.plan.Layout.Rank(rank, c.place.device)
	}
	return rank
}

// reportGrace is how long a rank waits to hear the reason of those who know better:
// one that was aborted by a peer, for the peer's; one that has waited in vain for
// a peer, longer in each phase, for that of a rank that waited in a phase before.
const reportGrace = 100 * time.Millisecond

func (c *Communicator) yield(r report, p Phase, err error) {
	wait := reportGrace
	switch {
	case r.Reason == group.TimedOut && p > Reduce && p != Remainder:
		wait *= time.Duration(p - Reduce)
	case r.Reason != group.Aborted || !errors.Is(err, backend.ErrAborted):
		return
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.news:
	case <-c.world.Down():
	}
}

// losing is the report of a lost rank, which every rank learns from its world.
func (c *Communicator) losing(f *rendezvous.Failure) report {
	r := report{By: -1, Report: group.LostRank(c.ranks, f)}
	r.Rank = c.Rank()
	return r
}

// translateTime bounds how long a rank waits to hear what another one called.
const translateTime = 500 * time.Millisecond

// translate puts the callers' headers in place of those of a phase: every rank
// that sees a mismatch says what it called.
func (c *Communicator) translate(r *report, own *backend.Header) {
	key := func(rank int) string { return fmt.Sprintf("%s/call/%d", c.key, rank) }
	ctx, cancel := context.WithTimeout(c.ctx, translateTime)
	defer cancel()
	if own != nil {
		// If this fails the others name the phase's header.
		called := encoded(*own)
		_ = c.world.Store.Set(ctx, key(c.Rank()), called[:])
	}
	for _, side := range []struct {
		rank   int
		header *[backend.HeaderSize]byte
	}{{r.Rank, &r.Mine}, {r.Peer, &r.Theirs}} {
		if called, err := c.world.Store.Get(ctx, key(side.rank)); err == nil && len(called) == backend.HeaderSize {
			copy(side.header[:], called)
		}
	}
}

// publishTime bounds how long an end waits for the store: all ranks must know
// within a second.
const publishTime = 250 * time.Millisecond

// publish puts a report into the store and returns the first one that is there.
func (c *Communicator) publish(r report) report {
	text, err := json.Marshal(r)
	if err != nil {
		return r
	}
	ctx, cancel := context.WithTimeout(context.Background(), publishTime)
	defer cancel()
	current, _, err := c.world.Store.CompareAndSwap(ctx, c.key+"/end", nil, text)
	if err != nil {
		return r // the store is lost, which ends the others as well
	}
	return parsed(current)
}

func parsed(text []byte) report {
	var r report
	if err := json.Unmarshal(text, &r); err != nil {
		return report{By: -1, Report: group.Report{Reason: group.Aborted, Rank: -1, Peer: -1, Text: "another rank failed, but its report cannot be read: " + err.Error()}}
	}
	return r
}

// abort ends every communicator of this rank, all at once: on a GPU each may take
// a while, and the peers of all must know within a second.
func (c *Communicator) abort(cause error) {
	c.cancel()
	var all sync.WaitGroup
	for _, inner := range c.Unwrap() {
		all.Go(func() { inner.Abort(cause) })
	}
	all.Wait()
}

// Abort implements [backend.Communicator].
func (c *Communicator) Abort(cause error) {
	if !c.layered() {
		c.flat.Abort(cause)
		return
	}
	if cause == nil {
		cause = errors.New("no cause given")
	}
	c.ending.Lock()
	defer c.ending.Unlock()
	if !c.end(c.Rank(), fmt.Errorf("%w: %w", backend.ErrAborted, cause)) {
		return
	}
	c.publish(report{By: c.Rank(), Report: group.Report{Reason: group.Aborted, Rank: c.Rank(), Peer: c.Rank(), Text: cause.Error()}})
	c.abort(cause)
}

// listen waits for a report until there is an error here.
func (c *Communicator) listen() {
	for c.ctx.Err() == nil {
		text, err := c.world.Store.Get(c.ctx, c.key+"/end")
		f := c.world.Failure()
		switch {
		case err == nil:
			c.hear(parsed(text))
			return
		case f != nil:
			c.hear(c.losing(f))
			return
		case !errors.Is(err, context.DeadlineExceeded):
			return // this rank has ended or closed, or rank 0, who has the store, has left
		}
	}
}

// finishGrace is how long calls that every rank has begun may go on after another rank
// has ended the group, which may have done them before: its report comes another way
// than their data, and may come first.
const finishGrace = 20 * time.Millisecond

func (c *Communicator) grace() {
	timer := time.NewTimer(finishGrace)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.ctx.Done():
	}
}

// hear ends all communicators with what another rank has reported.
func (c *Communicator) hear(r report) {
	if r.By == c.Rank() {
		return // who is at it
	}
	close(c.news)
	if r.Reason != group.Mismatch {
		c.grace()
	}
	c.ending.Lock()
	defer c.ending.Unlock()
	if cause := r.Cause(c.ranks); c.end(r.Peer, cause) {
		c.abort(cause)
	}
}

// lookEvery is how often a rank looks for failed phases on a device.
const lookEvery = 10 * time.Millisecond

// watch looks for failed phases on queues that go on after a failure, until there
// is an error: perhaps nobody joins the call, or a phase that waits for peers is
// joined before the one that has failed.
func (c *Communicator) watch() {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-ticker.C:
			c.look()
		}
	}
}

// look looks at the calls that may be under way, up to the first that is.
func (c *Communicator) look() {
	if !c.mu.TryLock() {
		return // a call is being started, which will find out by itself
	}
	recent := slices.Clone(c.recent)
	c.mu.Unlock()
	for _, e := range recent {
		if !e.call.over && e.call.pending() {
			return
		}
		e.call.over = true
	}
}

// pending reports whether a call is under way. One whose phase has failed is not.
func (k *call) pending() (some bool) {
	for _, b := range k.works {
		if !b.work.Done() {
			some = true
		} else if err := b.work.Join(context.Background()); err != nil {
			k.c.fail(k, b.at, err)
			return false
		}
	}
	return some
}
