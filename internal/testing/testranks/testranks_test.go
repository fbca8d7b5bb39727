package testranks

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// member counts how many are open.
type member struct {
	*rendezvous.World
	open *atomic.Int64
}

func (m member) Close() error {
	m.open.Add(-1)
	return nil
}

func connecting(open *atomic.Int64, broken int) func(w *rendezvous.World) (member, error) {
	return func(w *rendezvous.World) (member, error) {
		if w.Rank == broken {
			return member{}, errors.New("no memory")
		}
		open.Add(1)
		return member{w, open}, nil
	}
}

func TestErrorsAreByRank(t *testing.T) {
	errs := Each(3, func(r int) error {
		if r == 1 {
			return errors.New("broken")
		}
		return nil
	})
	require.Check(t, len(errs) == 3 && errs[0] == nil && errs[1] != nil && errs[2] == nil,
		"the errors are %v", errs)
	err := Join(errs)
	require.Check(t, err != nil && err.Error() == "rank 1: broken", "together they are %v", err)
	require.NoError(t, All(3, func(int) error { return nil }))
}

func TestRanksMeetAndAreClosed(t *testing.T) {
	var open atomic.Int64
	t.Run("ranks", func(t *testing.T) {
		g := New(t, 3, time.Minute, connecting(&open, -1))
		require.Report(t, g.All(func(m member) error {
			return m.Barrier(context.Background(), "here")
		}))
		g.Fail(2, errors.New("out of petrol"))
		err := g.All(func(m member) error {
			<-m.Down()
			return m.Failure()
		})
		require.Check(t, err != nil && strings.Count(err.Error(), "out of petrol") == 3,
			"the errors are %v", err)
		n := open.Load()
		require.Check(t, n == 3, "%d ranks are open", n)
	})
	n := open.Load()
	require.Check(t, n == 0, "%d ranks are open at the end", n)
}

func TestRanksAreClosedWhenOneCannotConnect(t *testing.T) {
	var open atomic.Int64
	if _, err := Connect(3, time.Minute, connecting(&open, 1)); err == nil ||
		err.Error() != "rank 1: no memory" || open.Load() != 0 {
		t.Errorf("the error is %v, and %d ranks are open", err, open.Load())
	}
}

func TestARankThatFailsEndsTheOthers(t *testing.T) {
	var open atomic.Int64
	errs := Run(3, connecting(&open, -1), func(m member) error {
		if Must(m.Rank, nil) == 0 {
			NoError(errors.New("out of petrol"))
		}
		return m.Barrier(context.Background(), "never")
	})
	n := open.Load()
	require.Check(t, n == 0, "%d ranks are open", n)
	for r, err := range errs {
		require.Fails(t, fmt.Sprint("rank ", r), err, "out of petrol")
	}
}
