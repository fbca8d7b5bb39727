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

// A failure of any phase must end the communicators of all phases, on every rank, even if it is
// idle or waits in another phase. The group's member decides, and has the first error; whoever sees
// that it has ended stops the communicators.

// failure returns the error that has ended the group as the error of a call; nil if the group is
// well, or flat runs every call.
func (c *Communicator) failure(call string) error {
	if c.member == nil {
		return nil
	}
	return c.member.Failure(call)
}

// fail ends the group because a phase of call k ended with err, unless it has ended. It
// returns the error of the call.
func (c *Communicator) fail(k *call, at slicePhase, err error) error {
	return c.failAs(k.header.String(), &k.header, at, err)
}

// failAs is fail for a call that is no collective if h is nil. It returns when all
// communicators have ended, whoever has ended them: an admission must not open before.
func (c *Communicator) failAs(what string, h *backend.Header, at slicePhase, err error) error {
	if c.member.Err() == nil {
		c.member.Tell(c.found(h, at, err))
		<-c.member.Over() // the watchdog ends a doubt
	}
	c.stop()
	return c.member.Failure(what)
}

// seen returns the error of something that flat did alone. If that has ended
// flat, the others end with it.
func (c *Communicator) seen(err error, what string) error {
	var e *backend.Error
	if !c.layered() || !errors.As(err, &e) {
		return err
	}
	return c.failAs(what, nil, slicePhase{phase: remainderPhase}, err)
}

// stop ends every communicator of this rank, all at once: on a GPU each may take
// a while, and the peers of all must know within a second.
func (c *Communicator) stop() {
	c.ending.Do(func() {
		cause := c.member.Err() // which says whom it blames
		var all sync.WaitGroup
		for _, inner := range c.Unwrap() {
			all.Go(func() { inner.Abort(cause) })
		}
		all.Wait()
	})
}

// Abort implements [backend.Communicator].
func (c *Communicator) Abort(cause error) {
	if !c.layered() {
		c.Base.Abort(cause)
		return
	}
	c.member.Abort(cause)
	c.stop()
}

// watched is a Communicator as the watchdog of its group sees it: perhaps nobody joins a call that
// has failed, or a phase that waits for peers is joined before the one that has failed. The
// communicators of the phases decide how long a rank waits for others.
type watched struct{ *Communicator }

var _ group.Watched = watched{}

// Wants implements [group.Watched].
func (c watched) Wants() uint64 {
	calls, ok := c.underWay()
	switch {
	case !ok:
		return 1 // a call is being started, or runs on its caller
	case len(calls) > 0:
		return calls[0].header.Seq
	}
	return 0
}

// Advance implements [group.Watched]. It looks at the calls that may be under way, up to the
// first that is. A call that is being started will find out by itself.
func (c watched) Advance() error {
	calls, _ := c.underWay()
	for _, k := range calls {
		if k.pending() {
			break
		}
		k.over = true
	}
	return nil
}

// underWay returns the calls that were not over when Advance looked; false while one is
// being started.
func (c watched) underWay() (calls []*call, ok bool) {
	if !c.mu.TryLock() {
		return nil, false
	}
	defer c.mu.Unlock()
	for _, e := range c.recent.calls {
		if !e.call.over {
			calls = append(calls, e.call)
		}
	}
	return calls, true
}

// Stop implements [group.Watched].
func (c watched) Stop() { c.stop() }

// pending reports whether a call is under way. One whose phase has failed is not. Queues of the
// host look at each phase themselves: see admission.
func (k *call) pending() (some bool) {
	if k.c.onHost {
		return !k.Done()
	}
	for i, b := range k.works[k.looked:] {
		if !b.work.Done() {
			if !some {
				some, k.looked = true, k.looked+i
			}
		} else if err := b.work.Join(context.Background()); err != nil {
			if !k.told {
				k.told = true
				k.c.member.Tell(k.c.found(&k.header, b.at, err))
			}
			return k.c.member.Err() == nil // in doubt: flat may know better
		}
	}
	return some
}

