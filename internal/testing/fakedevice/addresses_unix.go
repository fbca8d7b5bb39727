//go:build unix

package fakedevice

import "golang.org/x/sys/unix"

// reserveAddresses takes addresses that have no memory.
func reserveAddresses(nbytes int) ([]byte, error) {
	return unix.Mmap(-1, 0, nbytes, unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE|noReserve)
}

func freeAddresses(a []byte) error { return unix.Munmap(a) }
