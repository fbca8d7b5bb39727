//go:build gpu

package ops

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/backend/nccl"
	"github.com/euryale-ml/euryale/rendezvous"
)

// gpuKinds lists the kinds on GPUs.
func gpuKinds() []kind { return []kind{onGPUs, gpuStaged} }

// gpus are the devices that the tests share, by their ordinals, since opening one
// compiles all kernels.
var gpus struct {
	sync.Mutex
	open []*cuda.Device
}

// skipOrFail skips a test that lacks a device, or fails it where REQUIRE_GPU=1.
func skipOrFail(t testing.TB, why string) {
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
		skipOrFail(t, err.Error())
	}
	gpus.Lock()
	defer gpus.Unlock()
	for n := len(gpus.open); n < P; n++ {
		d, err := cuda.Open(n)
		if n > 0 && errors.Is(err, backend.ErrArgument) {
			t.Skipf("the test needs %d GPUs, the machine has %d", P, n)
		}
		if err == nil {
			err = warm(d)
		}
		if err != nil {
			t.Fatal(err)
		}
		gpus.open = append(gpus.open, d)
	}
	return gpus.open[:P]
}

// warm takes and gives back memory of the sizes that tests use: asking the driver
// while another rank of this process waits for this one can be a deadlock.
func warm(d *cuda.Device) error {
	var all []backend.Buffer
	for nbytes := 512; nbytes <= 1<<20; nbytes *= 2 {
		for range 32 {
			b, err := d.Alloc(nbytes)
			if err != nil {
				return err
			}
			all = append(all, b)
		}
	}
	for nbytes := 2 << 20; nbytes <= 16<<20; nbytes += 2 << 20 {
		for range 4 {
			b, err := d.Alloc(nbytes)
			if err != nil {
				return err
			}
			all = append(all, b)
		}
	}
	for _, b := range all {
		if err := d.Free(b); err != nil {
			return err
		}
	}
	return nil
}

// results is room for what the graph of any test computes, reserved before
// collectives start.
const results = 256 << 20

// connectGPUs connects P ranks with NCCL, rank r on GPU r.
func connectGPUs(t testing.TB, P int) connect {
	t.Helper()
	devices := needGPUs(t, P)
	b := nccl.New(func(ordinal int) (nccl.Device, error) { return devices[ordinal], nil })
	if err := b.Available(); err != nil {
		skipOrFail(t, err.Error())
	}
	return func(w *rendezvous.World) (backend.Communicator, *cuda.Engine, func() error, error) {
		return connectGPU(b, devices[w.Rank], w)
	}
}

// connectGPU connects one rank. When all is closed, the device must have as much
// memory in use as before.
func connectGPU(b backend.Backend, d *cuda.Device, w *rendezvous.World) (backend.Communicator, *cuda.Engine, func() error, error) {
	before := d.MemoryStats().InUse
	e, closeEngine, err := newEngine(d)
	if err == nil {
		err = e.Reserve(results)
	}
	if err != nil {
		return nil, nil, nil, err
	}
	comm, err := b.Connect(context.Background(), w)
	return comm, e, func() error {
		err := closeEngine()
		if after := d.MemoryStats().InUse; after != before {
			err = errors.Join(err, fmt.Errorf("%s has %d bytes in use, %d before", d.Name(), after, before))
		}
		return err
	}, err
}
