// Package testenv says where the tests of ops and autograd run: on the host, on
// guarded memory that stands in for a device, and on GPUs, with the same bodies.
package testenv

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/backend/fakedevice"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Kind is where graphs are and where their ranks communicate.
type Kind string

const (
	Hosts      Kind = "host"       // all on the host
	Devices    Kind = "device"     // all on guarded memory, on its own queue
	Staged     Kind = "staged"     // graphs on the host, communication on guarded memory
	GPUs       Kind = "gpu"        // all on GPUs, a rank on each, with NCCL
	GPUsStaged Kind = "gpu staged" // graphs on the host, communication on GPUs
)

// Kinds lists every kind that this build has.
func Kinds() []Kind { return append([]Kind{Hosts, Devices, Staged}, gpuKinds()...) }

// OnDevices lists those whose graphs are on a device.
func OnDevices() []Kind {
	return slices.DeleteFunc(Kinds(), func(k Kind) bool { return !k.OnDevice() })
}

// OnHosts lists those whose graphs are on the host.
func OnHosts() []Kind { return slices.DeleteFunc(Kinds(), Kind.OnDevice) }

// OnDevice reports whether graphs are on a device.
func (k Kind) OnDevice() bool { return k == Devices || k == GPUs }

// OnGPU reports whether ranks communicate on GPUs.
func (k Kind) OnGPU() bool { return k == GPUs || k == GPUsStaged }

// Each runs a test for every kind in a list.
func Each(t *testing.T, list []Kind, test func(t *testing.T, k Kind)) {
	for _, k := range list {
		t.Run(string(k), func(t *testing.T) { test(t, k) })
	}
}

// Rank is one rank of a test.
type Rank struct {
	World  *rendezvous.World
	Comm   backend.Communicator // a wrapper that replaces it is closed instead
	Engine *cuda.Engine         // of the device where graphs are, nil for the host

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
		return k.graphs(connectGPUs(t, P))
	case k != Hosts:
		return k.graphs(connectGuarded)
	}
	return Host
}

// graphs leaves out the engine where graphs are on the host.
func (k Kind) graphs(connect Connect) Connect {
	if k.OnDevice() {
		return connect
	}
	return func(w *rendezvous.World) (*Rank, error) {
		r, err := connect(w)
		if err == nil {
			r.Engine = nil
		}
		return r, err
	}
}

// Host connects a rank on the host. It is a [Connect].
func Host(w *rendezvous.World) (*Rank, error) {
	comm, err := host.New().Connect(context.Background(), w)
	if err != nil {
		return nil, err
	}
	return &Rank{World: w, Comm: comm, closeDevice: func() error { return nil }}, nil
}

// connectGuarded puts a communicator of the host on guarded memory.
func connectGuarded(w *rendezvous.World) (*Rank, error) {
	inner, err := host.New().Connect(context.Background(), w)
	if err != nil {
		return nil, err
	}
	d, err := fakedevice.New(host.Device{})
	if err != nil {
		return nil, errors.Join(err, inner.Close())
	}
	e, closeEngine, err := NewEngine(d)
	if err != nil {
		return nil, errors.Join(err, inner.Close(), d.Close())
	}
	return &Rank{w, fakedevice.Over(inner, d), e, func() error { return errors.Join(closeEngine(), d.Close()) }}, nil
}

// NewEngine returns an engine on its own queue.
func NewEngine(d backend.Device) (*cuda.Engine, func() error, error) {
	q, err := d.NewQueue()
	if err != nil {
		return nil, nil, err
	}
	e, err := cuda.NewEngine(d, q)
	return e, func() error { return errors.Join(e.Close(), q.Close()) }, err
}
