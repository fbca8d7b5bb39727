package observe

import (
	"context"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// New returns inner with its last n collectives recorded; n below 1 counts as
// 1. The result owns inner.
func New(inner backend.Communicator, n int) *Communicator {
	return &Communicator{Base: backend.Wrap(inner), rank: inner.Rank(), size: inner.Size(), ring: newRing(inner.Rank(), max(n, 1))}
}

// Communicator records inner's collectives. Those of its parts are kept in the
// same ring.
type Communicator struct {
	backend.Base
	rank int // inner's, here because every call asks
	size int
	ring *ring
	seq  uint64   // number of the last call; the ring's mu guards it
	_    [64]byte // ranks of one process would write to the same cache line
}

var _ backend.Wrapper = (*Communicator)(nil)

// Split implements [backend.Communicator].
func (c *Communicator) Split(color, key int) (backend.Communicator, error) {
	part, err := c.Base.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return &Communicator{Base: backend.Wrap(part), rank: part.Rank(), size: part.Size(), ring: c.ring}, nil
}

// Start implements [backend.Communicator]. Calls with wrong arguments are not
// recorded.
func (c *Communicator) Start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	count, err := what.Check(c.rank, c.size, dst, src)
	if err != nil {
		return c.Base.Start(q, what, dst, src) // which says the same
	}
	traced := c.ring.begin(c, q, &what, count, dst, src)
	w, err := c.Base.Start(q, what, dst, src)
	if err != nil {
		c.ring.over(traced, err, false)
		return nil, err
	}
	if !dst.Device() && !src.Device() { // on a device it is not over yet, and to ask takes time
		if w.Done() {
			c.ring.over(traced, w.Join(context.Background()), false)
			return w, nil
		}
	}
	traced.inner = w
	traced.started.Store(true)
	return traced, nil
}

// Events returns what is kept, the oldest first.
func (c *Communicator) Events() []Event {
	c.ring.poll()
	return c.ring.events()
}

// Dropped returns how many collectives were recorded and are no longer kept.
func (c *Communicator) Dropped() uint64 { return c.ring.dropped() }

// Event is one collective of one rank.
type Event struct {
	Comm   string         // name of the group
	Rank   int            // this rank in the group
	Queue  int            // 0 is the device's default queue, others are numbered as they come
	Header backend.Header // what was called
	Bytes  int64          // of the larger buffer
	Start  time.Time
	End    time.Time // zero while it is not known to be over
	Err    error
}
