package gpu

import (
	"slices"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/observe"
)

// mover copies between the host and any of the backend's devices.
func mover(b *Backend) func(dst, src backend.Buffer) error {
	return func(dst, src backend.Buffer) error {
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, d := range b.devices {
			f := d.(*fakeDevice)
			if f.Owns(dst.Addr()) || f.Owns(src.Addr()) || dst.Len() == 0 {
				return f.move(dst, src)
			}
		}
		return backend.ErrArgument
	}
}

func suite(t *testing.T, sizes ...int) backendtest.Options {
	b := newFake().backend(t)
	for ordinal := range slices.Max(sizes) { // they stay open, and so do their queues
		if _, err := b.device(ordinal); err != nil {
			t.Fatal(err)
		}
	}
	record := func(c backend.Communicator) backend.Communicator { return observe.New(c, 100) }
	over := backendtest.Over(b, group.Compared, record)
	return backendtest.Options{
		New:   func(size int, timeout time.Duration) (*backendtest.Group, error) { return over(size, timeout) },
		Sizes: sizes, OwnOrder: true, Copy: mover(b),
	}
}

func TestCommunicatorOnFake(t *testing.T) { backendtest.Run(t, suite(t, 1, 2, 3)) }