// found is the event that an error of a phase is to the group.
func (c *Communicator) found(h *backend.Header, at slicePhase, err error) group.Event {
	f := group.Found{Report: c.report(at, err), Cause: fmt.Errorf("%v: %w", at, bare(err))}
	lost, aborted := c.world.Failure(), errors.Is(err, backend.ErrAborted)
	switch r := &f.Report; {
	case r.Reason == group.Mismatch:
		c.translate(r, h)
		f.Cause = nil // the report says it in the calls of the callers
		if c.verify.Load() && at.phase != remainderPhase {
			f.Doubt = group.LateTime + group.ReportGrace // flat compares the calls of all ranks
		}
	case r.Reason == group.Aborted && lost != nil:
		return group.Down{Failure: lost}
	case r.Reason == group.Aborted && aborted:
		f.Doubt = group.ReportGrace
	case r.Reason == group.Aborted:
		f.Cause = fmt.Errorf("%w: %w", backend.ErrAborted, f.Cause)
	case r.Reason == group.TimedOut && at.phase > reducePhase && at.phase != remainderPhase:
		f.Doubt = time.Duration(at.phase-reducePhase) * group.ReportGrace
	}
	return f
}

// report makes the report of an error of a phase.
func (c *Communicator) report(at slicePhase, err error) group.Report {
	own, members := c.Rank(), c.member.Members
	r := group.Report{Reason: group.Aborted, Rank: own, Peer: own, Lost: members[own],
		Text: fmt.Sprintf("%v, on %s: %v", at, members.Rank(own), bare(err))}
	var e *backend.Error
	var of interface{ Blames() int }
	switch {
	case errors.As(err, &e) && e.Peer >= 0:
		r.Peer = c.rankOf(at.phase, e.Peer)
		r.Lost = members[r.Peer]
	case errors.As(err, &of) && of.Blames() >= 0:
		r.Lost, r.Peer = of.Blames(), slices.Index(members, of.Blames())
	}
	var f *rendezvous.Failure
	var m *backend.MismatchError
	switch {
	case errors.As(err, &f):
		r = group.LostRank(members, f)
	case errors.As(err, &m):
		r.Reason = group.Mismatch
		r.Sides = [2]int{c.rankOf(at.phase, m.Rank), c.rankOf(at.phase, m.Peer)}
		if e == nil || e.Peer < 0 {
			r.Peer = -1
		}
		m.Mine.Put(&r.Mine)
		m.Theirs.Put(&r.Theirs)
	case errors.Is(err, backend.ErrTimeout):
		r.Reason = group.TimedOut
	case errors.Is(err, backend.ErrClosed):
		r.Reason = group.Closed
	}
	return r
}

// bare returns what an error of a phase's communicator says about its cause, without the rank and
// the call of the phase.
func bare(err error) error {
	var e *backend.Error
	if errors.As(err, &e) {
		return e.Cause
	}
	return err
}

// rankOf returns the rank here of a rank of a phase's communicator.
func (c *Communicator) rankOf(p phase, rank int) int {
	switch p {
	case reducePhase, gatherPhase:
		return c.plan.Layout.Rank(c.place.machine, rank)
	case exchangePhase, broadcastPhase:
		return c.plan.Layout.Rank(rank, c.place.device)
	}
	return rank
}

// translateTime bounds how long a rank waits to hear what another one called.
const translateTime = 500 * time.Millisecond

// translate replaces the headers of a phase by the callers': every rank that sees a mismatch says
// what it called.
func (c *Communicator) translate(r *group.Report, own *backend.Header) {
	key := func(rank int) string { return fmt.Sprintf("%s/call/%d", c.key, rank) }
	ctx, cancel := context.WithTimeout(c.ctx, translateTime)
	defer cancel()
	store := c.world.Store
	if own != nil {
		var called [backend.HeaderSize]byte
		own.Put(&called)
		// if this fails the others name the phase's header
		_ = store.Set(ctx, key(c.Rank()), called[:])
	}
	for _, side := range []struct {
		rank   int
		header *[backend.HeaderSize]byte
	}{{r.Sides[0], &r.Mine}, {r.Sides[1], &r.Theirs}} {
		if called, err := store.Get(ctx, key(side.rank)); err == nil &&
			len(called) == backend.HeaderSize {
			copy(side.header[:], called)
		}
	}
}
