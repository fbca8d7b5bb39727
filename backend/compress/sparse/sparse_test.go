package sparse

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// wrap is Wrap for tests, which pass what it takes. change may reach inside.
func wrap(change func(*Communicator), how Selection,
	opts ...Option) func(backend.Communicator) backend.Communicator {
	return func(inner backend.Communicator) backend.Communicator {
		c, err := New(inner, how, opts...)
		if err != nil {
			panic(err)
		}
		change(c)
		return c
	}
}

func asIs(*Communicator) {}

// always keeps to messages, whatever they cost.
func always(c *Communicator) { c.always = true }

// group runs f on P ranks.
func group(t *testing.T, P int, wrap func(backend.Communicator) backend.Communicator,
	f func(c *Communicator) error) {
	t.Helper()
	g := require.Value(backendtest.Over(host.Backend{}, wrap)(P, time.Minute))(t)
	backendtest.Each(t, g.Comms, func(c backend.Communicator) error {
		return errors.Join(f(c.(*Communicator)), c.Close())
	})
	require.Report(t, g.Close())
}

// withState gives the f32 calls of the suite a state for each length, so that they are
// sparse: with everything selected and no feedback the results equal inner's.
// f64 goes past, because f32 cannot hold what the suite computes in it.
type withState struct{ *Communicator }

func (s withState) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if what.Kind == backend.AllReduce && src.DType() == backend.F32 && what.State == 0 {
		what.State = 1 + src.Len()
	}
	return s.Communicator.Start(q, what, dst, src)
}

func TestCommunicator(t *testing.T) {
	shim := func(c backend.Communicator) backend.Communicator {
		return withState{c.(*Communicator)}
	}
	t.Run("dense", func(t *testing.T) {
		all := wrap(asIs, TopK(1), WithoutFeedback())
		backendtest.RunWrapper(t, backendtest.Options{Sizes: []int{3},
			New: backendtest.Over(host.Backend{}, all, shim)})
	})
	t.Run("messages", func(t *testing.T) {
		all := wrap(always, TopK(1), WithoutFeedback())
		// Not its own order, but it does not keep the sign of a zero.
		backendtest.RunWrapper(t, backendtest.Options{Sizes: []int{2}, OwnOrder: true,
			New: backendtest.Over(host.Backend{}, all, shim)})
	})
}

func reduction(op backend.ReduceOp) backend.Collective {
	return backend.Collective{Kind: backend.AllReduce, Op: op, State: 3}
}

// sum runs one sparse call.
func sum(c backend.Communicator, op backend.ReduceOp, x []float32) ([]float32, error) {
	y := slices.Repeat([]float32{-7}, len(x))
	return y, run(c, reduction(op), backend.Of(y), backend.Of(x))
}

// normals is the operand of a rank in a step.
func normals(n, rank, step int) []float32 {
	rng := rand.New(rand.NewPCG(uint64(rank), uint64(step)))
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64()) / 10
	}
	return x
}

// scattered is an operand with a share of elements, the others zero.
func scattered(n, rank int, density float64) []float32 {
	rng := rand.New(rand.NewPCG(uint64(rank), 77))
	x := make([]float32, n)
	for i := range x {
		if rng.Float64() < density {
			x[i] = float32(rng.NormFloat64())
		}
	}
	return x
}

// bursts are operands that need room for five times as much from step to step, or for less.
func bursts(n, rank, step int) []float32 {
	return scattered(n, 100*step+rank, []float64{0.02, 0.1, 0.5}[step%3])
}

// same compares bit for bit, but for the sign of zeros.
func same(got, want []float32) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d elements, want %d", len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] && (got[i] == got[i] || want[i] == want[i]) {
			return fmt.Errorf("element %d of %d is %v, want %v", i, len(got), got[i], want[i])
		}
	}
	return nil
}

// total adds in rank order, and divides an average.
func total(op backend.ReduceOp, xs [][]float32) []float32 {
	y := make([]float32, len(xs[0]))
	for _, x := range xs {
		for i, v := range x {
			y[i] += v
		}
	}
	if op == backend.Avg {
		for i := range y {
			y[i] /= float32(len(xs))
		}
	}
	return y
}

// masked is the meaning of a threshold.
func masked(x []float32, limit float32) []float32 {
	s := make([]float32, len(x))
	for i, v := range x {
		if v != 0 && !(float32(math.Abs(float64(v))) < limit) {
			s[i] = v
		}
	}
	return s
}

// largest is the meaning of a top-k: sort by magnitude, then by index.
func largest(x []float32, k int) []float32 {
	order := make([]int, len(x))
	for i := range order {
		order[i] = i
	}
	size := func(i int) float64 { return math.Abs(float64(x[i])) }
	sort.SliceStable(order, func(a, b int) bool { return size(order[a]) > size(order[b]) })
	s := make([]float32, len(x))
	for _, i := range order[:k] {
		s[i] = x[i]
	}
	return s
}

func TestThresholdSumsTheMaskedVectorsUnraced(t *testing.T) {
	const limit = 0.25
	for _, P := range []int{2, 5} {
		for _, change := range []func(*Communicator){asIs, always} {
			everywhere(t, P, wrap(change, Threshold(limit), WithoutFeedback()),
				func(c *Communicator) error {
					for _, n := range []int{1, 1000, 3*block + 1, 1_000_001} {
						if n > 1_000_000 && P > 2 {
							continue
						}
						densities := []float64{0, 0.01, 0.05, 0.5, 0.9, 1}
						if n > 1_000_000 && os.Getenv("EURYALE_FULL") != "1" {
							densities = []float64{0.05, 0.9} // sparse, and dense
						}
						for _, density := range densities {
							if err := sumsMasked(c, limit, n, density); err != nil {
								return fmt.Errorf("n %d, density %v: %w", n, density, err)
							}
						}
					}
					return nil
				})
		}
	}
}

