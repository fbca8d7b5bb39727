package fault

import (
	"fmt"
	"os"
	"sync/atomic"

	"github.com/euryale-ml/euryale/backend"
)

// New returns inner with a fault: plan happens to rank plan.Rank of inner. The result owns inner.
// Wrap every rank's communicator, with the same plan. A plan that does not pass [Plan.Check] never
// happens.
//
// Cost: an atomic addition for each call of plan.Rank, nothing on other ranks.
func New(inner backend.Communicator, plan Plan) *Communicator {
	c := &Communicator{Base: backend.Wrap(inner), plan: plan}
	if inner.Rank() == plan.Rank {
		c.calls = new(atomic.Int64)
	}
	return c
}

// Communicator is a communicator with a [Plan] that happens to one of its ranks.
type Communicator struct {
	backend.Base
	plan  Plan
	calls *atomic.Int64 // started so far, on groups from Split, too; nil on ranks without the fault
}

var _ backend.Wrapper = (*Communicator)(nil)

// Split implements [backend.Communicator]. Calls on the groups count as well.
func (c *Communicator) Split(color, key int) (backend.Communicator, error) {
	part, err := c.Base.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return &Communicator{Base: backend.Wrap(part), plan: c.plan, calls: c.calls}, nil
}

// Start implements [backend.Communicator].
func (c *Communicator) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	defer backend.AbortOnPanic(c, &what)
	if into := c.recording(q); into != nil {
		w, err := c.Base.Start(q, what, dst, src)
		return c.recorded(into, what, w, err)
	}
	c.count()
	return c.Base.Start(q, what, dst, src)
}

// StartChecked implements [backend.CheckedStarter].
func (c *Communicator) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	defer backend.AbortOnPanic(c, &what)
	if into := c.recording(q); into != nil {
		w, err := c.Pass(q, what, count, dst, src)
		return c.recorded(into, what, w, err)
	}
	c.count()
	return c.Pass(q, what, count, dst, src)
}

// recording returns what a call on q is recorded into, nil if it runs, or if nothing is counted.
func (c *Communicator) recording(q backend.Queue) *backend.Recording {
	if c.calls == nil {
		return nil
	}
	if q == nil {
		q = c.Device().Default()
	}
	if g, ok := q.(backend.GraphQueue); ok {
		return g.Recording()
	}
	return nil
}

// recorded makes each replay of a graph count a call that was recorded into it.
func (c *Communicator) recorded(into *backend.Recording, what backend.Collective, w backend.Work,
	err error) (backend.Work, error) {
	if err == nil {
		into.OnLaunch(func() {
			defer backend.AbortOnPanic(c, &what)
			c.count()
		})
	}
	return w, err
}

// count counts a call. At the call of the plan, the fault happens.
func (c *Communicator) count() {
	if c.calls != nil && c.calls.Add(1) == int64(c.plan.Call) {
		c.happen()
	}
}

// happen is the fault. It returns if the rank goes on: after Abort, and after Stop
// once the process is continued.
func (c *Communicator) happen() {
	switch c.plan.Kind {
	case Kill:
		killHere()
	case Stop:
		stopHere()
	case Panic:
		panic(fmt.Sprintf("injected fault: %v", c.plan))
	case Exit:
		os.Exit(ExitCode)
	case Abort:
		c.Base.Abort(fmt.Errorf("injected fault: %v", c.plan))
	}
}
