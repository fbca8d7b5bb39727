package half

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

var halves = []backend.DType{backend.F16, backend.BF16}

// wrap is Wrap for tests, which pass what it takes.
func wrap(half backend.DType) func(backend.Communicator) backend.Communicator {
	return func(inner backend.Communicator) backend.Communicator {
		c, err := New(inner, half)
		if err != nil {
			panic(err)
		}
		return c
	}
}

// ranks runs f on P ranks over 16 bits.
func ranks(t *testing.T, P int, half backend.DType, f func(c *Communicator) error) {
	t.Helper()
	g := require.Value(backendtest.Over(host.Backend{}, wrap(half))(P, time.Minute))(t)
	backendtest.Each(t, g.Comms, func(c backend.Communicator) error {
		err := testranks.Ended(func() error { return f(c.(*Communicator)) })
		return errors.Join(err, c.Close())
	})
	require.Report(t, g.Close())
}

// asHalf lets the suite see what comes of 16 bits: an average of 16-bit floats
// is widened, and given to half as f32, so that it must come back with the
// bits that it has anyway. Sums and averages of f32 and f64, which half
// rounds and the suite wants exact, go past it; the tests below are about them.
type asHalf struct{ *Communicator }

func (a asHalf) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	_, err := what.Check(a.Rank(), a.Size(), dst, src)
	switch {
	case err != nil || !shrinks(what, backend.F32) || what.Association == backend.Tree:
	case src.DType() == backend.F32 || src.DType() == backend.F64:
		return a.Base.Start(q, what, dst, src)
	case src.DType() == a.half && what.Op == backend.Avg:
		return a.widened(q, what, dst, src)
	}
	return a.Communicator.Start(q, what, dst, src)
}

func (a asHalf) widened(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if q == nil {
		q = a.Device().Default()
	}
	memory, err := a.Device().Alloc(4 * (dst.Len() + src.Len()))
	if err != nil {
		return nil, err
	}
	wide := memory.As(backend.F32)
	x, y := wide.Slice(0, src.Len()), wide.Slice(src.Len(), wide.Len())
	if err := q.Cast(x, src); err != nil {
		return nil, err
	}
	inner, err := a.Communicator.Start(q, what, y, x)
	if err != nil {
		return nil, err
	}
	w := &work{c: a.Communicator, inner: inner}
	if err := inner.Wait(q); err != nil {
		return w, nil
	}
	if err := q.Cast(dst, y); err != nil {
		return nil, err
	}
	w.done, err = q.Record()
	return w, err
}

func TestCommunicator(t *testing.T) {
	sizes := map[backend.DType][]int{backend.F16: {4}, backend.BF16: {3}}
	for _, half := range halves {
		t.Run(half.String(), func(t *testing.T) {
			shim := func(c backend.Communicator) backend.Communicator {
				return asHalf{c.(*Communicator)}
			}
			backendtest.RunWrapper(
				t, backendtest.Options{New: backendtest.Over(host.Backend{}, wrap(half), shim),
					Sizes: sizes[half]})
		})
	}
}

func reduction(kind backend.Kind, op backend.ReduceOp) backend.Collective {
	return backend.Collective{Kind: kind, Op: op}
}

// operand is the data of one rank.
func operand(n, rank int) []float32 {
	rng := rand.New(rand.NewPCG(7, uint64(rank)))
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64())
	}
	return x
}

func TestEveryOperandAndTheAverageAreRoundedOnce(t *testing.T) {
	unit := map[backend.DType]float64{backend.F16: 0x1p-11, backend.BF16: 0x1p-8}
	const n = 5000
	for _, half := range halves {
		for _, P := range []int{2, 3, 4, 7} {
			ranks(t, P, half, func(c *Communicator) error {
				for _, op := range []backend.ReduceOp{backend.Sum, backend.Avg} {
					y := make([]float32, n)
					testranks.NoError(backend.Run(c,
						reduction(backend.AllReduce, op), backend.Of(y),
						backend.Of(operand(n, c.Rank()))))
					if err := within(y, P, op, 2.01*unit[half]); err != nil {
						return fmt.Errorf("%v by %v among %d: %w", op, half, P, err)
					}
				}
				return nil
			})
		}
	}
}

