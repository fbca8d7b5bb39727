// Package testenv says where the tests of ops, autograd and vm run: on the host, on
// guarded memory that stands in for a device, and on GPUs, with the same bodies.
package testenv

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Kind is where graphs run and where their ranks communicate. Tensors are on the host: machines of
// package vm that run on a device copy them there.
type Kind string

const (
	Hosts      Kind = "host"       // all on the host
	Devices    Kind = "device"     // all on guarded memory
	Staged     Kind = "staged"     // graphs on the host, communication on guarded memory
	GPUs       Kind = "gpu"        // all on GPUs, a rank on each, with NCCL
	GPUsStaged Kind = "gpu staged" // graphs on the host, communication on GPUs
)

// kinds lists every kind that this build has.
func kinds() []Kind { return append([]Kind{Hosts, Devices, Staged}, gpuKinds()...) }

// OnDevices lists those whose graphs run on a device.
func OnDevices() []Kind {
	return slices.DeleteFunc(kinds(), func(k Kind) bool { return !k.OnDevice() })
}

// OnHosts lists those whose graphs run on the host.
func OnHosts() []Kind { return slices.DeleteFunc(kinds(), Kind.OnDevice) }

// OnDevice reports whether graphs run on a device.
func (k Kind) OnDevice() bool { return k == Devices || k == GPUs }

// OnGPU reports whether ranks communicate on GPUs.
func (k Kind) OnGPU() bool { return k == GPUs || k == GPUsStaged }

// Sampled reports whether tests take a part of their cases: on emulated GPUs, which are slow,
// unless EURYALE_FULL=1 asks for all. Other kinds have the rest.
func (k Kind) Sampled() bool {
	return k.OnGPU() && os.Getenv("EMULATED_DEVICES") != "" && !env.Full.Set(os.Getenv)
}

// Each runs a test for every kind in a list.
func Each(t *testing.T, list []Kind, test func(t *testing.T, k Kind)) {
	for _, k := range list {
		t.Run(string(k), func(t *testing.T) { test(t, k) })
	}
}

// Rank is one rank of a test.
type Rank struct {
	World *rendezvous.World
	Comm  backend.Communicator // a wrapper that replaces it is closed instead

	closeDevice func() error
}

// Close closes the communicator, then the device. The world stays open.
func (r *Rank) Close() error { return errors.Join(r.Comm.Close(), r.closeDevice()) }

// Connect connects a rank. It is called for all ranks at once.
type Connect func(w *rendezvous.World) (*Rank, error)

// Connect returns how P ranks of the kind connect. It skips the test where the
// machine has too few devices.
func (k Kind) Connect(t testing.TB, P int) Connect {
	t.Helper()
	switch {
	case k.OnGPU():
		return connectGPUs(t, P)
	case k != Hosts:
		return connectGuarded
	}
	return Host
}

// Host connects a rank on the host. It is a [Connect].
func Host(w *rendezvous.World) (*Rank, error) {
	comm, err := host.Backend{}.Connect(context.Background(), w)
	if err != nil {
		return nil, err
	}
	return &Rank{World: w, Comm: comm, closeDevice: func() error { return nil }}, nil
}

// connectGuarded puts a communicator of the host on guarded memory.
func connectGuarded(w *rendezvous.World) (*Rank, error) {
	inner, err := host.Backend{}.Connect(context.Background(), w)
	if err != nil {
		return nil, err
	}
	d, err := fakedevice.New(host.Device{})
	if err != nil {
		return nil, errors.Join(err, inner.Close())
	}
	return &Rank{w, fakedevice.Over(inner, d), d.Close}, nil
}

// Link makes a symbolic link for a test, or skips it: Windows may refuse to, and Wine says that it
// has made one.
func Link(t testing.TB, target, path string) {
	t.Helper()
	err := os.Symlink(target, path)
	if _, unread := os.Readlink(path); err != nil || unread != nil {
		t.Skip("no symbolic links are made here: ", errors.Join(err, unread))
	}
}