// sumsMasked makes a call by threshold. Every rank has another count, the last none,
// and rank 0 only the tail.
func sumsMasked(c *Communicator, limit float32, n int, density float64) error {
	operand := func(r int) []float32 {
		x := scattered(n, r, density*float64(c.Size()-1-r)/float64(c.Size()-1))
		if r == 0 {
			clear(x[:n/2])
		}
		return x
	}
	before := c.Counters()
	y, err := sum(c, backend.Avg, operand(c.Rank()))
	if err != nil {
		return err
	}
	var sent [][]float32
	for r := range c.Size() {
		sent = append(sent, masked(operand(r), limit))
	}
	count := int64(0)
	for _, v := range sent[c.Rank()] {
		if v != 0 {
			count++
		}
	}
	if got := c.Counters(); got.Entries-before.Entries != count || got.Held != 0 {
		return fmt.Errorf("the counters are %+v, and were %+v, want %d entries", got, before, count)
	}
	c.Reset()
	return same(y, total(backend.Avg, sent))
}

// The pattern for which SINGA sent duplicates and an index -1.
func TestNonzerosInTheTailOnly(t *testing.T) {
	for _, opts := range [][]Option{nil, {WithoutFeedback()}} {
		everywhere(t, 2, wrap(always, Threshold(0), opts...), func(c *Communicator) error {
			y := testranks.Must(sum(c, backend.Sum, []float32{0, 0, 0, 4, 5, 6}))
			if n := c.Counters().Entries; n != 3 {
				return fmt.Errorf("%d entries, want 3", n)
			}
			return same(y, []float32{0, 0, 0, 8, 10, 12})
		})
	}
}

func TestTopKSendsTheLargestUnraced(t *testing.T) {
	cases := []struct {
		name    string
		density float64
		k       int
		x       []float32
	}{
		{"all below 1", 0.05, 50, normals(1000, 9, 1)},
		{"seven of a hundred", 0.07, 7, normals(100, 9, 2)},
		{"at least one", 0.001, 1, normals(20, 9, 3)},
		{"all", 1, 20, normals(20, 9, 4)},
		{"ties", 0.3, 3, []float32{1, -1, 2, 1, 1, -1, 1, 1, 1, 1}},
		{"all equal", 0.5, 5, slices.Repeat([]float32{-3}, 10)},
		{"zeros", 0.5, 3, []float32{0, float32(math.Copysign(0, -1)), 0, 7, 0}},
		{"subnormals", 0.5, 2, []float32{1e-45, 3e-45, -4e-45, 0}},
		{"far apart", 0.4, 2, []float32{1e-30, 1e30, -1e31, 1e-31, 5}},
		{"many blocks", 0.013, 260, normals(20_000, 9, 5)},
	}
	for _, tt := range cases {
		k := topK(tt.density, len(tt.x))
		require.Check(t, k == tt.k, "%s: k is %d, want %d", tt.name, k, tt.k)
	}
	// One group for all cases, since a group on GPUs takes a second to connect.
	for _, change := range []func(*Communicator){asIs, always} {
		everywhere(t, 2, wrap(change, TopK(1)), func(c *Communicator) error {
			for _, tt := range cases {
				c.how = TopK(tt.density)
				if err := sendsLargest(c, tt.x, tt.k); err != nil {
					return fmt.Errorf("%s: %w", tt.name, err)
				}
			}
			return nil
		})
	}
}

// sendsLargest makes a call by top-k, of x and of x backwards.
func sendsLargest(c *Communicator, x []float32, k int) error {
	back := slices.Clone(x)
	slices.Reverse(back)
	own := x
	if c.Rank() == 1 {
		own = back
	}
	before := c.Counters()
	y, err := sum(c, backend.Sum, own)
	if err != nil {
		return err
	}
	if n := c.Counters().Entries - before.Entries; n != int64(k) {
		return fmt.Errorf("%d entries, want %d", n, k)
	}
	stays := kept(c)
	c.Reset()
	return errors.Join(same(y, total(backend.Sum, [][]float32{largest(x, k), largest(back, k)})),
		same(stays, minus(own, largest(own, k))))
}

func minus(x, y []float32) []float32 {
	d := slices.Clone(x)
	for i, v := range y {
		d[i] -= v
	}
	return d
}

func TestKIsWhatTheDensityMeans(t *testing.T) {
	for _, tt := range []struct {
		density float64
		n, k    int
	}{{0.07, 100, 7}, {0.05, 1000, 50}, {0.05, 1001, 51}, {0.29, 100, 29}, {0.57, 100, 57},
		{1, 3, 3}, {1e-9, 5, 1}, {0.1, 3_000_000_000, 300_000_000}} {
		k := topK(tt.density, tt.n)
		require.Check(t, k == tt.k, "%v of %d is %d, want %d", tt.density, tt.n, k, tt.k)
	}
	for percent := 1; percent <= 100; percent++ {
		for n := 100; n <= 10000; n += 100 {
			if k := topK(float64(percent)/100, n); k != percent*n/100 {
				t.Fatalf("%d %% of %d is %d", percent, n, k)
			}
		}
	}
}

