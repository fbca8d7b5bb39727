package hierarchy

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

var (
	allReduce     = backend.Collective{Kind: backend.AllReduce}
	reduceScatter = backend.Collective{Kind: backend.ReduceScatter}
	allGather     = backend.Collective{Kind: backend.AllGather}
	allToAll      = backend.Collective{Kind: backend.AllToAll}
	broadcast     = backend.Collective{Kind: backend.Broadcast}
)

func planOf(t *testing.T, l Layout, o Options) Plan {
	t.Helper()
	return require.Value(NewPlan(l, o))(t)
}

// tenth is a network ten times slower than what is inside a machine.
func tenth() *Links {
	return &Links{Inside: Link{2 * time.Microsecond, 100e9}, Between: Link{8 * time.Microsecond,
		10e9}, Step: 4 * time.Microsecond}
}

func TestLargeOperandsAreHierarchicalAndSmallOnesFlat(t *testing.T) {
	p := planOf(t, Grid(4, 8), Options{Links: tenth()})
	// of 8 MiB at most
	for what, slices := range map[*backend.Collective]int{&allReduce: 3, &reduceScatter: 4,
		&allGather: 4} {
		c := p.Choose(*what, backend.F32, 25<<18)
		require.Check(t, c.Hierarchical && c.Layered < c.Flat && c.Slices == slices,
			"%v of 25 MiB: %+v", *what, c)
	}
	two := planOf(t, Grid(2, 1), Options{Links: tenth()})
	c := two.Choose(allReduce, backend.F32, 256)
	require.Check(t, !c.Hierarchical, "a small all-reduce of two ranks: %+v", c)
}

// The predicted times of one slice, by hand.
func TestPredictionIsTheModel(t *testing.T) {
	p := planOf(t, Grid(2, 2), Options{Links: tenth(), SliceBytes: 8e6})
	c := p.Choose(allReduce, backend.F32, 1e6) // 4 MB
	// Inside twice 2 µs + 2 MB at 100 GB/s, between twice 8 µs + 1 MB at 10 GB/s, five phases.
	want := 2*(2+20)*time.Microsecond + 2*(8+100)*time.Microsecond + 5*4*time.Microsecond
	require.Check(t, c.Layered == want && c.Slices == 1,
		"hierarchical: %v in %d slices, want %v in 1", c.Layered, c.Slices, want)
	// Inside root's machine 2 µs + 4 MB, between 8 µs + 2 MB, inside the other 2 µs + 2 MB, four
	// phases.
	if got, want := p.Choose(broadcast, backend.F32, 1e6).Layered,
		(2+40+8+200+2+20+4*4)*time.Microsecond; got != want {
		t.Errorf("a broadcast: %v, want %v", got, want)
	}
	// Three copies of 4 MB, inside 2 µs + 2 MB, between 8 µs + 2 MB, five phases.
	if got, want := p.Choose(allToAll, backend.F32, 1e6).Layered,
		(120+2+20+8+200+5*4)*time.Microsecond; got != want {
		t.Errorf("an all-to-all: %v, want %v", got, want)
	}
	// Sent directly: in each of two steps 2 messages of 8 µs + 1 MB at 10 GB/s, and one inside at
	// the same time. Small operands go to everyone at once.
	p.Direct = true
	if got, want := p.Choose(allReduce, backend.F32, 1e6).Flat,
		(2*2*(8+100)+4)*time.Microsecond; got != want {
		t.Errorf("flat and directly: %v, want %v", got, want)
	}
	if got, want := p.Choose(allReduce, backend.F32, 25).Flat,
		(2*8+4)*time.Microsecond+20*time.Nanosecond; got != want {
		t.Errorf("100 bytes flat and directly: %v, want %v", got, want)
	}
	// What a call takes beyond that counts in the choice.
	slow := *tenth()
	slow.Call = time.Second
	q := planOf(t, Grid(2, 2), Options{Links: &slow, SliceBytes: 8e6})
	if c := q.Choose(allReduce, backend.F32, 1e6); c.Layered != want+time.Second || c.Hierarchical {
		t.Errorf("a call takes a second more: %+v", c)
	}
	text := q.Explain(allReduce, backend.F32, 4e6)
	require.Check(t, strings.Contains(text, "4µs for a phase, 1s for a call\n"), "%v", text)
	// In 16 bits half of that goes between; other operands as they are.
	half := planOf(t, Grid(2, 2), Options{Links: tenth(), SliceBytes: 8e6,
		Exchange: backend.BF16})
	require.Equal(t, "exchanged in 16 bits", half.Choose(allReduce, backend.F32, 1e6).Layered,
		want-100*time.Microsecond)
	require.Equal(t, "integers are not rounded", half.Choose(allReduce, backend.I32, 1e6).Layered,
		want)
	// Six steps of 8 µs and 3/2 of 4 MB at 10 GB/s.
	require.Equal(t, "flat", c.Flat,
		6*8*time.Microsecond+600*time.Microsecond+4*time.Microsecond)
}

