package host

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/serial"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

var sum = backend.Collective{Kind: backend.AllReduce}

// ranks runs every rank of a group of P and fails the test with their errors.
func ranks(t *testing.T, P int, rank func(c *comm) error) {
	t.Helper()
	comms := connect(t, P, 3*time.Second)
	require.Report(t, testranks.All(P, func(r int) error { return rank(comms[r]) }))
}

func TestCommunicatorOutlivesTheQueueOfItsLastCall(t *testing.T) {
	ranks(t, 2, func(c *comm) error {
		q := newQueue()
		x := backend.Of(make([]float32, 4))
		w := testranks.Must(c.Start(q, sum, x, x))
		return errors.Join(w.Join(context.Background()), q.Close(), backend.Run(c, sum, x, x))
	})
}

func TestRefusedCallLeavesRanksInStep(t *testing.T) {
	ranks(t, 2, func(c *comm) error {
		x := backend.Of(make([]float32, 4))
		testranks.NoError(backend.Run(c, sum, x, x))
		if c.rank == 0 {
			q := newQueue()
			q.Close()
			if _, err := c.Start(q, sum, x, x); !errors.Is(err, backend.ErrArgument) {
				return fmt.Errorf("on a closed queue: %w", err)
			}
		}
		return backend.Run(c, sum, x, x)
	})
}

// Each communicator's calls have one order on both ranks, and that is all that
// the contract asks for.
func TestCallsOfTwoCommunicatorsAreNotOrdered(t *testing.T) {
	ranks(t, 2, func(a *comm) error {
		b := testranks.Must(a.Split(0, 0))
		defer b.Close()
		q := newQueue()
		defer q.Close()
		x, y, z := backend.Of(make([]float32, 4)), backend.Of(make([]float32, 4)),
			backend.Of(make([]float32, 4))
		w := testranks.Must(a.Start(q, sum, x, x))
		testranks.NoError(w.Join(context.Background()))
		if a.rank == 1 {
			testranks.NoError(backend.Run(a, sum, z, z))
		}
		w = testranks.Must(b.Start(q, sum, y, y))
		if a.rank == 0 {
			testranks.NoError(backend.Run(a, sum, z, z))
		}
		return w.Join(context.Background())
	})
}

func TestAllocIsNotTakenForAnAllGather(t *testing.T) {
	comms := connect(t, 2, 3*time.Second)
	errs := testranks.Each(2, func(r int) error {
		if r == 0 {
			_, err := comms[r].Alloc(4096)
			return err
		}
		return backend.Run(comms[r], backend.Collective{Kind: backend.AllGather},
			backend.Of(make([]int64, 2)), backend.Of([]int64{7}))
	})
	for r, err := range errs {
		require.Fails(t, fmt.Sprint("rank ", r), err, backend.ErrMismatch)
	}
}

func TestSplitsBelongToTheCallerAfterStart(t *testing.T) {
	ranks(t, 2, func(c *comm) error {
		q := newQueue()
		defer q.Close()
		release := make(serial.Event)
		testranks.NoError(q.Wait(release))
		splits := []int{3, 1}
		dst := make([]float32, 4)
		w, err := c.Start(q, backend.Collective{Kind: backend.AllGather, Splits: splits},
			backend.Of(dst), backend.Of(make([]float32, splits[c.rank])))
		splits[0], splits[1] = 1, 3
		close(release)
		if err != nil {
			return err
		}
		return w.Join(context.Background())
	})
}

func TestHugeAllocIsAnError(t *testing.T) {
	for _, P := range []int{1, 2} {
		for _, n := range []int{math.MaxInt, 1 << 62, 1 << 61} {
			ranks(t, P, func(c *comm) error {
				if _, err := c.Alloc(n); err == nil {
					return fmt.Errorf("alloc of %d bytes", n)
				}
				return allReduce(c, make([]float32, 4))
			})
		}
	}
}
