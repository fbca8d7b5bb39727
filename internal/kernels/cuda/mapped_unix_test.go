//go:build unix

package cuda

import (
	"os"
	"syscall"
)

// mapped maps a file, which an emulator maps, too.
func mapped(file *os.File, nbytes int) ([]byte, error) {
	return syscall.Mmap(int(file.Fd()), 0, nbytes, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_SHARED)
}

func unmap(mem []byte) error { return syscall.Munmap(mem) }
