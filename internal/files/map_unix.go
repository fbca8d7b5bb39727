//go:build unix

package files

import (
	"os"

	"golang.org/x/sys/unix"
)

// Map returns the first bytes of a file of a disk as memory that can only be read, nil if the
// system does not map it. The file may be closed. It must not become shorter: who reads what is cut
// off ends the process, unless debug.SetPanicOnFault is set. Nothing unmaps it.
func Map(f File, size int64) []byte {
	on, ok := f.(*os.File)
	if !ok || int64(int(size)) != size || size == 0 {
		return nil
	}
	memory, err := unix.Mmap(int(on.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil
	}
	_ = unix.Madvise(memory, unix.MADV_WILLNEED) // a hint
	return memory
}