// within compares a reduction of operands with float64, up to a share of their
// magnitudes. F16 also loses what is below half its smallest number.
func within(y []float32, P int, op backend.ReduceOp, share float64) error {
	scale := 1.0
	if op == backend.Avg {
		scale = 1 / float64(P)
	}
	want, size := make([]float64, len(y)), make([]float64, len(y))
	for r := range P {
		for i, x := range operand(len(y), r) {
			want[i] += scale * float64(x)
			size[i] += scale * math.Abs(float64(x))
		}
	}
	for i := range y {
		bound := share*size[i] + 2*float64(P)*0x1p-25
		if !(math.Abs(float64(y[i])-want[i]) <= bound) {
			return fmt.Errorf("element %d is %v, want %v ± %v", i, y[i], want[i], bound)
		}
	}
	return nil
}

// A model of what must come out, written apart: round each, add in 32 bits in rank order,
// divide, round, and widen.
func TestBitsAreThoseOfFP32AccumulationWithOneRounding(t *testing.T) {
	const n, P = 3000, 5
	for _, half := range halves {
		want := make([]float32, n)
		narrow, wide := make([]backend.Float16, n), make([]float32, n)
		k := kernels.Host{}
		round := func(x []float32) []float32 {
			b := backend.Of(narrow).As(half)
			require.NoError(t, errors.Join(k.Cast(b, backend.Of(x)),
				k.Cast(backend.Of(wide), b)))
			return wide
		}
		for r := range P {
			for i, x := range round(operand(n, r)) {
				if r == 0 {
					want[i] = x
				} else {
					want[i] += x
				}
			}
		}
		for i := range want {
			want[i] /= P
		}
		copy(want, round(want))
		ranks(t, P, half, func(c *Communicator) error {
			y := operand(n, c.Rank())
			testranks.NoError(backend.Run(c,
				reduction(backend.AllReduce, backend.Avg), backend.Of(y), backend.Of(y)))
			for i := range y {
				if math.Float32bits(y[i]) != math.Float32bits(want[i]) {
					return fmt.Errorf("%v: element %d is %v, want %v", half, i, y[i], want[i])
				}
			}
			return nil
		})
	}
}

// same runs a reduction in which every rank has the same number.
func same[T float32 | float64](c *Communicator, op backend.ReduceOp, x T) (T, error) {
	y := []T{x, x, x}
	b := backend.Of(y)
	err := backend.Run(c, reduction(backend.AllReduce, op), b, b)
	return y[1], err
}

func TestSumsDoNotOverflowTheWire(t *testing.T) {
	ranks(t, 4, backend.F16, func(c *Communicator) error {
		for _, x := range []float32{40000, -40000, 3e4, 65504} {
			want := 4 * x
			y, err := same(c, backend.Sum, x)
			if err != nil || math.Abs(float64(y-want)) > 0x1p-10*math.Abs(float64(want)) {
				return fmt.Errorf("the sum of %v is %v (%w), want %v", x, y, err, want)
			}
			y64, err := same(c, backend.Sum, float64(x))
			if err != nil || y64 != float64(y) {
				return fmt.Errorf("in f64 it is %v (%w), want %v", y64, err, y)
			}
			if y, err = same(c, backend.Avg, x); err != nil ||
				math.Abs(float64(y-x)) > 0x1p-10*math.Abs(float64(x)) {
				return fmt.Errorf("the average of %v is %v (%w)", x, y, err)
			}
		}
		return nil
	})
}

