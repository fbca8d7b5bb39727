// Package spinwait waits for what can only be looked at, such as an event of a GPU.
package spinwait

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// eager is how long there are no pauses: what takes microseconds must not wait
	// for a sleeping thread, which takes fifty of them to wake up. A rank that
	// sleeps too long makes the others wait, and sleep too.
	eager = time.Millisecond
	// share is how much of the time waited so far the next pause takes at most.
	share = 16
	// longest bounds a pause, and so how late news of a failure is.
	longest = time.Millisecond
)

// Wait is one wait. The zero value is ready to use.
type Wait struct{ since time.Time }

// Pause is called between two looks. It costs a sixteenth of the wait at most,
// and lets other goroutines run.
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

// sleep is time.Sleep to within a tenth of a millisecond: that one takes a whole
// millisecond at least where no goroutine runs. A signal may end it early.
func sleep(d time.Duration) {
	ts := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.Nanosleep(&ts, nil)
}

func pauseAfter(waited time.Duration) time.Duration {
	if waited < eager {
		return 0
	}
	return min(waited/share, longest)
}
