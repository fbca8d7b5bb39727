//go:build gpu

package gpu

/*
#include <cuda.h>
*/
import "C"

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/gpu/nvml"
	peers "github.com/euryale-ml/euryale/kernels/cuda"
)

// openPeer returns a communicator's device as one whose memory others can reach.
func openPeer(d backend.Device) (peerDevice, error) {
	g, ok := d.(*cuda.Device)
	if !ok {
		return nil, fmt.Errorf("%s is a %T, not a GPU", d.Name(), d)
	}
	own := &device{Device: g, disowned: map[uintptr]bool{}, imported: map[uintptr]C.CUdeviceptr{}}
	var err error
	own.context, err = own.retain(g.Ordinal())
	return own, err
}

// device is a GPU. Its context stays until Close, and so does what is in it, even if the
// GPU itself is closed before.
type device struct {
	*cuda.Device
	context  cu.CUContext
	retained []cu.Device // whose primary contexts are
	disowned map[uintptr]bool
	imported map[uintptr]C.CUdeviceptr // where the allocations begin that imports are in
}

// Multiprocessors implements [peerDevice].
func (d *device) Multiprocessors() int {
	self, err := cu.GetDevice(d.Ordinal())
	if err != nil {
		return 0
	}
	n, err := self.Attribute(cu.MultiprocessorCount)
	if err != nil {
		return 0
	}
	return n
}

// retain keeps a device's primary context until Close.
func (d *device) retain(ordinal int) (cu.CUContext, error) {
	other, err := cu.GetDevice(ordinal)
	if err != nil {
		return cu.CUContext{}, err
	}
	context, err := other.RetainPrimaryCtx()
	if err == nil {
		d.retained = append(d.retained, other)
	}
	return context, err
}

// bound runs f in the device's context.
func (d *device) bound(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := cu.CurrentContext()
	if err != nil {
		return err
	}
	if err := cu.SetCurrentContext(d.context); err != nil {
		return err
	}
	return errors.Join(f(), cu.SetCurrentContext(before))
}

// Wires asks the driver, and NVML if it is there, for the connections.
func (d *device) Wires() Wires {
	w := Wires{Bus: d.PCIBusID(), Tears: d.tears()}
	n, err := cu.NumDevices()
	for ordinal := 0; err == nil && ordinal < n; ordinal++ {
		if bus, can := d.reach(ordinal); can {
			w.Reach = append(w.Reach, bus)
		}
	}
	lib, err := nvml.Open()
	if err != nil {
		return w
	}
	defer lib.Close()
	links, err := lib.Links(w.Bus)
	if err != nil {
		return w
	}
	for _, l := range links {
		switch {
		case l.Switch:
			w.Switches++
		case l.PCIBusID != "":
			w.Direct = append(w.Direct, l.PCIBusID)
		}
	}
	return w
}

// tears reports whether lines may arrive in parts: always, if nobody knows the device.
func (d *device) tears() bool {
	self, err := cu.GetDevice(d.Ordinal())
	if err != nil {
		return true
	}
	major, minor, err := self.ComputeCapability()
	return err != nil || !peers.WholeLines(10*major+minor)
}

// reach reports whether kernels can reach the memory of another device of this
// process, and where it is in the machine.
func (d *device) reach(ordinal int) (bus string, can bool) {
	self, err := cu.GetDevice(d.Ordinal())
	if err != nil {
		return "", false
	}
	other, err := cu.GetDevice(ordinal)
	if err != nil || ordinal == d.Ordinal() {
		return "", false
	}
	var text [32]C.char
	if C.cuDeviceGetPCIBusId(&text[0], C.int(len(text)), C.CUdevice(other)) != C.CUDA_SUCCESS {
		return "", false
	}
	n, err := self.CanAccessPeer(other)
	return C.GoString(&text[0]), err == nil && n != 0
}

// EnablePeerAccess implements [peerDevice]. Peer access is given to the other device's primary
// context, which is the one that its rank uses.
func (d *device) EnablePeerAccess(ordinal int) error {
	if ordinal == d.Ordinal() {
		return nil
	}
	context, err := d.retain(ordinal)
	if err != nil {
		return err
	}
	unbind, err := d.Bind()
	if err != nil {
		return err
	}
	defer unbind()
	if err := context.EnablePeerAccess(0); err != nil && !errors.Is(err, cu.PeerAccessAlreadyEnabled) {
		return fmt.Errorf("peer access from %s to cuda:%d: %w", d.Name(), ordinal, err)
	}
	return nil
}

// Export implements [peerDevice].
func (d *device) Export(b backend.Buffer) ([]byte, error) {
	h, err := d.Device.Export(b)
	if err != nil {
		return nil, err
	}
	return json.Marshal(h)
}

// Import implements [peerDevice].
func (d *device) Import(name []byte) (backend.Buffer, error) {
	var h cuda.MemoryHandle
	if err := json.Unmarshal(name, &h); err != nil {
		return backend.Buffer{}, err
	}
	b, err := d.Device.Import(h)
	if err == nil {
		d.imported[b.Addr()] = C.CUdeviceptr(b.Addr() - uintptr(h.Offset))
	}
	return b, err
}

// CloseImport implements [peerDevice].
func (d *device) CloseImport(b backend.Buffer) error {
	err := d.Device.CloseImport(b)
	if !errors.Is(err, backend.ErrClosed) {
		return err
	}
	return d.bound(func() error {
		if code := C.cuIpcCloseMemHandle(d.imported[b.Addr()]); code != C.CUDA_SUCCESS {
			return fmt.Errorf("close an import of %s: error %d of the driver", d.Name(), code)
		}
		return nil
	})
}

// Disown implements [peerDevice].
func (d *device) Disown(b backend.Buffer) error {
	err := d.Device.Disown(b)
	d.disowned[b.Addr()] = err == nil
	return err
}

// Free implements [peerDevice].
func (d *device) Free(b backend.Buffer) error {
	if !d.disowned[b.Addr()] {
		return d.Device.Free(b)
	}
	delete(d.disowned, b.Addr())
	return d.bound(func() error { return cu.MemFree(cu.DevicePtr(b.Addr())) })
}

// FreeHost implements [peerDevice].
func (d *device) FreeHost(b backend.Buffer) error {
	return d.bound(func() error { return cu.MemFreeHost(unsafe.Pointer(unsafe.SliceData(b.Bytes()))) })
}

// Close implements [peerDevice]: the GPU itself is not closed.
func (d *device) Close() error {
	var errs []error
	for _, other := range d.retained {
		errs = append(errs, other.ReleasePrimaryCtx())
	}
	d.retained = nil
	return errors.Join(errs...)
}
