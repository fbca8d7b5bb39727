package gpu

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/spinwait"
	"github.com/euryale-ml/euryale/rendezvous"
)

// report is that of a group, as an error on its way to fail.
type report struct{ group.Report }

func (r report) Error() string { return r.Text }

// broken makes a report of an error that the group cannot go on after, unless it
// is one, or the group's own.
func (c *comm) broken(err error) error {
	var r report
	if err == nil || c.own(err) || errors.As(err, &r) {
		return err
	}
	return report{group.Report{Reason: group.Aborted, Peer: c.rank, Text: err.Error()}}
}

// own reports whether err is the sticky error of this group: that of a part is
// another one.
func (c *comm) own(err error) bool {
	var sticky *backend.Error
	return errors.As(err, &sticky) && sticky.Comm == c.name
}

// ended returns err as the caller is to see it: a report ends the group, and a
// sticky error names the call and is returned when the device no longer works
// for the group.
func (c *comm) ended(err error, call string) error {
	var r report
	switch {
	case errors.As(err, &r):
		r.Rank = c.rank
		c.end(r.Peer, r.Cause(c.members), false)
		c.publish(r.Report)
	case !c.own(err):
		return err
	}
	c.destroy()
	return c.failure(call)
}

// end records the first error of this rank, and which calls were done by then:
// those after it have failed, whatever aborted kernels leave behind.
func (c *comm) end(peer int, cause error, patient bool) {
	if patient && c.err.Load() == nil {
		c.grace()
	}
	c.state.Lock()
	defer c.state.Unlock()
	if c.err.Load() != nil {
		return
	}
	for c.events != nil && c.done < c.started.Load() {
		if ok, err := c.lib.happened(c.dev, c.events[(c.done+1)%eventSlots]); !ok || err != nil {
			break
		}
		c.done++
	}
	c.err.Store(&backend.Error{Comm: c.name, Members: c.members, Rank: c.rank, Peer: peer, Cause: cause})
	close(c.over)
}

// graceTime is how long calls that every rank has begun may go on after another
// rank has ended the group, which may have done them before; and how long a rank
// that closes waits for the others to close, too.
const graceTime = 50 * time.Millisecond

func (c *comm) grace() {
	c.mapped.RLock()
	common := uint64(0)
	if c.mine != nil {
		common = c.board.common(c.size)
	}
	c.mapped.RUnlock()
	// A peer may be done with a call that this rank's Start has not returned from.
	for deadline := time.Now().Add(graceTime); time.Now().Before(deadline); time.Sleep(50 * time.Microsecond) {
		if done, err := c.happened(common); done || err != nil {
			return
		}
	}
}

// stuckTime is how long a call that is being started may take to come back
// before its engine is aborted under it, which ends it.
const stuckTime = 500 * time.Millisecond

// destroy aborts the engine, once, and returns when nothing of the group is under
// way on the device. NCCL may still be freeing what it had then: among ranks of
// one process it frees that of all of them when the last one aborts, and the
// driver waits for every kernel of a device before it frees memory there, also
// for one of another group that waits for this very rank.
func (c *comm) destroy() { c.finish(false) }

// finish is destroy, but of a group that is well it ends the engine in peace if
// all ranks close it: an abort takes NCCL a second.
func (c *comm) finish(well bool) {
	c.kill.Do(func() {
		engine := c.lastEngine()
		c.endings.begin(func() error {
			defer close(c.dead)
			switch {
			case engine == nil:
				return nil
			case well && c.board.group().leave(c.size, graceTime):
				return engine.close()
			}
			return engine.abort()
		})
		c.rest()
	})
}

// lastEngine returns the engine once no call is being started, or when that
// takes too long. No call is started afterwards, since the group has ended.
func (c *comm) lastEngine() engine {
	for deadline := time.Now().Add(stuckTime); !c.order.TryLock(); time.Sleep(20 * time.Microsecond) {
		if time.Now().After(deadline) {
			return c.engine
		}
	}
	defer c.order.Unlock()
	return c.engine
}

// rest waits until the calls that were started have ended on the device, or else
// for the engine's end.
func (c *comm) rest() {
	for wait := (spinwait.Wait{}); !c.idle(); wait.Pause() {
		select {
		case <-c.dead:
			return
		default:
		}
	}
}

// idle reports whether nothing is under way on the device: each call's event
// comes after those before it.
func (c *comm) idle() bool {
	c.state.Lock()
	defer c.state.Unlock()
	started := c.started.Load()
	if c.events == nil || started != c.seq.Load() { // a call was started in part, and has no event
		return false
	}
	if started == 0 {
		return true
	}
	ok, err := c.lib.happened(c.dev, c.events[started%eventSlots])
	return ok || err != nil
}

// endings are the ends of a rank's groups, a group and its parts, which may take
// longer than Close of a part.
type endings struct {
	under sync.WaitGroup
	mu    sync.Mutex
	errs  []error
}

// begin runs f, which is part of an end, in the background.
func (e *endings) begin(f func() error) {
	e.under.Go(func() {
		if err := f(); err != nil {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.errs = append(e.errs, err)
		}
	})
}

