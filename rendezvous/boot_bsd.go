//go:build unix && !linux

package rendezvous

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// bootID tells apart machines with the same name: it returns when the system started, or the
// machine's ID.
func bootID() (boot string, memory uint64) {
	name := "kern.hostuuid"
	if runtime.GOOS == "darwin" {
		name = "kern.bootsessionuuid"
	}
	boot, _ = unix.Sysctl(name) // without it, names alone tell machines apart
	return boot, 0
}
