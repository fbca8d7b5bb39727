package sparse

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// What a race has come to, in tests that are not about its times.
var (
	lost = race{messages: 3 * time.Millisecond, plain: 2 * time.Millisecond}
	won  = race{messages: 2 * time.Millisecond, plain: 3 * time.Millisecond}
)

// racing lets races decide, of which those for k of n elements have come to r.
func racing(n, k int, r race, change ...func(*Communicator)) func(*Communicator) {
	return func(c *Communicator) {
		c.fewest = false
		c.ran(n, k, r)
		for _, f := range change {
			f(c)
		}
	}
}

// ran makes r the race for k of n elements, wherever they are.
func (c *Communicator) ran(n, k int, r race) {
	for _, device := range []bool{false, true} {
		for _, d := range []backend.DType{backend.F32, backend.F64} {
			c.races[raceKind{n, k, d, device}] = r
		}
	}
}

func TestATopKThatLosesItsRacePassesAsItIs(t *testing.T) {
	const n, P = 5000, 2 // whose sums are the same in any order
	everywhere(t, P, wrap(racing(n, 50, lost), TopK(0.01)), func(c *Communicator) error {
		var all [][]float32
		for r := range P {
			all = append(all, normals(n, r, 0))
		}
		for range 2 {
			y, err := sum(c, backend.Sum, all[c.Rank()])
			if err := errors.Join(err, same(y, total(backend.Sum, all))); err != nil {
				return err
			}
		}
		if left := kept(c); len(left) > 0 {
			return fmt.Errorf("calls that have sent everything have a residual of %d", len(left))
		}
		got, bytes := c.Counters(), int64(2*4*n) // 2(P-1)/P of 4n, twice
		if want := (Counters{Calls: 2, Dense: 2, Entries: 2 * n, Bytes: bytes, DenseBytes: bytes}); got != want {
			return fmt.Errorf("the counters are %+v, want %+v", got, want)
		}
		return explained(c, "plain: ", "messages took 3ms and a plain all-reduce 2ms", "5 % less")
	})
}

// explained finds parts in what is said of the last call.
func explained(c *Communicator, begin string, parts ...string) error {
	why := c.Explain(3)
	missing := slices.IndexFunc(parts, func(part string) bool { return !strings.Contains(why, part) })
	if !strings.HasPrefix(why, begin) || missing >= 0 {
		return fmt.Errorf("%q, want %q and %q", why, begin, parts)
	}
	return nil
}

// What a residual holds is not forgotten because a call that should take it along did not start.
func TestARestIsTakenAlongByTheNextCallThatStarts(t *testing.T) {
	const n, P = 5000, 2
	group(t, P, wrap(racing(n, 50, won), TopK(0.01)), func(c *Communicator) error {
		closed, err := c.Device().NewQueue()
		if err == nil {
			err = closed.Close()
		}
		if err != nil {
			return err
		}
		if _, err := sum(c, backend.Sum, normals(n, c.Rank(), 0)); err != nil {
			return err
		}
		c.ran(n, 50, lost)
		zeros := make([]float32, n)
		if _, err := c.Start(closed, reduction(backend.Sum), backend.Of(make([]float32, n)), backend.Of(zeros)); err == nil {
			return errors.New("a call on a closed queue has started")
		}
		y, err := sum(c, backend.Sum, zeros)
		if err != nil {
			return err
		}
		var rests [][]float32
		for r := range P {
			x := normals(n, r, 0)
			rests = append(rests, minus(x, largest(x, 50)))
		}
		return same(y, total(backend.Sum, rests))
	})
}

