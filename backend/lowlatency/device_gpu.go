//go:build gpu

package lowlatency

/*
#include <cuda.h>
*/
import "C"

import (
	"encoding/json"
	"errors"
	"fmt"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/gpu/nvml"
)

// gpu returns a communicator's device as one whose memory others can reach.
func gpu(d backend.Device) (Device, error) {
	g, ok := d.(*cuda.Device)
	if !ok {
		return nil, fmt.Errorf("%s is a %T, not a GPU", d.Name(), d)
	}
	return &device{Device: g}, nil
}

// device is a GPU.
type device struct {
	*cuda.Device
	friends []cu.Device // whose primary contexts are retained
}

// Wires asks the driver, and NVML if it is there, for the connections.
func (d *device) Wires() Wires {
	w := Wires{Bus: d.PCIBusID()}
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

// Befriend implements [Device]. Peer access is given to the other device's primary
// context, which is the one that its rank uses.
func (d *device) Befriend(ordinal int) error {
	if ordinal == d.Ordinal() {
		return nil
	}
	other, err := cu.GetDevice(ordinal)
	if err != nil {
		return err
	}
	context, err := other.RetainPrimaryCtx()
	if err != nil {
		return err
	}
	d.friends = append(d.friends, other)
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

// Export implements [Device].
func (d *device) Export(b backend.Buffer) ([]byte, error) {
	h, err := d.Device.Export(b)
	if err != nil {
		return nil, err
	}
	return json.Marshal(h)
}

// Import implements [Device].
func (d *device) Import(name []byte) (backend.Buffer, error) {
	var h cuda.MemoryHandle
	if err := json.Unmarshal(name, &h); err != nil {
		return backend.Buffer{}, err
	}
	return d.Device.Import(h)
}

// Close implements [Device]: the GPU itself is not closed.
func (d *device) Close() error {
	var errs []error
	for _, other := range d.friends {
		errs = append(errs, other.ReleasePrimaryCtx())
	}
	d.friends = nil
	return errors.Join(errs...)
}
