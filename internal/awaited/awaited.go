// Package awaited counts for whom ranks wait: communicators add to the [Times] of their World, and
// package observe reads them.
package awaited

import (
	"sync/atomic"
	"time"
)

// Times are how long a rank has waited for each other rank in collectives: for ranks whose headers
// or data had not come. Nil ones count nothing.
type Times struct {
	on  atomic.Bool
	all []atomic.Int64 // nanoseconds, by rank
}

// New returns the times of a job of so many ranks, which do not count yet.
func New(ranks int) *Times { return &Times{all: make([]atomic.Int64, ranks)} }

// Count begins to count.
func (t *Times) Count() { t.on.Store(true) }

// Counts reports whether they count. A communicator checks this before it reads a clock.
func (t *Times) Counts() bool { return t != nil && t.on.Load() }

// Since adds the time since a wait for a rank began.
func (t *Times) Since(began time.Time, rank int) {
	t.all[rank].Add(int64(time.Since(began)))
}

// AppendTo appends the times so far, by rank.
func (t *Times) AppendTo(to []time.Duration) []time.Duration {
	for r := range t.all {
		to = append(to, time.Duration(t.all[r].Load()))
	}
	return to
}
