// Package shm makes memory that processes of one machine share, and hands it
// over from one rank to the others.
//
// The memory is an unnamed file on a tmpfs: nothing is left behind when the last
// process ends, however it ends. Other ranks open it through /proc, so they must
// run as the same user and see each other's processes.
package shm
