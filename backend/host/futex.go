package host

import (
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	futexWait = 0 // FUTEX_WAIT; not private: the word is shared between processes
	futexWake = 1 // FUTEX_WAKE
)

// sleepOn sleeps while *word is value, until woken or for d at most. Being
// woken for no reason is fine: callers look again.
func sleepOn(word *atomic.Uint32, value uint32, d time.Duration) {
	timeout := unix.NsecToTimespec(d.Nanoseconds())
	// Syscall, not RawSyscall: the scheduler must be able to run other goroutines.
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWait, uintptr(value),
		uintptr(unsafe.Pointer(&timeout)), 0, 0)
}

// wake ends the sleep of whoever sleeps on word.
func wake(word *atomic.Uint32) {
	word.Add(1)
	// Never blocks, so the scheduler need not know.
	unix.RawSyscall(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWake, 1<<30)
}