// With a what each slice costs on the busier kind of link, and y what the whole operand
// takes on the other one, sqrt(y/a) slices are the fastest.
func TestSlicesAreAsManyAsAreFastest(t *testing.T) {
	nvlink := Link{3 * time.Microsecond, 200e9}
	same := &Links{nvlink, nvlink, 5 * time.Microsecond, 0}
	slow := &Links{nvlink, Link{30 * time.Microsecond, 1e9}, 5 * time.Microsecond, 0}
	for _, test := range []struct {
		layout Layout
		links  *Links
		what   backend.Collective
		nbytes int
		slices int
	}{
		{Grid(2, 2), same, allReduce, 25 << 20, 2}, // sqrt(65/16)
		{Grid(2, 2), same, allReduce, 1 << 20, 1},  // 3 us are not worth 25
		// 2.7 ms between: sqrt(2684/16)
		{Grid(2, 2), same, allReduce, 1 << 30, 13},
		{Grid(2, 2), slow, allReduce, 25 << 20, 1},  // sqrt(131/70) = 1.4
		{Grid(2, 2), slow, allReduce, 256 << 20, 4}, // sqrt(1342/70)
		{Grid(2, 4), nil, allReduce, 25 << 20, 3},   // the round numbers
		// one kind of link, and slots for 8 MiB
		{Grid(4, 1), same, allReduce, 25 << 20, 4},
		{Grid(2, 2), same, reduceScatter, 25 << 20, 4}, // slots
		{Grid(2, 2), same, allReduce, 16, 1},
	} {
		p := planOf(t, test.layout, Options{Mode: Always, Links: test.links})
		c := p.Choose(test.what, backend.F32, test.nbytes/4)
		require.Check(t, c.Slices == test.slices,
			"%v of %d bytes as %v over %v: %d slices, want %d", test.what, test.nbytes, test.layout,
			*p.Options.Links, c.Slices, test.slices)
		least := 1 // the slots have room for
		if p.needsSlots(test.what.Kind) {
			least = (test.nbytes + defaultSlotBytes - 1) / defaultSlotBytes
		}
		for n := least; n < 200; n++ {
			took := time.Duration(p.layeredTime(test.what, backend.F32, test.nbytes/4, n))
			require.Check(t, took >= c.Layered-1,
				"%v of %d bytes as %v over %v: %d slices take %v, and %d %v", test.what,
				test.nbytes, test.layout, *p.Options.Links, c.Slices, c.Layered, n, took)
		}
	}
}

// Pieces are multiples of cache lines and all there is, however it is cut.
func TestPiecesAreTheShare(t *testing.T) {
	p := planOf(t, Grid(2, 2), Options{})
	for _, d := range []backend.DType{backend.U8, backend.BF16, backend.F64} {
		for _, share := range []int{1, 7, 8, 63, 64, 65, 1003, 1 << 20, 1<<24 + 1} {
			for _, kind := range []backend.Kind{backend.AllReduce, backend.AllGather} {
				piece, slices := p.pieces(backend.Collective{Kind: kind}, d, 4*share+3)
				if last := share - (slices-1)*piece; last < 1 || last > piece || slices > 1 &&
					piece*d.Size()%cacheLine != 0 {
					t.Errorf("%v: a share of %d %v is cut into %d slices of %d", kind, share, d,
						slices, piece)
				}
				require.Check(t, kind != backend.AllGather || piece*4*d.Size() <= defaultSlotBytes,
					"a slice of %d elements of %v for each rank has no room in a slot", piece, d)
			}
		}
	}
}

