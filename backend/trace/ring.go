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
	work       backend.Work // set while nobody knows that it is over
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

// begin records an event that starts now and returns its ticket.
func (r *ring) begin(q backend.Queue, c *Communicator, nbytes int, h backend.Header) (ticket uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ticket = r.next
	r.next++
	s := &r.slots[ticket%uint64(len(r.slots))]
	s.comm, s.queue, s.header, s.bytes, s.start, s.end = c, r.number(q), h, nbytes, time.Since(r.epoch), 0
	s.err, s.work = nil, nil
	return ticket
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

// pending keeps the work of an event that is under way, and returns one that
// records its end.
func (r *ring) pending(ticket uint64, w backend.Work) *work {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.at(ticket); s != nil && s.end == 0 {
		s.work = w
	}
	if len(r.works) == 0 {
		r.works = make([]work, worksAtOnce)
	}
	next := &r.works[0]
	r.works = r.works[1:]
	*next = work{w, r, ticket}
	return next
}

// poll asks the works that nobody has joined whether they are done. past is a
// context that is over.
func (r *ring) poll(past context.Context) {
	for ticket, w := range r.unfinished() {
		if err := w.Join(past); !errors.Is(err, context.Canceled) {
			r.end(ticket, err)
		}
	}
}

func (r *ring) unfinished() map[uint64]backend.Work {
	r.mu.Lock()
	defer r.mu.Unlock()
	works := map[uint64]backend.Work{}
	for ticket := r.first(); ticket < r.next; ticket++ {
		if s := r.at(ticket); s.work != nil {
			works[ticket] = s.work
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
