package observe

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/observe/internal/straggler"
)

// Recorder keeps the last calls of a rank, in all its groups. It implements [backend.Hooks].
type Recorder struct {
	mu      sync.Mutex
	keeps   int      // the number of calls kept
	records []record // of the calls kept, and ahead that are cleared
	next    uint64   // number of calls so far
	place   int      // of the next call in records; the one before precedes it, wrapping around

	ticks  ticks
	clock  *clock // nil without TimeParts
	seen   int    // queues so far
	queues [16]struct {
		queue  backend.Queue
		number int
	} // the last ones used

	rank   int // of the outermost group
	totals totals

	graphs   []*replays
	recorded int           // graphs so far
	self     *inGraph      // for whom the recorder takes part in graphs
	parts    []*stepPart   // of the steps in graphs
	layers   bool          // are kept
	computed time.Duration // see takeComputed
	usual    straggler.Level
}

var _ backend.JoinHooks = (*Recorder)(nil)

// record is the data for an [Event], which is made only when somebody asks.
type record struct {
	comm       backend.Communicator
	queue      int
	header     backend.Header
	bytes      int
	start, end stamp // end is 0 while the call is not known to have ended
	joined     stamp // when somebody began to wait, 0 if nobody has, or nobody counts
	// since the epoch: the device's times of a part, or start and end, filled in when somebody asks
	from, to time.Duration
	err      error
	work     backend.Work // nil after the end
	part     *timedPart   // nil for a whole call
}

// New returns a recorder of the last n calls of rank; n below 1 counts as 1.
func New(rank, n int) *Recorder {
	r := &Recorder{rank: rank, ticks: newTicks()}
	r.resize(n)
	return r
}

// resize makes room for n calls, if there are none yet.
func (r *Recorder) resize(n int) {
	if r.next == 0 {
		r.keeps = max(n, 1)
		r.records = make([]record, (r.keeps+ahead-1)/ahead*ahead+ahead)
	}
}

// KeepLayers makes room for n layers of recorded steps besides the calls, from which Events and
// WriteChrome then have them. Call it before the first call.
func (r *Recorder) KeepLayers(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.resize(r.keeps + n)
	r.layers = true
}

// ahead is how many records are cleared together, ahead of their use. The processor prefetches
// consecutive memory by itself. For a single record, which has left its caches since its last use,
// it would wait.
const ahead = 16

// Start implements [backend.Hooks].
func (r *Recorder) Start(c *backend.Call) (id uint64) {
	r.mu.Lock()
	this := r.fresh()
	this.comm, this.queue, this.bytes, this.work = c.Comm, r.number(c.Queue), c.Bytes, c.Work
	this.part = r.beginPart(c)
	this.start = r.ticks.now()
	// last: it was just written in pieces, and a copy must wait until these are in the cache
	this.header = c.Header
	id = r.next
	r.advance()
	r.mu.Unlock() // not deferred, as in End: a defer takes 2 ns
	return id
}

// fresh returns the next record, which is clear. mu is held.
func (r *Recorder) fresh() *record {
	if r.place%ahead == 0 {
		r.clear(r.records[r.place : r.place+ahead])
	}
	return &r.records[r.place]
}

// advance counts the record that fresh has returned. mu is held.
func (r *Recorder) advance() {
	if r.place++; r.place == len(r.records) {
		r.place = 0
	}
	r.next++
}

// clear makes records ready for use. mu is held.
func (r *Recorder) clear(some []record) {
	if r.clock != nil {
		for i := range some {
			if p := some[i].part; p != nil {
				r.clock.reusePart(p)
			}
		}
	}
	clear(some)
}

// End implements [backend.Hooks].
func (r *Recorder) End(id uint64, err error) {
	now := max(r.ticks.now(), 1)
	r.mu.Lock()
	if id >= r.first() { // otherwise another call has its record
		this := r.record(id)
		this.err, this.work = err, nil
		if r.totals.kinds != nil {
			r.totals.add(this, now-cmp.Or(this.joined, this.start))
		}
		if !r.finish(this.part, err) {
			this.end = now
		}
	}
	r.mu.Unlock()
}

// Events returns the recorded calls, the oldest first.
func (r *Recorder) Events() []Event {
	r.poll()
	return r.endedEvents()
}

// endedEvents is Events, of calls whose end somebody has seen.
func (r *Recorder) endedEvents() (all []Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	tick := r.ticks.scale()
	for i := r.first(); i < r.next; i++ {
		this := r.record(i)
		this.settle(tick)
		all = append(all, this.event(r.ticks.epoch))
	}
	return all
}

// Last returns the call that was started last, and whether there was one. It does not check whether
// the call has ended.
func (r *Recorder) Last() (Event, bool) {
	r.mu.Lock()
	next, this := r.next, record{}
	if next > 0 {
		this = *r.record(next - 1)
	}
	r.mu.Unlock()
	if next == 0 {
		return Event{}, false
	}
	this.settle(r.ticks.scale())
	return this.event(r.ticks.epoch), true
}

// Dropped returns how many recorded collectives are no longer kept.
func (r *Recorder) Dropped() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.first()
}

// poll ends the calls and parts that have ended but that nobody has joined.
func (r *Recorder) poll() {
	r.readParts()
	r.readReplays()
	for _, w := range r.unfinished() {
		if w.Done() {
			_ = w.Join(context.Background()) // which calls End with the error
		}
	}
}

// unfinished returns the calls that are not known to have ended.
func (r *Recorder) unfinished() (some []backend.Work) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := r.first(); i < r.next; i++ {
		if w := r.record(i).work; w != nil {
			some = append(some, w)
		}
	}
	return some
}

// record returns the record of a call that is kept.
func (r *Recorder) record(id uint64) *record {
	at := r.place - int(r.next-id)
	if at < 0 { // a division would take longer than everything else
		at += len(r.records)
	}
	return &r.records[at]
}

// first returns the number of the oldest call kept. mu is held.
func (r *Recorder) first() uint64 {
	if n := uint64(r.keeps); r.next > n {
		return r.next - n
	}
	return 0
}

// number returns the number of a queue. Queues that have not been used for long are forgotten, so
// that many short-lived ones are not kept alive.
func (r *Recorder) number(q backend.Queue) int {
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