func TestWhatIsOutOfRangeShows(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for _, half := range halves {
		ranks(t, 3, half, func(c *Communicator) error {
			// Rank 1 alone has something special; the others have ones.
			for _, pair := range [][2]float32{{inf, inf}, {-inf, -inf}, {65519, 65519},
				{65520, inf}, {-1e6, -inf}, {0x1p-26, 0}} {
				x, want := pair[0], pair[1]
				if half == backend.BF16 && !math.IsInf(float64(x), 0) {
					want = x // it has the range
				}
				y := []float32{0, 0}
				if c.Rank() == 1 {
					y[1] = x
				}
				testranks.NoError(backend.Run(c,
					reduction(backend.AllReduce, backend.Sum), backend.Of(y), backend.Of(y)))
				if y[0] != 0 || y[1] != want && math.Abs(float64(y[1]-want)) > 0x1p-7*math.Abs(
					float64(want)) {
					return fmt.Errorf("%v: %v came out as %v, want %v", half, x, y[1], want)
				}
			}
			y := []float32{1, 1, 1}
			if c.Rank() == 1 {
				y[0], y[1] = nan, inf
			}
			if c.Rank() == 2 {
				y[1] = -inf
			}
			err := backend.Run(c, reduction(backend.AllReduce, backend.Avg), backend.Of(y),
				backend.Of(y))
			if err != nil || y[0] == y[0] || y[1] == y[1] || y[2] != 1 {
				return fmt.Errorf("%v: NaN and the sum of infinities came out as %v (%w)", half,
					y, err)
			}
			return nil
		})
	}
}

func TestChunksAreThoseOfTheRank(t *testing.T) {
	const P = 4
	splits := []int{3, 0, 5, 1}
	ranks(t, P, backend.BF16, func(c *Communicator) error {
		for _, s := range [][]int{nil, splits} {
			n, lo := 2, 2*c.Rank()
			if s != nil {
				n, lo = s[c.Rank()], 0
				for _, m := range s[:c.Rank()] {
					lo += m
				}
			}
			x := make([]float64, 8)
			if s != nil {
				x = make([]float64, 9)
			}
			for i := range x {
				x[i] = float64(i + c.Rank())
			}
			y := x[lo : lo+n] // in place
			what := backend.Collective{Kind: backend.ReduceScatter, Splits: s}
			testranks.NoError(backend.Run(c, what, backend.Of(y), backend.Of(x)))
			for i, got := range y {
				if want := float64(P*(lo+i) + 6); got != want {
					return fmt.Errorf("splits %v: element %d of rank %d is %v, want %v", s, i,
						c.Rank(), got, want)
				}
			}
		}
		return nil
	})
}

func TestEverythingElsePassesExactly(t *testing.T) {
	const fine = 1 + 0x1p-20 // lost in 16 bits
	ranks(t, 2, backend.BF16, func(c *Communicator) error {
		for _, what := range []backend.Collective{
			{Kind: backend.Broadcast}, {Kind: backend.AllGather}, {Kind: backend.AllReduce,
				Op: backend.Max},
			{Kind: backend.AllReduce, Op: backend.Avg, Exact: true}, {Kind: backend.Reduce,
				Op: backend.Avg},
		} {
			x, y := []float32{fine, fine}, []float32{fine, fine, fine, fine}
			if what.Kind != backend.AllGather {
				y = y[:2]
			}
			testranks.NoError(backend.Run(c, what, backend.Of(y), backend.Of(x)))
			for _, v := range y {
				if v != fine {
					return fmt.Errorf("%v made %v of %v", what, v, fine)
				}
			}
		}
		if n := c.Counters(); n != (Counters{}) {
			return fmt.Errorf("the counters are %+v", n)
		}
		y, err := same(c, backend.Avg, float32(fine))
		if n := c.Counters(); err != nil || y != 1 || n != (Counters{1, 6, 12}) {
			return fmt.Errorf("an average of %v is %v (%w), with counters %+v", fine, y, err, n)
		}
		// of a caller that casts itself
		short := backend.Of(make([]float32, 3)).As(backend.BF16)
		err = backend.Run(c, backend.Collective{Kind: backend.AllReduce, Op: backend.Avg,
			Original: backend.Original{Op: backend.Sum, DType: backend.F32}}, short, short)
		if n := c.Counters(); err != nil || n != (Counters{2, 18, 36}) {
			return fmt.Errorf("what was cast before (%w) has the counters %+v", err, n)
		}
		return nil
	})
}

