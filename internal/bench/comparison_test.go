package bench_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

func TestComparisonTellsWaysApart(t *testing.T) {
	const slower = 2 * time.Millisecond
	for name, wrap := range map[string]wrap{"host": asIs, "device": guarded(t)} {
		t.Run(name, func(t *testing.T) {
			results := make(chan []float64, 2)
			require.NoError(t, onRanks(2, func(comm backend.Communicator) error {
				comm = wrap(comm)
				c := testranks.Must(bench.NewComparison(comm, 4096, nil))
				call := func() (backend.Work, error) {
					return comm.Start(nil, backend.Collective{Kind: backend.AllReduce}, c.Buffer(),
						c.Buffer())
				}
				slow := func() (backend.Work, error) {
					if comm.Rank() == 1 { // whose time is the one that counts
						time.Sleep(slower)
					}
					return call()
				}
				micros, err := c.Race(time.Millisecond, call, slow)
				results <- micros
				return errors.Join(err, c.Close())
			}))
			a, b := <-results, <-results
			require.Check(t, fmt.Sprint(a) == fmt.Sprint(b), "ranks have %v and %v", a, b)
			require.Check(t, len(a) == 2 && !(a[0] <= 0) &&
				!(a[1] < float64(slower.Microseconds())) && !(a[0] > a[1]), "%v us", a)
		})
	}
}

func TestComparisonEndsWithAnError(t *testing.T) {
	broken := errors.New("as the test wants")
	way := func() (backend.Work, error) { return nil, broken }
	require.NoError(t, onRanks(1, func(comm backend.Communicator) error {
		c, err := bench.NewComparison(comm, 1, nil)
		if err != nil {
			return err
		}
		_, err = c.Race(time.Millisecond, way)
		_, many := c.Race(time.Millisecond, make([]func() (backend.Work, error), 8)...)
		require.Check(t, errors.Is(err, broken) && many != nil &&
			strings.Contains(many.Error(), "room for 7"), "%v, %v", err, many)
		return c.Close()
	}))
}

// slowClock counts as many milliseconds as calls of the way have been started.
type slowClock struct{ calls, from, to int }

func (c *slowClock) Start() error { c.from = c.calls; return nil }

func (c *slowClock) Stop() error { c.to = c.calls; return nil }

func (c *slowClock) Elapsed() (time.Duration, error) {
	return time.Duration(c.to-c.from) * time.Millisecond, nil
}

func TestComparisonGoesByItsClock(t *testing.T) {
	require.NoError(t, onRanks(2, func(comm backend.Communicator) error {
		clock := &slowClock{}
		c := testranks.Must(bench.NewComparison(comm, 4, clock))
		way := func() (backend.Work, error) {
			clock.calls++
			return comm.Start(nil, backend.Collective{Kind: backend.AllReduce}, c.Buffer(),
				c.Buffer())
		}
		micros, err := c.Race(time.Millisecond, way)
		if err == nil && micros[0] != 1000 {
			err = fmt.Errorf("a call takes %v us", micros)
		}
		return errors.Join(err, c.Close())
	}))
}

// A race in a hurry begins where rank 0 sees time for it, and ends with few rounds.
func TestRacesInAHurryEndInTimeOnEveryRank(t *testing.T) {
	const limit = time.Second
	counts := make(chan [2]int, 2) // of races with times, and of calls
	require.NoError(t, onRanks(2, func(comm backend.Communicator) error {
		c, err := bench.NewComparison(comm, 4, nil)
		if err != nil {
			return err
		}
		began, pause, n := time.Now(), time.Millisecond, [2]int{}
		c.Hurry(began.Add(limit))
		way := func() (backend.Work, error) {
			n[1]++
			time.Sleep(pause)
			return comm.Start(nil, backend.Collective{Kind: backend.AllReduce}, c.Buffer(),
				c.Buffer())
		}
		for ; ; pause *= 4 {
			micros := testranks.Must(c.Race(time.Millisecond, way))
			if micros == nil {
				break
			}
			n[0]++
		}
		took := time.Since(began)
		c.Hurry(time.Now())
		before := n[1]
		if micros, err := c.Race(time.Millisecond, way); micros != nil || err != nil ||
			n[1] != before {
			return fmt.Errorf("a race without time: %v, %v", micros, err)
		}
		counts <- n
		if took > 2*limit {
			err = fmt.Errorf("rank %d raced for %v", comm.Rank(), took)
		}
		return errors.Join(err, c.Close())
	}))
	a, b := <-counts, <-counts
	if a != b || a[0] < 2 || a[0] > 4 { // a race has 10 calls at the least, of 1, 4, 16, 64 ms
		t.Errorf("races with times, and calls: %v and %v", a, b)
	}
}

// timed is a queue of a device whose clock says milliseconds: as many as calls were started.
type timed struct {
	backend.Queue
	calls *int
}

type timedEvent struct{ at int }

func (q timed) NewTimedEvent() (backend.TimedEvent, error) { return &timedEvent{}, nil }

func (q timed) RecordTimed(e backend.TimedEvent) error {
	e.(*timedEvent).at = *q.calls
	return nil
}

func (e *timedEvent) Elapsed(since backend.TimedEvent) (time.Duration, bool, error) {
	return time.Duration(e.at-since.(*timedEvent).at) * time.Millisecond, true, nil
}

func (e *timedEvent) Close() error { return nil }

// timedDevice is a device with such a queue.
type timedDevice struct {
	backend.Device
	queue timed
}

func (d timedDevice) Default() backend.Queue { return d.queue }

type onTimed struct {
	backend.Communicator
	device timedDevice
}

func (c onTimed) Device() backend.Device { return c.device }

func TestComparisonGoesByTheClockOfTheDevice(t *testing.T) {
	require.NoError(t, onRanks(2, func(comm backend.Communicator) error {
		calls := 0
		comm = onTimed{comm, timedDevice{comm.Device(), timed{comm.Device().Default(), &calls}}}
		c := testranks.Must(bench.NewComparison(comm, 4, nil))
		micros, err := c.Race(time.Millisecond, func() (backend.Work, error) {
			calls++
			return comm.Start(nil, backend.Collective{Kind: backend.AllReduce}, c.Buffer(),
				c.Buffer())
		})
		if err == nil && micros[0] != 1000 {
			err = fmt.Errorf("a call takes %v us", micros)
		}
		return errors.Join(err, c.Close())
	}))
}
