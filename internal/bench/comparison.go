package bench

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

const (
	// minRounds is the least number of rounds: a median of fewer says little. More than
	// maxRounds gain nothing.
	minRounds = 11
	maxRounds = 201
	// maxWays bounds the ways of a comparison: their times must fit the exchanged words.
	maxWays = wordsBytes/8 - 1
)

// Clock measures the time between two points of a device's default queue, where Start and
// Stop were called. Elapsed may wait for the queue to reach Stop.
type Clock interface {
	Start() error
	Stop() error
	Elapsed() (time.Duration, error)
}

// hostClock is the clock of the host. It runs until it is read.
type hostClock struct{ began time.Time }

func (c *hostClock) Start() error { c.began = time.Now(); return nil }

func (c *hostClock) Stop() error { return nil }

func (c *hostClock) Elapsed() (time.Duration, error) { return time.Since(c.began), nil }

// Comparison times several ways to run a call of a communicator, in turn.
type Comparison struct {
	run    run
	buffer backend.Buffer
	clock  Clock
}

// NewComparison returns a comparison with nbytes bytes of zeroed device memory. A nil clock
// is the host's, whose times include one wait at the end of each batch. It is collective.
func NewComparison(comm backend.Communicator, nbytes int, clock Clock) (*Comparison, error) {
	if clock == nil {
		clock = &hostClock{}
	}
	c := &Comparison{run: run{comm: comm, memory: memory{device: comm.Device()}}, clock: clock}
	var err error
	if c.buffer, err = c.run.own(nbytes); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	if c.buffer.Device() {
		c.run.memory.staging = make([]byte, wordsBytes)
	}
	if c.run.words, err = comm.Alloc(wordsBytes); err != nil { // last, as in run.prepare
		return nil, errors.Join(fmt.Errorf("bench: get memory that all ranks can reach: %w", err),
			c.Close())
	}
	return c, nil
}

// Buffer returns the memory, for operands.
func (c *Comparison) Buffer() backend.Buffer { return c.buffer }

// Close frees the memory.
func (c *Comparison) Close() error { return c.run.free() }

// Race returns the microseconds that each way takes for a call when calls are started
// back to back: the median over rounds, on the slowest rank, the same on every rank. In
// a round each way makes one call that synchronizes the ranks and then a timed batch of
// calls, with one wait at its end. All rounds together take about as long as budget. Race
// is collective; the ways must not depend on the rank.
func (c *Comparison) Race(budget time.Duration, ways ...func() (backend.Work, error)) ([]float64,
	error) {
	if len(ways) > maxWays {
		return nil, fmt.Errorf("bench: a race of %d ways: there is room for %d", len(ways), maxWays)
	}
	batches, rounds, err := c.plan(budget, ways)
	if err != nil {
		return nil, err
	}
	times := make([][]time.Duration, len(ways))
	for range rounds {
		for i, way := range ways {
			took, err := c.batch(way, int(batches[i]))
			if err != nil {
				return nil, err
			}
			times[i] = append(times[i], took)
		}
	}
	medians := make([]float64, len(ways))
	for i := range times {
		slices.Sort(times[i])
		medians[i] = micros(quantile(times[i], 0.5)) / float64(batches[i])
	}
	return medians, together(&c.run, backend.Collective{Kind: backend.AllReduce, Op: backend.Max},
		medians)
}

// plan warms up. It returns the calls of each way in a batch and the number of rounds,
// which rank 0 decides for all.
func (c *Comparison) plan(budget time.Duration, ways []func() (backend.Work, error)) (
	batches []int64, rounds int, err error) {
	chosen := make([]int64, len(ways)+1)
	round := time.Duration(1)
	for i, way := range ways {
		few, err := c.few(way)
		if err != nil {
			return nil, 0, err
		}
		took, err := c.batch(way, few)
		if err != nil {
			return nil, 0, err
		}
		call := max(took/time.Duration(few), 1)
		chosen[i] = int64(min(max(int(batchTime/call), few), maxBatch))
		round += call * time.Duration(chosen[i])
	}
	chosen[len(ways)] = int64(min(max(budget/round, minRounds), maxRounds))
	if err := together(&c.run, backend.Collective{Kind: backend.Broadcast}, chosen); err != nil {
		return nil, 0, err
	}
	return chosen[:len(ways)], int(chosen[len(ways)]), nil
}

// few warms up and returns the least number of calls in a batch. It is one if a single
// call takes so long on any rank that the wait at the end is negligible.
func (c *Comparison) few(way func() (backend.Work, error)) (int, error) {
	var took time.Duration
	for range 2 { // the first one allocates memory
		var err error
		if took, err = c.batch(way, 1); err != nil {
			return 0, err
		}
	}
	longest := []int64{int64(took)}
	if err := together(&c.run, backend.Collective{Kind: backend.AllReduce, Op: backend.Max},
		longest); err != nil {
		return 0, err
	}
	if time.Duration(longest[0]) > batchTime {
		return 1, nil
	}
	_, err := c.batch(way, minBatch)
	return minBatch, err
}

// batch returns the time of calls that are started back to back, once all ranks are
// ready.
func (c *Comparison) batch(way func() (backend.Work, error), calls int) (time.Duration, error) {
	last, err := way()
	if err != nil {
		return 0, err
	}
	if err := Await(last); err != nil {
		return 0, err
	}
	if err := c.clock.Start(); err != nil {
		return 0, err
	}
	for range calls {
		if last, err = way(); err != nil {
			return 0, err
		}
	}
	if err := c.clock.Stop(); err != nil {
		return 0, err
	}
	if err := Await(last); err != nil {
		return 0, err
	}
	return c.clock.Elapsed()
}