// wait returns what went wrong in all ends, once they have come.
func (e *endings) wait() error {
	e.under.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	return errors.Join(e.errs...)
}

// failure returns the sticky error as that of a call, or nil.
func (c *comm) failure(call string) error {
	err := c.err.Load()
	if err == nil {
		return nil
	}
	named := *err
	named.Call = call
	return &named
}

// publish tells the group of its end, if this is the first report.
func (c *comm) publish(r group.Report) {
	c.mapped.RLock()
	defer c.mapped.RUnlock()
	if c.mine != nil {
		c.board.group().end.Publish(r)
	}
}

// news returns the report that another rank has published, or else one that a rank has
// closed without taking part in call seq.
func (c *comm) news(seq uint64) (r group.Report, old, ok bool) {
	c.mapped.RLock()
	defer c.mapped.RUnlock()
	if c.mine == nil {
		return group.Report{}, false, false
	}
	if r, ok := c.board.group().end.Read(); ok {
		return r, true, true
	}
	for p := range c.size {
		if other := c.board.rank(p); p != c.rank && other.closed.Load() != 0 && other.posted.Load() < seq {
			return group.ClosedWithout(c.members, p), false, true
		}
	}
	return group.Report{}, false, false
}

// interrupted returns why a wait for call seq is in vain, or nil.
func (c *comm) interrupted(seq uint64) error {
	if err := c.failure(""); err != nil {
		return err
	}
	r, old, ok := c.news(seq)
	switch {
	case !ok:
		return nil
	case !old:
		return report{r}
	}
	c.end(r.Peer, r.Cause(c.members), r.Reason != group.Mismatch)
	return c.failure("")
}

// absent reports the ranks that have not begun call seq.
func (c *comm) absent(seq uint64) report {
	c.mapped.RLock()
	defer c.mapped.RUnlock()
	var ranks []int
	for p := range c.size {
		if c.mine != nil && p != c.rank && c.board.rank(p).posted.Load() < seq {
			ranks = append(ranks, p)
		}
	}
	if len(ranks) > 0 {
		return report{group.Absent(c.world.Stopped(), c.members, ranks, c.timeout)}
	}
	return report{group.Stuck(c.timeout)}
}

// Abort implements [backend.Communicator].
func (c *comm) Abort(cause error) {
	if cause == nil {
		cause = errors.New("no cause given")
	}
	r := group.AbortedBy(c.members, c.rank, cause)
	r.Rank = c.rank
	c.end(r.Peer, fmt.Errorf("%w: %w", backend.ErrAborted, cause), false)
	c.publish(r)
	c.destroy()
}

// How often the watchdog looks, with calls under way and without.
const (
	busyLook = 2 * time.Millisecond
	idleLook = 10 * time.Millisecond
)

// watch ends the group when it cannot go on, until Close.
func (c *comm) watch() {
	defer close(c.watched)
	down := c.world.Down()
	progress := watchdog{c: c, since: time.Now()}
	timer := time.NewTimer(idleLook)
	defer timer.Stop()
	for {
		select {
		case <-c.left:
			return
		case <-down:
			c.mourn(c.world.Failure())
			return
		case <-timer.C:
		}
		busy, err := progress.look()
		if err != nil {
			c.ended(err, "")
			return
		}
		timer.Reset(idleLook)
		if busy {
			timer.Reset(busyLook)
		}
	}
}

// mourn ends the group because a rank of the job is lost.
func (c *comm) mourn(f *rendezvous.Failure) {
	r := group.LostRank(c.members, f)
	r.Rank = c.rank
	c.end(r.Peer, fmt.Errorf("%w: %w", backend.ErrAborted, f), false)
	c.publish(r)
	c.destroy()
}

// watchdog watches the calls that nobody joins, too.
type watchdog struct {
	c       *comm
	settled uint64    // calls up to this one are done and compared
	since   time.Time // when that was last so
}

// look finds what ends the group: a rank that has, a mismatch, an error of NCCL,
// or calls that make no progress.
func (d *watchdog) look() (busy bool, err error) {
	c := d.c
	c.state.Lock()
	settled, seq, started := min(c.done, c.verified), c.seq.Load(), c.started.Load()
	c.state.Unlock()
	if err := c.interrupted(settled + 1); err != nil && (seq > settled || c.err.Load() != nil) {
		return false, err
	}
	if settled < seq {
		if _, err := c.happened(min(settled+1, started)); err != nil {
			return false, err
		}
		if _, err := c.compared(seq); err != nil {
			return false, err
		}
		if err := c.background(); err != nil {
			return false, err
		}
	}
	if settled == seq || settled != d.settled {
		d.settled, d.since = settled, time.Now()
	}
	if time.Since(d.since) >= c.timeout {
		return false, c.absent(settled + 1)
	}
	return settled < seq, nil
}

// background returns an error that NCCL has found by itself.
func (c *comm) background() error {
	if !c.order.TryLock() { // a call is being started, which will report it
		return nil
	}
	defer c.order.Unlock()
	if c.engine == nil || c.err.Load() != nil {
		return nil
	}
	return c.broken(c.engine.failed())
}
