//go:build unix

package observe

import (
	"os"
	"syscall"
)

// raise sends this process a signal.
func raise(s syscall.Signal) { syscall.Kill(os.Getpid(), s) }