func TestWhatIsSentAndWhatStaysIsAll(t *testing.T) {
	const n, steps, P = 5000, 30, 3
	for name, how := range map[string]Selection{"threshold": Threshold(0.1), "top-k": TopK(0.02)} {
		for _, values := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
			// Rank 0 alone has an operand, so that the result is what it has sent.
			everywhere(t, P, wrap(asIs, how, WithValues(values)), func(c *Communicator) error {
				old := make([]float32, n)
				all := make([]float64, n)
				delivered := make([]float64, n)
				for step := range steps {
					x := make([]float32, n)
					if c.Rank() == 0 {
						x = normals(n, 0, step)
						x[0] = 1e5 // more than F16 can hold
						if step == 0 {
							x[1], x[2] = largestOf(values), -largestOf(values)/3
						}
					}
					y := testranks.Must(sum(c, backend.Sum, x))
					if c.Rank() != 0 {
						continue
					}
					now := kept(c)
					for i := range x {
						// f32 would hide what is lost
						if v := x[i] + old[i]; float64(y[i])+float64(now[i]) != float64(v) {
							return fmt.Errorf("%s, %v, step %d: element %d: %v sent + %v kept is "+
								"not %v", name, values, step, i, y[i], now[i], v)
						}
						all[i] += float64(x[i])
						delivered[i] += float64(y[i])
					}
					old = slices.Clone(now)
				}
				for i := range all {
					e := math.Abs(delivered[i] + float64(old[i]) - all[i])
					if e > steps*0x1p-24*(math.Abs(all[i])+1) {
						return fmt.Errorf("%s, %v: after %d steps element %d has %v delivered "+
							"and %v kept of %v", name, values, steps, i, delivered[i], old[i],
							all[i])
					}
				}
				return nil
			})
		}
	}
}

// largestOf is the largest number of f32 of which nothing is lost, however values are sent.
func largestOf(values backend.DType) float32 {
	if values == backend.F16 {
		return math.Nextafter32(0x1p29, 0)
	}
	return math.MaxFloat32
}

// What rounding takes off is exact for all numbers of f32, but for F16 and those that are too
// large: half an ulp of them is lost at most.
func TestTheRestIsExact(t *testing.T) {
	edges := []float32{0, 1e-45, 0x1p-126, 0x1p-25, 0x1.000002p-25, 0x1.fffffep-15, 65504,
		65519.996, 65520,
		0x1.fffffep28, 0x1p29, 0x1.ffep29, 0x1p40, 0x1.000002p40, 0x1.fefffep127, 0x1.ffp127,
		math.MaxFloat32}
	rng := rand.New(rand.NewPCG(29, 29))
	for _, values := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		r, lost := &rounder{dtype: values, saturate: true}, 0
		for try := range 100_000 {
			v := math.Float32frombits(rng.Uint32())
			if try < len(edges) {
				v = edges[try]
			}
			if v-v != 0 {
				continue
			}
			_, seen := r.round([]float32{v})
			rest, size := remainder(v, seen[0]), float32(math.Abs(float64(v)))
			bound := float64(size-math.Nextafter32(size, 0)) / 2 // half an ulp, or less
			if size <= largestOf(values) {
				bound = 0
			}
			// v - rest is exact, as the two are near, or rest is 0 or v.
			e := math.Abs(float64(v) - float64(rest) - float64(seen[0]))
			if e > 0 {
				lost++
			}
			require.That(t, e <= bound, "%v: %v is sent as %v and leaves %v: %v is lost", values, v,
				seen[0], rest, e)
		}
		require.Check(t, (lost > 0) == (values == backend.F16),
			"%v: something is lost of %d numbers", values, lost)
	}
}

func TestSmallGradientsArriveLate(t *testing.T) {
	const each, limit = 0.25, 1.5 // exact sums; after ceil(1.5/0.25) = 6 steps
	everywhere(t, 2, wrap(asIs, Threshold(limit)), func(c *Communicator) error {
		for step := 1; step <= 18; step++ {
			x, want := make([]float32, 1000), make([]float32, 1000)
			for i := range slack { // there is room for so many
				x[10*i] = each
				if step%6 == 0 {
					want[10*i] = limit
				}
			}
			y, err := sum(c, backend.Avg, x)
			if err == nil {
				err = same(y, want)
			}
			if err != nil {
				return fmt.Errorf("step %d: %w", step, err)
			}
		}
		return nil
	})
}

// model is the meaning of a rank's calls with room for some entries only.
type model struct{ residual []float32 }

func (m *model) send(x []float32, limit float32, room int) (sent []float32, selected int) {
	sent = make([]float32, len(x))
	for i, g := range x {
		v := m.residual[i] + g
		m.residual[i] = v
		if v != 0 && float32(math.Abs(float64(v))) >= limit {
			if selected++; selected <= room {
				sent[i], m.residual[i] = v, 0
			}
		}
	}
	return sent, selected
}

func TestOverflowWaitsAndThenAllGoDenseTogether(t *testing.T) { testenv.Each(t, kinds(), overflow) }

func overflow(t *testing.T, k testenv.Kind) {
	const n, P, limit = 10_000, 4, 0.5
	densities := []float64{0.001, 0.02, 0.2, 0.6, 0.6, 0.01, 0.001, 0.001, 0.9, 0, 0, 0}
	at(t, k, P, wrap(asIs, Threshold(limit)), func(c *Communicator) error {
		models := make([]model, P)
		for r := range models {
			models[r].residual = make([]float32, n)
		}
		selected := []int{-1, -1} // by the last two calls, at most
		for step, density := range densities {
			l := layout{values: backend.F32}
			limitOfMessages := l.largest(8 * n / P)
			room, dense := limitOfMessages, false
			if most := selected[0]; most > limitOfMessages {
				room, dense = n, true
			} else if most >= 0 {
				room = min(limitOfMessages, most+most/4+slack)
			}
			before := c.Counters()
			operand := func(r int) []float32 {
				x := scattered(n, 100*step+r, density*float64(r+1)/P)
				for i := range x {
					x[i] *= 3
					if k.OnGPU() { // where inner adds in its own order: sums are exact
						x[i] = float32(math.Round(256*float64(x[i])) / 256)
					}
				}
				return x
			}
			y := testranks.Must(sum(c, backend.Sum, operand(c.Rank())))
			most := 0
			sent := make([][]float32, P)
			for r := range models {
				var n int
				sent[r], n = models[r].send(operand(r), limit, room)
				most = max(most, n)
			}
			selected = []int{selected[1], most}
			if err := errors.Join(same(y, total(backend.Sum, sent)),
				same(kept(c), models[c.Rank()].residual)); err != nil {
				return fmt.Errorf("step %d, room for %d: %w", step, room, err)
			}
			if got := c.Counters().Dense - before.Dense; (got == 1) != dense {
				return fmt.Errorf("step %d: %d dense reductions, want %v", step, got, dense)
			}
		}
		n := c.Counters()
		if n.Calls != int64(len(densities)) || n.Dense < 2 || c.Rank() == P-1 && n.Held == 0 {
			return fmt.Errorf("the counters are %+v", n)
		}
		return nil
	})
}

