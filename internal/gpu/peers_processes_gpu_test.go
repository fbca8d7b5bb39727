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
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// reduceByKernels is a process of a job, named by its algorithm: it reduces until that fails,
// then uses its device, and closes. It replays a graph of three reductions if it is to.
func reduceByKernels(c *Communicator, inGraph bool) error {
	if c.Refused() != "" {
		return errors.New(c.Refused())
	}
	x := make([]float32, 1<<14)
	err := holding(c, x, func(b backend.Buffer) error {
		if inGraph { // by copy engines, too
			memory := testranks.Must(c.Alloc(b.NBytes()))
			b = memory.As(backend.F32)
			testranks.NoError(c.Device().Default().Zero(b))
		}
		what, y := its(c, b)
		step := func() error { return backend.Run(c, what, y, b) }
		if inGraph {
			graph := testranks.Must(threeSums(c, b))
			defer graph.Close() // which the end of c has freed
			step = func() error {
				w, err := graph.Launch(nil)
				if err != nil {
					return err
				}
				return w.Join(context.Background())
			}
		}
		for i := 0; ; i++ {
			if i == 10 {
				fmt.Println("under way")
			}
			if err := step(); err != nil {
				fmt.Println("error:", strings.ReplaceAll(err.Error(), "\n", " "))
				return nil // and copy the memory, which uses the device
			}
		}
	})
	if err != nil {
		return err
	}
	fmt.Println("device usable")
	if err := c.Close(); err != nil {
		return err
	}
	for deadline := time.Now().Add(10 * time.Second); c.Kept() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("%d bytes are kept for a rank that is dead", c.Kept())
		}
	}
	fmt.Println("memory given back")
	return nil
}

// threeSums records sums.
func threeSums(c *Communicator, x backend.Buffer) (*backend.Graph, error) {
	q := c.Device().Default().(backend.GraphQueue)
	return q.Capture(func() error {
		for range 3 {
			if _, err := c.Start(q, sum, x, x); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestKilledRankIsNamedAmongKernels(t *testing.T) {
	size := len(needGPUs(t, 2).all)
	for _, a := range FullyConnected.Algorithms()[1:] {
		t.Run(a.String(), func(t *testing.T) { killed(t, a.String(), size, "") })
	}
}

// A rank that is killed in the middle of replays is named as in any call, and the devices of the
// others go on.
func TestKilledRankIsNamedInGraphs(t *testing.T) {
	size := len(needGPUs(t, 2).all)
	for _, a := range []Algorithm{byNCCL, byLL, byTwoShot, byCopyEngines} {
		t.Run(a.String(), func(t *testing.T) {
			killed(t, inGraph+a.String(), size, "of a graph of 3 collectives")
		})
	}
}

// killed kills the last rank of a scenario, whose others must say so, and what they did.
func killed(t *testing.T, name string, size int, doing string) {
	ranks := proctest.Start(t, name, size)
	for _, rank := range ranks {
		rank.Says(t, "under way")
	}
	if t.Failed() {
		return
	}
	began, victim := time.Now(), size-1
	require.NoError(t, ranks[victim].Process.Kill())
	for r, rank := range ranks[:victim] {
		rank.Says(t, fmt.Sprintf("rank %d is down", victim), doing)
		took := time.Since(began)
		require.Check(t, took <= proctest.Within(2*time.Second), "rank %d took %v", r, took)
		rank.Says(t, "device usable")
		rank.Says(t, "memory given back")
	}
}
