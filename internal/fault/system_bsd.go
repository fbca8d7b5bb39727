//go:build unix && !linux

package fault

import "golang.org/x/sys/unix"

const canStop = true

// killHere ends the process, at once or a moment later.
func killHere() {
	unix.Kill(unix.Getpid(), unix.SIGKILL)
	select {}
}

func stopHere() { unix.Kill(unix.Getpid(), unix.SIGSTOP) }
