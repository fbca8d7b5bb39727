//go:build darwin || freebsd

package shm

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// Total returns how many bytes of memory the machine has.
func Total() (uint64, error) {
	name := "hw.physmem"
	if runtime.GOOS == "darwin" {
		name = "hw.memsize"
	}
	all, err := unix.SysctlUint64(name)
	if err != nil {
		return 0, fmt.Errorf("how much memory there is: %w", err)
	}
	return all, nil
}
