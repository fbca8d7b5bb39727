//go:build unix

package files

import (
	"io/fs"
	"syscall"
)

// noWait makes an open of a pipe or a terminal return at once, and take no terminal.
const noWait = syscall.O_NONBLOCK | syscall.O_NOCTTY

// onDisk returns how many bytes the disk has for a file, 0 where the file system does not say.
func onDisk(info fs.FileInfo) int64 {
	const block = 512 // whatever that of the disk is
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return s.Blocks * block
	}
	return 0
}