func TestATopKThatWinsItsRaceIsSparse(t *testing.T) {
	const n, P = 5000, 3
	everywhere(t, P, wrap(racing(n, 50, won), TopK(0.01)), func(c *Communicator) error {
		var sent [][]float32
		for r := range P {
			sent = append(sent, largest(normals(n, r, 0), 50))
		}
		y, err := sum(c, backend.Sum, normals(n, c.Rank(), 0))
		return errors.Join(err, same(y, total(backend.Sum, sent)),
			same(kept(c), minus(normals(n, c.Rank(), 0), sent[c.Rank()])), explained(c, "sparse: ", "messages took 2ms"))
	})
}

// What is as fast, but for the error of a race, is sent as it is.
func TestMessagesMustGainMoreThanTheErrorOfARace(t *testing.T) {
	for messages, plain := range map[time.Duration]bool{94: false, 96: true, 100: true, 50: false} {
		if r := (race{messages, 100}); r.plainWins() != plain {
			t.Errorf("%v: a plain one wins: %v", r, r.plainWins())
		}
	}
}

func TestMoreBytesThanADenseAllReducePassWithoutARace(t *testing.T) {
	const n = 1000
	everywhere(t, 2, wrap(racing(n, 1, won), TopK(0.8)), func(c *Communicator) error {
		y, err := sum(c, backend.Sum, normals(n, c.Rank(), 0))
		want := total(backend.Sum, [][]float32{normals(n, 0, 0), normals(n, 1, 0)})
		return errors.Join(err, same(y, want), same(kept(c), nil), explained(c, "plain: "))
	})
}

// The selection of a report, and what is finite, is known only of sparse calls.
func TestCallsThatMustBeSparseDoNotPass(t *testing.T) {
	const n = 5000
	stays := func(c *Communicator) error {
		_, err := sum(c, backend.Sum, normals(n, c.Rank(), 1))
		return errors.Join(err, explained(c, "sparse: "))
	}
	slow := racing(n, 50, lost)
	t.Run("strict", func(t *testing.T) { everywhere(t, 2, wrap(slow, TopK(0.01), WithStrict()), stays) })
	t.Run("threshold", func(t *testing.T) { everywhere(t, 2, wrap(slow, Threshold(0.3)), stays) })
	t.Run("fewest bytes", func(t *testing.T) {
		byBytes := func(c *Communicator) { c.fewest = true }
		everywhere(t, 2, wrap(racing(n, 50, lost, byBytes), TopK(0.01)), stays)
	})
	t.Run("report", func(t *testing.T) {
		everywhere(t, 2, wrap(slow, TopK(0.01)), func(c *Communicator) error {
			x, sent, y := normals(n, c.Rank(), 1), make([]float32, n), make([]float32, n)
			if err := reported(c, backend.Of(sent), backend.Of(y), backend.Of(x)); err != nil {
				return err
			}
			return same(sent, largest(x, 50))
		})
	})
}

// A residual that messages have left goes along with the first call that passes, whole.
func TestACallThatPassesTakesTheResidualAlong(t *testing.T) {
	const n, P = 5000, 2
	for _, values := range []backend.DType{backend.F32, backend.BF16} {
		everywhere(t, P, wrap(racing(n, 50, won), TopK(0.01), WithValues(values)), func(c *Communicator) error {
			if _, err := sum(c, backend.Avg, normals(n, c.Rank(), 0)); err != nil {
				return err
			}
			var left [P][]float32
			for r := range P {
				left[r] = minus(normals(n, r, 0), rounded(largest(normals(n, r, 0), 50), values))
			}
			if err := same(kept(c), left[c.Rank()]); err != nil {
				return err
			}
			c.ran(n, 50, lost)
			for step := 1; step < 4; step++ {
				var all [][]float32
				for r := range P {
					x := normals(n, r, step)
					if step == 1 {
						x = total(backend.Sum, [][]float32{left[r], x})
					}
					all = append(all, x)
				}
				y, err := sum(c, backend.Avg, normals(n, c.Rank(), step))
				if err := errors.Join(err, same(y, total(backend.Avg, all)), same(kept(c), nil), explained(c, "plain: ")); err != nil {
					return fmt.Errorf("values as %v, step %d: %w", values, step, err)
				}
			}
			if n := c.Counters(); n.Calls != 4 || n.Dense != 3 {
				return fmt.Errorf("the counters are %+v", n)
			}
			c.ran(n, 50, won) // and what was sent is not sent again
			y, err := sum(c, backend.Sum, make([]float32, n))
			return errors.Join(err, same(y, make([]float32, n)))
		})
	}
}