func TestBackToBackCallsOfOtherCountsAreExact(t *testing.T) { backToBack(t, 100) }

func TestManyBackToBackCallsOfOtherCountsAreExactUnraced(t *testing.T) { backToBack(t, 1000) }

func backToBack(t *testing.T, calls int) {
	t.Helper()
	const n, P = 700, 3
	group(t, P, wrap(asIs, Threshold(0.5)), func(c *Communicator) error {
		q, err := c.Device().NewQueue()
		if err != nil {
			return err
		}
		defer q.Close()
		var all, delivered [n]int64
		rng := rand.New(rand.NewPCG(4, 4)) // the same on every rank
		var xs, ys [4][]float32
		var ws [4]backend.Work
		for step := range calls {
			i := step % len(xs)
			if ws[i] != nil {
				if err := ws[i].Join(t.Context()); err != nil {
					return err
				}
				for j, y := range ys[i] {
					delivered[j] += int64(y)
				}
			}
			xs[i], ys[i] = make([]float32, n), make([]float32, n)
			density := rng.Float64()
			for r := range P {
				for j := range n {
					if rng.Float64() < density {
						v := rng.IntN(9) - 4
						all[j] += int64(v)
						if r == c.Rank() {
							xs[i][j] = float32(v)
						}
					}
				}
			}
			if ws[i], err = c.Start(q, reduction(backend.Sum), backend.Of(ys[i]),
				backend.Of(xs[i])); err != nil {
				return err
			}
		}
		for i, w := range ws {
			if err := w.Join(t.Context()); err != nil {
				return err
			}
			for j, y := range ys[i] {
				delivered[j] += int64(y)
			}
		}
		held := make([]float32, P*n)
		if err := backend.Run(c, backend.Collective{Kind: backend.AllGather}, backend.Of(held),
			backend.Of(kept(c))); err != nil {
			return err
		}
		for j := range all {
			for r := range P {
				delivered[j] += int64(held[r*n+j])
			}
			if delivered[j] != all[j] {
				return fmt.Errorf("element %d: %d arrived or are kept, of %d", j, delivered[j],
					all[j])
			}
		}
		return nil
	})
}

func TestNaNAndInfinityAreSeenByAll(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for name, how := range map[string]Selection{"threshold": Threshold(2), "top-k": TopK(0.01)} {
		for _, values := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
			everywhere(t, 3, wrap(asIs, how, WithValues(values)), func(c *Communicator) error {
				x := normals(1000, c.Rank(), 0)
				if c.Rank() == 1 {
					x[700], x[30], x[31] = nan, inf, -inf
				}
				y := testranks.Must(sum(c, backend.Sum, x))
				if y[700] == y[700] || y[30] != inf || y[31] != -inf {
					return fmt.Errorf("%s, %v: they came out as %v, %v and %v", name, values,
						y[700], y[30], y[31])
				}
				if i := slices.IndexFunc(kept(c), func(v float32) bool {
					return v-v != 0
				}); i >= 0 {
					return fmt.Errorf("%s, %v: the residual keeps %v", name, values, kept(c)[i])
				}
				return nil
			})
		}
	}
}

// More NaN than there is room for come in several calls, and Reset forgets those that wait.
func TestNaNThatHaveNoRoomWait(t *testing.T) {
	const n, P = 1000, 3
	full := (&layout{values: backend.F32}).largest(8 * n / P) // of a threshold's first message
	for _, test := range []struct {
		how   Selection
		all   int   // NaN in the operand of a rank
		calls []int // NaN in the result of each call
	}{
		{TopK(0.01), 25, []int{10, 10, 5, 0}},
		{Threshold(2), full + 50, []int{full, 50, 0}},
	} {
		everywhere(t, P, wrap(asIs, test.how), func(c *Communicator) error {
			x := make([]float32, n)
			waiting := 0
			if c.Rank() == 1 {
				copy(x, slices.Repeat([]float32{float32(math.NaN())}, test.all))
				waiting = test.all
			}
			with := slices.Clone(x)
			for call, want := range test.calls {
				y := testranks.Must(sum(c, backend.Sum, x))
				clear(x) // only the residual has them now
				waiting = max(waiting-want, 0)
				if came, wait := countNaN(y), countNaN(kept(c)); came != want || wait != waiting {
					return fmt.Errorf("%v, call %d: %d NaN came and %d wait, want %d and %d",
						test.how, call, came, wait, want, waiting)
				}
			}
			c.Reset()
			if _, err := sum(c, backend.Sum, with); err != nil {
				return err
			}
			if wait := countNaN(kept(c)); (wait > 0) != (c.Rank() == 1) {
				return fmt.Errorf("%v: %d NaN wait before Reset", test.how, wait)
			}
			c.Reset()
			y := testranks.Must(sum(c, backend.Sum, make([]float32, n)))
			return errors.Join(same(y, make([]float32, n)), same(kept(c), make([]float32, n)))
		})
	}
}

func countNaN(x []float32) (n int) {
	for _, v := range x {
		if v != v {
			n++
		}
	}
	return n
}

