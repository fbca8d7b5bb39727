//go:build gpu

package cuda

/*
#include <cuda.h>
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
)

// CanReach reports whether kernels of d can reach memory of other directly.
func (d *Device) CanReach(other *Device) (bool, error) {
	if d.ordinal == other.ordinal {
		return true, nil
	}
	can, err := d.device.CanAccessPeer(other.device)
	if err != nil {
		return false, d.named("peer access to "+other.Name(), err)
	}
	return can != 0, nil
}

// EnablePeer lets kernels and copies of d reach memory of other, a device of
// this process: once for each of the two directions. To enable it again does
// nothing. Do it before work starts: it may stop the device.
func (d *Device) EnablePeer(other *Device) error {
	can, err := d.CanReach(other)
	if err != nil || d.ordinal == other.ordinal {
		return err
	}
	if !can {
		return d.named("peer access to "+other.Name(), fmt.Errorf("%w: the machine does not connect them so (nvidia-smi topo -p2p r): copy with CopyFrom", backend.ErrUnsupported))
	}
	return d.on("peer access to "+other.Name(), func() error {
		if err := other.context.EnablePeerAccess(0); err != nil && !errors.Is(err, cu.PeerAccessAlreadyEnabled) {
			return err
		}
		return nil
	})
}

// MemoryHandle names device memory for another process of the machine. It is
// bytes, to be sent as they are.
type MemoryHandle struct {
	Memory [64]byte // the driver's handle of a whole allocation
	Offset uint64   // of the first byte in it
	NBytes uint64
}

// Export returns a handle of memory from Alloc. It must stay allocated as long as
// others use it, and what is written there is seen by them once it is done.
func (d *Device) Export(b backend.Buffer) (MemoryHandle, error) {
	base, nbytes, ok := d.memory.allocation(b.Addr())
	if end := int(b.Addr()-base) + b.NBytes(); !ok || end > nbytes {
		return MemoryHandle{}, d.named("export", fmt.Errorf("%w: %d bytes at %#x are not from Alloc of this device", backend.ErrArgument, b.NBytes(), b.Addr()))
	}
	h := MemoryHandle{Offset: uint64(b.Addr() - base), NBytes: uint64(b.NBytes())}
	err := d.on("export", func() error {
		var handle C.CUipcMemHandle
		if code := C.cuIpcGetMemHandle(&handle, C.CUdeviceptr(base)); code != C.CUDA_SUCCESS {
			return fmt.Errorf("%w: can processes share memory here (containers need --ipc=host)?", failure(int(code)))
		}
		h.Memory = *(*[64]byte)(unsafe.Pointer(&handle))
		return nil
	})
	return h, err
}

// Import returns another process's memory, on this device or on one that it can
// reach. Give it back with CloseImport before that process frees it.
func (d *Device) Import(h MemoryHandle) (backend.Buffer, error) {
	var base C.CUdeviceptr
	err := d.on("import", func() error {
		handle := *(*C.CUipcMemHandle)(unsafe.Pointer(&h.Memory))
		if code := C.cuIpcOpenMemHandle(&base, handle, C.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS); code != C.CUDA_SUCCESS {
			return fmt.Errorf("%w: is the handle from another process of this machine that still has the memory?", failure(int(code)))
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

// CloseImport gives back memory from Import. Work that uses it must be done.
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
		return d.named("close an import", fmt.Errorf("%w: %#x is not from Import", backend.ErrArgument, b.Addr()))
	}
	return d.on("close an import", func() error {
		if code := C.cuIpcCloseMemHandle(C.CUdeviceptr(bases[len(bases)-1])); code != C.CUDA_SUCCESS {
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
