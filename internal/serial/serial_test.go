package serial

import (
	"context"
	"errors"
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
		if !e.Submit(func() { got = append(got, i) }) {
			t.Fatal("an open executor refuses a task")
		}
	}
	e.Close()
	e.Close()
	if len(got) != 100 || !slices.IsSorted(got) {
		t.Errorf("ran %v", got)
	}
	if e.Submit(func() { t.Error("it runs after Close") }) {
		t.Error("a closed executor takes a task")
	}
	require.NoError(t, goleak.Find(before))
}

func TestJoinPrefersWhatHasHappened(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	e := make(Event)
	if err := e.Join(over); !errors.Is(err, context.Canceled) {
		t.Errorf("before: %v", err)
	}
	close(e)
	if err := e.Join(over); err != nil {
		t.Errorf("after: %v", err)
	}
}
