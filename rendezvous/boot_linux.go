package rendezvous

import (
	"os"
	"strings"
	"syscall"
)

// bootID returns what tells machines of one name apart: the start of the system, and the device of
// shared memory, 0 if there is none; every mount has its own number.
func bootID() (boot string, memory uint64) {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	var s syscall.Stat_t
	_ = syscall.Stat("/dev/shm", &s)
	return strings.TrimSpace(string(id)), s.Dev
}