func TestOneRankRoundsNothing(t *testing.T) {
	ranks(t, 1, backend.BF16, func(c *Communicator) error {
		if y, err := same(c, backend.Sum, float32(1.234567)); err != nil || y != 1.234567 {
			return fmt.Errorf("the sum of one is %v (%w)", y, err)
		}
		return nil
	})
}

// Two calls on their own queues, without a wait between them, while the first
// queue is late: the second must not overwrite the 16 bits of the first.
func TestCallsDoNotShareTheirBits(t *testing.T) {
	const P, n = 3, 2000
	ranks(t, P, backend.F16, func(c *Communicator) error {
		var qs [2]backend.Queue
		var ys [2][]float32
		var ws [2]backend.Work
		for i := range qs {
			q := testranks.Must(c.Device().NewQueue())
			defer q.Close()
			qs[i], ys[i] = q, make([]float32, n)
		}
		for round := range 50 {
			for i, q := range qs {
				for j := range ys[i] {
					ys[i][j] = float32(round + j%100 + 1000*i)
				}
				if i == 0 {
					q.Wait(late(time.Duration(round%3) * 100 * time.Microsecond))
				}
				var err error
				if ws[i], err = c.Start(q, reduction(backend.AllReduce, backend.Avg),
					backend.Of(ys[i]), backend.Of(ys[i])); err != nil {
					return err
				}
			}
			for i, w := range ws {
				testranks.NoError(w.Join(t.Context()))
				for j, y := range ys[i] {
					if want := float32(round + j%100 + 1000*i); y != want {
						return fmt.Errorf("round %d, call %d: element %d is %v, want %v", round, i,
							j, y, want)
					}
				}
			}
		}
		return nil
	})
}

func TestRanksThatDisagreeAreToldWhatTheyCalled(t *testing.T) {
	for name, last := range map[string]func(c *Communicator) error{
		"allreduce(avg) of 3 f32": func(c *Communicator) error {
			_, err := same(c, backend.Avg, float32(1))
			return err
		},
		"allreduce(sum) of 3 f64": func(c *Communicator) error {
			_, err := same(c, backend.Sum, 1.0)
			return err
		},
		"allreduce(sum) of 3 f32 with state 5": func(c *Communicator) error {
			y := backend.Of([]float32{1, 2, 3})
			return backend.Run(c, backend.Collective{Kind: backend.AllReduce, State: 5}, y, y)
		},
	} {
		ranks(t, 3, backend.F16, func(c *Communicator) error {
			call := last
			if c.Rank() != 2 {
				call = func(c *Communicator) error {
					_, err := same(c, backend.Sum, float32(1))
					return err
				}
			}
			err := call(c)
			if !errors.Is(err, backend.ErrMismatch) || !strings.Contains(err.Error(), name) ||
				!strings.Contains(err.Error(), "allreduce(sum) of 3 f32 (call") {
				return fmt.Errorf("%s: the error is %v", name, err)
			}
			return nil
		})
	}
}

// rounding rounds calls on the way that may be, from 100 elements on, and knows what it
// was asked for. Wrapped in others it is still found.
type rounding struct {
	*Communicator // does it, for calls of its own
	asked         []backend.Collective
}

func (r *rounding) Capabilities() backend.Capabilities {
	caps := r.Base.Capabilities()
	caps.Transport = func(what backend.Collective, d backend.DType, count int) backend.DType {
		if what.AllowHalf == r.half && count >= 100 {
			return r.half
		}
		return d
	}
	return caps
}

func (r *rounding) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	r.asked = append(r.asked, what)
	if what.AllowHalf == 0 {
		return r.Base.Start(q, what, dst, src)
	}
	return r.Communicator.Start(q, backend.Collective{Kind: what.Kind, Op: what.Op}, dst, src)
}

