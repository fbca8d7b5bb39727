//go:build unix

package session

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// isPipe reports whether an open file is the pipe of an inode.
func isPipe(fd int, inode string) bool {
	var stat unix.Stat_t
	return unix.Fstat(fd, &stat) == nil && stat.Mode&unix.S_IFMT == unix.S_IFIFO &&
		fmt.Sprint(stat.Ino) == inode
}

func write(fd int, text []byte) { unix.Write(fd, text) }
