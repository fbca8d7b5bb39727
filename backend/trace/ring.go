package trace

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// ring holds the last events of a rank, in all its groups.
type ring struct {
	rank  int // of the outermost group
	epoch time.Time

	mu    sync.Mutex
	slots []slot
	next  uint64 // number of events so far; event i is in slots[i%len(slots)]

	works []work // not handed out yet

	queues [8]backend.Queue // the last ones seen
	ids    [8]int
	seen   int // queues so far
}

// slot is what an [Event] is made of when somebody asks: less to write for each
// call. Times are since the ring's epoch.
type slot struct {
	comm       *Communicator
	queue      int
	header     backend.Header
	bytes      int
	start, end time.Duration // end is 0 while nobody knows that it is over
	err        error
	work       *work // set while nobody knows that it is over
}

func (s *slot) event(epoch time.Time) Event {
	e := Event{
		Comm: s.comm.Name(), Rank: s.comm.Rank(), Queue: s.queue,
		Header: s.header, Bytes: int64(s.bytes), Start: epoch.Add(s.start), Err: s.err,
	}
	if s.end != 0 {
		e.End = epoch.Add(s.end)
	}
	return e
}

func newRing(rank, n int) *ring {
	return &ring{rank: rank, epoch: time.Now(), slots: make([]slot, n)}
}

// begin records an event that starts now, and returns the work that ends it.
func (r *ring) begin(q backend.Queue, c *Communicator, nbytes int, h backend.Header) *work {
	r.mu.Lock()
	defer r.mu.Unlock()
	ticket, w := r.next, r.newWork()
	r.next++
	w.ring, w.ticket = r, ticket
	s := &r.slots[ticket%uint64(len(r.slots))]
	s.comm, s.queue, s.header, s.bytes, s.start, s.end = c, r.number(q), h, nbytes, time.Since(r.epoch), 0
	s.err, s.work = nil, w
	return w
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

// at returns the slot of a ticket, nil if it holds a later event by now.
func (r *ring) at(ticket uint64) *slot {
	if r.next-ticket > uint64(len(r.slots)) {
		return nil
	}
	return &r.slots[ticket%uint64(len(r.slots))]
}

// end records that an event is over. The first time counts.
func (r *ring) end(ticket uint64, err error) {
	now := max(time.Since(r.epoch), 1)
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.at(ticket); s != nil && s.end == 0 {
		s.end, s.err, s.work = now, err, nil
	}
}

// worksAtOnce is how many works are allocated together, so that most calls
// allocate nothing.
const worksAtOnce = 64

// newWork takes a work that was not used yet. mu is held.
func (r *ring) newWork() *work {
	if len(r.works) == 0 {
		r.works = make([]work, worksAtOnce)
	}
	w := &r.works[0]
	r.works = r.works[1:]
	return w
}

// poll asks the works that nobody has joined whether they are done. past is a
// context that is over.
func (r *ring) poll(past context.Context) {
	for _, w := range r.unfinished() {
		if err := w.inner.Join(past); !errors.Is(err, context.Canceled) {
			r.end(w.ticket, err)
		}
	}
}

// unfinished are the works of the events that have started and are kept.
func (r *ring) unfinished() (works []*work) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for ticket := r.first(); ticket < r.next; ticket++ {
		if w := r.at(ticket).work; w != nil && w.started.Load() {
			works = append(works, w)
		}
	}
	return works
}

// first returns the ticket of the oldest event kept. mu is held.
func (r *ring) first() uint64 {
	if n := uint64(len(r.slots)); r.next > n {
		return r.next - n
	}
	return 0
}

func (r *ring) events() []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []Event
	for ticket := r.first(); ticket < r.next; ticket++ {
		all = append(all, r.at(ticket).event(r.epoch))
	}
	return all
}

func (r *ring) dropped() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.first()
}