func (r *rounding) StartChecked(q backend.Queue, what backend.Collective, _ int, dst,
	src backend.Buffer) (backend.Work, error) {
	return r.Start(q, what, dst, src)
}

func (r *rounding) Split(color, key int) (backend.Communicator, error) {
	part, err := r.Base.Split(color, key)
	return &rounding{Communicator: over(part, r.half)}, err
}

func TestInnerRoundsOnTheWayWhereItCan(t *testing.T) {
	const P, n = 3, 500
	for _, half := range halves {
		on := func(c backend.Communicator) backend.Communicator {
			return &rounding{Communicator: over(c, half)}
		}
		between := func(c backend.Communicator) backend.Communicator { return group.Compared(c) }
		g, err := backendtest.Over(host.Backend{}, on, between, wrap(half))(P, time.Minute)
		require.NoError(t, err)
		backendtest.Each(t, g.Comms, func(comm backend.Communicator) error {
			part := testranks.Must(comm.Split(0, comm.Rank()))
			for _, c := range []*Communicator{comm.(*Communicator), part.(*Communicator)} {
				if err := goesOn(c, n); err != nil {
					return fmt.Errorf("%v: %w", half, err)
				}
			}
			return part.Close()
		})
		require.Report(t, g.Close())
	}
}

// goesOn makes calls of which inner rounds those that it said it would.
func goesOn(c *Communicator, n int) error {
	inner, _ := backend.As[*rounding](c.Base)
	inner.asked = nil
	for _, test := range []struct {
		what   backend.Collective
		n      int
		passes bool
	}{
		{backend.Collective{Kind: backend.AllReduce}, n, true},
		{backend.Collective{Kind: backend.AllReduce, Op: backend.Avg, State: 3}, n, true},
		{backend.Collective{Kind: backend.AllReduce}, 99, false},
		{backend.Collective{Kind: backend.ReduceScatter, Splits: []int{n, 0, 0}}, n, false},
	} {
		y := operand(test.n, c.Rank())
		dst := y
		if test.what.Splits != nil && c.Rank() != 0 {
			dst = y[:0]
		}
		if err := backend.Run(c, test.what, backend.Of(dst), backend.Of(y)); err != nil {
			return err
		}
		if len(dst) > 0 {
			if err := within(dst, c.Size(), test.what.Op, 2.01*0x1p-8); err != nil {
				return fmt.Errorf("%v: %w", test.what, err)
			}
		}
		asked := inner.asked[len(inner.asked)-1]
		h := asked.Header(1, test.n, backend.F32)
		if passes := asked.AllowHalf != 0; passes != test.passes || passes &&
			asked.Op != test.what.Op || h.Original == (backend.Original{}) ||
			h.Asked() != test.what.Header(1, test.n, backend.F32) && test.what.Splits == nil {
			return fmt.Errorf("%v of %d came to inner as %v, which stands for %v", test.what,
				test.n, asked, h.Asked())
		}
	}
	// bytes are rounded off
	if got := c.Counters(); got.Calls != 4 || got.Bytes == 0 || got.Dense-2*got.Bytes < 0 ||
		got.Dense-2*got.Bytes > got.Calls {
		return fmt.Errorf("the counters are %+v", got)
	}
	return nil
}

func TestRanksThatRoundDifferentlyAreTold(t *testing.T) {
	of := func(rank int) backend.DType { return halves[rank%2] }
	on := func(c backend.Communicator) backend.Communicator {
		return &rounding{Communicator: over(c, of(c.Rank()))}
	}
	between := func(c backend.Communicator) backend.Communicator { return group.Compared(c) }
	own := func(c backend.Communicator) backend.Communicator { return wrap(of(c.Rank()))(c) }
	g := require.Value(backendtest.Over(host.Backend{}, on, between, own)(2, time.Minute))(t)
	backendtest.Each(t, g.Comms, func(c backend.Communicator) error {
		y := backend.Of(operand(200, c.Rank()))
		if err := backend.Run(c, reduction(backend.AllReduce, backend.Sum), y, y); !errors.Is(
			err, backend.ErrMismatch) {
			return fmt.Errorf("the error is %w", err)
		}
		return nil
	})
	require.NoError(t, g.Close())
}

