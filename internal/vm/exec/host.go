package exec

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/workers"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Host is the host as a Device. It runs everything on the calling goroutine and the workers that
// the kernels have.
type Host struct{ arithmetic }

type arithmetic = kernels.Host

var _ Device = Host{}

// OnHost returns the host as a Device with so many workers.
func OnHost(n int) Host { return Host{arithmetic{Workers: workers.New(n)}} }

// Host implements [Device].
func (Host) Host() bool { return true }

// Alloc implements [Device].
func (Host) Alloc(nbytes int) (backend.Buffer, error) {
	return backend.Of(make([]float64, (nbytes+7)/8)).As(backend.U8).Slice(0, nbytes), nil
}

// Free implements [Device]: memory goes when nobody refers to it.
func (Host) Free(backend.Buffer) error { return nil }

// Copies implements [Device].
func (Host) Copies() *residence.Copies { return residence.OnHost() }

// AllocHost implements [Device].
func (h Host) AllocHost(nbytes int) (backend.Buffer, error) { return h.Alloc(nbytes) }

// FreeHost implements [Device].
func (Host) FreeHost(backend.Buffer) error { return nil }

// Capture implements [Device].
func (Host) Capture(func() error) (*backend.Graph, error) {
	return nil, fmt.Errorf("vm: %w: the host records no graphs", backend.ErrUnsupported)
}

// Fuse implements [Device].
func (h Host) Fuse(p *fuse.Program) (fuse.Loop, error) { return fuse.Host(p, h.Workers) }

// Main implements [Device].
func (Host) Main() backend.Queue { return nil }

// NewQueue implements [Device].
func (Host) NewQueue() (backend.Queue, error) { return nil, nil }

// Join implements [Device].
func (Host) Join() error { return nil }

// Close implements [Device]. It ends the workers.
func (h Host) Close() error {
	h.Workers.Close()
	return nil
}
