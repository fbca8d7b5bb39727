package spinwait

import (
	"context"
	"time"
)

// Patience bounds a wait for other ranks by the time in which this process runs. A process that is
// stopped, or gets no core, hears nobody meanwhile: of a pause between two looks, 5 ms count at
// most.
type Patience struct {
	left time.Duration
	last time.Time
}

// glance is above what a sleep of 200 us takes on an idle machine, and below what a process waits
// for a core on one with ten times the work.
const glance = 5 * time.Millisecond

// Patient returns a Patience of d, which starts now.
func Patient(d time.Duration) *Patience { return &Patience{left: d, last: time.Now()} }

// Over reports whether the time is used up, after it has counted the time since the last call.
func (p *Patience) Over() bool {
	now := time.Now()
	p.left -= min(now.Sub(p.last), glance)
	p.last = now
	return p.left <= 0
}

// Await waits until done is closed, and reports whether that happened in time.
func (p *Patience) Await(done <-chan struct{}) bool {
	tick := time.NewTicker(glance / 5)
	defer tick.Stop()
	for !p.Over() {
		select {
		case <-done:
			return true
		case <-tick.C:
		}
	}
	return false
}

// WithPatience is [context.WithTimeout] with a [Patience] of d in place of a deadline. When it is
// used up, the context is canceled with the cause [context.DeadlineExceeded]; its Err is Canceled.
func WithPatience(parent context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	go func() {
		if !Patient(d).Await(ctx.Done()) {
			cancel(context.DeadlineExceeded)
		}
	}()
	return ctx, func() { cancel(nil) }
}
