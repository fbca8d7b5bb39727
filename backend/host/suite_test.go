package host_test

import (
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/observe"
)

func TestCommunicator(t *testing.T) {
	backendtest.Run(t, backendtest.Options{New: backendtest.Over(host.Backend{})})
}

// As euryale.Init composes it.
func TestCommunicatorCheckedAndTraced(t *testing.T) {
	record := func(c backend.Communicator) backend.Communicator {
		return backend.WithHooks(c, observe.New(c.Rank(), 100))
	}
	backendtest.RunWrapper(t, backendtest.Options{Sizes: []int{3},
		New: backendtest.Over(host.Backend{}, group.Compared, record)})
}
