//go:build gpu

package nvml

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "nvml_gpu.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"time"
	"unsafe"
)

const soname = "libnvidia-ml.so.1"

// Values of the library.
const (
	success         = 0
	remoteGPU       = 0
	remoteSwitch    = 2
	maxLinks        = 18
	versionCapacity = 80
)

// Library is the open management library.
type Library struct{ table *C.struct_euryale_nvml }

// Open opens the library; the caller closes it.
func Open() (*Library, error) { return open(soname) }

func open(path string) (*Library, error) {
	l := &Library{(*C.struct_euryale_nvml)(C.calloc(1, C.sizeof_struct_euryale_nvml))}
	if l.table == nil {
		return nil, errors.New("nvml: out of memory")
	}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	if why := C.euryale_nvml_open(l.table, name); why != nil {
		err := fmt.Errorf("nvml: %s: it is a part of NVIDIA's driver; a container gets it with "+
			"NVIDIA_DRIVER_CAPABILITIES=compute,utility", C.GoString(why))
		l.unload()
		return nil, err
	}
	if err := l.failure("start", C.euryale_nvml_init(l.table)); err != nil {
		l.unload()
		return nil, err
	}
	return l, nil
}

// Close ends the use of the library.
func (l *Library) Close() error {
	err := l.failure("stop", C.euryale_nvml_shutdown(l.table))
	l.unload()
	return err
}

func (l *Library) unload() {
	C.euryale_nvml_close(l.table)
	C.free(unsafe.Pointer(l.table))
	l.table = nil
}

func (l *Library) failure(doing string, code C.int) error {
	if code == success {
		return nil
	}
	return fmt.Errorf("nvml: %s: %s", doing, C.GoString(C.euryale_nvml_error(l.table, code)))
}

// Driver returns the version of the driver: "580.95.05".
func (l *Library) Driver() (string, error) {
	var text [versionCapacity]C.char
	err := l.failure("version of the driver", C.euryale_nvml_driver(l.table, &text[0],
		versionCapacity))
	return C.GoString(&text[0]), err
}

// State returns what the device at a PCI bus id does at the moment.
func (l *Library) State(pciBusID string) (State, error) {
	device, err := l.find(pciBusID)
	if err != nil {
		return State{}, err
	}
	var s [6]C.ulonglong
	C.euryale_nvml_state(l.table, device, &s[0])
	const mega = 1e6
	return State{MemoryTotal: int64(s[0]), MemoryUsed: int64(s[1]), Clock: int64(s[2]) * mega,
		MaxClock: int64(s[3]) * mega, Throttled: time.Duration(s[4] + s[5])}, nil
}

// find returns the library's handle of a device.
func (l *Library) find(pciBusID string) (device unsafe.Pointer, err error) {
	name := C.CString(pciBusID)
	defer C.free(unsafe.Pointer(name))
	return device, l.failure("find the device at "+pciBusID, C.euryale_nvml_find(l.table, name,
		&device))
}

// Link is an active NVLink of a device, by its far end.
type Link struct {
	Switch   bool   // to an NVSwitch, which reaches all devices
	PCIBusID string // of the GPU at the other end, as CUDA writes it; "" if not known
}

// Links returns the active NVLinks of the device at a PCI bus id.
func (l *Library) Links(pciBusID string) ([]Link, error) {
	device, err := l.find(pciBusID)
	if err != nil {
		return nil, err
	}
	var links []Link
	for i := range C.uint(maxLinks) {
		var active C.uint
		// A link that the device does not have is an error, too.
		if C.euryale_nvml_link_state(l.table, device, i, &active) == success && active == 1 {
			links = append(links, l.link(device, i))
		}
	}
	return links, nil
}

// link returns the far end of a link, if it is known.
func (l *Library) link(device unsafe.Pointer, i C.uint) Link {
	var kind C.uint
	typed := C.euryale_nvml_link_remote_type(l.table, device, i, &kind) == success
	if typed && kind != remoteGPU {
		return Link{Switch: kind == remoteSwitch}
	}
	var pci C.struct_euryale_pci
	if C.euryale_nvml_link_remote_pci(l.table, device, i, &pci) != success {
		return Link{}
	}
	// The library writes the domain with eight digits, CUDA with four.
	return Link{PCIBusID: fmt.Sprintf("%04X:%02X:%02X.0", uint(pci.domain), uint(pci.bus),
		uint(pci.device))}
}
