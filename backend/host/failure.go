package host

import (
	"github.com/euryale-ml/euryale/internal/group"
)

// health is what the ranks show each other of their state, in the region. An event that ends the
// group wakes everyone.
type health struct{ *region }

var _ group.Health = health{}

// Begun implements [group.Health]. Here a rank begins steps.
func (h health) Begun(r int) uint64 {
	lines := &h.rankPage(r).lines
	return max(lines[0].posted.Load(), lines[1].posted.Load())
}

func (h health) Closed(r int) bool { return h.rankPage(r).closed.Load() != 0 }

func (h health) Close() {
	h.rankPage(h.rank).closed.Store(1)
	h.wakeAll()
}

func (h health) Publish(r group.Report) {
	if h.group().end.Publish(r) {
		h.wakeAll()
	}
}

func (h health) Reported() (group.Report, bool) { return h.group().end.Read() }

func (h health) Heard() (group.Report, bool) { return h.Reported() }

// failure returns the group's error as that of call k, or nil.
func (c *comm) failure(k *call) error {
	if c.Member.Err() == nil {
		return nil
	}
	return c.Member.Failure(k.c.Header(k.seq, k.count, k.dtype).String())
}

// interrupted returns the error that ends a wait for rank p, or nil. The group decides.
//
// A rank posts before it can fail in anything later. So if p has posted a step when an end is
// noticed, that step was complete before the end, and goes on.
func (c *comm) interrupted(p int, k *call) error {
	if c.Member.Check(c.step) == nil || c.posted(p, c.step) {
		return nil
	}
	return c.failure(k)
}

// calm reports whether only the timeout can end the wait for rank p.
func (c *comm) calm(p int) bool {
	_, ended := c.health.Reported()
	return !ended && c.Member.Err() == nil && !c.health.Closed(p)
}
