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

func suite(t *testing.T, sizes ...int) backendtest.Options {
	g := newRig(t)
	g.openDevices(t, slices.Max(sizes))
	record := func(c backend.Communicator) backend.Communicator {
		return backend.WithHooks(c, observe.New(c.Rank(), 100))
	}
	over := backendtest.Over(g.nccl(), group.Compared, record)
	return backendtest.Options{
		New:   func(size int, timeout time.Duration) (*backendtest.Group, error) { return over(size, timeout) },
		Sizes: sizes, OwnOrder: true, Copy: g.move,
	}
}

func TestCommunicatorOnFake(t *testing.T) { backendtest.Run(t, suite(t, 1, 2, 3)) }
