package host

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
)

// fail ends the group for this rank with r, unless it has ended already, tells
// the other ranks, and returns the error of call k.
func (c *comm) fail(r group.Report, k *call) error {
	r.Rank = c.rank
	c.end(r.Peer, r.Cause(c.members))
	c.publish(r)
	return c.failure(k)
}

// end records the first error of this rank.
func (c *comm) end(peer int, cause error) {
	c.err.CompareAndSwap(nil, &backend.Error{Comm: c.name, Members: c.members, Rank: c.rank, Peer: peer, Cause: cause})
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

// publish tells the group of its end, if this is the first report, and wakes everyone.
func (c *comm) publish(r group.Report) {
	if c.region.group().end.Publish(r) {
		c.wakeAll()
	}
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
	if r, ok := c.region.group().end.Read(); ok {
		c.end(r.Peer, r.Cause(c.members))
	}
	err := c.failure(k)
	gone := c.region.rank(p).closed.Load() != 0
	switch {
	case c.posted(p, c.step):
		return nil
	case err == nil && gone:
		return c.fail(c.closedWithout(p), k)
	}
	return err
}

// reportGrace is how long a rank that finds another one closed waits for the reason:
// one that leaves because of a third rank tells the job, and the news take a while.
const reportGrace = 100 * time.Millisecond

// closedWithout reports rank p, which has closed without taking part in the current
// step, or the rank of the job that made it leave.
func (c *comm) closedWithout(p int) group.Report {
	select {
	case <-c.world.Down():
		return group.LostRank(c.members, c.world.Failure())
	case <-c.left:
	case <-time.After(reportGrace):
	}
	return group.ClosedWithout(c.members, p)
}

// absent reports the ranks that have not posted the current step: p and others.
func (c *comm) absent(p int) group.Report {
	ranks := []int{p}
	for other := range c.size {
		if other != p && other != c.rank && !c.posted(other, c.step) {
			ranks = append(ranks, other)
		}
	}
	slices.Sort(ranks)
	return group.Absent(c.world.Stopped(), c.members, ranks, c.timeout)
}

// Abort implements [backend.Communicator].
func (c *comm) Abort(cause error) {
	if cause == nil {
		cause = errors.New("no cause given")
	}
	c.abort(group.AbortedBy(c.members, c.rank, cause), cause)
}

// abort ends the group from outside a call.
func (c *comm) abort(r group.Report, cause error) {
	c.mapped.RLock()
	defer c.mapped.RUnlock()
	c.end(r.Peer, fmt.Errorf("%w: %w", backend.ErrAborted, cause))
	if c.unmapped {
		return
	}
	r.Rank = c.rank
	c.publish(r)
	c.wakeAll() // this rank too, whoever published first
}

// watch aborts the group when a rank of the job is lost.
func (c *comm) watch() {
	select {
	case <-c.left:
	case <-c.world.Down():
		f := c.world.Failure()
		c.abort(group.LostRank(c.members, f), f)
	}
}
