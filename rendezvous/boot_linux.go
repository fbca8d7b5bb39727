package rendezvous

import (
	"os"
	"strings"
	"syscall"
)

// bootID tells apart machines with the same name: it returns the ID of the boot, and the device of
// shared memory, 0 if there is none; every mount has another device.
func bootID() (boot string, memory uint64) {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	var s syscall.Stat_t
	_ = syscall.Stat("/dev/shm", &s)
	return strings.TrimSpace(string(id)), s.Dev
}
