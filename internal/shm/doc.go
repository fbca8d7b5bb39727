// Package shm allocates memory that processes of one machine share. Package group hands it over
// from one rank to the others.
//
// The memory is an unnamed file on a tmpfs. It vanishes when the last process ends, however it
// ends. Other processes of the same user open it through /proc. If one cannot, because it does not
// see the other process (containers with separate PID namespaces), the file gets a name in the
// tmpfs until all have opened it; all must share the tmpfs then. A process that is killed in
// between leaves the file behind.
package shm
