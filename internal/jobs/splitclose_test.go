//go:build linux

package jobs_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/backend/tcp"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestFoundSplitBesideCloseMakesNobodyWait: another goroutine closes one rank's communicator while
// all split it. Ranks whose Split was done before hear of it in the new group, long before the
// timeout.
func TestFoundSplitBesideCloseMakesNobodyWait(t *testing.T) { onHierarchies(t, splitBesideClose) }

// onHierarchies draws from a test many times, on backends without hierarchy and with it.
func onHierarchies(t *testing.T, draw func(*testing.T, backend.Backend)) {
	t.Setenv("EURYALE_TIMEOUT", "60s")
	draws := 10
	if isFull() {
		draws = 200
	}
	for name, b := range map[string]backend.Backend{"host": host.Backend{}, "tcp": tcp.Backend{}} {
		for _, topology := range []string{"", "2x2"} { // flat, and hierarchical
			t.Run(name+topology, func(t *testing.T) {
				t.Setenv("EURYALE_TOPOLOGY", topology)
				for range draws {
					draw(t, b)
				}
			})
		}
	}
}

func splitBesideClose(t *testing.T, b backend.Backend) {
	var whole sync.WaitGroup
	whole.Add(4)
	var longest time.Duration
	said := make([]string, 4)
	var mu sync.Mutex
	euryale.Run(context.Background(), 4, func(comm backend.Communicator, _ sync.Locker) error {
		if err := backend.Barrier(comm); err != nil {
			whole.Done()
			return err
		}
		if comm.Rank() == 1 {
			go func() {
				time.Sleep(rand.N(2 * time.Millisecond))
				comm.Close()
			}()
		}
		began := time.Now()
		part, err := comm.Split(0, 0)
		if err == nil && part.Rank() != 1 {
			err = backend.Barrier(part)
		}
		mu.Lock()
		longest = max(longest, time.Since(began))
		said[comm.Rank()] = fmt.Sprint(time.Since(began), " ", part != nil, " ", err)
		mu.Unlock()
		whole.Done()
		whole.Wait()
		return err
	}, b)
	require.Check(t, longest <= 20*time.Second, "a rank has waited for %v: %q", longest, said)
}

// TestSplitBesideAbortNamesTheRank: whoever waits inside a Split when another rank aborts learns
// which one it was, and not that a wait was cancelled or that a rank has closed which heard of it
// before.
func TestSplitBesideAbortNamesTheRank(t *testing.T) { onHierarchies(t, splitBesideAbort) }

func splitBesideAbort(t *testing.T, b backend.Backend) {
	euryale.Run(context.Background(), 4, func(comm backend.Communicator, _ sync.Locker) error {
		if err := backend.Barrier(comm); err != nil {
			return err
		}
		if comm.Rank() == 1 {
			go func() {
				time.Sleep(rand.N(20 * time.Millisecond))
				comm.Abort(errors.New("enough"))
			}()
		}
		for {
			part, err := comm.Split(0, 0)
			if err != nil {
				if comm.Rank() != 1 && !strings.Contains(err.Error(), "rank 1") {
					t.Errorf("rank %d: %v", comm.Rank(), err)
				}
				comm.Close() // others may see this before they hear of the abort
				return err
			}
			part.Close()
		}
	}, b)
}

// TestAnErrorThatWasSurvivedEndsNobody: the ranks of a part disagree, and go on with all. Those
// that are through first do not end the others.
func TestAnErrorThatWasSurvivedEndsNobody(t *testing.T) {
	draws := 10
	if isFull() {
		draws = 100
	}
	for name, b := range map[string]backend.Backend{"host": host.Backend{}, "tcp": tcp.Backend{}} {
		for _, closes := range []bool{true, false} {
			t.Run(fmt.Sprint(name, " closes the part: ", closes), func(t *testing.T) {
				for range draws {
					require.NoError(t, euryale.Run(context.Background(), 5,
						func(comm backend.Communicator, _ sync.Locker) error {
							return survives(comm, closes)
						}, b))
				}
			})
		}
	}
}

func survives(comm backend.Communicator, closes bool) error {
	part, err := comm.Split(0, comm.Rank())
	if err != nil {
		return err
	}
	x, y := make([]float32, 10+comm.Rank()/4), make([]float32, 5000)
	sum := backend.Collective{Kind: backend.AllReduce}
	err = backend.Run(part, sum, backend.Of(x), backend.Of(x))
	var e *backend.Error
	if !errors.Is(err, backend.ErrMismatch) || !errors.As(err, &e) || e.Blames() != 4 {
		return fmt.Errorf("rank 4 has called something else, and the error is %w", err)
	}
	if closes {
		if err := part.Close(); err != nil {
			return err
		}
	}
	for range 20 {
		if err := backend.Run(comm, sum, backend.Of(y), backend.Of(y)); err != nil {
			return fmt.Errorf("a group that is well: %w", err)
		}
	}
	return nil
}
