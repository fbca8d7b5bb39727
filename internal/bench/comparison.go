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
	// A comparison in a hurry needs but a few rounds of short batches.
	hurriedRounds = 3
	hurriedBatch  = 10
	hurriedTime   = 200 * time.Microsecond
	// growth is how many times as long a race in a hurry may take as the one before it.
	growth = 4
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

// Timer is a clock of a device's queue, which notes when it gets to a point.
type Timer struct {
	queue    backend.TimedQueue
	from, to backend.TimedEvent
}

// NewTimer returns a timer of a queue.
func NewTimer(q backend.TimedQueue) (*Timer, error) {
	from, err := q.NewTimedEvent()
	if err != nil {
		return nil, err
	}
	to, err := q.NewTimedEvent()
	if err != nil {
		return nil, errors.Join(err, from.Close())
	}
	return &Timer{q, from, to}, nil
}

// Start marks where the time begins: after what is on the queue now.
func (t *Timer) Start() error { return t.queue.RecordTimed(t.from) }

// Stop marks where it ends.
func (t *Timer) Stop() error { return t.queue.RecordTimed(t.to) }

// Elapsed waits for the queue, and returns the time from Start to Stop.
func (t *Timer) Elapsed() (time.Duration, error) {
	e, err := t.queue.Record()
	if err != nil {
		return 0, err
	}
	if err := Await(e); err != nil {
		return 0, err
	}
	took, happened, err := t.to.Elapsed(t.from)
	if err == nil && !happened {
		err = errors.New("bench: the device has passed a point of its queue, and not noted when")
	}
	return took, err
}

// Close frees the timer.
func (t *Timer) Close() error { return errors.Join(t.from.Close(), t.to.Close()) }

// clockOf returns the clock of a device, the host's if it has none, and what frees the clock.
func clockOf(d backend.Device) (clock Clock, free func() error, err error) {
	q, ok := d.Default().(backend.TimedQueue)
	if !ok {
		return &hostClock{}, func() error { return nil }, nil
	}
	t, err := NewTimer(q)
	if err != nil {
		return nil, nil, err
	}
	return t, t.Close, nil
}

// Comparison times several ways to run a call of a communicator, in turn.
type Comparison struct {
	run    run
	buffer backend.Buffer
	clock  Clock
	free   func() error

	ends  time.Time     // by when the races must be over; zero for no limit. Rank 0's counts
	least time.Duration // that the last race would have taken with the fewest rounds
}

// NewComparison returns a comparison with nbytes bytes of zeroed device memory. A nil clock is
// the device's, or the host's for a device without one: its times include one wait at the end of
// each batch. It is collective.
func NewComparison(comm backend.Communicator, nbytes int, clock Clock) (*Comparison, error) {
	m := run{comm: comm}
	buffer, err := m.own(nbytes)
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	c, err := NewComparisonOn(comm, buffer, clock)
	if err != nil {
		return nil, errors.Join(err, m.free())
	}
	c.run.owned = m.owned
	return c, nil
}

// NewComparisonOn is NewComparison with memory of the caller's, who frees it after Close.
func NewComparisonOn(comm backend.Communicator, buffer backend.Buffer, clock Clock) (*Comparison,
	error) {
	c := &Comparison{run: run{comm: comm, memory: memory{device: comm.Device()}}, buffer: buffer,
		clock: clock, free: func() error { return nil }}
	var err error
	if clock == nil {
		if c.clock, c.free, err = clockOf(comm.Device()); err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
	}
	if buffer.Device() {
		c.run.memory.staging = make([]byte, wordsBytes)
	}
	if c.run.words, err = comm.Alloc(wordsBytes); err != nil { // last, as in run.prepare
		return nil, errors.Join(fmt.Errorf("bench: get memory that all ranks can reach: %w", err),
			c.free())
	}
	return c, nil
}

// Buffer returns the memory, for operands.
func (c *Comparison) Buffer() backend.Buffer { return c.buffer }

// Close frees the memory.
func (c *Comparison) Close() error {
	return errors.Join(c.run.comm.Free(c.run.words), c.free(), c.run.free())
}

// Hurry makes later races quick, and bounds them: Race returns no times, on every rank, where
// rank 0 sees that the race might not be over by a point in time. It is taken to need four times
// as long as the one before it: let sizes grow by no more.
// The first one is taken to need no time.
func (c *Comparison) Hurry(ends time.Time) { c.ends, c.least = ends, 0 }

// inTime reports whether there is time for a race, as rank 0 sees it.
func (c *Comparison) inTime() (bool, error) {
	if c.ends.IsZero() {
		return true, nil
	}
	left := []int64{int64(time.Until(c.ends) - growth*c.least)}
	err := together(&c.run, backend.Collective{Kind: backend.Broadcast}, left)
	return left[0] > 0, err
}

// fewest returns the least number of rounds and of calls in a batch, and how long a batch of more
// calls may take.
func (c *Comparison) fewest() (rounds, calls int, batch time.Duration) {
	if c.ends.IsZero() {
		return minRounds, minBatch, batchTime
	}
	return hurriedRounds, hurriedBatch, hurriedTime
}

// Race returns the microseconds that each way takes for a call when calls are started
// back to back: the median over rounds, on the slowest rank, the same on every rank. In
// a round each way makes one call that synchronizes the ranks and then a timed batch of
// calls, with one wait at its end. All rounds together take about as long as budget. Race
// is collective; the ways must not depend on the rank. It returns no times if there is no time
// left: see Hurry.
func (c *Comparison) Race(budget time.Duration, ways ...func() (backend.Work, error)) ([]float64,
	error) {
	if len(ways) > maxWays {
		return nil, fmt.Errorf("bench: a race of %d ways: there is room for %d", len(ways), maxWays)
	}
	if ok, err := c.inTime(); !ok || err != nil {
		return nil, err
	}
	began := time.Now()
	batches, rounds, err := c.plan(budget, ways)
	if err != nil || rounds == 0 {
		return nil, err
	}
	times := make([][]time.Duration, len(ways))
	for round := range rounds {
		for i, way := range ways {
			took, err := c.batch(way, int(batches[i]))
			if err != nil {
				return nil, err
			}
			times[i] = append(times[i], took)
		}
		if round < hurriedRounds {
			c.least = time.Since(began)
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

// plan warms up. It returns the calls of each way in a batch and the number of rounds, 0 if there
// is no time for enough of them, which rank 0 decides for all.
func (c *Comparison) plan(budget time.Duration, ways []func() (backend.Work, error)) (
	batches []int64, rounds int, err error) {
	chosen := make([]int64, len(ways)+1)
	round := time.Duration(1)
	least, _, batch := c.fewest()
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
		chosen[i] = int64(min(max(int(batch/call), few), maxBatch))
		round += call * time.Duration(chosen[i])
	}
	rounds = int(min(max(budget/round, time.Duration(least)), maxRounds))
	if !c.ends.IsZero() {
		if rounds = min(rounds, int(time.Until(c.ends)/round)); rounds < least {
			rounds = 0
		}
	}
	chosen[len(ways)] = int64(rounds)
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
	_, calls, batch := c.fewest()
	if time.Duration(longest[0]) > batch {
		return 1, nil
	}
	_, err := c.batch(way, calls)
	return calls, err
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
