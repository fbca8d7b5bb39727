// Package spinwait waits by polling, for things such as the event of a GPU.
package spinwait

import (
	"runtime"
	"time"
)

const (
	// eager is how long a wait has no pauses. A thread takes 50 microseconds to wake
	// up, which is too long for waits of a few microseconds. A rank that sleeps too
	// long makes the others wait, and sleep, too.
	eager = time.Millisecond
	// share bounds the next pause to a part of the time waited so far. Steps of 2 to 33 ms on an
	// H200 took 1.5 to 4 % longer with a sixteenth.
	share = 256
	// longest bounds a pause, and so the delay until a failure is noticed.
	longest = time.Millisecond
)

// Wait is one wait. The zero value is ready to use.
type Wait struct{ since time.Time }

// Pause is called between two polls. It prolongs the wait by at most a part in 256, and lets
// other goroutines run.
func (w *Wait) Pause() {
	if w.since.IsZero() {
		w.since = time.Now()
	}
	if pause := pauseAfter(time.Since(w.since)); pause > 0 {
		sleep(pause)
		return
	}
	runtime.Gosched()
}

func pauseAfter(waited time.Duration) time.Duration {
	if waited < eager {
		return 0
	}
	return min(waited/share, longest)
}
