package rendezvous

import (
	"sync/atomic"
	"time"
)

// Awaited counts how long a rank has waited for each other rank in collectives: for ranks whose
// headers or data had not come. A nil Awaited counts nothing.
type Awaited struct {
	on    atomic.Bool
	times []atomic.Int64 // nanoseconds, by rank
}

// Count begins to count.
func (a *Awaited) Count() { a.on.Store(true) }

// Counts reports whether it counts. A communicator checks this before it reads a clock.
func (a *Awaited) Counts() bool { return a != nil && a.on.Load() }

// Since adds the time since a wait for a rank began.
func (a *Awaited) Since(began time.Time, rank int) {
	a.times[rank].Add(int64(time.Since(began)))
}

// Times appends the times so far, by rank.
func (a *Awaited) Times(to []time.Duration) []time.Duration {
	for r := range a.times {
		to = append(to, time.Duration(a.times[r].Load()))
	}
	return to
}

// NewAwaited returns an Awaited for the ranks of a job, which does not count yet.
func (w *World) NewAwaited() *Awaited { return &Awaited{times: make([]atomic.Int64, w.Size)} }
