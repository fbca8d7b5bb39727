package sparse

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// race is what one call took in either way, on the slowest rank, before the first call of
// its kind: the same numbers on all ranks.
type race struct{ messages, plain time.Duration }

// raceKind is what calls have in common for which one race is enough.
type raceKind struct {
	n, k   int
	dtype  backend.DType
	device bool
}

// What a race takes: a call of each way that nobody times, since it makes memory and opens
// connections, and one that is timed. If both of those took less than brief, rounds of
// some calls back to back follow, and the shortest time of each way counts.
const (
	brief  = 10 * time.Millisecond // one call is timed well enough beyond it
	rounds = 3
	batch  = 4
)

// gain is the share of a plain all-reduce's time within which messages must end: what is
// gained must be more than what a race errs by. Four of them among two H200 came to 0.66, 0.72,
// 0.83 and 0.87, where many calls came to 0.63, 0.67, 0.86 and 0.90
// (bench/results/2026-11-21-h200x2-sparse-calls.txt).
const gain = 0.95

// plainWins reports whether a call had better pass.
func (r race) plainWins() bool { return float64(r.messages) > gain*float64(r.plain) }

// String says how it ended.
func (r race) String() string {
	tenth := func(d time.Duration) time.Duration { return d.Round(100 * time.Nanosecond) }
	return fmt.Sprintf("in a race before the first such call, messages took %v and a plain all-reduce %v: they are sent if they take %.0f %% less",
		tenth(r.messages), tenth(r.plain), 100*(1-gain))
}

// weigh lets a call of a top-k pass as it is where that is sooner: where messages would be
// more bytes, and where they have lost a race. If there is a residual, the call takes all of
// it along. Calls whose selection somebody wants to know, and strict ones, stay sparse.
func (k *call) weigh(q backend.Queue, do deviceKernels) error {
	k.slot.passed, k.slot.race = false, race{}
	if k.k == 0 || k.c.fewest || k.c.always || k.c.strict || k.sent.Len() > 0 {
		return nil
	}
	if !k.dense {
		r, err := k.raced(q, do)
		if err != nil {
			return fmt.Errorf("race messages against a plain all-reduce of %d %v: %w", k.slot.n, k.src.DType(), err)
		}
		if k.slot.race = r; !r.plainWins() {
			return nil
		}
	}
	if k.slot.passed = true; k.slot.owes {
		k.flush()
	}
	return nil
}

// flush makes a call reduce all of operand and residual densely, so that nothing is left:
// every element is selected, and none is rounded.
func (k *call) flush() {
	k.flushes, k.dense, k.k = true, true, 0
	k.layout.values, k.layout.capacity = backend.F32, 0
}

// pass starts a call that passes.
func (k *call) pass(q backend.Queue) (backend.Work, error) {
	k.dense = true
	k.count()
	n := &k.c.counters
	n.bytes.Add(int64(k.what.Kind.BusFactor(k.c.Size()) * float64(k.src.NBytes())))
	n.entries.Add(int64(k.slot.n))
	return k.c.inner.Start(q, k.what, k.dst, k.src)
}

// raced returns the race for a call, which the first one of its kind holds.
func (k *call) raced(q backend.Queue, do deviceKernels) (race, error) {
	kind := raceKind{k.slot.n, k.k, k.src.DType(), k.src.Device()}
	if r, held := k.c.races[kind]; held {
		return r, nil
	}
	y, free, err := k.lane()
	if err != nil {
		return race{}, err
	}
	o := k.c.options
	o.how, o.warmUp = TopK(k.c.density(k.slot.calls)), 0
	trial := newCommunicator(lent{k.c.inner}, o)
	trial.always = true
	r, err := k.hold(
		func() (backend.Work, error) { return trial.Start(q, k.what, y, k.src) },
		func() (backend.Work, error) { return k.c.inner.Start(q, k.what, y, k.src) },
		func(times []int64) error { return k.agree(q, do, times) })
	if err := errors.Join(err, trial.Close(), free()); err != nil {
		return race{}, err
	}
	k.c.races[kind] = r
	return r, nil
}

// lane returns where a race may write: the destination, or memory like it if that is the
// operand.
func (k *call) lane() (y backend.Buffer, free func() error, err error) {
	free = func() error { return nil }
	if k.dst.Addr() != k.src.Addr() {
		return k.dst, free, nil
	}
	if !k.src.Device() {
		return backend.Of(make([]int64, words(k.src.NBytes()))).As(backend.U8).Slice(0, k.src.NBytes()).As(k.src.DType()), free, nil
	}
	b, err := k.c.Device().Alloc(k.src.NBytes())
	return b.As(k.src.DType()), func() error { return k.c.Device().Free(b) }, err
}

// hold times both ways; agree makes times those of the slowest rank.
func (k *call) hold(messages, plain func() (backend.Work, error), agree func(times []int64) error) (race, error) {
	both := func(calls int) (r race, err error) {
		times := make([]int64, 2)
		for i, way := range []func() (backend.Work, error){messages, plain} {
			took, err := timed(calls, way)
			if err != nil {
				return r, err
			}
			times[i] = int64(took) / int64(calls)
		}
		err = agree(times)
		return race{time.Duration(times[0]), time.Duration(times[1])}, err
	}
	if _, err := both(1); err != nil {
		return race{}, err
	}
	best, err := both(1)
	for i := 0; i < rounds && err == nil && best.messages+best.plain < brief; i++ {
		var r race
		r, err = both(batch)
		if i == 0 {
			best = r
		}
		best = race{min(best.messages, r.messages), min(best.plain, r.plain)}
	}
	return best, err
}

// timed returns how long calls take that are started back to back.
func timed(calls int, start func() (backend.Work, error)) (time.Duration, error) {
	began := time.Now()
	var last backend.Work
	for range calls {
		var err error
		if last, err = start(); err != nil {
			return 0, err
		}
	}
	err := last.Join(context.Background())
	return time.Since(began), err
}

// agree replaces numbers by the largest of all ranks.
func (k *call) agree(q backend.Queue, do deviceKernels, numbers []int64) error {
	c, words := k.c, backend.Of(numbers)
	most := backend.Collective{Kind: backend.AllReduce, Op: backend.Max}
	if do == nil {
		w, err := c.inner.Start(q, most, words, words)
		if err != nil {
			return err
		}
		return w.Join(context.Background())
	}
	memory, err := c.Device().Alloc(words.NBytes())
	if err != nil {
		return err
	}
	there := memory.As(backend.I64)
	_, err = timed(1, func() (backend.Work, error) {
		if err := do.Move(there, words); err != nil {
			return nil, err
		}
		return c.inner.Start(q, most, there, there)
	})
	if err == nil {
		err = do.Move(words, there)
	}
	if err == nil {
		var moved backend.Event
		if moved, err = q.Record(); err == nil {
			err = moved.Join(context.Background())
		}
	}
	return errors.Join(err, c.Device().Free(memory))
}

// lent is a communicator that a wrapper does not own.
type lent struct{ backend.Communicator }

// Close does nothing: who has lent it closes it.
func (lent) Close() error { return nil }

// Unwrap implements [backend.Wrapper].
func (l lent) Unwrap() []backend.Communicator { return []backend.Communicator{l.Communicator} }
