package hierarchy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// encoded returns a header as it is in a report.
func encoded(h backend.Header) (b [backend.HeaderSize]byte) {
	h.Put(b[:])
	return b
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
// communicators have ended, whoever has ended them: an admission must not open before.
func (c *Communicator) failAs(what string, h *backend.Header, at step, err error) error {
	c.life.fail(func() finding {
		r := c.report(at, err)
		cause := fmt.Errorf("%v: %w", at, bare(err))
		if r.Reason == group.Aborted && !errors.Is(err, backend.ErrAborted) {
			cause = fmt.Errorf("%w: %w", backend.ErrAborted, cause)
		}
		return finding{r, cause, graceOf(r, at.phase, err), func(r *group.Report) { c.translate(r, h) }}
	})
	return c.life.failure(what)
}

// report makes the report of an error of a phase.
func (c *Communicator) report(at step, err error) group.Report {
	own := c.Rank()
	r := group.Report{Reason: group.Aborted, Rank: own, Peer: own, Lost: c.ranks[own], Text: fmt.Sprintf("%v, on %s: %v", at, c.ranks.Rank(own), bare(err))}
	var e *backend.Error
	var of interface{ Blames() int }
	switch {
	case errors.As(err, &e) && e.Peer >= 0:
		r.Peer = c.rankOf(at.phase, e.Peer)
		r.Lost = c.ranks[r.Peer]
	case errors.As(err, &of) && of.Blames() >= 0:
		r.Lost, r.Peer = of.Blames(), slices.Index(c.ranks, of.Blames())
	}
	var f *rendezvous.Failure
	var m *backend.MismatchError
	switch {
	case errors.As(err, &f):
		r = group.LostRank(c.ranks, f)
		r.Rank = own
	case errors.As(err, &m):
		r.Reason, r.Rank, r.Peer = group.Mismatch, c.rankOf(at.phase, m.Rank), c.rankOf(at.phase, m.Peer)
		r.Mine, r.Theirs = encoded(m.Mine), encoded(m.Theirs)
	case errors.Is(err, backend.ErrTimeout):
		r.Reason = group.TimedOut
	case errors.Is(err, backend.ErrClosed):
		r.Reason = group.Closed
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

// graceOf returns how long to wait for a better report than r, of an error of a phase.
func graceOf(r group.Report, p Phase, err error) time.Duration {
	switch {
	case r.Reason == group.TimedOut && p > Reduce && p != Remainder:
		return time.Duration(p-Reduce) * reportGrace
	case r.Reason == group.Aborted && errors.Is(err, backend.ErrAborted):
		return reportGrace
	}
	return 0
}

// translateTime bounds how long a rank waits to hear what another one called.
const translateTime = 500 * time.Millisecond

// translate puts the callers' headers in place of those of a phase: every rank
// that sees a mismatch says what it called.
func (c *Communicator) translate(r *group.Report, own *backend.Header) {
	key := func(rank int) string { return fmt.Sprintf("%s/call/%d", c.life.key, rank) }
	ctx, cancel := context.WithTimeout(c.life.ctx, translateTime)
	defer cancel()
	store := c.life.world.Store
	if own != nil {
		// If this fails the others name the phase's header.
		called := encoded(*own)
		_ = store.Set(ctx, key(c.Rank()), called[:])
	}
	for _, side := range []struct {
		rank   int
		header *[backend.HeaderSize]byte
	}{{r.Rank, &r.Mine}, {r.Peer, &r.Theirs}} {
		if called, err := store.Get(ctx, key(side.rank)); err == nil && len(called) == backend.HeaderSize {
			copy(side.header[:], called)
		}
	}
}

// stop ends every communicator of this rank, all at once: on a GPU each may take
// a while, and the peers of all must know within a second.
func (c *Communicator) stop(cause error) {
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
	c.life.abort(cause)
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
		case <-c.life.ctx.Done():
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
	recent := slices.Clone(c.recent.calls)
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
