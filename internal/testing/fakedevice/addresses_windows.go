package fakedevice

import (
	"unsafe"

	"golang.org/x/sys/windows"
)

// reserveAddresses takes addresses that have no memory.
func reserveAddresses(nbytes int) ([]byte, error) {
	at, err := windows.VirtualAlloc(0, uintptr(nbytes), windows.MEM_RESERVE, windows.PAGE_NOACCESS)
	if err != nil {
		return nil, err
	}
	// The runtime does not know these addresses, so nothing moves or frees them.
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&at)), nbytes), nil
}

func freeAddresses(a []byte) error {
	return windows.VirtualFree(uintptr(unsafe.Pointer(unsafe.SliceData(a))), 0, windows.MEM_RELEASE)
}
