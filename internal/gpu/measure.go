package gpu

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Where the table has no row for the group's devices, the ranks measure together as they connect,
// by what euryale bench --tune measures by, in a hurry: fewer rounds, fewer sizes, and one type
// for all.

const (
	// measureTime bounds what the ranks measure, by the clock of rank 0.
	measureTime = 500 * time.Millisecond
	// raceTime is for one size of a collective, of which there are 36.
	raceTime = 8 * time.Millisecond
	// leastMeasured and mostMeasured are bytes of the largest operand.
	leastMeasured, mostMeasured = 1 << 10, 64 << 20
	// measuredStep is no more than a race in a hurry allows.
	measuredStep = 4
)

// quick says how much the ranks measure as they connect.
type quick struct {
	time time.Duration
	most int // bytes
}

// unmeasured reports whether the ranks are to measure: the same on every rank.
func (c *choice) unmeasured() bool {
	return c.why == "" && c.plan.Measure && !c.plan.Table.serves(c.plan.machine())
}

// measured returns c once it goes by what its ranks have measured. An error there never is one of
// Connect: it ends the group on every rank, and the ranks go without in another one.
func (b *Backend) measured(ctx context.Context, w *rendezvous.World,
	c *Communicator) (*Communicator, error) {
	rows, problem := c.measure()
	if problem != nil {
		c.Abort(problem)
		closing := c.Close()
		again, err := b.connect(ctx, w, "gpu/again")
		if err != nil {
			return nil, errors.Join(err, fmt.Errorf("after ranks measured: %w", problem), closing)
		}
		c = again
	}
	switch {
	case problem != nil:
		c.lacks = fmt.Sprintf("the ranks could not measure as they connected: %v", problem)
	case len(rows) == 0:
		c.lacks = fmt.Sprintf("%v were too short to measure as the ranks connected", b.quick.time)
	case w.Rank == 0:
		b.keep(rows)
	}
	return c, nil
}

// keep keeps rows in the user's file, or else in this process.
func (b *Backend) keep(rows Table) {
	_, err := rows.Keep()
	if err == nil {
		return
	}
	b.mu.Lock()
	b.own = append(b.own, rows...)
	b.mu.Unlock()
	if b.Notice != nil {
		b.Notice(fmt.Sprintf("what ranks measured as they connected serves this process alone: %v",
			err))
	}
}

// unkept returns the rows that keep has kept in this process.
func (b *Backend) unkept() Table {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.own
}

// measure makes the group and its parts go by times that its ranks measure now, and returns them.
// An error is one of every rank, some of which may have ended the group by then.
func (c *Communicator) measure() (Table, error) {
	ends := time.Now().Add(c.quick.time)
	memory, problem := c.dev.Alloc(c.quick.most)
	if err := c.vote(problem); err != nil {
		if problem == nil {
			err = errors.Join(err, c.dev.Free(memory))
		}
		return nil, err
	}
	rows, problem := c.times(memory, ends)
	if problem != nil {
		c.Abort(problem)
	}
	// The driver may wait for every kernel before it frees memory, so none may run.
	problem = errors.Join(c.vote(problem), c.dev.Free(memory))
	c.order.Lock()
	defer c.order.Unlock()
	all, err := group.Agree(c.gather, c.members, rows, problem)
	if err != nil {
		return nil, err
	}
	c.asked.Table = append(c.asked.Table, all[0]...)
	c.goBy(c.asked.Table)
	for a := range c.used {
		c.used[a].Store(0)
	}
	return all[0], nil
}

// vote is [group.Gatherer.Vote] of the ranks.
func (c *Communicator) vote(problem error) error {
	c.order.Lock()
	defer c.order.Unlock()
	return c.gather.Vote(c.members, problem)
}

// times measures.
func (c *Communicator) times(memory backend.Buffer, ends time.Time) (rows Table, err error) {
	comparison, err := bench.NewComparisonOn(c, memory, nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, comparison.Close()) }()
	race := func(ways []func() (backend.Work, error)) ([]float64, error) {
		return comparison.Race(raceTime, ways...)
	}
	var sizes []int
	for n := leastMeasured; n <= c.quick.most; n *= measuredStep {
		sizes = append(sizes, n)
	}
	left := time.Until(ends)
	for _, call := range []struct {
		kind  backend.Kind
		sixth time.Duration // of the time, by when it is to be over
	}{{backend.AllReduce, 3}, {backend.ReduceScatter, 4}, {backend.AllGather, 5},
		{backend.AllToAll, 6}} {
		comparison.Hurry(ends.Add(-left * (6 - call.sixth) / 6))
		row, err := c.Tune(call.kind, backend.F32, sizes, memory, race)
		if err != nil {
			return nil, err
		}
		row.DType, row.Quick = 0, true
		row.Source = fmt.Sprintf("as ranks connected, %s, NCCL %s",
			time.Now().UTC().Format(time.DateOnly), versionText(c.lib.version()))
		if len(row.Samples) > 0 {
			rows = append(rows, row)
		}
	}
	return rows, nil
}
