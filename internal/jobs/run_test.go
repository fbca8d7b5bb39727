//go:build linux

package jobs_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// runEnds runs three ranks and fails the test if Run takes longer than limit or
// returns an error without the words.
func runEnds(t *testing.T, limit time.Duration, want string, rank func(comm backend.Communicator,
	build sync.Locker) error) error {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- euryale.Run(context.Background(), 3, rank) }()
	select {
	case err := <-ended:
		require.Fails(t, "Run", err, want)
		return err
	case <-time.After(limit):
		t.Fatalf("Run has not returned after %v", limit)
		return nil
	}
}

// soon is well below the timeout of a job, 60 s.
const soon = 20 * time.Second

func TestFoundRankThatReturnsWithTheBuildLockEndsTheOthers(t *testing.T) {
	broken := errors.New("cannot build")
	err := runEnds(t, soon, "cannot build", func(comm backend.Communicator,
		build sync.Locker) error {
		build.Lock()
		if comm.Rank() == 1 {
			return broken
		}
		build.Unlock()
		return backend.Barrier(comm)
	})
	require.Check(t, errors.Is(err, broken), "the error of Run does not wrap the rank's: %v", err)
}

// A program that a signal ends closes what Init has given it, and not each group.
func TestFoundCloseEndsTheCallsOfGroups(t *testing.T) {
	const size = 2
	var errs [size]error
	require.Report(t, euryale.Run(context.Background(), size, func(comm backend.Communicator,
		_ sync.Locker) error {
		part, err := comm.Split(0, 0)
		if err != nil {
			return err
		}
		x := backend.Of(make([]float32, 1<<10))
		for i := 0; err == nil; i++ {
			if i == 100 && comm.Rank() == 1 {
				go comm.Close()
			}
			err = backend.Run(part, backend.Collective{Kind: backend.AllReduce}, x, x)
		}
		errs[comm.Rank()] = err
		return nil
	}))
	for r, err := range errs {
		require.Fails(t, fmt.Sprint("rank ", r), err, backend.ErrClosed)
	}
	require.Fails(t, "the rank that closed", errs[1], "Close was called on this rank")
}

func TestAbortEndsTheCallsOfGroups(t *testing.T) {
	ended := make(chan error, 1)
	require.Report(t, euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		part, err := comm.Split(0, 0)
		if err != nil {
			return err
		}
		if comm.Rank() == 0 {
			ended <- backend.Barrier(part)
			return nil
		}
		comm.Abort(errors.New("enough"))
		select {
		case err := <-ended:
			require.Fails(t, "a call of the group", err, "enough")
		case <-time.After(10 * time.Second):
			t.Error("a call of the group goes on")
		}
		return nil
	}))
}

func TestGroupsKnowTheRanksOfTheMachine(t *testing.T) {
	require.NoError(t, euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		alone, err := comm.Split(comm.Rank(), 0)
		if err != nil {
			return err
		}
		if a, b := comm.Capabilities().LocalRanks, alone.Capabilities().LocalRanks; a != 2 ||
			b != 2 {
			t.Errorf("rank %d of 2 on one machine is said to share it with %d ranks, and in a "+
				"group of its own with %d", comm.Rank(), a, b)
		}
		return alone.Close()
	}, host.Backend{}))
}

func TestFoundRankThatPanicsWithTheBuildLockEndsTheOthers(t *testing.T) {
	broken := errors.New("boo")
	err := runEnds(t, soon, "rank 2 panicked: boo", func(comm backend.Communicator,
		build sync.Locker) error {
		build.Lock()
		if comm.Rank() == 2 {
			panic(broken)
		}
		build.Unlock()
		return backend.Barrier(comm)
	})
	var p *euryale.PanicError
	require.Check(t, errors.As(err, &p) && p.Rank == 2 && errors.Is(err, broken) &&
		strings.Contains(string(p.Stack), "TestFoundRankThatPanics"), "the error of Run does not "+
		"say where the rank has panicked: %v", err)
}

