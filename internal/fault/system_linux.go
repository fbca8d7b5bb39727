package fault

import (
	"runtime"

	"golang.org/x/sys/unix"
)

const canStop = true

func killHere() { signal(unix.SIGKILL) }

func stopHere() { signal(unix.SIGSTOP) }

// signal sends a signal to the calling thread, not to the process: the kernel delivers it before
// the thread goes on, so the call is never started.
func signal(s unix.Signal) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	unix.Tgkill(unix.Getpid(), unix.Gettid(), s) // cannot fail: the thread is this one
}
