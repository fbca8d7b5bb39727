package shm

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Total returns how many bytes of memory the machine has.
func Total() (uint64, error) {
	var machine unix.Sysinfo_t
	if err := unix.Sysinfo(&machine); err != nil {
		return 0, fmt.Errorf("how much memory there is: %w", err)
	}
	return uint64(machine.Totalram) * uint64(machine.Unit), nil
}
