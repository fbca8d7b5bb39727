package backendtest

import (
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest/reference"
)

// referenceGroup makes a group of the reference communicator.
func referenceGroup(wrap func(backend.Communicator) backend.Communicator) func(int, time.Duration) (*Group, error) {
	return func(size int, timeout time.Duration) (*Group, error) {
		plain := reference.New("test", size, timeout)
		g := &Group{Fail: plain[0].Lose}
		for _, c := range plain {
			g.Comms = append(g.Comms, wrap(c))
		}
		return g, nil
	}
}

func TestReferencePasses(t *testing.T) {
	Run(t, Options{New: referenceGroup(func(c backend.Communicator) backend.Communicator { return c })})
}