// rounded is x as messages hold it.
func rounded(x []float32, values backend.DType) []float32 {
	r := rounder{dtype: values, saturate: true}
	var all []float32
	for part := range slices.Chunk(slices.Clone(x), block) {
		_, seen := r.round(part)
		all = append(all, seen...)
	}
	return all
}

// The residual is of f32. Calls after that keep their 64 bits, also those of a run that resumes.
func TestACallOfF64TakesTheResidualAlong(t *testing.T) {
	const n, P = 100, 2
	everywhere(t, P, wrap(racing(n, 1, won), TopK(0.01)), func(c *Communicator) error {
		x, y := make([]float64, n), make([]float64, n)
		for i := range x {
			x[i] = float64(i)
		}
		call := func() error { return run(c, reduction(backend.Sum), backend.Of(y), backend.Of(x)) }
		if err := call(); err != nil {
			return err
		}
		c.ran(n, 1, lost)
		if err := call(); err != nil {
			return err
		}
		for i := range y {
			want := float64(2 * P * i)
			if i == n-1 { // which was sent before
				want /= 2
			}
			if y[i] != want {
				return fmt.Errorf("element %d is %v, want %v", i, y[i], want)
			}
		}
		state, err := c.State()
		if err := errors.Join(err, c.SetState(state)); err != nil {
			return err
		}
		for i := range x {
			x[i] += 0x1p-40
		}
		if err := call(); err != nil {
			return err
		}
		for i := range y {
			if y[i] != P*x[i] {
				return fmt.Errorf("element %d is %v after a resume, want %v", i, y[i], P*x[i])
			}
		}
		return same(kept(c), nil)
	})
}

// A race is held once, comes to the same on all ranks, decides, and leaves nothing behind.
func TestARaceIsHeldOnceByAllRanks(t *testing.T) {
	const n, P = 3000, 2
	byRace := func(c *Communicator) { c.fewest = false }
	for _, d := range []backend.DType{backend.F32, backend.F64} {
		for _, in := range []string{"place", "another"} {
			everywhere(t, P, wrap(byRace, TopK(0.01)), func(c *Communicator) error {
				step := func(i int) error {
					x := backend.Of(normals(n, c.Rank(), i))
					if d == backend.F64 {
						wide := backend.Of(make([]float64, n))
						narrow(wide, x)
						x = wide
					}
					y := x
					if in == "another" {
						y = backend.Of(make([]int64, n*d.Size()/8)).As(d)
					}
					return inPlace(c, y, x)
				}
				if err := step(0); err != nil {
					return err
				}
				if len(c.races) != 1 {
					return fmt.Errorf("%d races were held", len(c.races))
				}
				held := maps.Clone(c.races)
				var words []int64
				for kind, r := range held {
					if kind.n != n || kind.k != 30 || kind.dtype != d || r.messages <= 0 || r.plain <= 0 {
						return fmt.Errorf("%+v: %v", kind, r)
					}
					words = []int64{int64(r.messages), -int64(r.messages), int64(r.plain), -int64(r.plain)}
				}
				most := slices.Clone(words)
				if err := run(c, backend.Collective{Kind: backend.AllReduce, Op: backend.Max}, backend.Of(most), backend.Of(words)); err != nil {
					return err
				}
				if !slices.Equal(most, words) {
					return fmt.Errorf("the ranks have raced %v, this one %v", most, words)
				}
				plain := c.slots[3].race.plainWins()
				before := c.Counters()
				if before.Calls != 1 || (before.Dense == 1) != plain || (len(kept(c)) == 0) != plain {
					return fmt.Errorf("%v, but the counters are %+v, and the residual has %d", c.slots[3].race, before, len(kept(c)))
				}
				if err := step(1); err != nil {
					return err
				}
				state, err := c.State()
				if err != nil {
					return err
				}
				c.races = nil
				if err := errors.Join(c.SetState(state), step(2)); err != nil {
					return err
				}
				if !maps.Equal(c.races, held) {
					return fmt.Errorf("a race was held again: %v, %v", c.races, held)
				}
				state[racesOf] = backend.Of([]int64{1})
				if err := c.SetState(state); !errors.Is(err, backend.ErrArgument) {
					return fmt.Errorf("damaged races: %v", err)
				}
				return nil
			})
		}
	}
}

