//go:build gpu

package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// gpuKinds lists the kinds on GPUs.
func gpuKinds() []Kind { return []Kind{GPUs, GPUsStaged} }

// gpus are the devices that the tests share, by their ordinals, since opening one
// compiles all kernels.
var gpus struct {
	sync.Mutex
	open []*cuda.Device
}

// Lacking skips a test that lacks a device, or fails it where REQUIRE_GPU=1.
func Lacking(t testing.TB, why string) {
	t.Helper()
	if os.Getenv("REQUIRE_GPU") == "1" {
		t.Fatalf("REQUIRE_GPU=1: %s", why)
	}
	t.Skip(why)
}

// needGPUs opens the first P devices. It skips the test where there are fewer.
func needGPUs(t testing.TB, P int) []*cuda.Device {
	t.Helper()
	if err := cuda.Available(); err != nil {
		Lacking(t, err.Error())
	}
	gpus.Lock()
	defer gpus.Unlock()
	for n := len(gpus.open); n < P; n++ {
		d, err := cuda.Open(n)
		if n > 0 && errors.Is(err, backend.ErrArgument) {
			t.Skipf("the test needs %d GPUs, the machine has %d", P, n)
		}
		require.NoError(t, err)
		gpus.open = append(gpus.open, d)
	}
	return gpus.open[:P]
}

// connectGPUs connects P ranks with NCCL, rank r on GPU r.
func connectGPUs(t testing.TB, P int) Connect { return ConnectGPUs(t, P, nil) }

// ConnectGPUs does that with options for calls by other ways, nil for those that users ask for.
func ConnectGPUs(t testing.TB, P int, o *gpu.Options) Connect {
	t.Helper()
	devices := needGPUs(t, P)
	b := gpu.New(func(ordinal int) (gpu.Device, error) { return devices[ordinal], nil })
	b.Options = o
	if err := b.Available(); err != nil {
		Lacking(t, err.Error())
	}
	return func(w *rendezvous.World) (*Rank, error) { return connectGPU(b, devices[w.Rank], w) }
}

// connectGPU connects one rank, as Init does: with kernels of our own for the calls that they
// win. When all is closed, the device must have as much memory in use as before.
func connectGPU(b backend.Backend, d *cuda.Device, w *rendezvous.World) (*Rank, error) {
	before := d.MemoryStats().InUse
	comm, err := b.Connect(context.Background(), w)
	if err != nil {
		return nil, err
	}
	return &Rank{w, comm, func() error {
		if after := d.MemoryStats().InUse; after != before {
			return fmt.Errorf("%s has %d bytes in use, %d before", d.Name(), after, before)
		}
		return nil
	}}, nil
}

// OwnGPU opens the device of a rank that is its own process, and returns how
// it connects, or what it lacks. A rank for which there is no GPU shares the first one: NCCL takes
// it for a separate machine then.
func OwnGPU(ordinal int) (Connect, error) {
	d, err := cuda.Open(ordinal)
	if ordinal > 0 && errors.Is(err, backend.ErrArgument) {
		if err := os.Setenv("NCCL_HOSTID", fmt.Sprint("rank ", ordinal)); err != nil {
			return nil, err
		}
		d, err = cuda.Open(0)
	}
	if err != nil {
		return nil, err
	}
	b := gpu.New(func(int) (gpu.Device, error) { return d, nil })
	return func(w *rendezvous.World) (*Rank, error) {
		r, err := connectGPU(b, d, w)
		if err != nil {
			return nil, errors.Join(err, d.Close())
		}
		closeDevice := r.closeDevice
		r.closeDevice = func() error { return errors.Join(closeDevice(), d.Close()) }
		return r, nil
	}, b.Available()
}