func TestStrictNamesStateRankAndElement(t *testing.T) {
	for _, how := range []Selection{Threshold(0.1), TopK(0.01), TopK(1)} {
		everywhere(t, 4, wrap(asIs, how, WithStrict()), func(c *Communicator) error {
			if _, err := sum(c, backend.Sum, normals(1000, c.Rank(), 0)); err != nil {
				return err
			}
			before := kept(c)
			x := normals(1000, c.Rank(), 1)
			if c.Rank() >= 2 {
				x[10*c.Rank()] = float32(math.Inf(-1))
			}
			_, err := sum(c, backend.Sum, x)
			var e *NotFiniteError
			if !errors.As(err, &e) || *e != (NotFiniteError{3, 2, 20}) ||
				!strings.Contains(err.Error(), "element 20 of the operand of rank 2 with state 3") {
				return fmt.Errorf("%v: the error is %v", how, err)
			}
			if err := same(kept(c), before); err != nil {
				return fmt.Errorf("%v: the residual has changed: %w", how, err)
			}
			_, err = sum(c, backend.Sum, normals(1000, c.Rank(), 2))
			return err
		})
	}
}

// A step that is left out is undone with all states: later calls give the bits that they
// would have given without it.
func TestUndoneCallsHaveNeverBeen(t *testing.T) {
	const n = 1000
	for how, opts := range map[Selection][]Option{Threshold(0.2): {WithStrict(),
		WithValues(backend.F16)}, TopK(0.01): {WithStrict()}, TopK(1): {WithStrict()}} {
		everywhere(t, 3, wrap(asIs, how, opts...), func(c *Communicator) error {
			step := func(state, number int) ([]float32, error) {
				y := make([]float32, n)
				what := backend.Collective{Kind: backend.AllReduce, Op: backend.Avg, State: state}
				return y, run(c, what, backend.Of(y), backend.Of(normals(n, c.Rank(), number)))
			}
			for _, left := range []int{0, 1, 4} { // steps before the one that is left out
				c.Reset()
				var want [][]float32
				for undone := range 2 {
					for number := range left {
						if _, err := step(1, number); err != nil {
							return err
						}
					}
					before := testranks.Must(c.State())
					if undone == 1 {
						if _, err := step(1, 99); err != nil {
							return err
						}
						for range 2 { // the second does nothing
							// state 2 was never used
							testranks.NoError(errors.Join(c.Undo(1), c.Undo(2)))
						}
						after := testranks.Must(c.State())
						for name, b := range before {
							if !bytes.Equal(b.Bytes(), after[name].Bytes()) {
								return fmt.Errorf("%v: %s is not what it was", how, name)
							}
						}
					}
					for number := range 4 {
						y := testranks.Must(step(1, 10+number))
						if undone == 0 {
							want = append(want, y)
						} else if err := same(y, want[number]); err != nil {
							return fmt.Errorf("%v: %d steps after it: %w", how, number+1, err)
						}
					}
					c.Reset()
				}
			}
			return nil
		})
	}
	everywhere(t, 1, wrap(asIs, TopK(1)), func(c *Communicator) error {
		if err := c.Undo(1); !errors.Is(err, backend.ErrArgument) {
			return fmt.Errorf("the error is %v", err)
		}
		return nil
	})
}

func TestF64IsReducedAsF32(t *testing.T) {
	const n = 2 * block
	for _, how := range []Selection{Threshold(0.1), TopK(0.02), TopK(0.9)} {
		for _, opts := range [][]Option{nil, {WithoutFeedback()}} {
			everywhere(t, 3, wrap(asIs, how, opts...), func(c *Communicator) error {
				for step := range 4 {
					x := normals(n, c.Rank(), step)
					wide, y64 := make([]float64, n), make([]float64, n)
					narrow(backend.Of(wide), backend.Of(x))
					what := reduction(backend.Avg)
					what.State = 64
					testranks.NoError(run(c, what, backend.Of(y64), backend.Of(wide)))
					y := testranks.Must(sum(c, backend.Avg, x))
					back := make([]float32, n)
					narrow(backend.Of(back), backend.Of(y64))
					if err := same(back, y); err != nil {
						return fmt.Errorf("%v, step %d: %w", how, step, err)
					}
				}
				return nil
			})
		}
	}
}

func TestStateResumesWithTheSameBits(t *testing.T) {
	const n, steps = 3000, 12
	for _, how := range []Selection{Threshold(0.2), TopK(0.01)} {
		everywhere(t, 3, wrap(asIs, how, WithValues(backend.BF16)), func(c *Communicator) error {
			trajectory := make([][]float32, steps)
			var kept map[string]backend.Buffer
			for step := range steps {
				var err error
				if trajectory[step], err = sum(c, backend.Avg,
					bursts(n, c.Rank(), step)); err != nil {
					return err
				}
				if step == steps/2 {
					if kept, err = c.State(); err != nil {
						return err
					}
				}
			}
			c.Reset()
			testranks.NoError(c.SetState(kept))
			for step := steps/2 + 1; step < steps; step++ {
				y, err := sum(c, backend.Avg, bursts(n, c.Rank(), step))
				if err == nil {
					err = same(y, trajectory[step])
				}
				if err != nil {
					return fmt.Errorf("%v: step %d: %w", how, step, err)
				}
			}
			return nil
		})
	}
}

