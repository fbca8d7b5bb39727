// Package spinwait waits by polling, for things such as the event of a GPU, and bounds waits by the
// time in which the process runs.
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

	// few is how many cores are so few that whoever polls keeps others from what it waits for.
	// Waits are shorter there, of eagerOfFew, and pauses longer: tests on the emulated
	// driver, of two ranks on two cores, take 0.6 of the CPU's time.
	few        = 2
	eagerOfFew = 50 * time.Microsecond
	shareOfFew = 16
)

// Wait is one wait. The zero value is ready to use.
type Wait struct{ since time.Time }

// Pause is called between two polls. It prolongs the wait by at most a part in 256, or in 16 where
// cores are few, and lets other goroutines run.
func (w *Wait) Pause() {
	if w.since.IsZero() {
		w.since = time.Now()
	}
	if pause := pauseAfter(time.Since(w.since), runtime.NumCPU()); pause > 0 {
		sleep(pause)
		return
	}
	runtime.Gosched()
}

func pauseAfter(waited time.Duration, cores int) time.Duration {
	eager, share := eager, time.Duration(share)
	if cores <= few {
		eager, share = eagerOfFew, shareOfFew
	}
	if waited < eager {
		return 0
	}
	return min(waited/share, longest)
}
