package host

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/rendezvous"
)

// reason is why a group ended.
type reason uint32

const (
	aborted reason = iota + 1
	timedOut
	lost // a rank of the job is down
	mismatch
	closed
)

// report is what a rank tells the group of its end.
type report struct {
	reason       reason
	rank         int // who reports
	peer         int // who is to blame, -1 if unknown
	mine, theirs [backend.HeaderSize]byte
	text         string
}

// cause turns a report into the error it stands for.
func (c *comm) cause(r report) error {
	switch r.reason {
	case timedOut:
		return fmt.Errorf("%w: %s", backend.ErrTimeout, r.text)
	case lost:
		return fmt.Errorf("%w: %w", backend.ErrAborted, &rendezvous.Failure{Rank: c.members[r.peer], Cause: errors.New(r.text)})
	case mismatch:
		return &backend.MismatchError{Rank: r.rank, Peer: r.peer,
			Mine: backend.GetHeader(r.mine[:]), Theirs: backend.GetHeader(r.theirs[:])}
	case closed:
		return fmt.Errorf("%w: %s", backend.ErrClosed, r.text)
	default:
		return fmt.Errorf("%w: %s", backend.ErrAborted, r.text)
	}
}

// fail ends the group for this rank with r, unless it has ended already, tells
// the other ranks, and returns the error of call k.
func (c *comm) fail(r report, k *call) error {
	r.rank = c.rank
	c.end(r.peer, c.cause(r))
	c.publish(r)
	return c.failure(k)
}

// end records the first error of this rank.
func (c *comm) end(peer int, cause error) {
	c.err.CompareAndSwap(nil, &backend.Error{Comm: c.name, Rank: c.rank, Peer: peer, Cause: cause})
}

// failure returns the sticky error as that of call k, or nil.
func (c *comm) failure(k *call) error {
	err := c.err.Load()
	if err == nil {
		return nil
	}
	named := *err
	named.Call = backend.GetHeader(k.header[:]).String()
	return &named
}

// publish writes the group's obituary, if this is the first, and wakes everyone.
func (c *comm) publish(r report) {
	o := &c.region.group().obituary
	if !o.state.CompareAndSwap(0, writing) {
		return
	}
	o.reason, o.rank, o.peer = uint32(r.reason), int32(r.rank), int32(r.peer)
	o.mine, o.theirs = r.mine, r.theirs
	o.length = uint32(copy(o.text[:], r.text))
	o.state.Store(written)
	c.wakeAll()
}

// obituary reads what another rank has published.
func (c *comm) obituary() (report, bool) {
	o := &c.region.group().obituary
	if o.state.Load() != written {
		return report{}, false
	}
	n := min(int(o.length), len(o.text))
	return report{reason: reason(o.reason), rank: int(o.rank), peer: int(o.peer),
		mine: o.mine, theirs: o.theirs, text: string(o.text[:n])}, true
}

// interrupted returns why a wait for rank p is in vain, or nil.
//
// A rank posts before it can fail in what follows. So a step that p has posted
// by the time that an end is seen is a step that was complete before the end,
// and goes on.
func (c *comm) interrupted(p int, k *call) error {
	if c.closing.Load() {
		c.end(-1, fmt.Errorf("%w: Close was called on this rank during the call", backend.ErrClosed))
	}
	if r, ok := c.obituary(); ok {
		c.end(r.peer, c.cause(r))
	}
	err := c.failure(k)
	gone := c.region.rank(p).closed.Load() != 0
	switch {
	case c.posted(p, c.step):
		return nil
	case err == nil && gone:
		return c.fail(report{reason: closed, peer: p, text: fmt.Sprintf(
			"rank %d has closed its communicator without taking part: every rank must start the same collectives", p)}, k)
	}
	return err
}

// absent describes the ranks that have not posted the current step.
func (c *comm) absent() string {
	var ranks []string
	for p := range c.size {
		if p != c.rank && !c.posted(p, c.step) {
			ranks = append(ranks, fmt.Sprint(p))
		}
	}
	return fmt.Sprintf("no sign of rank %s for %v: stopped, busy, or at another place of its program (EURYALE_TIMEOUT sets how long to wait)",
		strings.Join(ranks, ", "), c.timeout)
}

// Abort implements [backend.Communicator].
func (c *comm) Abort(cause error) {
	if cause == nil {
		cause = errors.New("no cause given")
	}
	c.abort(report{reason: aborted, peer: c.rank, text: fmt.Sprintf("rank %d aborted: %v", c.rank, cause)}, cause)
}

// abort ends the group from outside a call.
func (c *comm) abort(r report, cause error) {
	c.mapped.RLock()
	defer c.mapped.RUnlock()
	c.end(r.peer, fmt.Errorf("%w: %w", backend.ErrAborted, cause))
	if c.unmapped {
		return
	}
	r.rank = c.rank
	c.publish(r)
	c.wakeAll() // this rank too, whoever published first
}

// watch aborts the group when a rank of the job is lost.
func (c *comm) watch() {
	select {
	case <-c.left:
	case <-c.world.Down():
		f := c.world.Failure()
		if peer := slices.Index(c.members, f.Rank); peer >= 0 {
			c.abort(report{reason: lost, peer: peer, text: f.Cause.Error()}, f)
			return
		}
		c.abort(report{reason: aborted, peer: -1, text: fmt.Sprintf("a rank outside the group was lost: %v", f)}, f)
	}
}