func TestDamagedStatesAreRefused(t *testing.T) {
	everywhere(t, 2, wrap(asIs, TopK(0.5)), func(c *Communicator) error {
		if _, err := sum(c, backend.Avg, normals(100, c.Rank(), 0)); err != nil {
			return err
		}
		good, _ := c.State()
		before := kept(c)
		for name, change := range map[string]func(m map[string]backend.Buffer){
			"no residual": func(m map[string]backend.Buffer) { delete(m, "sparse.residual.3") },
			"too short": func(m map[string]backend.Buffer) {
				m["sparse.residual.3"] = m["sparse.residual.3"].Slice(0, 99)
			},
			"fewer than none": func(m map[string]backend.Buffer) {
				m["sparse.counts.3"] = backend.Of([]int64{100, 1, 50, -2})
			},
			"two counts": func(m map[string]backend.Buffer) {
				m["sparse.counts.3"] = backend.Of([]int64{100, 1})
			},
			"not a number": func(m map[string]backend.Buffer) {
				m["sparse.counts.x"] = m["sparse.counts.3"]
			},
			"too many selected": func(m map[string]backend.Buffer) {
				m["sparse.counts.3"] = backend.Of([]int64{100, 1, math.MaxInt64, 50})
			},
			"a negative call": func(m map[string]backend.Buffer) {
				m["sparse.counts.3"] = backend.Of([]int64{100, -1, 50, 50})
			},
			"other dtype": func(m map[string]backend.Buffer) {
				m["sparse.residual.3"] = m["sparse.residual.3"].As(backend.I32)
			},
		} {
			bad := map[string]backend.Buffer{}
			for k, v := range good {
				bad[k] = v
			}
			change(bad)
			if err := c.SetState(bad); !errors.Is(err, backend.ErrArgument) {
				return fmt.Errorf("%s: the error is %v", name, err)
			}
		}
		return same(kept(c), before)
	})
}

// A top-k used to pass as a plain all-reduce where that was faster: then its state had no
// residual, and there were times of both ways.
func TestStatesOfEarlierProgramsLoad(t *testing.T) {
	const n = 100
	everywhere(t, 2, wrap(asIs, TopK(0.1)), func(c *Communicator) error {
		earlier := map[string]backend.Buffer{
			"sparse.residual.3": backend.Of([]float32{}),
			"sparse.counts.3":   backend.Of([]int64{n, 4, 10, 10}),
			"sparse.races":      backend.Of([]int64{n, 10, 4, 0, 7000, 8000}),
		}
		testranks.NoError(c.SetState(earlier))
		x := normals(n, c.Rank(), 0)
		y, err := sum(c, backend.Sum, x)
		want := total(backend.Sum, [][]float32{largest(normals(n, 0, 0), 10),
			largest(normals(n, 1, 0), 10)})
		return errors.Join(err, same(y, want), same(kept(c), minus(x, largest(x, 10))))
	})
	c := require.Value(New(alone{}, TopK(0.1), WithValues(backend.F16)))(t)
	for description, want := range map[string]bool{
		"sparse (topk=0.1, values f16, feedback true)":                                   true,
		"sparse (topk=0.1, values f16, feedback true, warm-up 0, fewest bytes false)":    true,
		"sparse (topk=0.1, values f16, feedback true, warm-up 3, fewest bytes true)":     true,
		"sparse (topk=0.10001, values f16, feedback true, warm-up 0, fewest bytes true)": false,
		"sparse (topk=0.1, values f32, feedback true, warm-up 0, fewest bytes true)":     false,
		"sparse (topk=0.1, values f16, feedback false)":                                  false,
		"": false,
	} {
		require.Equal(t, fmt.Sprintf("it resumes from %q", description), c.Resumes(description),
			want)
	}
}

func TestAnotherLengthWithAStateIsAnError(t *testing.T) {
	everywhere(t, 2, wrap(asIs, TopK(0.5)), func(c *Communicator) error {
		for i, n := range []int{10, 11} {
			_, err := sum(c, backend.Sum, make([]float32, n))
			if (err != nil) != (i == 1) || i == 1 && (!errors.Is(err, backend.ErrArgument) ||
				!strings.Contains(err.Error(), "11 elements with state 3, which is for 10")) {
				return fmt.Errorf("length %d: %v", n, err)
			}
		}
		c.Reset()
		_, err := sum(c, backend.Sum, make([]float32, 11))
		return err
	})
}

func TestEverythingElsePassesExactly(t *testing.T) {
	everywhere(t, 2, wrap(asIs, TopK(0.1)), func(c *Communicator) error {
		x := normals(100, 0, 0)
		y := make([]float32, 100)
		for _, what := range []backend.Collective{
			{Kind: backend.Broadcast, State: 1}, {Kind: backend.AllReduce, Op: backend.Max,
				State: 1},
			{Kind: backend.AllReduce, Op: backend.Avg}, {Kind: backend.AllReduce, Op: backend.Avg,
				Exact: true},
		} {
			testranks.NoError(run(c, what, backend.Of(y), backend.Of(x)))
			if err := same(y, x); err != nil {
				return fmt.Errorf("%v: %w", what, err)
			}
		}
		if n := c.Counters(); n != (Counters{}) {
			return fmt.Errorf("the counters are %+v", n)
		}
		return nil
	})
}

func TestOneRankSendsNothingAndKeepsNothing(t *testing.T) {
	everywhere(t, 1, wrap(asIs, TopK(0.1)), func(c *Communicator) error {
		x := normals(100, 0, 0)
		y, err := sum(c, backend.Avg, x)
		return errors.Join(err, same(y, x))
	})
}

// Over 16 bits, what is reduced densely stays exact, or feedback would be wrong.
func TestDenseReductionsPassAWireExactly(t *testing.T) {
	onWire := func(c backend.Communicator) backend.Communicator {
		w, err := half.New(c, backend.BF16)
		if err != nil {
			panic(err)
		}
		return wrap(asIs, TopK(0.9))(w)
	}
	everywhere(t, 2, onWire, func(c *Communicator) error {
		y := testranks.Must(sum(c, backend.Sum, normals(1000, c.Rank(), 0)))
		return same(y, total(backend.Sum, [][]float32{largest(normals(1000, 0, 0), 900),
			largest(normals(1000, 1, 0), 900)}))
	})
}

