package group

import (
	"errors"
	"fmt"
	"path"

	"golang.org/x/sys/unix"
)

// allowedCores returns the cores that this process may use.
func allowedCores() (cores []int) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err == nil {
		for cpu := range len(set) * 64 {
			if set.IsSet(cpu) {
				cores = append(cores, cpu)
			}
		}
	}
	return cores
}

// lifeOf returns a descriptor that can be read once a process is dead, gone if it already is,
// and living for this process. A process passes for living, too, where the system has no such
// descriptors (before Linux 5.3), and in another pid namespace.
func lifeOf(process string) int {
	self := Process()
	var pid int
	namespace, number := path.Split(process)
	here, _ := path.Split(self)
	if _, err := fmt.Sscan(number, &pid); err != nil || process == self || namespace != here {
		return living
	}
	fd, err := unix.PidfdOpen(pid, 0)
	switch {
	case errors.Is(err, unix.ESRCH):
		return gone
	case err != nil:
		return living
	}
	return fd
}

func dead(life int) bool {
	if life < 0 {
		return life == gone
	}
	look := []unix.PollFd{{Fd: int32(life), Events: unix.POLLIN}}
	n, err := unix.Poll(look, 0)
	return err == nil && n > 0
}

// closeProcess closes the descriptor of a process.
func closeProcess(life int) {
	if life >= 0 {
		unix.Close(life)
	}
}
