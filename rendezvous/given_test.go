package rendezvous

import (
	"context"
	"errors"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// setBefore returns the values of an all-gather that has ended early, nil unless all were set.
func setBefore(t *testing.T, w *World, g gathering) [][]byte {
	t.Helper()
	there := require.Value(w.gatherer().peek(t.Context(), g))(t)
	values, _ := g.outcome("vote", there, false, errors.New("a failure"))
	return values
}

// A value that a rank gave before it failed can still be had, so that the
// outcome of an all-gather does not depend on who reads it first.
func TestValueGivenBeforeAFailureCanBeHad(t *testing.T) {
	worlds := require.Value(Local(2, 0))(t)
	defer func() {
		for _, w := range worlds {
			w.Close()
		}
	}()
	vote := gathering{key: "vote", size: 2}
	for _, w := range worlds {
		v := setBefore(t, worlds[0], vote)
		require.Check(t, v == nil, "before rank %d has given its value: %q", w.Rank, v)
		require.NoError(t, w.inner.Set(t.Context(), rankKey("vote", w.Rank),
			[]byte{byte(w.Rank)}))
	}
	require.NoError(t, worlds[1].Fail(errors.New("gone")))
	<-worlds[0].Down()
	v := setBefore(t, worlds[0], vote)
	require.Check(t, len(v) == 2 && v[1][0] == 1, "got %q", v)
	var f *Failure
	_, err := worlds[0].AllGather(t.Context(), "later", []byte("a"))
	require.Check(t, errors.As(err, &f) && f.Rank == 1, "a later call: %v", err)
}

// slow is a store at the end of a long way: what it answers to a Get comes too late.
type slow struct{ Store }

func (slow) Get(ctx context.Context, _ string) ([]byte, error) { return nil, ended(ctx) }

// A rank whose answer is late knows that all have come, and blames nobody.
func TestLateAnswerIsNoFailure(t *testing.T) {
	w, err := New(Env{Job: "j", Size: 1, LocalSize: 1, Timeout: soon}, slow{NewMemStore()})
	require.NoError(t, err)
	defer w.Close()
	values, err := w.AllGather(t.Context(), "k", []byte("v"))
	require.Check(t, err == nil && len(values) == 1 && string(values[0]) == "v", "got %q, %v",
		values, err)
}
