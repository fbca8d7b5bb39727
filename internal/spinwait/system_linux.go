package spinwait

import (
	"time"

	"golang.org/x/sys/unix"
)

// Yield lets the other threads of this core run.
func Yield() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// sleep is time.Sleep to within a tenth of a millisecond: that one takes a whole
// millisecond at least where no goroutine runs. A signal may end it early.
func sleep(d time.Duration) {
	ts := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.Nanosleep(&ts, nil)
}
