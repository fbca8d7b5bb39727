//go:build gpu

package cuda

/*
#include <cuda.h>
*/
import "C"

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/gpu/nvml"
)

// CanReach reports whether kernels of d can reach memory of another device of this process
// directly.
func (d *Device) CanReach(ordinal int) (bool, error) {
	if ordinal == d.ordinal {
		return true, nil
	}
	other, err := cu.GetDevice(ordinal)
	if err != nil {
		return false, d.named(fmt.Sprintf("find cuda:%d", ordinal), err)
	}
	can, err := d.device.CanAccessPeer(other)
	return can != 0, d.named(fmt.Sprintf("peer access to cuda:%d", ordinal), err)
}

// EnablePeerAccess lets kernels and copies of d reach memory of another open device of this
// process: once for each of the two directions. To enable it again does nothing. Do it
// before work starts: it may stop the device.
//
// Errors: ErrUnsupported if the machine does not connect the devices that way.
func (d *Device) EnablePeerAccess(ordinal int) error {
	can, err := d.CanReach(ordinal)
	if err != nil || ordinal == d.ordinal {
		return err
	}
	return d.on(fmt.Sprintf("peer access to cuda:%d", ordinal), func() error {
		if !can {
			return fmt.Errorf("%w: the machine does not connect them so (nvidia-smi topo -p2p "+
				"r): copy with CopyFrom", backend.ErrUnsupported)
		}
		other, err := cu.GetDevice(ordinal)
		if err != nil {
			return err
		}
		context, err := other.RetainPrimaryCtx() // the other Device's, which keeps it
		if err != nil {
			return err
		}
		err = context.EnablePeerAccess(0)
		if errors.Is(err, cu.PeerAccessAlreadyEnabled) {
			err = nil
		}
		return errors.Join(err, other.ReleasePrimaryCtx())
	})
}

// Reachable returns the PCI bus ids of the other devices of this process whose memory
// kernels of d can reach.
func (d *Device) Reachable() []string {
	var all []string
	n, err := cu.NumDevices()
	for ordinal := 0; err == nil && ordinal < n; ordinal++ {
		if can, err := d.CanReach(ordinal); !can || err != nil || ordinal == d.ordinal {
			continue
		}
		if other, err := cu.GetDevice(ordinal); err == nil {
			if bus, err := busOf(other); err == nil {
				all = append(all, bus)
			}
		}
	}
	return all
}

// NVLinks returns the PCI bus ids at the far ends of the device's NVLinks to devices, one for
// each link, and how many links lead to switches. Without NVML there are none.
func (d *Device) NVLinks() (direct []string, switches int) {
	lib, err := nvml.Open()
	if err != nil {
		return nil, 0
	}
	defer lib.Close()
	links, err := lib.Links(d.bus)
	if err != nil {
		return nil, 0
	}
	for _, l := range links {
		switch {
		case l.Switch:
			switches++
		case l.PCIBusID != "":
			direct = append(direct, l.PCIBusID)
		}
	}
	return direct, switches
}

// memoryHandle names device memory for another process of the machine.
type memoryHandle struct {
	Memory [C.CU_IPC_HANDLE_SIZE]byte // the driver's handle of a whole allocation
	Offset uint64                     // of the first byte in it
	NBytes uint64
}

// Export returns a handle of memory from Alloc, for Import in another process of the machine.
// The memory must stay allocated as long as others use it, and what is written there is seen
// by them once it is done.
func (d *Device) Export(b backend.Buffer) ([]byte, error) {
	base, nbytes, ok := d.memory.allocation(b.Addr())
	if end := int(b.Addr()-base) + b.NBytes(); !ok || end > nbytes {
		return nil,
			d.named("export", fmt.Errorf("%w: %d bytes at %#x are not from Alloc of this device",
				backend.ErrArgument, b.NBytes(), b.Addr()))
	}
	h := memoryHandle{Offset: uint64(b.Addr() - base), NBytes: uint64(b.NBytes())}
	err := d.on("export", func() error {
		var handle C.CUipcMemHandle
		if code := C.cuIpcGetMemHandle(&handle, C.CUdeviceptr(base)); code != C.CUDA_SUCCESS {
			return fmt.Errorf("%w: can processes share memory here (containers need --ipc=host)?",
				failure(int(code)))
		}
		h.Memory = *(*[C.CU_IPC_HANDLE_SIZE]byte)(unsafe.Pointer(&handle))
		return nil
	})
	if err != nil {
		return nil, err
	}
	return binary.Append(nil, binary.NativeEndian, h)
}

// Import returns another process's memory, on this device or on one that it can
// reach. Give it back with CloseImport before that process frees it.
func (d *Device) Import(name []byte) (backend.Buffer, error) {
	var h memoryHandle
	if _, err := binary.Decode(name, binary.NativeEndian, &h); err != nil {
		return backend.Buffer{}, d.named("import", fmt.Errorf("%w: a handle of %d bytes: %w",
			backend.ErrArgument, len(name), err))
	}
	var base C.CUdeviceptr
	err := d.on("import", func() error {
		handle := *(*C.CUipcMemHandle)(unsafe.Pointer(&h.Memory))
		if code := C.cuIpcOpenMemHandle(&base, handle,
			C.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS); code != C.CUDA_SUCCESS {
			return fmt.Errorf("%w: is the handle from another process of this machine that still "+
				"has the memory?", failure(int(code)))
		}
		return nil
	})
	if err != nil {
		return backend.Buffer{}, err
	}
	addr := uintptr(base) + uintptr(h.Offset)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.imports[addr] = append(d.imports[addr], uintptr(base))
	return backend.OnDevice(backend.U8, addr, int(h.NBytes)), nil
}

// CloseImport gives back memory from Import, after Close only with Retain. Work that uses it
// must be done.
func (d *Device) CloseImport(b backend.Buffer) error {
	d.mu.Lock()
	bases := d.imports[b.Addr()]
	if n := len(bases); n > 1 {
		d.imports[b.Addr()] = bases[:n-1]
	} else {
		delete(d.imports, b.Addr())
	}
	d.mu.Unlock()
	if len(bases) == 0 {
		return d.named("close an import", fmt.Errorf("%w: %#x is not from Import",
			backend.ErrArgument, b.Addr()))
	}
	return d.onRetained("close an import", func() error {
		if code := C.cuIpcCloseMemHandle(
			C.CUdeviceptr(bases[len(bases)-1])); code != C.CUDA_SUCCESS {
			return failure(int(code))
		}
		return nil
	})
}

// allocation returns where the allocation lies that an address is in.
func (c *cache) allocation(addr uintptr) (base uintptr, nbytes int, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.around(addr); s != nil {
		return s.addr, s.nbytes, true
	}
	return 0, 0, false
}
