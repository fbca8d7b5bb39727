// Package shm makes memory that processes of one machine share.
//
// The memory is an unnamed file on a tmpfs, of which nothing is left behind when the last
// process ends, however it ends. Other processes open it through /proc, as the same user.
// Where one cannot, since it does not see the other process (containers with pid
// namespaces of their own), the file gets a name in the tmpfs, which all must share
// then, until all have opened it: a process that is killed meanwhile leaves the file behind.
// Package group hands memory over from one rank to the others.
package shm
