package group_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// overStore returns the ranks of a group that is told of its end over the store alone.
func overStore(t *testing.T, size int) ([]*group.Member, []*rendezvous.World) {
	t.Helper()
	worlds := require.Value(rendezvous.Local(size, time.Minute))(t)
	of := make(backend.Members, size)
	for r := range of {
		of[r] = r
	}
	all := make([]*group.Member, size)
	for r, w := range worlds {
		h := group.NewStoreHealth(w, "test/end")
		all[r] = group.NewMember(group.Config{Name: "test", Rank: r, Members: of, World: w,
			Health: h, Timeout: math.MaxInt64})
		all[r].Watch(&engine{stopped: make(chan struct{})})
		t.Cleanup(func() { all[r].Leave(); h.Release(); w.Close() })
	}
	return all, worlds
}

// Ranks that fail at once name one cause, on all ranks, also on those that were idle.
func TestTheFirstReportIsTheCauseOnAllRanks(t *testing.T) {
	for range 20 {
		all, _ := overStore(t, 4)
		var failing sync.WaitGroup
		for _, r := range []int{1, 2} {
			failing.Go(func() {
				report := group.Report{Reason: group.Aborted, Peer: r, Lost: r,
					Text: fmt.Sprintf("a cable of rank %d", r)}
				all[r].Tell(group.Found{Report: report})
			})
		}
		failing.Wait()
		for _, m := range all {
			ended(t, m, "a cable of rank", backend.ErrAborted)
		}
		var first, e *backend.Error
		errors.As(all[0].Err(), &first)
		for r, m := range all {
			if !errors.As(m.Err(), &e) || e.Rank != r || e.Peer != first.Peer ||
				e.Cause.Error() != first.Cause.Error() {
				t.Fatalf("rank %d says %v, rank 0 %v", r, m.Err(), first)
			}
		}
	}
}

// The rank that has found the end wraps what it has found; the others have its text.
func TestOwnErrorWrapsWhatWasFound(t *testing.T) {
	all, _ := overStore(t, 2)
	cable := errors.New("a cable was pulled")
	all[1].Tell(group.Found{Report: group.Report{Reason: group.Aborted, Peer: 1,
		Text: cable.Error()}, Cause: fmt.Errorf("%w: %w", backend.ErrAborted, cable)})
	for _, m := range all {
		ended(t, m, "a cable was pulled", backend.ErrAborted)
	}
	if !errors.Is(all[1].Err(), cable) || errors.Is(all[0].Err(), cable) {
		t.Errorf("rank 1: %v; rank 0: %v", all[1].Err(), all[0].Err())
	}
}

// A rank that was only woken by the end of another one waits for its report.
func TestABetterReportIsWaitedFor(t *testing.T) {
	all, _ := overStore(t, 2)
	all[1].Tell(group.Found{Report: group.Report{Reason: group.Aborted, Peer: 1,
		Text: "the end of a phase"}, Doubt: time.Minute})
	all[0].Abort(errors.New("the weather"))
	for _, m := range all {
		ended(t, m, "the weather", backend.ErrAborted)
	}
}

func TestReportThatCannotBeReadEndsTheGroup(t *testing.T) {
	all, worlds := overStore(t, 1)
	require.NoError(t, worlds[0].Store.Set(context.Background(), "test/end", []byte("?")))
	ended(t, all[0], "cannot be read", backend.ErrAborted)
	err := all[0].Err()
	require.Check(t, !strings.Contains(err.Error(), "because of"), "somebody is blamed: %v", err)
}

// The cause of a job's failure may be a timeout itself, as where a rank has waited for one that was
// cut off. Whoever listens for a report then stops.
func TestListeningEndsWhenTheJobFailsByATimeout(t *testing.T) {
	worlds := require.Value(rendezvous.Local(1, time.Minute))(t)
	defer worlds[0].Close()
	h := group.NewStoreHealth(worlds[0], "test/end")
	require.NoError(t, worlds[0].Fail(fmt.Errorf("no sign of rank 7: %w",
		context.DeadlineExceeded)))
	released := make(chan struct{})
	go func() {
		h.Release()
		close(released)
	}()
	select {
	case <-released:
	case <-time.After(time.Minute):
		t.Error("it still listens")
	}
}
