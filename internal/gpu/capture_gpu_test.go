//go:build gpu

package gpu

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// groupWithin is group with a timeout.
func (g *gpus) groupWithin(t testing.TB, size int, timeout time.Duration,
	o Options) []*Communicator {
	t.Helper()
	group := require.Value(backendtest.Over(g.with(o))(size, timeout))(t)
	return owned(t, group)
}

func TestGraphsOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, use := range []Algorithm{byNCCL, byLL, byLL128TwoShot, byOneShot, byTwoShot} {
		comms := g.group(t, 2, forced(use))
		for _, test := range graphCases {
			if test.name != "replays" { // which counts from the start
				t.Run(fmt.Sprintf("%s/%v", test.name, use), func(t *testing.T) {
					each(t, comms, test.run)
				})
			}
		}
	}
}

func TestGraphsCountReplaysOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, use := range []Algorithm{byNCCL, byTwoShot} {
		each(t, g.group(t, 2, forced(use)), callsRunInReplaysOnly)
	}
}

func TestGraphsOfGroupAndPartOnGPU(t *testing.T) {
	g := needGPUs(t, 4)
	for _, use := range []Algorithm{byNCCL, byTwoShot} {
		each(t, g.group(t, 4, forced(use)), groupAndPart)
	}
}

func TestGraphsWatchdogOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, use := range []Algorithm{byNCCL, byTwoShot, byCopyEngines} {
		gate := g.newGate(t)
		comms := g.groupWithin(t, 2, time.Second, forced(use))
		works := halfway(t, comms, func(q backend.Queue) error { return gate.shut(q) })
		err := works[0].Join(context.Background())
		require.Check(t, errors.Is(err, backend.ErrTimeout) &&
			strings.Contains(err.Error(), "replay 1 of a graph of 5 collectives") &&
			strings.Contains(err.Error(), "at collective 3: allreduce(sum) of 16 f32"), "%v: the "+
			"error is %v", use, err)
		for _, c := range gate.ranks {
			c.Abort(errors.New("enough"))
		}
	}
}

func TestGraphsEndOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, use := range []Algorithm{byNCCL, byLL, byTwoShot, byCopyEngines} {
		for name, end := range ends {
			t.Run(fmt.Sprintf("%s/%v", name, use), func(t *testing.T) {
				endsReplays(t, g.group(t, 2, forced(use)), end.of, end.want)
			})
		}
		t.Run(fmt.Sprintf("all/%v", use), func(t *testing.T) {
			closesWithGraphs(t, g.group(t, 2, forced(use)))
		})
	}
}
