package trace

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// ring holds the last calls of a rank, in all its groups.
type ring struct {
	rank  int // of the outermost group
	epoch time.Time

	mu     sync.Mutex // guards the calls, too
	places []place
	next   uint64 // number of calls so far; call i is in places[i%len(places)]
	fresh  []call // not used yet

	queues [8]backend.Queue // the last ones seen
	ids    [8]int
	seen   int // queues so far
}

// place has a call. It is free if the call is over and nobody else has its memory: that
// is not asked of the call itself, which has been out of the processor's caches for long.
type place struct {
	call *call
	free bool
}

// call is what an [Event] is made of when somebody asks, and the Work that records its
// end. Times are since the ring's epoch.
type call struct {
	ring       *ring
	number     uint64
	comm       *Communicator
	queue      int
	header     backend.Header
	bytes      int
	start, end time.Duration // end is 0 while nobody knows that it is over
	err        error
	inner      backend.Work
	started    atomic.Bool // there is inner, and somebody may join the call
}

var _ backend.Work = (*call)(nil)

// Wait implements [backend.Work].
func (c *call) Wait(q backend.Queue) error { return c.inner.Wait(q) }

// Join implements [backend.Work].
func (c *call) Join(ctx context.Context) error {
	err := c.inner.Join(ctx)
	if stopped := ctx.Err(); stopped == nil || !errors.Is(err, stopped) {
		c.over(err, true)
	}
	return err
}

// over records that a call is over. The first time counts. shared says whether somebody
// may join it.
func (c *call) over(err error, shared bool) {
	now := max(time.Since(c.ring.epoch), 1)
	c.ring.mu.Lock()
	defer c.ring.mu.Unlock()
	if c.end == 0 {
		c.end, c.err = now, err
	}
	if p := c.ring.place(c.number); p.call == c {
		p.free = !shared
	}
}

// event is that of a call. The ring's mu is held.
func (c *call) event() Event {
	epoch := c.ring.epoch
	e := Event{
		Comm: c.comm.Name(), Rank: c.comm.Rank(), Queue: c.queue,
		Header: c.header, Bytes: int64(c.bytes), Start: epoch.Add(c.start), Err: c.err,
	}
	if c.end != 0 {
		e.End = epoch.Add(c.end)
	}
	return e
}

func newRing(rank, n int) *ring {
	return &ring{rank: rank, epoch: time.Now(), places: make([]place, n)}
}

// begin records a call that starts now.
func (r *ring) begin(q backend.Queue, c *Communicator, nbytes int, h backend.Header) *call {
	r.mu.Lock()
	defer r.mu.Unlock()
	this := r.room(r.place(r.next))
	this.ring, this.number, this.comm, this.queue, this.header, this.bytes = r, r.next, c, r.number(q), h, nbytes
	this.start, this.end, this.err = time.Since(r.epoch), 0, nil
	r.next++
	return this
}

// place returns that of a call.
func (r *ring) place(number uint64) *place { return &r.places[number%uint64(len(r.places))] }

// callsAtOnce is how many calls are allocated together, so that most calls allocate
// nothing.
const callsAtOnce = 64

// room returns memory for a call in a place. mu is held.
func (r *ring) room(p *place) *call {
	if !p.free {
		if len(r.fresh) == 0 {
			r.fresh = make([]call, callsAtOnce)
		}
		p.call, r.fresh = &r.fresh[0], r.fresh[1:]
	}
	p.free = false
	return p.call
}

// number returns the number of a queue. Queues that have not been seen for long
// are forgotten, so that many short-lived ones are not kept alive.
func (r *ring) number(q backend.Queue) int {
	if q == nil {
		return 0
	}
	for i, known := range r.queues {
		if known == q {
			return r.ids[i]
		}
	}
	i := r.seen % len(r.queues)
	r.seen++
	r.queues[i], r.ids[i] = q, r.seen
	return r.seen
}

// poll asks the calls that nobody has joined whether they are done. past is a
// context that is over.
func (r *ring) poll(past context.Context) {
	for _, c := range r.unfinished() {
		if err := c.inner.Join(past); !errors.Is(err, context.Canceled) {
			c.over(err, true)
		}
	}
}

// kept are the calls that are kept, the oldest first. mu is held.
func (r *ring) kept() (all []*call) {
	for i := r.first(); i < r.next; i++ {
		all = append(all, r.place(i).call)
	}
	return all
}

// first returns the number of the oldest call kept. mu is held.
func (r *ring) first() uint64 {
	if n := uint64(len(r.places)); r.next > n {
		return r.next - n
	}
	return 0
}

// unfinished are those of which nobody knows that they are over.
func (r *ring) unfinished() (some []*call) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.kept() {
		if c.started.Load() && c.end == 0 {
			some = append(some, c)
		}
	}
	return some
}

func (r *ring) events() (all []Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.kept() {
		all = append(all, c.event())
	}
	return all
}

func (r *ring) dropped() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.first()
}
