package sparse

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// slow is a link over which selecting pays at 1 %, and fast one over which it does not, for
// operands of the host of some thousand elements: at 5.2 ns for each, the break-even is
// near 1 GB/s.
const slow, fast = 1e7, 1e12

// What the constants are fitted to: measured on GPUs, with links as fast as NCCL's dense all-reduce has them there:
// 272 GB/s between two, 305 GB/s among four.
func TestEstimatesAreWhatWasMeasured(t *testing.T) {
	const n = 1 << 25
	us := func(x float64) time.Duration { return time.Duration(x * 1e3) }
	for _, tt := range []struct {
		ranks           int
		density, link   float64
		measured, plain time.Duration
	}{
		{2, 0.01, 271.7e9, us(384), us(494)},
		{2, 0.05, 271.7e9, us(614), us(494)},
		{4, 0.01, 305.5e9, us(439), us(660)},
		{4, 0.05, 305.5e9, us(669), us(660)},
	} {
		c := &Communicator{inner: ranks{size: tt.ranks}, options: options{how: TopK(tt.density), values: backend.F32, link: tt.link}}
		k := &call{c: c, slot: &slot{n: n}, what: reduction(backend.Avg), k: topK(tt.density, n),
			src: backend.OnDevice(backend.F32, 256, n), layout: layout{values: backend.F32, segments: 1}}
		e := k.estimate()
		near := func(got, want time.Duration) bool { return max(got-want, want-got) < want*7/100 }
		if !near(e.selecting+e.messages, tt.measured) || !near(e.plain, tt.plain) {
			t.Errorf("%d ranks, %v: %v, want %v and %v", tt.ranks, tt.density, e, tt.measured, tt.plain)
		}
		if c.link = 1; k.estimate().sooner() {
			t.Errorf("%d ranks, %v: over a link that stands still: %v", tt.ranks, tt.density, k.estimate())
		}
		if e.sooner() != (tt.plain < tt.measured) {
			t.Errorf("%d ranks, %v: a plain all-reduce ends sooner: %v", tt.ranks, tt.density, e.sooner())
		}
	}
}

// ranks is a communicator of so many ranks, of which nothing but that is asked.
type ranks struct {
	backend.Communicator
	size int
}

func (r ranks) Size() int { return r.size }

// residual is that of the slot of sum, empty if there is none.
func residual(c *Communicator) ([]float32, error) {
	state, err := c.State()
	if err != nil {
		return nil, err
	}
	return backend.View[float32](state[residualOf+"3"]), nil
}

func TestOverAFastLinkATopKPassesAsItIs(t *testing.T) {
	const n, P = 5000, 2 // whose sums are the same in any order
	everywhere(t, P, wrap(asIs, TopK(0.01), WithLink(fast)), func(c *Communicator) error {
		var all [][]float32
		for r := range P {
			all = append(all, normals(n, r, 0))
		}
		want := total(backend.Sum, all)
		for range 2 {
			y, err := sum(c, backend.Sum, all[c.Rank()])
			if err := errors.Join(err, same(y, want)); err != nil {
				return err
			}
		}
		if left, err := residual(c); err != nil || len(left) > 0 {
			return fmt.Errorf("calls that have sent everything have a residual of %d: %v", len(left), err)
		}
		got, bytes := c.Counters(), int64(2*4*n) // 2(P-1)/P of 4n, twice
		if want := (Counters{Calls: 2, Dense: 2, Entries: 2 * n, Bytes: bytes, DenseBytes: bytes}); got != want {
			return fmt.Errorf("the counters are %+v, want %+v", got, want)
		}
		why := c.Explain(3)
		for _, part := range []string{"plain: ", "1000 GB/s", "selecting 50 elements", "a plain all-reduce at 0s"} {
			if !strings.Contains(why, part) {
				return fmt.Errorf("%q is missing in %q", part, why)
			}
		}
		return nil
	})
}

func TestOverASlowLinkATopKIsSparse(t *testing.T) {
	const n, P = 5000, 3
	everywhere(t, P, wrap(asIs, TopK(0.01), WithLink(slow)), func(c *Communicator) error {
		var sent [][]float32
		for r := range P {
			sent = append(sent, largest(normals(n, r, 0), 50))
		}
		y, err := sum(c, backend.Sum, normals(n, c.Rank(), 0))
		if err := errors.Join(err, same(y, total(backend.Sum, sent))); err != nil {
			return err
		}
		if why := c.Explain(3); !strings.HasPrefix(why, "sparse: ") || !strings.Contains(why, "0.01 GB/s") {
			return errors.New(why)
		}
		left, err := residual(c)
		return errors.Join(err, same(left, minus(normals(n, c.Rank(), 0), sent[c.Rank()])))
	})
}

// What passes is not looked at, and what a residual holds would be sent late for ever.
func TestCallsThatMustBeSparseDoNotPass(t *testing.T) {
	const n = 5000
	stays := func(c *Communicator) error {
		_, err := sum(c, backend.Sum, normals(n, c.Rank(), 1))
		if why := c.Explain(3); err == nil && !strings.HasPrefix(why, "sparse: ") {
			err = errors.New(why)
		}
		return err
	}
	t.Run("strict", func(t *testing.T) {
		everywhere(t, 2, wrap(asIs, TopK(0.01), WithLink(fast), WithStrict()), stays)
	})
	t.Run("threshold", func(t *testing.T) {
		everywhere(t, 2, wrap(asIs, Threshold(0.3), WithLink(fast)), stays)
	})
	t.Run("report", func(t *testing.T) {
		everywhere(t, 2, wrap(asIs, TopK(0.01), WithLink(fast)), func(c *Communicator) error {
			x, sent, y := normals(n, c.Rank(), 1), make([]float32, n), make([]float32, n)
			if err := reported(c, backend.Of(sent), backend.Of(y), backend.Of(x)); err != nil {
				return err
			}
			return same(sent, largest(x, 50))
		})
	})
	t.Run("residual", func(t *testing.T) {
		everywhere(t, 2, wrap(asIs, TopK(0.01), WithLink(slow)), func(c *Communicator) error {
			if err := stays(c); err != nil {
				return err
			}
			state, err := c.State()
			if err != nil {
				return err
			}
			c.Reset()
			c.link = fast
			return errors.Join(c.SetState(state), stays(c))
		})
	})
}

// With a warm-up the first calls are dense enough to pass; the state of such a slot has no
// residual, and resumes.
func TestAWarmUpPassesUntilItIsSparse(t *testing.T) {
	const n = 5000
	// 105 ns for each of 1250 elements and 5.2 ns for each of 5000 are 157 us, of 50 they
	// are 31 us: between them is a plain all-reduce, of 20 kB at 0.4 GB/s.
	group(t, 2, wrap(asIs, TopK(0.01), WithLink(0.4e9), WithWarmUp(1)), func(c *Communicator) error {
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
			if why := c.Explain(3); !strings.HasPrefix(why, want) {
				return fmt.Errorf("call %d, want %s: %s", call, want, why)
			}
		}
		return nil
	})
}
