package autograd

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/cuda"
	deviceguard "github.com/euryale-ml/euryale/backend/guard"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/rendezvous"
)

// kind is where a model is and where its ranks communicate.
type kind string

const (
	onHosts   kind = "host"       // all on the host
	onDevices kind = "device"     // all on guarded memory, on a queue of its own
	stagings  kind = "staged"     // the model on the host, communication on guarded memory
	onGPUs    kind = "gpu"        // all on GPUs, a rank on each, with NCCL
	gpuStaged kind = "gpu staged" // the model on the host, communication on GPUs
)

// kinds lists every kind that this build has.
func kinds() []kind { return append([]kind{onHosts, onDevices, stagings}, gpuKinds()...) }

// deviceKinds lists those whose models are on a device.
func deviceKinds() []kind {
	return slices.DeleteFunc(kinds(), func(k kind) bool { return !k.onDevice() })
}

// hostKinds lists those whose models are on the host.
func hostKinds() []kind {
	return slices.DeleteFunc(kinds(), func(k kind) bool { return k.onDevice() })
}

func (k kind) onDevice() bool { return k == onDevices || k == onGPUs }

func (k kind) onGPU() bool { return k == onGPUs || k == gpuStaged }

// onEach runs a test for every kind in a list.
func onEach(t *testing.T, list []kind, test func(t *testing.T, k kind)) {
	for _, k := range list {
		t.Run(string(k), func(t *testing.T) { test(t, k) })
	}
}

// connect makes the communicator of a rank and an engine for its device, nil for
// the host. It is called for all ranks at once.
type connect func(w *rendezvous.World) (comm backend.Communicator, e *cuda.Engine, closeDevice func() error, err error)

// connect returns how ranks of the kind connect.
func (k kind) connect(t testing.TB, size int) connect {
	t.Helper()
	switch {
	case k.onGPU():
		return connectGPUs(t, size)
	case k != onHosts:
		return connectGuarded
	}
	return connectHost
}

func connectHost(w *rendezvous.World) (backend.Communicator, *cuda.Engine, func() error, error) {
	comm, err := host.New().Connect(context.Background(), w)
	return comm, nil, func() error { return nil }, err
}

// connectGuarded puts a communicator of the host on guarded memory.
func connectGuarded(w *rendezvous.World) (backend.Communicator, *cuda.Engine, func() error, error) {
	inner, err := host.New().Connect(context.Background(), w)
	if err != nil {
		return nil, nil, nil, err
	}
	d, err := deviceguard.New(host.Device{})
	if err != nil {
		return nil, nil, nil, err
	}
	e, closeEngine, err := newEngine(d)
	return deviceguard.Over(inner, d), e, func() error { return errors.Join(closeEngine(), d.Close()) }, err
}

// newEngine returns an engine on a queue of its own.
func newEngine(d backend.Device) (*cuda.Engine, func() error, error) {
	q, err := d.NewQueue()
	if err != nil {
		return nil, nil, err
	}
	e, err := cuda.NewEngine(d, q)
	return e, func() error { return errors.Join(e.Close(), q.Close()) }, err
}
