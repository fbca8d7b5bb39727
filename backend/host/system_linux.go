//go:build !portable

package host

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// core returns the core that the caller runs on, or ran on a moment ago.
func core() int {
	var n uint32
	unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&n)), 0, 0)
	return int(n)
}

// leaveCore moves the thread to another core, if it may use one.
func leaveCore(here int) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var allowed unix.CPUSet
	if unix.SchedGetaffinity(0, &allowed) != nil {
		return // it stays, which is slower
	}
	others := allowed
	if others.Clear(here); others.Count() == 0 || unix.SchedSetaffinity(0, &others) != nil {
		return
	}
	// It cannot fail: these cores were allowed before. If none of them still is, the system has
	// chosen others.
	_ = unix.SchedSetaffinity(0, &allowed)
}

const (
	futexWait = 0 // FUTEX_WAIT; not private: the word is shared between processes
	futexWake = 1 // FUTEX_WAKE
)

// sleepOn sleeps while *word is value, until woken or for d at most. Spurious wake-ups are fine:
// callers look again.
func sleepOn(word *atomic.Uint32, value uint32, d time.Duration) {
	timeout := unix.NsecToTimespec(d.Nanoseconds())
	// Syscall, not RawSyscall: the scheduler must be able to run other goroutines.
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWait, uintptr(value),
		uintptr(unsafe.Pointer(&timeout)), 0, 0)
}

// wake wakes everyone who sleeps on word.
func wake(word *atomic.Uint32) {
	word.Add(1)
	// It never blocks, so the scheduler need not know.
	unix.RawSyscall(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWake, 1<<30)
}