// Each length has a race of its own. One that meets a NaN is a race all the same, and leaves
// nothing of it behind. Reset forgets them.
func TestRacesOfSeveralLengthsMeetNaN(t *testing.T) {
	const at = 7
	byRace := func(c *Communicator) { c.fewest = false }
	everywhere(t, 2, wrap(byRace, TopK(0.01)), func(c *Communicator) error {
		for slot, n := range []int{3000, 5000, 3000} {
			what := reduction(backend.Sum)
			what.State = 1 + slot
			x, y := normals(n, c.Rank(), slot), make([]float32, n)
			if c.Rank() == 1 {
				x[at] = float32(math.NaN())
			}
			if err := run(c, what, backend.Of(y), backend.Of(x)); err != nil {
				return err
			}
			if y[at] == y[at] {
				return fmt.Errorf("the NaN of %d elements is %v", n, y[at])
			}
			clear(x)
			if err := run(c, what, backend.Of(y), backend.Of(x)); err != nil {
				return err
			}
			if slices.ContainsFunc(y, func(v float32) bool { return v != v }) {
				return fmt.Errorf("a NaN of %d elements came back", n)
			}
		}
		if len(c.races) != 2 {
			return fmt.Errorf("%d races were held for two lengths", len(c.races))
		}
		if c.Reset(); len(c.races) > 0 {
			return fmt.Errorf("%d races after a reset", len(c.races))
		}
		return nil
	})
}

// inPlace is run for a destination that is the operand, if it is.
func inPlace(c *Communicator, y, x backend.Buffer) error {
	if y.Addr() != x.Addr() || c.Device().Name() == "host" {
		return run(c, reduction(backend.Sum), y, x)
	}
	memory, err := c.Device().Alloc(x.NBytes())
	if err != nil {
		return err
	}
	there := memory.As(x.DType())
	return errors.Join(move(c, there, x), backend.Run(c, reduction(backend.Sum), there, there), c.Device().Free(memory))
}

// With a warm-up the first calls are dense enough to pass; the state of such a slot has no
// residual, and resumes.
func TestAWarmUpPassesUntilItIsSparse(t *testing.T) {
	const n = 5000
	quarters := func(c *Communicator) {
		c.ran(n, 1250, lost)
		c.ran(n, 313, lost)
	}
	group(t, 2, wrap(racing(n, 79, won, quarters, func(c *Communicator) { c.ran(n, 50, won) }), TopK(0.01), WithWarmUp(1)), func(c *Communicator) error {
		for call, want := range []string{"plain", "plain", "sparse", "sparse"} {
			state, err := c.State()
			if err != nil {
				return err
			}
			c.Reset()
			if err := c.SetState(state); err != nil {
				return fmt.Errorf("before call %d: %w", call, err)
			}
			if _, err := sum(c, backend.Sum, normals(n, c.Rank(), call)); err != nil {
				return err
			}
			if err := explained(c, want); err != nil {
				return fmt.Errorf("call %d: %w", call, err)
			}
		}
		return nil
	})
}
