//go:build unix && !linux

package rendezvous

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// bootID returns what tells machines of one name apart: the start of the system, or the machine's
// own number.
func bootID() (boot string, memory uint64) {
	name := "kern.hostuuid"
	if runtime.GOOS == "darwin" {
		name = "kern.bootsessionuuid"
	}
	boot, _ = unix.Sysctl(name) // without it, names alone do
	return boot, 0
}
