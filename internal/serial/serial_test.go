package serial

import (
	"context"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestTasksRunInOrderAndBeforeClose(t *testing.T) {
	before := goleak.IgnoreCurrent()
	e := New()
	var got []int
	for i := range 100 {
		require.That(t, e.Submit(func() { got = append(got, i) }),
			"an open executor refuses a task")
	}
	e.Close()
	e.Close()
	require.Check(t, len(got) == 100 && slices.IsSorted(got), "ran %v", got)
	require.Check(t, !e.Submit(func() { t.Error("it runs after Close") }),
		"a closed executor takes a task")
	require.NoError(t, goleak.Find(before))
}

func TestJoinPrefersWhatHasHappened(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	e := make(Event)
	require.Fails(t, "before", e.Join(over), context.Canceled)
	close(e)
	err := e.Join(over)
	require.Check(t, err == nil, "after: %v", err)
}