func TestAPanicInACallEndsRun(t *testing.T) {
	for _, name := range []string{"host", "tcp"} {
		t.Setenv("EURYALE_BACKEND", name)
		heard := make([]error, 3)
		err := runEnds(t, soon, "rank 1 panicked: backend: Buffer.Slice(1, 2)",
			func(comm backend.Communicator, _ sync.Locker) error {
				heard[comm.Rank()] = panicsInACall(comm, false)
				return heard[comm.Rank()]
			})
		var p *euryale.PanicError
		require.Check(t, errors.As(err, &p) && strings.Contains(string(p.Stack), "panicsInACall"),
			"%s: the error of Run does not say where the rank has panicked: %v", name, err)
		for _, r := range []int{0, 2} {
			require.Fails(t, fmt.Sprintf("%s: rank %d heard", name, r), heard[r],
				"because of rank 1", "panicked in alltoall: backend: Buffer.Slice")
		}
	}
}

func TestANilBufferIsAnErrorOfTheCall(t *testing.T) {
	require.NoError(t, euryale.Run(t.Context(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		x := backend.Of([]float32{1, 2, 3, 4})
		for _, kind := range backend.Kinds() {
			what := backend.Collective{Kind: kind, Root: comm.Rank()}
			for _, nothing := range []backend.Buffer{backend.Host(backend.F32, nil, 4),
				backend.Host(backend.F32, nil, -4)} {
				require.Fails(t, fmt.Sprintf("%v of %d elements at nil", kind, nothing.Len()),
					backend.Run(comm, what, nothing, nothing), backend.ErrArgument)
			}
		}
		return backend.Run(comm, backend.Collective{Kind: backend.AllReduce}, x, x)
	}))
}

func TestFoundRankThatEndsItsGoroutineWithTheBuildLockEndsTheOthers(t *testing.T) {
	runEnds(t, soon, "rank 0: its goroutine was ended by runtime.Goexit",
		func(comm backend.Communicator, build sync.Locker) error {
			build.Lock()
			if comm.Rank() == 0 {
				runtime.Goexit()
			}
			build.Unlock()
			return backend.Barrier(comm)
		})
}

func TestFoundCollectiveUnderTheBuildLockIsNamed(t *testing.T) {
	runEnds(t, soon, "while it holds the build lock", func(comm backend.Communicator,
		build sync.Locker) error {
		build.Lock()
		defer build.Unlock()
		g := gorgonia.NewGraph()
		w := gorgonia.NewMatrix(g, gorgonia.Float32, gorgonia.WithShape(4, 6),
			gorgonia.WithInit(gorgonia.Ones()), gorgonia.WithName("w"))
		dp, err := autograd.New(comm, gorgonia.Nodes{w})
		if err != nil {
			return err
		}
		return dp.Close()
	})
}

func TestFoundBuildLockThatIsNeverReleasedIsNamed(t *testing.T) {
	t.Setenv("EURYALE_TIMEOUT", "300ms")
	runEnds(t, soon, "build lock", func(comm backend.Communicator, build sync.Locker) error {
		build.Lock()
		build.Lock() // by the rank that has it
		return nil
	})
}

func TestBuildLockIsHeldByOneRankAtATime(t *testing.T) {
	held := 0
	require.NoError(t, euryale.Run(context.Background(), 4, func(comm backend.Communicator,
		build sync.Locker) error {
		for range 100 {
			build.Lock()
			held++
			if held != 1 {
				return errors.New("another rank holds the lock")
			}
			runtime.Gosched()
			held--
			build.Unlock()
			build.Unlock() // does nothing
		}
		return backend.Barrier(comm)
	}))
}

func TestFoundRunHeedsTheTimeout(t *testing.T) {
	t.Setenv("EURYALE_TIMEOUT", "300ms")
	release := make(chan struct{})
	var once sync.Once
	runEnds(t, soon, "no sign of rank 1", func(comm backend.Communicator, _ sync.Locker) error {
		if comm.Rank() == 1 {
			<-release
			return nil
		}
		err := backend.Barrier(comm)
		once.Do(func() { close(release) })
		return err
	})
	t.Setenv("EURYALE_TIMEOUT", "soon")
	runEnds(t, soon, "EURYALE_TIMEOUT", func(backend.Communicator, sync.Locker) error {
		return nil
	})
}