func TestReasonsToRunFlat(t *testing.T) {
	same := tenth()
	same.Between = same.Inside
	almost := tenth()
	almost.Between = Link{almost.Inside.Latency, 0.99 * almost.Inside.Bandwidth}
	grid := Grid(2, 3)
	average := backend.Collective{Kind: backend.AllReduce, Op: backend.Avg}
	for _, test := range []struct {
		layout Layout
		o      Options
		what   backend.Collective
		dtype  backend.DType
		n      int
		say    string
	}{
		{Layout{}, Options{Mode: Always}, allReduce, backend.F32, 1 << 20, "there are no ranks"},
		{layoutOf([][]int{{0, 1}, {2}}), Options{Mode: Always}, reduceScatter, backend.F32, 3 << 20,
			"machine 0 has 2 ranks and machine 1 has 1: start as many on each"},
		{layoutOf([][]int{{0, 1}, {2}}), Options{Mode: Always}, average, backend.F16, 1 << 20,
			"machine 0 has 2 ranks and machine 1 has 1: start as many on each"},
		{Grid(1, 4), Options{Mode: Always}, allReduce, backend.F32, 1 << 20,
			"one machine"},
		{grid, Options{Mode: Never}, allReduce, backend.F32, 1 << 20, "switched off"},
		{grid, Options{Links: same}, allReduce, backend.F32, 1 << 20, "equally fast"},
		{Grid(3, 1), Options{Links: tenth()}, allReduce, backend.F32, 8,
			"of one device each have nothing to bring together"},
		{grid, Options{Links: almost}, allReduce, backend.F32, 1 << 20, "predicted to be faster"},
		{grid, Options{Mode: Always}, allReduce, backend.F32, 5,
			"fewer elements than there are ranks"},
		{grid, Options{Mode: Always}, allReduce, backend.F32, 0,
			"fewer elements than there are ranks"},
		{grid, Options{Mode: Always}, backend.Collective{Kind: backend.Gather}, backend.F32,
			1 << 20, "gather is never hierarchical"},
		{Grid(3, 1), Options{Mode: Always}, allToAll, backend.F32, 3 << 20,
			"of one device each have nothing to bring together"},
		{grid, Options{Mode: Always}, backend.Collective{Kind: backend.AllGather,
			Splits: make([]int, 6)}, backend.F32, 1 << 20, "uneven"},
		{grid, Options{Mode: Always}, average, backend.F16, 1 << 20, "not for 3"},
		{gridOf(cuda.MaxSources+1, 2, machineMinor), Options{Mode: Always}, average, backend.F16,
			1 << 20, "the averages of 257 machines are too many"},
	} {
		p := planOf(t, test.layout, test.o)
		text := p.Explain(test.what, test.dtype, test.n*test.dtype.Size())
		if c := p.Choose(test.what, test.dtype, test.n); c.Hierarchical ||
			!strings.Contains(c.Reason, test.say) ||
			!strings.Contains(text, "flat, because "+c.Reason) {
			t.Errorf("%v on %v: %+v\n%s", test.what, test.layout, c, text)
		}
	}
	for _, test := range []struct {
		machines int
		what     backend.Collective
	}{{cuda.MaxSources + 1, allReduce}, {cuda.MaxSources + 1, average}, {cuda.MaxSources + 1,
		allGather}} {
		p := planOf(t, Grid(test.machines, 1), Options{Mode: Always})
		c := p.Choose(test.what, backend.F32, 1<<20)
		require.Check(t, c.Hierarchical, "%v of %d machines: %+v", test.what, test.machines, c)
	}
}

func TestExplanationPrintsBothTimes(t *testing.T) {
	p := planOf(t, Grid(2, 2), Options{Links: tenth()})
	want := `allreduce(sum) of 26214400 bytes of f32 on 2 machines x 2 devices: ` +
		`hierarchical, because it is predicted to be faster
  flat            3.9842ms  39.3 MB over the busiest link
  hierarchical    1.4861ms  26.2 MB inside and 13.1 MB between machines from each rank, in 3 slices
  bound           1.3107ms  these bytes alone on the busier kind of link
  links         inside 2µs + 100 GB/s, between 8µs + 10 GB/s, 4µs for a phase
`
	require.Equal(t, "the explanation", p.Explain(allReduce, backend.F32, 25<<20), want)
}

func TestExplanationCountsWhatIsExchanged(t *testing.T) {
	p := planOf(t, Grid(2, 2), Options{Links: tenth(), Exchange: backend.BF16})
	got := p.Explain(allReduce, backend.F32, 25<<20)
	require.Check(t, strings.Contains(got, "26.2 MB inside and 6.55 MB, as bf16, between machines"),
		"%v", got)
	if got := p.Explain(allGather, backend.F32, 25<<20); !strings.Contains(
		got, "13.1 MB inside and 6.55 MB between machines") {
		t.Error(got)
	}
}

func TestTrafficIsTheFormula(t *testing.T) {
	const S = 1 << 20
	for _, l := range []Layout{Grid(1, 4), Grid(2, 2),
		Grid(4, 1), gridOf(3, 2, machineMinor)} {
		M, D, W := float64(l.Machines()), float64(l.Devices()), float64(l.Size())
		got, want := l.layeredTraffic(backend.AllReduce, S).Between, 2*(M-1)/M*S/D
		require.Check(t, math.Abs(got-want) <= 1e-6, "%v: %v bytes between machines, want %v", l,
			got, want)
		flat := total(Plan{Layout: l}.flatLegs(backend.AllReduce, S)[0])
		if got, want := flat.Between+flat.Inside, 2*(W-1)/W*S; math.Abs(got-want) > 1e-6 ||
			(flat.Between > 0) != (M > 1) {
			t.Errorf("%v: a ring moves %v bytes, want %v", l, got, want)
		}
	}
}

func TestWrongOptionsAreRefused(t *testing.T) {
	for name, o := range map[string]Options{
		"mode": {Mode: 9}, "slices": {SliceBytes: -1}, "slots": {Slots: -1}, "spans": {Spans: -1},
		"exchange":  {Exchange: backend.I32},
		"bandwidth": {Links: &Links{}}, "time": {Links: &Links{Link{-1, 1}, Link{0, 1}, 0, 0}},
		"call":    {Links: &Links{Link{0, 1}, Link{0, 1}, 0, -1}},
		"scratch": {Slots: 1 << 10, SliceBytes: 1 << 40}, "many": {Slots: math.MaxInt},
		"large":    {SliceBytes: math.MaxInt},
		"infinite": {Links: &Links{Link{1, math.Inf(1)}, Link{0, 1}, 0, 0}},
	} {
		require.Fails(t, name, require.Err(NewPlan(Grid(2, 2), o)), backend.ErrArgument)
	}
}
