// Package shm allocates memory that processes of one machine share. Package group hands it over
// from one rank to the others.
//
// The memory is an unnamed file on a tmpfs. It vanishes when the last process ends, however it
// ends. Other processes of the same user open it through /proc. If one cannot, because it does not
// see the other process (containers with separate PID namespaces), the file gets a name in the
// tmpfs until all have opened it; all must share the tmpfs then. A process that is killed in
// between leaves the file behind.
//
// On other systems than Linux, which lack such files, the memory is of the Go heap, for the
// goroutines of one process. Build tag portable has Linux do the same, for tests.
package shm

import "errors"

// ErrProcesses says that the other ranks are processes, which cannot share memory here.
var ErrProcesses = errors.New("processes share memory on Linux only: use backend tcp, or ranks " +
	"that are goroutines of one process")

// Room is the file system of shared memory: how many bytes are free, of how many, and whether it is
// in memory.
type Room struct {
	Free, All uint64
	IsTmpfs   bool
}
