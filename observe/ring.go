package observe

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
	mu      sync.Mutex // guards the communicators' seq, too
	keeps   int        // calls
	records []record   // those of keeps calls, and of ahead that are cleared
	next    uint64     // number of calls so far; call i is in records[i%len(records)]
	fresh   []call     // not used yet
	spare   *call      // one that nobody has

	epoch  time.Time
	seen   int // queues so far
	queues [8]struct {
		queue  backend.Queue
		number int
	} // the last ones seen

	rank int // of the outermost group
}

// record is what an [Event] is made of when somebody asks. Times are since the ring's epoch.
type record struct {
	comm       *Communicator
	queue      int
	header     backend.Header
	bytes      int
	start, end time.Duration // end is 0 while nobody knows that it is over
	err        error
	call       *call
}

// call is the Work of a call, which records its end. It holds little: each is written to
// memory that the processor has not seen for long.
type call struct {
	inner   backend.Work
	ring    *ring
	number  uint64
	started atomic.Bool // there is inner, and somebody may join the call
}

var _ backend.Work = (*call)(nil)

// Wait implements [backend.Work].
func (c *call) Wait(q backend.Queue) error { return c.inner.Wait(q) }

// Done implements [backend.Work].
func (c *call) Done() bool { return c.inner.Done() }

// Join implements [backend.Work].
func (c *call) Join(ctx context.Context) error {
	err := c.inner.Join(ctx)
	if stopped := ctx.Err(); stopped == nil || !errors.Is(err, stopped) {
		c.ring.over(c, err, true)
	}
	return err
}

// event is that of a call. The ring's mu is held.
func (r *record) event(epoch time.Time) Event {
	e := Event{
		Comm: r.comm.Name(), Rank: r.comm.Rank(), Queue: r.queue,
		Header: r.header, Bytes: int64(r.bytes), Start: epoch.Add(r.start), Err: r.err,
	}
	if r.end != 0 {
		e.End = epoch.Add(r.end)
	}
	return e
}

func newRing(rank, n int) *ring {
	return &ring{rank: rank, epoch: time.Now(), keeps: n, records: make([]record, (n+ahead-1)/ahead*ahead+ahead)}
}

// ahead is how many records are cleared together, ahead of their use. What is in a row the
// processor fetches by itself; for one record at a time, which has been out of its caches since
// its last use, it would wait.
const ahead = 16

// begin records a call that starts now.
func (r *ring) begin(c *Communicator, q backend.Queue, what *backend.Collective, count int, dst, src backend.Buffer) *call {
	r.mu.Lock()
	defer r.mu.Unlock()
	c.seq++
	at := r.next % uint64(len(r.records))
	if at%ahead == 0 {
		clear(r.records[at : at+ahead])
	}
	this := &r.records[at]
	this.comm, this.queue = c, r.number(q)
	this.header.Set(what, c.seq, count, what.DType(dst, src))
	this.bytes, this.call, this.start = max(dst.NBytes(), src.NBytes()), r.room(), time.Since(r.epoch)
	this.call.ring, this.call.number = r, r.next
	r.next++
	return this.call
}

// record returns the place of a call's record.
func (r *ring) record(number uint64) *record { return &r.records[number%uint64(len(r.records))] }

// callsAtOnce is how many calls are allocated together, so that most calls allocate
// nothing.
const callsAtOnce = 64

// room returns memory for a call. mu is held.
func (r *ring) room() *call {
	if c := r.spare; c != nil {
		r.spare = nil
		return c
	}
	if len(r.fresh) == 0 {
		r.fresh = make([]call, callsAtOnce)
	}
	c := &r.fresh[0]
	r.fresh = r.fresh[1:]
	return c
}

// over records that a call is over, if it is kept. The first time counts. shared says
// whether somebody has the call, whose memory is used again else.
func (r *ring) over(c *call, err error, shared bool) {
	now := max(time.Since(r.epoch), 1)
	r.mu.Lock()
	defer r.mu.Unlock()
	if this := r.record(c.number); this.call == c && this.end == 0 {
		this.end, this.err = now, err
	}
	if !shared {
		r.spare = c
	}
}

// number returns the number of a queue. Queues that have not been seen for long
// are forgotten, so that many short-lived ones are not kept alive.
func (r *ring) number(q backend.Queue) int {
	if q == nil {
		return 0
	}
	for i := range r.queues {
		if known := &r.queues[i]; known.queue == q {
			return known.number
		}
	}
	place := &r.queues[r.seen%len(r.queues)]
	r.seen++
	place.queue, place.number = q, r.seen
	return r.seen
}

// poll asks the calls that nobody has joined whether they are done.
func (r *ring) poll() {
	for _, c := range r.unfinished() {
		if c.inner.Done() {
			r.over(c, c.inner.Join(context.Background()), true)
		}
	}
}

// kept are the calls that are kept, the oldest first. mu is held.
func (r *ring) kept() (all []*record) {
	for i := r.first(); i < r.next; i++ {
		all = append(all, r.record(i))
	}
	return all
}

// first returns the number of the oldest call kept. mu is held.
func (r *ring) first() uint64 {
	if n := uint64(r.keeps); r.next > n {
		return r.next - n
	}
	return 0
}

// unfinished are those that have been started and of which nobody knows that they are over.
func (r *ring) unfinished() (some []*call) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.kept() {
		if c.call.started.Load() && c.end == 0 {
			some = append(some, c.call)
		}
	}
	return some
}

func (r *ring) events() (all []Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.kept() {
		all = append(all, c.event(r.epoch))
	}
	return all
}

func (r *ring) dropped() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.first()
}
