package fault

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// replays runs graphs of collectives as two ranks, to rank 1 of which plan happens: an eager call,
// a capture of two calls and a part's one, and launches until one fails. It returns how many
// launches there were before, and what the last one did.
func replays(t *testing.T, k testenv.Kind, plan Plan, launches int) (before [2]int, errs [2]error) {
	t.Helper()
	got := testranks.Run(2, k.Connect(t, 2), func(r *testenv.Rank) error {
		c, rank := New(r.Comm, plan), r.Comm.Rank()
		r.Comm = c
		part := testranks.Must(c.Split(0, rank))
		defer part.Close() // also where it has failed: its memory is not the parent's
		memory := testranks.Must(c.Device().Alloc(64))
		x, q := memory.As(backend.F32), c.Device().Default().(backend.GraphQueue)
		sum := backend.Collective{Kind: backend.AllReduce}
		start := func(c backend.Communicator) error { _, err := c.Start(q, sum, x, x); return err }
		// The other rank may have launched, and failed, before this one is done with either.
		errs[rank] = errors.Join(q.Zero(x), backend.Run(c, sum, x, x))
		if errs[rank] != nil {
			return errs[rank]
		}
		graph, err := q.Capture(func() error {
			return errors.Join(start(c), start(part), start(c))
		})
		if errs[rank] = err; err != nil {
			return err
		}
		for errs[rank] == nil && before[rank] < launches {
			if errs[rank] = launch(graph); errs[rank] == nil {
				before[rank]++
			}
		}
		if errs[rank] == nil {
			return errors.Join(graph.Close(), c.Device().Free(memory))
		}
		return errs[rank] // and the rank is lost to the other one
	})
	for _, err := range got {
		require.Check(t, err == nil || errors.Is(err, backend.ErrAborted), "%v", err)
	}
	return before, errs
}

// launch launches a graph and waits for it. A panic is an error.
func launch(g *backend.Graph) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("%w: panic: %v", backend.ErrAborted, v)
		}
	}()
	w, err := g.Launch(nil)
	if err != nil {
		return err
	}
	return w.Join(context.Background())
}

// A capture starts nothing: its collectives count when the graph is launched, each time.
func TestFaultHappensAtACollectiveOfAReplay(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for call := 2; call <= 10; call++ { // call 1 is eager, and a launch has 3
			for _, kind := range []Kind{Abort, Panic} {
				plan := Plan{kind, 1, call}
				before, errs := replays(t, k, plan, 3)
				if want := (call - 2) / 3; before[1] != want {
					t.Errorf("%v: it happened after %d launches, want %d", plan, before[1], want)
				}
				require.Fails(t, fmt.Sprintf("%v: rank 1", plan), errs[1], plan.String())
				require.Fails(t, fmt.Sprintf("%v: rank 0", plan), errs[0], backend.ErrAborted,
					"because of rank 1")
			}
		}
		before, errs := replays(t, k, Plan{Abort, 1, 11}, 3)
		if slices.ContainsFunc(errs[:], func(err error) bool { return err != nil }) ||
			before != [2]int{3, 3} {
			t.Errorf("call 11 of 10: %v launches, %v", before, errs)
		}
	})
}
