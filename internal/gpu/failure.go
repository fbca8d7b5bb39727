package gpu

import (
	"errors"
	"time"

	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/spinwait"
)

// ended returns err as the caller is to see it: what ends the group, and the group's own
// error, name the call and are returned when the device no longer works for the group.
func (c *Communicator) ended(err error, call string) error {
	if !c.member.Ends(err) {
		return err
	}
	c.destroy()
	return c.member.Failure(call)
}

// ending finds out which calls were done when the group has ended: those after them have
// failed, whatever aborted kernels leave behind.
func (c *Communicator) ending() {
	c.state.Lock()
	defer c.state.Unlock()
	for c.events != nil && c.done < c.started.Load() {
		if ok, err := c.dev.EventDone(c.events[(c.done+1)%eventSlots]); !ok || err != nil {
			break
		}
		c.done++
	}
	c.fixed = true
	if c.progress.at = c.progress.read(); c.status.straggler() >= 0 {
		c.progress.at = c.progress.seen
	}
	c.status.stop() // and not before: a kernel that is stopped has ended like any other
}

// leaveGrace is how long a rank that closes waits for the others to close, too.
const leaveGrace = 50 * time.Millisecond

// stuckTime is how long a call that is being started may take to come back
// before its engine is aborted under it, which ends it.
const stuckTime = 500 * time.Millisecond

// destroy aborts the engine, once, and returns when nothing of the group is under
// way on the device. NCCL may still be freeing what it had then: among ranks of
// one process it frees that of all of them when the last one aborts, and the
// driver waits for every kernel of a device before it frees memory there, also
// for one of another group that waits for this very rank.
func (c *Communicator) destroy() { c.finish(false) }

// finish is destroy, but of a group that is well it ends the engine in peace if
// all ranks close it: an abort takes NCCL a second.
func (c *Communicator) finish(well bool) {
	c.kill.Do(func() {
		engine := c.lastEngine()
		c.teardowns.beginPart(c.dead, func() error {
			defer close(c.dead)
			if engine == nil {
				return nil
			}
			c.freeGraphs()
			if well && c.board.Leave(leaveGrace) {
				return engine.close()
			}
			return engine.abort()
		})
		if w := c.waits.Load(); w != nil && !well {
			c.teardowns.beginPart(nil, func() error { w.endWaits(c.idle); return nil })
		}
		c.rest()
		c.kernelsEnd()
	})
}

// freeGraphs frees the graphs in which NCCL's calls are, since the end of NCCL's communicator waits
// for that. What runs of them is freed when it ends, by the abort at the latest. A
// launch that is under way comes first, unless that takes too long.
func (c *Communicator) freeGraphs() {
	freed := make(chan error, 1)
	go func() { freed <- c.graphs.destroy(c.member.Failure("launch of a graph")) }()
	select {
	case <-freed: // an error is one of a device that is gone
	case <-time.After(stuckTime):
	}
}

// lastEngine returns the engine once no call is being started, or when that
// takes too long. No call is started afterwards, since the group has ended.
func (c *Communicator) lastEngine() ncclComm {
	for deadline := time.Now().Add(stuckTime); !c.order.TryLock(); time.Sleep(
		20 * time.Microsecond) {
		if time.Now().After(deadline) {
			return c.engine
		}
	}
	defer c.order.Unlock()
	return c.engine
}

// rest waits until the calls that were started have ended on the device, or else
// for the engine's end.
func (c *Communicator) rest() {
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
func (c *Communicator) idle() bool {
	c.state.Lock()
	defer c.state.Unlock()
	started := c.started.Load()
	if c.events == nil || started != c.seq.Load() { // a call was started in part, and has no event
		return false
	}
	if started == 0 {
		return true
	}
	ok, err := c.dev.EventDone(c.events[started%eventSlots])
	return ok || err != nil
}

// Abort implements [backend.Communicator].
func (c *Communicator) Abort(cause error) {
	c.member.Abort(cause)
	c.destroy()
}

// watched is a comm as the watchdog of its group sees it.
type watched struct{ *Communicator }

var _ group.Watched = watched{}

// Wants implements [group.Watched]. A kernel that has given up waiting is news, too.
func (c watched) Wants() uint64 {
	wants := c.wants()
	if wants == 0 && c.status.straggler() >= 0 {
		return c.seq.Load() + 1
	}
	return wants
}

// wants returns the number of the first call that is not done and compared, 0 if all are.
func (c *Communicator) wants() uint64 {
	compared, _ := c.board.Compare(0)
	c.state.Lock()
	defer c.state.Unlock()
	if settled := min(c.done, compared); settled < c.seq.Load() {
		return settled + 1
	}
	return 0
}

// Advance implements [group.Watched].
func (c watched) Advance() error {
	c.look()
	if err := c.gaveUp(""); err != nil {
		return err
	}
	if _, err := c.happened(min(c.wants(), c.started.Load())); err != nil {
		return err
	}
	if _, err := c.compared(c.seq.Load()); err != nil {
		return err
	}
	return c.background()
}

// Stop implements [group.Watched].
func (c watched) Stop() { c.destroy() }

// background returns an error that NCCL has found by itself. Between machines that may be the
// connection to a rank that was lost or has aborted, whose news come a moment later and say more.
func (c *Communicator) background() error {
	if !c.order.TryLock() { // a call is being started, which will report it
		return nil
	}
	defer c.order.Unlock()
	if c.engine == nil || c.member.Err() != nil {
		return nil
	}
	err := c.member.Broken(c.engine.failed())
	var found group.Found
	if errors.As(err, &found) {
		found.Doubt = lostGrace
		return found
	}
	return err
}

// lostGrace is how long an error of NCCL waits for a better reason. The loss of a rank reaches the
// job's store as soon as NCCL, and takes two messages from there, which took more than 200 ms where
// all of 32 cores were busy.
const lostGrace = 10 * group.ReportGrace
