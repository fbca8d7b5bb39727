package backendtest

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// limit is how long the ranks of one scenario may take together.
const limit = 2 * time.Minute

// Each runs f for every communicator on its own goroutine and waits for
// all. When one fails, the others are aborted, and its error fails the test,
// with those of ranks that failed by themselves: which of them ends first is
// chance. testranks.NoError ends such a function, too. When they are stuck the
// error holds the stacks of all goroutines.
func Each(t testing.TB, comms []backend.Communicator, f func(comm backend.Communicator) error) {
	t.Helper()
	require.NoError(t, each(comms, f))
}

// outcome is how a rank's function ended.
type outcome struct {
	rank int
	err  error
}

func each(comms []backend.Communicator, f func(comm backend.Communicator) error) error {
	return eachWithin(limit, comms, f)
}

func (s *suite) each(comms []backend.Communicator, f func(comm backend.Communicator) error) error {
	return eachWithin(s.limit, comms, f)
}

func eachWithin(limit time.Duration, comms []backend.Communicator,
	f func(comm backend.Communicator) error) error {
	ends := make(chan outcome, len(comms))
	for _, c := range comms {
		go func() {
			ends <- outcome{c.Rank(), testranks.Ended(func() error { return f(c) })}
		}()
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	var failed error
	for range comms {
		select {
		case end := <-ends:
			if end.err == nil || failed != nil && strings.Contains(end.err.Error(), aborted) {
				continue
			}
			err := fmt.Errorf("rank %d of %d: %w", end.rank, comms[0].Size(), end.err)
			if failed == nil {
				abortAll(comms, err)
			}
			failed = errors.Join(failed, err)
		case <-timer.C:
			err := fmt.Errorf("stuck for %v (errors so far: %w); the goroutines:\n%s", limit,
				orNone(failed), stacks())
			abortAll(comms, err)
			return err
		}
	}
	return failed
}

// aborted begins the cause with which the ranks are ended when one has failed.
const aborted = "the test failed: "

// abortAll ends the other ranks, which wait for one that gave up.
func abortAll(comms []backend.Communicator, cause error) {
	for _, c := range comms {
		c.Abort(fmt.Errorf("%s%w", aborted, cause))
	}
}

func orNone(err error) error {
	if err == nil {
		return errSkip("none")
	}
	return err
}

func stacks() []byte {
	buf := make([]byte, 1<<20)
	return buf[:runtime.Stack(buf, true)]
}