func TestRanksThatDisagreeAreTold(t *testing.T) {
	for name, call := range map[string]func(c *Communicator) error{
		"reduction": func(c *Communicator) error {
			_, err := sum(c, []backend.ReduceOp{backend.Sum, backend.Avg}[c.Rank()],
				make([]float32, 1000))
			return err
		},
		"options": func(c *Communicator) error {
			c.how.limit += float64(c.Rank())
			_, err := sum(c, backend.Sum, make([]float32, 1000))
			return err
		},
		"length": func(c *Communicator) error {
			_, err := sum(c, backend.Sum, make([]float32, 1000+100*c.Rank()))
			return err
		},
		"reset": func(c *Communicator) error {
			if _, err := sum(c, backend.Sum, make([]float32, 1000)); err != nil {
				return err
			}
			if c.Rank() == 1 {
				c.Reset()
			}
			_, err := sum(c, backend.Sum, make([]float32, 1000))
			return err
		},
	} {
		everywhere(t, 2, wrap(asIs, Threshold(1)), func(c *Communicator) error {
			if err := call(c); !errors.Is(err, backend.ErrMismatch) {
				return fmt.Errorf("%s: the error is %v", name, err)
			}
			if err := backend.Barrier(c); err == nil {
				return fmt.Errorf("%s: the communicator goes on", name)
			}
			return nil
		})
	}
}

func TestWrongOptions(t *testing.T) {
	for name, wrong := range map[string]func() (*Communicator, error){
		"density above 1":    func() (*Communicator, error) { return New(nil, TopK(1.1)) },
		"negative density":   func() (*Communicator, error) { return New(nil, TopK(-1)) },
		"NaN density":        func() (*Communicator, error) { return New(nil, TopK(math.NaN())) },
		"negative threshold": func() (*Communicator, error) { return New(nil, Threshold(-1)) },
		"NaN threshold": func() (*Communicator, error) {
			return New(nil, Threshold(math.NaN()))
		},
		"f64 values": func() (*Communicator, error) {
			return New(nil, TopK(0.1), WithValues(backend.F64))
		},
	} {
		if c, err := wrong(); c != nil || !errors.Is(err, backend.ErrArgument) {
			t.Errorf("%s: %v, %v", name, c, err)
		}
	}
}

// Heads and entries that no rank sends must not reach memory.
func TestSelectionsAreReadAsTheyArePrinted(t *testing.T) {
	for _, how := range []Selection{TopK(0.05), TopK(1), Threshold(0.001), Threshold(0)} {
		require.Equal(t, "ParseSelection", require.Got(ParseSelection(how.String()))(t), how)
	}
	for _, text := range []string{"", "topk", "topk=", "topk=few", "topk=0", "gzip=3",
		"threshold=1x"} {
		if got, err := ParseSelection(text); !errors.Is(err, backend.ErrArgument) ||
			strings.Contains(err.Error(), "strconv") {
			t.Errorf("%q is read as %v: %v", text, got, err)
		}
	}
}

func TestExplanationsSayWhatWasDecided(t *testing.T) {
	const n = 1000
	for _, tt := range []struct {
		density float64
		want    string
	}{
		{0.01, "sparse: a rank receives 336 bytes in messages for 10 of 1000 elements, 6000 in a " +
			"dense all-reduce"},
		{0.5, "dense: a rank receives 12096 bytes in messages for 500 of 1000 elements, 6000 in " +
			"a dense all-reduce"},
	} {
		everywhere(t, 4, wrap(asIs, TopK(tt.density)), func(c *Communicator) error {
			if got := c.Explain(3); got != "state 3 has had no sparse call" {
				return fmt.Errorf("before a call: %q", got)
			}
			if _, err := sum(c, backend.Sum, normals(n, c.Rank(), 0)); err != nil {
				return err
			}
			if got := c.Explain(3); got != tt.want {
				return fmt.Errorf("%q, want %q", got, tt.want)
			}
			if dense := c.Counters().Dense == 1; dense != strings.HasPrefix(tt.want, "dense") {
				return fmt.Errorf("it was dense: %v, but %s", dense, tt.want)
			}
			return nil
		})
	}
}

func TestDamagedMessagesAreErrors(t *testing.T) {
	k := &call{c: newCommunicator(alone{}, options{}), residual: &residual{n: 10},
		plan: plan{layout: layout{values: backend.F32, capacity: 4}}}
	require.Report(t, k.judge(0, []int64{0, 7, 4}))
	for _, sent := range []int64{-1, 5, math.MaxInt64} {
		err := k.judge(0, []int64{0, 7, sent})
		require.Check(t, err != nil, "%d entries are taken", sent)
	}
}

// What a damaged message holds reaches no memory but the result.
func TestDamagedMessagesStayInTheResult(t *testing.T) {
	l := layout{values: backend.F32, capacity: 4}
	for _, sent := range []int64{4, 5, -1, math.MaxInt64} {
		memory := backend.Of(make([]int64, l.nbytes()/8)).As(backend.U8)
		m := l.message(memory)
		backend.View[int64](m.Head)[wordSent] = sent
		copy(backend.View[int32](m.Index), []int32{5, -3, math.MaxInt32, 6})
		copy(backend.View[float32](m.Values), []float32{1, 2, 3, 4})
		y := make([]float32, 8)
		new(selector).combine(backend.Of(y), l.messages(memory, 1), 1)
		err := same(y, []float32{0, 0, 0, 0, 0, 1, 0, 0})
		require.Check(t, err == nil, "%d entries: %v", sent, err)
	}
}

