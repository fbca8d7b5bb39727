// Package shm makes memory that processes of one machine share, and hands it
// over from one rank to the others.
//
// The memory is an unnamed file on a tmpfs, of which nothing is left behind when the last
// process ends, however it ends. Other ranks open it through /proc, as the same user.
// Where one cannot, since it does not see the other's process (containers with pid
// namespaces of their own), the file gets a name in the tmpfs, which all must share
// then, until all have opened it: a leader that is killed meanwhile leaves the file behind.
package shm
