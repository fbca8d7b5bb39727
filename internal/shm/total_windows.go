package shm

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/windows"
)

// Total returns how many bytes of memory the machine has.
func Total() (uint64, error) {
	status := struct { // MEMORYSTATUSEX
		length, load uint32
		total        uint64
		_            [6]uint64
	}{}
	status.length = uint32(unsafe.Sizeof(status))
	get := windows.NewLazySystemDLL("kernel32.dll").NewProc("GlobalMemoryStatusEx")
	if ok, _, err := get.Call(uintptr(unsafe.Pointer(&status))); ok == 0 {
		return 0, fmt.Errorf("how much memory there is: %w", err)
	}
	return status.total, nil
}
