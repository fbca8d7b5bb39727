//go:build unix

package rendezvous

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// The system's errors for an address that cannot be listened on.
const (
	errAddrInUse    = syscall.EADDRINUSE
	errAddrNotAvail = syscall.EADDRNOTAVAIL
)

// hangUps are the errors of a connection that the other side has ended.
func hangUps() []error { return []error{syscall.ECONNRESET, syscall.EPIPE} }

// mostFiles returns how many files the process may have open.
func mostFiles() uint64 {
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return mostUnproven * unprovenShare
	}
	return uint64(files.Cur)
}

// ownerOf returns the user that a file belongs to.
func ownerOf(info os.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Uid) }

// isPrivate reports whether only its owner can access a directory.
func isPrivate(info os.FileInfo) bool { return info.Mode().Perm() == 0o700 }

// replace renames a file to the name of another, which it replaces.
func replace(from, to string) error { return os.Rename(from, to) }