// The selector gives the bits of the loops that say what is meant.
func TestTheSelectorIsWhatTheKernelsMean(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	for try := range 300 {
		n := []int{1, 7, 100, block, 2*block + 5}[try%5]
		l := layout{values: []backend.DType{backend.F32, backend.F16, backend.BF16}[try%3],
			capacity: rng.IntN(n + 1)}
		s := kernels.Selection{Fingerprint: 5, Saturate: try%2 == 0, Above: atLeast(0.1).above}
		if try%4 == 1 {
			s.K = 1 + rng.IntN(n)
			l.capacity = s.K
		}
		if try%7 == 1 {
			s.Notes = backend.Of([]int64{0, int64(try % 2)})
		}
		x, residual := normals(n, 1, try), normals(n, 2, try)
		for range try % 3 {
			x[rng.IntN(n)] = []float32{float32(math.NaN()), float32(math.Inf(-1)), 1e38,
				0}[rng.IntN(4)]
		}
		results := make([][]byte, 2)
		for i, do := range []func(*kernels.Selection){
			func(s *kernels.Selection) { require.NoError(t, reference.Select(s)) },
			func(s *kernels.Selection) { new(selector).run(s) },
		} {
			own := s
			memory := backend.Of(make([]int64, l.nbytes()/8)).As(backend.U8)
			own.Out, own.X = l.message(memory), backend.Of(slices.Clone(x))
			if try%5 != 2 {
				own.Residual = backend.Of(slices.Clone(residual))
			}
			if try%6 == 3 {
				own.Dense = own.X
			}
			do(&own)
			y := make([]float64, n)
			if i == 0 {
				require.NoError(t, reference.Combine(backend.Of(y), l.messages(memory, 1),
					3))
			} else {
				new(selector).combine(backend.Of(y), l.messages(memory, 1), 3)
			}
			results[i] = slices.Concat(memory.Bytes(), own.X.Bytes(), own.Residual.Bytes(),
				backend.Of(y).Bytes())
		}
		if !bytes.Equal(results[0], results[1]) {
			t.Fatalf("selection %d of %d elements differs: %+v", try, n, s)
		}
	}
}

func FuzzTopKIsExact(f *testing.F) {
	f.Add(uint64(1), 10, 3, uint32(0xffffffff))
	f.Add(uint64(2), 5000, 77, uint32(0xffff0000))
	f.Fuzz(func(t *testing.T, seed uint64, n, k int, mask uint32) {
		n = 1 + int(uint(n)%9000)
		k = 1 + int(uint(k)%uint(n))
		rng := rand.New(rand.NewPCG(seed, 0))
		v := make([]float32, n)
		for i := range v {
			v[i] = math.Float32frombits(rng.Uint32() & mask) // a mask makes ties
		}
		var s search
		s.see(v)
		c := s.kth(v, k)
		at, got := make([]int32, n), make([]float32, n)
		picked := c.pick(at, v)
		require.That(t, picked == k && s.coarse == [1 << coarseBits]int{} && s.odd == s.coarse,
			"%d of %d elements, want %d", picked, n, k)
		for _, i := range at[:k] {
			got[i] = 1
		}
		order := make([]int, n)
		for i := range order {
			order[i] = i
		}
		sort.SliceStable(order, func(a, b int) bool {
			return magnitude(v[order[a]]) > magnitude(v[order[b]])
		})
		for _, i := range order[:k] {
			if got[i] != 1 {
				t.Fatalf("element %d, %v, is not selected", i, v[i])
			}
		}
	})
}

func BenchmarkSelect(b *testing.B) {
	const n = 1 << 22
	x := normals(n, 0, 0)
	for name, how := range map[string]Selection{"threshold=1%": Threshold(0.2576),
		"topk=1%": TopK(0.01), "topk=5%": TopK(0.05)} {
		b.Run(name, func(b *testing.B) {
			l := layout{values: backend.F32, capacity: n / 16}
			memory := backend.Of(make([]int64, l.nbytes()/8)).As(backend.U8)
			residual := make([]float32, n)
			s := kernels.Selection{Out: l.message(memory), X: backend.Of(x),
				Residual: backend.Of(residual), Saturate: true, Above: atLeast(float32(how.limit)).
						above}
			if how.density > 0 {
				s.K = topK(how.density, n)
			}
			host := new(selector)
			b.ResetTimer()
			for range b.N {
				clear(residual)
				host.run(&s)
				host.sources(l.messages(memory, 1))
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/element")
		})
	}
}

// alone is as much of a communicator as it takes to name a call.
type alone struct{ backend.Communicator }

func (alone) Size() int    { return 1 }
func (alone) Rank() int    { return 0 }
func (alone) Name() string { return "alone" }

func (alone) Capabilities() backend.Capabilities { return backend.Capabilities{} }

// What belongs to a call that was refused is in no state: one could not resume from it.
func TestStateAfterACallThatWasRefused(t *testing.T) {
	group(t, 2, wrap(always, Threshold(0.5)), func(c *Communicator) error {
		x := []float32{1, 2, 3, 4}
		if err := onClosedQueue(c, x); err != nil {
			return err
		}
		state, err := c.State()
		if err != nil {
			return err
		}
		if err := c.SetState(state); err != nil {
			return err
		}
		y, err := sum(c, backend.Sum, x)
		return errors.Join(err, same(y, []float32{2, 4, 6, 8}))
	})
}

// onClosedQueue makes a call that cannot start.
func onClosedQueue(c *Communicator, x []float32) error {
	closed, err := c.Device().NewQueue()
	if err == nil {
		err = closed.Close()
	}
	if err != nil {
		return err
	}
	if _, err := c.Start(closed, reduction(backend.Sum), backend.Of(x), backend.Of(x)); err == nil {
		return errors.New("a call on a closed queue has started")
	}
	return nil
}

// A call that could not be started is none to go back to before.
func TestUndoOfACallThatDidNotStart(t *testing.T) {
	group(t, 2, wrap(always, TopK(0.5), WithStrict()), func(c *Communicator) error {
		x := []float32{1, 2, 3, 4}
		fails := func() error { return errors.Join(onClosedQueue(c, x), c.Undo(3)) }
		if err := fails(); err != nil { // the first call
			return err
		}
		if _, err := sum(c, backend.Sum, x); err != nil {
			return err
		}
		before, err := c.State()
		if err := errors.Join(err, fails()); err != nil {
			return err
		}
		after, err := c.State()
		if err != nil {
			return err
		}
		for name, b := range before {
			if !slices.Equal(b.Bytes(), after[name].Bytes()) {
				return fmt.Errorf("%s has changed", name)
			}
		}
		return nil
	})
}