func TestWrongArguments(t *testing.T) {
	if c, err := Wrap(backend.F32)(nil); c != nil || !errors.Is(err, backend.ErrArgument) {
		t.Errorf("f32 gave %v and the error %v", c, err)
	}
}

// On a device half starts kernels and touches nothing.
func TestDeviceMemory(t *testing.T) {
	d := require.Value(fakedevice.New(host.Device{}))(t)
	onDevice := func(c backend.Communicator) backend.Communicator { return fakedevice.Over(c, d) }
	g, err := backendtest.Over(host.Backend{}, onDevice, wrap(backend.F16))(3, time.Minute)
	require.NoError(t, err)
	backendtest.Each(t, g.Comms, func(c backend.Communicator) error { return deviceSum(c) })
	require.NoError(t, errors.Join(g.Close(), d.Close()))
}

func deviceSum(c backend.Communicator) error {
	memory := testranks.Must(c.Device().Alloc(4 * 100))
	x, y := memory.As(backend.F32), make([]float32, 100)
	q := testranks.Must(c.Device().NewQueue())
	k := q
	testranks.NoError(k.Move(x, backend.Of(slices.Repeat([]float32{float32(40000 + c.Rank())},
		x.Len()))))
	w := testranks.Must(c.Start(q, reduction(backend.AllReduce, backend.Sum), x, x))
	testranks.NoError(errors.Join(w.Wait(q), k.Move(backend.Of(y), x), w.Join(context.Background()),
		q.Close()))
	for i, got := range y {
		if math.Abs(float64(got)-120003) > 0x1p-10*120003 {
			return fmt.Errorf("element %d is %v, want 120003", i, got)
		}
	}
	return errors.Join(c.Device().Free(memory), c.Close())
}

// late is an event that takes its time.
type late time.Duration

func (late) Done() bool { return false }

func (l late) Join(context.Context) error { time.Sleep(time.Duration(l)); return nil }

// waiting is an event that takes its time.
type waiting time.Duration

func (waiting) Done() bool { return false }

func (w waiting) Join(context.Context) error {
	time.Sleep(time.Duration(w))
	return nil
}

// A call that passes is ordered with those that travel as 16 bits, across queues.
func TestCallsThatPassKeepTheirPlace(t *testing.T) {
	const n = 1 << 16
	gather := backend.Collective{Kind: backend.AllGather}
	ranks(t, 2, backend.BF16, func(c *Communicator) error {
		var qs [2]backend.Queue
		for i := range qs {
			var err error
			if qs[i], err = c.Device().NewQueue(); err != nil {
				return err
			}
			defer qs[i].Close()
		}
		x, y, z := make([]float32, n), make([]float32, n), make([]float32, 2*n)
		for round := range 20 {
			for i := range x {
				x[i] = float32((1 - c.Rank()) * (1 + round)) // that of rank 0 counts
			}
			clear(y)
			testranks.NoError(qs[0].Wait(waiting(2 * time.Millisecond)))
			var last backend.Work
			for i, call := range []struct {
				what     backend.Collective
				dst, src []float32
			}{{backend.Collective{Kind: backend.Broadcast}, x, x},
				{reduction(backend.AllReduce, backend.Sum), y, x}, {gather, z, y}} {
				var err error
				if last, err = c.Start(qs[i%2], call.what, backend.Of(call.dst),
					backend.Of(call.src)); err != nil {
					return err
				}
			}
			testranks.NoError(last.Join(context.Background()))
			for i, got := range z {
				if want := float32(2 + 2*round); got != want {
					return fmt.Errorf("round %d: element %d is %v, want %v", round, i, got, want)
				}
			}
		}
		return nil
	})
}
