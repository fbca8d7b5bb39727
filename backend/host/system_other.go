//go:build !linux || portable

package host

import (
	"sync/atomic"
	"time"
)

// core returns 0: cores have no numbers here. Only ranks that are processes ask, and those are on
// Linux.
func core() int { return 0 }

func leaveCore(int) {}

// longestPause bounds the pauses of a sleep, and so how late a rank may wake after a long wait.
const longestPause = time.Millisecond

// sleepOn sleeps while *word is value, until woken or for d at most. It checks between pauses,
// which get longer: the ranks are goroutines, whose threads must not sleep.
func sleepOn(word *atomic.Uint32, value uint32, d time.Duration) {
	pause := 20 * time.Microsecond
	for end := time.Now().Add(d); word.Load() == value && time.Now().Before(end); {
		time.Sleep(pause)
		pause = min(2*pause, longestPause)
	}
}

// wake wakes everyone who sleeps on word.
func wake(word *atomic.Uint32) { word.Add(1) }
