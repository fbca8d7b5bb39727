package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

var sum = backend.Collective{Kind: backend.AllReduce}

// reducing are the algorithms of all-reduces by kernels.
func reducing() []Algorithm {
	return slices.DeleteFunc(FullyConnected.Algorithms()[1:],
		func(a Algorithm) bool { return !algorithms[a].runs(sum.Kind) })
}

func TestCommunicatorByOneShotOnFake(t *testing.T) {
	backendtest.RunWrapper(t, suiteOf(t, byOneShot, 2)) // the rest is not about kernels
}

func TestCommunicatorByTwoShotOnFakeUnraced(t *testing.T) {
	backendtest.Run(t, suiteOf(t, byTwoShot, 3))
}

// suiteOf are the options of the suite for one algorithm.
func suiteOf(t *testing.T, force Algorithm, size int) backendtest.Options {
	g := newRig(t)
	g.openDevices(t, size)
	o := options()
	o.Force = force
	return backendtest.Options{
		Sizes: []int{size}, Integers: backend.F32, // there are no kernels for i64
		New: func(size int, timeout time.Duration) (*backendtest.Group, error) {
			return g.newGroup(size, timeout, same(o))
		},
		Copy: g.Move, OwnOrder: true, // what is NCCL's has its order
		Tree: treeOf,
	}
}

// Sums of f32 in a tree run on their own kernels, whatever the table says or is forced, and those
// of 16 bits are refused.
func TestTreesHaveTheirKernels(t *testing.T) {
	g := newRig(t)
	for _, force := range []Algorithm{byNCCL, byLL} {
		o := options()
		o.Force = force
		for r, c := range g.group(t, 4, same(o)) {
			if can := c.Capabilities().Tree; slices.Contains(can, backend.F16) ||
				!slices.Contains(can, backend.F64) {
				t.Errorf("four ranks add %v in a tree", can)
			}
			for _, test := range []struct {
				what backend.Collective
				d    backend.DType
				n    int
				want Algorithm
			}{
				{backend.Collective{Kind: backend.AllReduce}, backend.F32, 4, byOneShot},
				{backend.Collective{Kind: backend.AllReduce, Op: backend.Avg}, backend.F32, 1 << 20,
					byTwoShot},
				{backend.Collective{Kind: backend.AllReduce, Algorithm: backend.TwoShot},
					backend.F32, 4, byTwoShot},
				{backend.Collective{Kind: backend.ReduceScatter}, backend.F32, 1 << 20, byPush},
				{backend.Collective{Kind: backend.AllReduce}, backend.F16, 4, byNCCL},
				{backend.Collective{Kind: backend.Reduce}, backend.F32, 4, byNCCL},
				{backend.Collective{Kind: backend.AllReduce, Splits: []int{1, 2, 1, 1}},
					backend.F32, 4, byNCCL},
			} {
				test.what.Association = backend.Tree
				if got := c.Choose(test.what, test.d, test.n); got != test.want {
					t.Errorf("rank %d, %v of %v: %v, want %v", r, test.what, test.d, got, test.want)
				}
			}
		}
	}
	comms := g.group(t, 4, same(options()))
	each(t, comms, func(c *Communicator) error {
		x := testranks.Must(c.Device().Alloc(4096))
		tree := backend.Collective{Kind: backend.AllReduce, Association: backend.Tree}
		if err := backend.Run(c, tree, x.As(backend.F16), x.As(backend.F16)); !errors.Is(
			err, backend.ErrUnsupported) {
			return fmt.Errorf("a tree of f16: %v", err)
		}
		return errors.Join(backend.Run(c, tree, x.As(backend.F32), x.As(backend.F32)),
			c.Device().Free(x))
	})
	for r := range comms {
		if x := g.last(r); !x.Tree || x.Way != peers.OneShot {
			t.Errorf("rank %d has started %v, in a tree %v", r, x.Way, x.Tree)
		}
	}
}

func TestCallsUseTheAlgorithmOfTheirSize(t *testing.T) {
	g := newRig(t)
	o := options()
	o.Force = byNCCL
	comms := g.group(t, 2, same(o))
	row := comms[0].row(backend.AllReduce, backend.F32)
	limits := row.limits()
	sizes := []int{0, 4, 256 << 10}
	for _, l := range limits[:len(limits)-1] {
		sizes = append(sizes, l.upTo/4*4-4, l.upTo/4*4, l.upTo/4*4+4)
	}
	each(t, comms, func(c *Communicator) error {
		for _, nbytes := range sizes {
			want := pick(limits, nbytes)
			if nbytes == 0 {
				want = byNCCL
			}
			before := c.Usage()
			testranks.NoError(holding(c, make([]float32, nbytes/4), func(b backend.Buffer) error {
				return backend.Run(c, sum, b, b)
			}))
			if got := c.Usage().minus(before); got != want {
				return fmt.Errorf("%d bytes: %v, want %v", nbytes, got, want)
			}
		}
		return nil
	})
}

// minus returns the algorithm of the one call between two counts.
func (u Usage) minus(before Usage) Algorithm {
	switch {
	case u.LL > before.LL:
		return byLL
	case u.LL128TwoShot > before.LL128TwoShot:
		return byLL128TwoShot
	case u.OneShot > before.OneShot:
		return byOneShot
	case u.TwoShot > before.TwoShot:
		return byTwoShot
	case u.Mesh > before.Mesh:
		return byMesh
	case u.Halved > before.Halved:
		return byHalved
	case u.Push > before.Push:
		return byPush
	}
	return byNCCL
}

func TestWhatHasNoKernelsRunsOnNCCL(t *testing.T) {
	g := newRig(t)
	o := options()
	o.Force = byOneShot
	c := g.group(t, 2, same(o))[0]
	for _, test := range []struct {
		what  backend.Collective
		dtype backend.DType
		want  Algorithm
	}{
		{sum, backend.F32, byOneShot}, {sum, backend.F16, byOneShot},
		{sum, backend.BF16, byOneShot},
		{sum, backend.F64, byNCCL}, {sum, backend.I32, byNCCL},
		{backend.Collective{Kind: backend.AllReduce, Op: backend.Avg}, backend.BF16, byOneShot},
		{backend.Collective{Kind: backend.AllReduce, Op: backend.Max}, backend.F32, byNCCL},
		{backend.Collective{Kind: backend.ReduceScatter}, backend.F32, byPush},
		{backend.Collective{Kind: backend.ReduceScatter, Splits: []int{1, 2}}, backend.F32, byNCCL},
		{backend.Collective{Kind: backend.AllGather}, backend.I64, byPush},
		{backend.Collective{Kind: backend.AllGather, Splits: []int{1, 2}}, backend.U8, byPush},
		{backend.Collective{Kind: backend.AllToAll}, backend.U8, byPush},
		{backend.Collective{Kind: backend.Broadcast}, backend.F32, byNCCL},
		{backend.Collective{Kind: backend.AllReduce, Algorithm: backend.TwoShot}, backend.F32,
			byTwoShot},
		{backend.Collective{Kind: backend.AllReduce, Algorithm: backend.OneShot}, backend.F64,
			byNCCL},
	} {
		if got := c.choose(&test.what, test.dtype, 1024); got != test.want {
			t.Errorf("%v of %v: %v, want %v", test.what, test.dtype, got, test.want)
		}
	}
}

// What is not pushed is refused, so that the caller packs pieces: Capabilities say which calls
// those are.
func TestPiecesArePushedWhereDevicesReachEachOther(t *testing.T) {
	even := backend.Collective{Kind: backend.AllToAll, Rows: &backend.Rows{Src: []int{2, 2},
		Dst: []int{1, 1}}}
	uneven := even
	uneven.Splits = []int{2, 2, 2, peers.MaxPiece / 2}
	for name, test := range map[string]struct {
		o     Options
		what  backend.Collective
		dtype backend.DType
		count int
		want  Algorithm
	}{
		"bf16":            {Options{}, even, backend.BF16, 2, byLL},
		"the longest":     {Options{}, even, backend.F32, packetBytes / 4, byLL},
		"longer":          {Options{}, even, backend.F32, packetBytes/4 + 2, byPush},
		"f64":             {Options{Force: byPush, Link: PCIe}, even, backend.F64, 1 << 20, byPush},
		"bytes":           {Options{Force: byPush}, even, backend.U8, 2, byPush},
		"nothing":         {Options{Force: byPush}, even, backend.F32, 0, byNCCL},
		"too large":       {Options{Force: byPush}, uneven, backend.F32, 1 << 30, byNCCL},
		"just fits":       {Options{Force: byPush}, uneven, backend.BF16, 1 << 30, byPush},
		"not forced":      {Options{Link: PCIe}, even, backend.F32, 2, byNCCL},
		"a shared device": {Options{Link: PCIe, SharedDevices: true}, even, backend.F32, 2, byPush},
		"another one":     {Options{Force: byTwoShot}, even, backend.I32, 2, byLL},
		"no memory":       {Options{Force: byPush, Off: true}, even, backend.F32, 2, byNCCL},
	} {
		test.o.Table, test.o.Staging = prototype(), 4<<10
		c := newRig(t).group(t, 2, same(test.o))[0]
		if got := c.Choose(test.what, test.dtype, test.count*test.dtype.Size()); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
		got := c.Capabilities().RunsRows(test.what, test.dtype, test.count)
		require.Check(t, got == (test.want != byNCCL), "%s: capabilities say %v", name, got)
		if text := c.Explain(test.what, test.dtype, test.count*test.dtype.Size()); strings.Contains(
			text, fmt.Sprintf(": %v: pieces are permuted", test.want)) != (test.want != byNCCL) {
			t.Errorf("%s: explained as %q", name, text)
		}
	}
}

func TestWhatMayTravelIn16BitsDoesFromASizeOn(t *testing.T) {
	g := newRig(t)
	o := options()
	o.Halved, o.Force = 4096, byHalved
	each(t, g.group(t, 2, same(o)), func(c *Communicator) error {
		for _, test := range []struct {
			n    int
			want Algorithm
		}{{0, byNCCL}, {1023, byNCCL}, {1024, byHalved}} {
			what := backend.Collective{Kind: backend.AllReduce, AllowHalf: backend.BF16}
			before := c.Usage()
			testranks.NoError(holding(c, make([]float32, test.n), func(b backend.Buffer) error {
				return backend.Run(c, what, b, b)
			}))
			if got := c.Usage().minus(before); got != test.want ||
				c.Halves(what, test.n) != (test.want == byHalved) {
				return fmt.Errorf("%d elements: %v, want %v", test.n, got, test.want)
			}
		}
		if x := g.last(c.Rank()); x.Way != peers.Halved || x.Half != backend.BF16 ||
			x.Op != backend.Sum || x.Src.Len() != 1024 {
			return fmt.Errorf("the kernel was asked for %+v", x)
		}
		if use := c.choose(&sum, backend.F32, 4096); use != byNCCL {
			return fmt.Errorf("%v without leave", use)
		}
		if text := c.Explain(backend.Collective{Kind: backend.AllReduce, AllowHalf: backend.F16},
			backend.F32, 4096); !strings.Contains(text, "halved, in 16 bits from 4 KiB on") {
			return errors.New(text)
		}
		return nil
	})
}

func TestOnlyLinesTravelIn16Bits(t *testing.T) {
	what := backend.Collective{Kind: backend.AllReduce, AllowHalf: backend.F16}
	for name, change := range map[string]func(o *Options){
		"PCIe":  func(o *Options) { o.Link = PCIe },
		"never": func(o *Options) { o.Halved = -1 },
		"off":   func(o *Options) { o.Off = true },
	} {
		o := options()
		o.Halved = 4
		change(&o)
		c := newRig(t).group(t, 2, same(o))[0]
		require.Check(t, !c.Halves(what, 1<<20), "%s: it does", name)
	}
}

// Devices that may tear the 128 bytes of a line use packets and barriers instead.
func TestDevicesThatTearLinesSendNone(t *testing.T) {
	for _, test := range []struct {
		force  Algorithm
		nbytes int
		want   Algorithm
	}{
		{byLL, packetBytes, byLL}, {byLL, packetBytes + 4, byTwoShot},
		{byLL128TwoShot, 1024, byTwoShot}, {byOneShot, 1024, byOneShot},
		{byTwoShot, 1024, byTwoShot},
	} {
		g := newRig(t)
		g.wires = func(rank int) wiring {
			w := switched(0, 0)[rank].with(2)
			w.Tears = rank == 1
			return w
		}
		o := options()
		o.Force, o.Halved = test.force, 4
		each(t, g.group(t, 2, same(o)), func(c *Communicator) error {
			if use := c.choose(&sum, backend.F32, test.nbytes); use != test.want {
				return fmt.Errorf("%d bytes, %v forced: %v, want %v", test.nbytes, test.force, use,
					test.want)
			}
			if c.Halves(backend.Collective{Kind: backend.AllReduce, AllowHalf: backend.F16},
				1<<20) {
				return errors.New("lines travel in 16 bits")
			}
			return nil
		})
	}
}

// Only memory from Alloc is used where it is, and only if it is of whole units.
func TestPlacesAreThoseOfAlloc(t *testing.T) {
	g := newRig(t)
	comms := g.group(t, 2, same(options()))
	each(t, comms, func(c *Communicator) error {
		first := testranks.Must(c.Alloc(1000))
		second := testranks.Must(c.Alloc(4096))
		other := testranks.Must(c.Device().Alloc(1024))
		defer c.Device().Free(other)
		const at = 1024 // small ones share a window
		floats := second.As(backend.F32)
		for _, test := range []struct {
			use            Algorithm
			what           backend.Collective
			dst, src       backend.Buffer
			source, target peers.InWindow
		}{
			{byTwoShot, sum, floats, floats, 0, peers.PlaceIn(1, at)},
			{byTwoShot, sum, floats.Slice(4, 8), floats.Slice(8, 12), 0, peers.PlaceIn(1, at+16)},
			{byTwoShot, sum, floats.Slice(4, 7), floats.Slice(8, 11), 0, 0},
			{byTwoShot, sum, floats.Slice(5, 9), floats.Slice(12, 16), 0, 0},
			{byTwoShot, sum, first.As(backend.F32).Slice(0, 4), other.As(backend.F32).Slice(0, 4),
				0, peers.PlaceIn(1, 0)},
			{byOneShot, sum, floats, floats, 0, 0},
			{byOneShot, sum, floats.Slice(0, 4), floats.Slice(8, 12), peers.PlaceIn(1, at+32), 0},
			{byLL, sum, floats.Slice(0, 4), floats.Slice(8, 12), 0, 0},
			{byPush, backend.Collective{Kind: backend.ReduceScatter}, floats.Slice(0, 4),
				floats.Slice(8, 16), 0, 0},
			{byPush, backend.Collective{Kind: backend.AllGather}, floats.Slice(1, 7),
				floats.Slice(8, 11), 0, peers.PlaceIn(1, at+4)},
			{byPush, backend.Collective{Kind: backend.AllToAll}, floats.Slice(0, 4),
				floats.Slice(8, 12), 0, peers.PlaceIn(1, at)},
		} {
			var x peers.PeerCall
			c.memory.placeOperands(&x,
				&call{what: test.what, use: test.use, dst: test.dst, src: test.src})
			if x.Source != test.source || x.Target != test.target {
				return fmt.Errorf("%v of %v: places %#x, %#x, want %#x, %#x", test.use, test.what,
					x.Source, x.Target, test.source, test.target)
			}
		}
		return nil
	})
}

func TestAllocGoesOnWithoutWindows(t *testing.T) {
	g := newRig(t)
	each(t, g.group(t, 2, same(options())), func(c *Communicator) error {
		placed := func(nbytes int, want bool) error {
			b, err := c.Alloc(nbytes)
			if err == nil && (c.memory.placeOf(b, 32) != 0) != want {
				err = fmt.Errorf("%d bytes: a place: %v", nbytes, !want)
			}
			return err
		}
		const most = peers.MaxWindows - 1
		var errs []error
		for range 100 {
			errs = append(errs, placed(smallBytes/100-align, true))
		}
		if used, _ := c.Windows(); used != 1 {
			return fmt.Errorf("small pieces use %d windows", used)
		}
		for range most - 1 {
			errs = append(errs, placed(smallBytes+4, true))
		}
		errs = append(errs, placed(32, true), placed(smallBytes+4, false),
			placed(smallBytes, false))
		if used, lacking := c.Windows(); used != most || lacking != 2*smallBytes+4 {
			return fmt.Errorf("%d windows, %d bytes without", used, lacking)
		}
		if text := c.Explain(sum, backend.F32, 1024); !strings.Contains(
			text, "used up its 63 windows: 2 MiB") {
			return errors.New(text)
		}
		if _, err := c.Alloc(8 + c.Rank()); !errors.Is(err, backend.ErrArgument) {
			return fmt.Errorf("different sizes: %w", err)
		}
		return errors.Join(errs...)
	})
}

// Ranks free in different orders, so a window is free on one of them earlier.
func TestFreedWindowsAreUsedAgain(t *testing.T) {
	g := newRig(t)
	each(t, g.group(t, 2, same(options())), func(c *Communicator) error {
		for range peers.MaxWindows {
			var taken []backend.Buffer
			for _, nbytes := range []int{64, smallBytes + 4, 128, smallBytes + 8} {
				b := testranks.Must(c.Alloc(nbytes))
				if c.memory.placeOf(b, 32) == 0 {
					return fmt.Errorf("%d bytes are in no window", nbytes)
				}
				taken = append(taken, b)
			}
			if c.Rank() == 1 {
				slices.Reverse(taken)
			}
			for _, b := range taken {
				testranks.NoError(c.Free(b))
				if err := c.Free(b); !errors.Is(err, backend.ErrArgument) {
					return fmt.Errorf("a second Free gave the error %v, want ErrArgument", err)
				}
			}
		}
		if used, lacking := c.Windows(); used > 3 || lacking != 0 {
			return fmt.Errorf("%d windows are used, %d bytes without, and nothing is allocated",
				used, lacking)
		}
		return nil
	})
}

// A window that one rank cannot have is nobody's, and nobody frees what another one has open.
func TestRefusedAllocLeavesNothing(t *testing.T) {
	for _, doing := range []string{"alloc much", "export", "import"} {
		for _, windows := range []int{0, peers.MaxWindows - 1} {
			t.Run(fmt.Sprint(doing, windows), func(t *testing.T) {
				if doing != "alloc much" && windows > 0 {
					t.Skip("without a window nothing is shared")
				}
				g := newRig(t)
				var refusing atomic.Bool
				g.fault = func(rank int, what string) error {
					switch {
					case refusing.Load() && what == "close import" && rank == 0:
						time.Sleep(5 * time.Millisecond) // others are done by then
					case refusing.Load() && rank == 2 && what == doing:
						return errors.New("as the test wants")
					}
					return nil
				}
				g.process = apart
				comms := g.group(t, 3, same(options()))
				alloc := func(c *Communicator) (backend.Buffer, error) {
					return c.Alloc(smallBytes + 1)
				}
				for range windows {
					each(t, comms, func(c *Communicator) error { _, err := alloc(c); return err })
				}
				refusing.Store(true)
				_, before := g.Live()
				each(t, comms, func(c *Communicator) error {
					b, err := alloc(c)
					if b.Len() != 0 || err == nil || !strings.Contains(err.Error(),
						"rank 2 failed:") || strings.Contains(err.Error(), "freed while") {
						return fmt.Errorf("%d bytes, %w", b.Len(), err)
					}
					return nil
				})
				refusing.Store(false)
				if _, after := g.Live(); after != before {
					t.Errorf("%d bytes are in use after it, %d before", after, before)
				}
				each(t, comms, func(c *Communicator) error { _, err := alloc(c); return err })
			})
		}
	}
}

func TestHostMemoryTakesTheSameAlgorithm(t *testing.T) {
	g := newRig(t)
	each(t, g.group(t, 2, same(options())), func(c *Communicator) error {
		x := []float32{1, 2, 3}
		run := func(b backend.Buffer) error { return backend.Run(c, sum, b, b) }
		var err error
		if c.Rank() == 0 {
			err = run(backend.Of(x))
		} else {
			err = holding(c, x, run)
		}
		if err == nil && (!slices.Equal(x, []float32{2, 4, 6}) || c.Usage().TwoShot != 1) {
			err = fmt.Errorf("%v, %+v", x, c.Usage())
		}
		g.mu.Lock()
		said := g.said[c.Rank()]
		g.mu.Unlock()
		if (said == 1) != (c.Rank() == 0) {
			err = errors.Join(err, fmt.Errorf("calls on host memory are noticed %d times", said))
		}
		return err
	})
}

// The kernels might not reach it. After the end, memory may be nobody's: the end is what counts.
func TestKernelsGetNoMemoryOfAnotherDevice(t *testing.T) {
	g := newRig(t)
	comms := g.group(t, 2, same(options()))
	c := comms[0]
	require.NoError(t, holding(comms[1], []float32{1}, func(theirs backend.Buffer) error {
		return holding(c, []float32{1}, func(mine backend.Buffer) error {
			var errs []error
			refused := func(err error, want error) {
				if !errors.Is(err, want) || want == backend.ErrArgument &&
					!strings.Contains(err.Error(), "not of this rank's device") {
					errs = append(errs, fmt.Errorf("the error is %w, want %w", err, want))
				}
			}
			for _, other := range []backend.Buffer{mine, backend.Of([]float32{1})} {
				refused(backend.Run(c, sum, other, theirs), backend.ErrArgument)
				refused(backend.Run(c, sum, theirs, other), backend.ErrArgument)
			}
			if n := len(g.seen[0]); n != 0 {
				errs = append(errs, fmt.Errorf("%d kernels were launched", n))
			}
			c.Abort(errors.New("enough"))
			refused(backend.Run(c, sum, theirs, mine), backend.ErrAborted)
			return errors.Join(errs...)
		})
	}))
}

func TestFailedCallOnHostMemoryHasNoWork(t *testing.T) {
	g := newRig(t)
	c := g.group(t, 2, same(options()))[0]
	x := backend.Of([]float32{1})
	began := make(chan struct{})
	go func() {
		<-began
		c.Abort(errors.New("enough")) // while the kernel waits for rank 1
	}()
	close(began)
	w, err := c.Start(nil, sum, x, x)
	require.Check(t, w == nil && errors.Is(err, backend.ErrAborted), "%v, %v", w, err)
}

// Whatever goes wrong on one rank, all decide alike, NCCL goes on, and nothing is
// left behind (which the rig's cleanup looks for).
func TestRanksTakeItTogetherOrNotAtAll(t *testing.T) {
	on := func(rank int, doing string) func(int, string) error {
		return func(r int, d string) error {
			if r == rank && d == doing {
				return errors.New("as the test wants")
			}
			return nil
		}
	}
	shared := func(int) Options {
		o := options()
		o.SharedDevices, o.Link = true, FullyConnected
		return o
	}
	tests := map[string]struct {
		of    func(int) Options
		apart bool
		wires func(rank int) wiring
		fault func(int, string) error
		why   string // "" if it is taken
	}{
		"one process":     {of: same(options())},
		"three processes": {of: same(options()), apart: true},
		"no memory": {of: same(options()), fault: on(1, "pin"),
			why: "rank 1 failed: as the test wants"},
		"no export": {of: same(options()), apart: true, fault: on(2, "export"),
			why: "rank 2 failed: as"},
		"no import": {of: same(options()), apart: true, fault: on(0, "import"),
			why: "rank 0 failed: memory of rank"},
		"no peer access": {of: same(options()), fault: on(1, "peer access"),
			why: "rank 1 failed: memory of rank 0"},
		"a link that lies": {of: same(options()), fault: on(2, "copy"), why: "what rank 2 wrote"},
		"off on one rank": {of: func(r int) Options { o := options(); o.Off = r == 2; return o },
			why: "rank 2 cannot: it is switched off"},
		"one device": {of: shared, apart: true, wires: func(rank int) wiring {
			return cards(1)[0].with(18)
		}, why: "ranks 0 and 1 share the device"},
		"one device of two spellings": {of: shared, apart: true, wires: func(rank int) wiring {
			w := wiring{Bus: "0000:1A:00.0"}.with(18)
			if rank > 0 {
				w.Bus = strings.ToLower(w.Bus)
			}
			return w
		}, why: "ranks 0 and 1 share the device"},
		"unknown links": {of: same(options()), wires: func(rank int) wiring {
			return cards(3)[rank]
		}, why: "do not all reach"},
		"a shared device": {of: shared, wires: func(rank int) wiring { return cards(1)[0] }},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			g := newRig(t)
			g.wires, g.fault = test.wires, test.fault
			if test.apart {
				g.process = apart
			}
			comms := g.group(t, 3, test.of)
			g.fault = nil
			each(t, comms, func(c *Communicator) error {
				why := c.Refused()
				if (why == "") != (test.why == "") || !strings.Contains(why, test.why) ||
					why != comms[0].why {
					return fmt.Errorf("refused because %q, want %q", why, test.why)
				}
				return holding(c, []float32{1}, func(b backend.Buffer) error {
					return backend.Run(c, sum, b, b)
				})
			})
			if (comms[0].Usage().TwoShot > 0) != (test.why == "") {
				t.Errorf("%+v", comms[0].Usage())
			}
		})
	}
}

// Ranks that have nowhere to say how far they have left must not share memory.
func TestNothingIsSharedWithoutABoard(t *testing.T) {
	t.Setenv("EURYALE_SHM_DIR", t.TempDir()+"/nowhere")
	_, err := newRig(t).newGroup(3, time.Minute, same(options()))
	n := strings.Count(fmt.Sprint(err), "EURYALE_SHM_DIR")
	require.Check(t, n >= 3, "%d of 3 ranks say why: %v", n, err)
}

// Copies that take too long are the end of an attempt, and may still be under way: what they
// use stays until they are done. A group without kernels gives it back, too.
func TestMemoryOfAFailedAttemptIsKeptUntilItsCopiesEnd(t *testing.T) {
	g := newRig(t)
	g.Busy = make(chan struct{})
	g.process = apart
	o := options()
	o.Timeout = 10 * time.Millisecond
	comms := g.group(t, 2, same(o))
	if why := comms[0].Refused(); !strings.Contains(why, context.DeadlineExceeded.Error()) {
		t.Errorf("refused because %q", why)
	}
	open := g.Imports()
	if _, nbytes := g.Live(); open != 2 || nbytes < 2*padBytes(2) {
		t.Errorf("%d imports and %d bytes are left while copies run", open, nbytes)
	}
	close(g.Busy)
}

// On a cube mesh ranks use the memory of their neighbours, and the one kernel that does
// with that.
func TestCubeMeshUsesNeighboursOnly(t *testing.T) {
	g := newRig(t)
	g.wires = func(rank int) wiring { return dgx1()[rank] }
	o := options()
	o.Force = byMesh
	comms := g.group(t, 8, same(o))
	each(t, comms, func(c *Communicator) error {
		if c.Refused() != "" {
			return errors.New(c.Refused())
		}
		partners := c.plan.Partners[c.Rank()]
		if c.memory.peers.Neighbours != partners {
			return fmt.Errorf("the kernels' neighbours are %v, want %v", c.memory.peers.Neighbours,
				partners)
		}
		for p, pad := range c.memory.peers.Pads[:8] {
			if near := p == c.Rank() || slices.Contains(partners[:], p); (pad != 0) != near {
				return fmt.Errorf("the pad of rank %d is at %#x", p, pad)
			}
		}
		x, want := []float32{1, 2, 3}, []float32{8, 16, 24}
		err := holding(c, x, func(b backend.Buffer) error { return backend.Run(c, sum, b, b) })
		if err == nil && (!slices.Equal(x, want) || c.Usage() != Usage{Mesh: 1}) {
			err = fmt.Errorf("%v, %+v", x, c.Usage())
		}
		return err
	})
	for r, calls := range g.seen {
		require.Check(t, len(calls) == 1 && calls[0].Way == peers.Mesh, "rank %d has launched %+v",
			r, calls)
	}
}

// Where an operand lies and how it is aligned is nobody else's affair.
func TestWaysAreTheSameOnEveryRank(t *testing.T) {
	for _, force := range reducing() {
		g := newRig(t)
		o := options()
		o.Force = force
		comms := g.group(t, 3, same(o))
		each(t, comms, func(c *Communicator) error {
			x := make([]float32, 3*512)
			for i := range 64 {
				lo, n := i*c.Rank()%5, 1+i*i%300
				in := func(b backend.Buffer) backend.Buffer { return b.Slice(lo, lo+n) }
				testranks.NoError(holding(c, x, func(b backend.Buffer) error {
					return backend.Run(c, sum, in(b), in(b))
				}))
			}
			return nil
		})
		for r, calls := range g.seen {
			for i, x := range calls {
				if x.Way != g.seen[0][i].Way || x.Src.Len() != g.seen[0][i].Src.Len() ||
					len(calls) != 64 {
					t.Errorf("%v, call %d of %d: %v on rank %d, %v on rank 0", force, i, len(calls),
						x.Way, r, g.seen[0][i].Way)
				}
			}
		}
	}
}

func TestPartsHaveMemoryOfTheirOwn(t *testing.T) {
	g := newRig(t)
	each(t, g.group(t, 4, same(options())), func(c *Communicator) error {
		part := testranks.Must(c.Split(c.Rank()%2, 0))
		p := part.(*Communicator)
		if p.why != "" || p.memory.pad.own == c.memory.pad.own {
			return fmt.Errorf("the part shares memory, or has none: %s", p.why)
		}
		testranks.NoError(holding(p, []float32{1}, func(b backend.Buffer) error {
			return backend.Run(p, sum, b, b)
		}))
		if c.Usage() != (Usage{}) || p.Usage().TwoShot != 1 {
			return fmt.Errorf("%+v, %+v", c.Usage(), p.Usage())
		}
		return p.Close()
	})
}

// Kernels that are stopped have ended like any other: it must be fixed before which calls are
// done.
func TestKernelsStopOnceTheGroupHasEnded(t *testing.T) {
	for name, end := range map[string]func(comms []*Communicator){
		"abort":     func(comms []*Communicator) { comms[0].Abort(errors.New("enough")) },
		"close":     func(comms []*Communicator) { comms[0].Close() },
		"elsewhere": func(comms []*Communicator) { comms[1].Abort(errors.New("enough")) },
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t)
			comms := g.group(t, 2, same(options()))
			c := comms[0]
			stopped := func() bool {
				c.status.mu.RLock()
				defer c.status.mu.RUnlock()
				return c.status.words.Len() == 0 || c.status.flag(0).Load() != 0
			}
			c.state.Lock() // which the end takes to fix that
			go end(comms)
			time.Sleep(40 * time.Millisecond)
			require.Check(t, !stopped(), "the kernels are told to stop too soon")
			c.state.Unlock()
			for deadline := time.Now().Add(10 * time.Second); !stopped(); time.Sleep(
				time.Millisecond) {
				require.That(t, !time.Now().After(deadline), "the kernels are not told to stop")
			}
		})
	}
}

// A rank that waits for nothing tells the others, too, that a kernel of it has given up.
func TestRanksHearOfAKernelThatGaveUp(t *testing.T) {
	g := newRig(t)
	comms := g.group(t, 2, same(options()))
	comms[0].status.flag(1).Store(1 + 1)
	select {
	case <-comms[1].member.Over():
	case <-time.After(10 * time.Second):
		t.Error("the other rank has not heard of it")
	}
}

// A kernel that gives up has ended like any other: its Work must not pass for done.
func TestKernelThatGaveUpIsATimeout(t *testing.T) {
	g := newRig(t)
	each(t, g.group(t, 2, same(options())), func(c *Communicator) error {
		return holding(c, []float32{1}, func(b backend.Buffer) error {
			w := testranks.Must(c.Start(nil, sum, b, b))
			c.status.flag(1).Store(1 + uint32(1-c.Rank()))
			named := func(err error) bool {
				var e *backend.Error
				return errors.As(err, &e) && errors.Is(err, backend.ErrTimeout) &&
					e.Peer == 1-c.Rank()
			}
			if err := w.Join(t.Context()); !named(err) {
				return fmt.Errorf("the error is %w", err)
			}
			if _, err := c.Start(nil, sum, b, b); !named(err) {
				return fmt.Errorf("a later call: %w", err)
			}
			return nil
		})
	})
}

// A kernel of another rank may be behind other work, and write to this rank's memory long
// after it has closed: nobody else must have got that memory by then.
func TestMemoryIsKeptUntilEveryRankHasClosed(t *testing.T) {
	g := newRig(t)
	comms := g.group(t, 3, same(options()))
	for _, c := range comms {
		defer func() {
			if n := c.Kept(); n != 0 {
				t.Errorf("rank %d keeps %d bytes after all have closed", c.Rank(), n)
			}
		}()
	}
	const large = smallBytes + 1
	each(t, comms, func(c *Communicator) error { _, err := c.Alloc(large); return err })
	want := comms[0].memory.bytes()
	began := time.Now()
	require.Report(t, comms[0].Close())
	if took := time.Since(began); took < closeTime || took > proctest.Within(20*closeTime) {
		t.Errorf("alone, it took %v", took)
	}
	require.Report(t, comms[1].Close())
	n := comms[0].Kept()
	require.Check(t, n == want && n >= padBytes(3), "%d bytes are kept, want %d", n, want)
	late := comms[2].memory
	word := backend.OnDevice(backend.U8, late.pad.at[0], late.pad.own.Len())
	err := late.do(func(a backend.Arithmetic) error { return a.Zero(word) })
	require.Check(t, err == nil, "the memory of rank 0 is gone: %v", err)
	require.Report(t, comms[2].Close())
	comms[0].Explain(sum, backend.F32, large) // while it gives back what that tells of
	used, _ := comms[0].Windows()
	require.Check(t, used == 1, "%d windows were used, want 1", used)
}

// The driver may wait for a kernel of another group before it frees memory of the host: a part
// closes nevertheless, and the group is asked no more of.
func TestCloseDoesNotWaitForTheDriver(t *testing.T) {
	g := newRig(t)
	comms := g.group(t, 2, same(options()))
	kernel := make(chan struct{}) // that the driver waits for
	g.fault = func(_ int, doing string) error {
		if doing == "unpin" {
			<-kernel
		}
		return nil
	}
	each(t, comms, func(c *Communicator) error {
		part := testranks.Must(c.Split(0, 0))
		began := time.Now()
		testranks.NoError(part.Close())
		if took := time.Since(began); took > proctest.Within(20*closeTime) {
			return fmt.Errorf("it took %v", took)
		}
		return nil
	})
	close(kernel)
}

func TestExplanationSaysAllThatMatters(t *testing.T) {
	g := newRig(t)
	o := options()
	o.Force = byNCCL
	c := g.group(t, 2, same(o))[0]
	for _, test := range []struct {
		what  backend.Collective
		dtype backend.DType
		bytes int
		want  []string
	}{
		{sum, backend.F32, 2 << 20, []string{"2 MiB", "2 ranks", h200, "fully-connected: two-shot",
			"nccl", "us"}},
		{sum, backend.F64, 1024, []string{": nccl", "f16 and bf16"}},
		{backend.Collective{Kind: backend.AllReduce, Algorithm: backend.OneShot}, backend.F32, 1024,
			[]string{"one-shot, as the call asks for"}},
	} {
		text := c.Explain(test.what, test.dtype, test.bytes)
		for _, part := range test.want {
			require.Check(t, strings.Contains(text, part), "%q is not in %q", part, text)
		}
	}
}

func TestModesAreParsed(t *testing.T) {
	for mode, want := range map[string]Options{"": {}, "auto": {}, "off": {Off: true},
		"nccl": {Off: true}, "inner": {Off: true}, "two-shot": {Force: byTwoShot},
		"ll": {Force: byLL}, "push": {Force: byPush}, "flagged": {Force: byLL},
		"flagged-two-shot": {Force: byLL128TwoShot}} {
		if got, err := parse(mode); err != nil || got.Off != want.Off || got.Force != want.Force {
			t.Errorf("%q: %+v, %v", mode, got, err)
		}
	}
	require.Fails(t, "parse", require.Err(parse("fast")), "two-shot")
}

func TestCallsAllocateLittle(t *testing.T) {
	g := newRig(t)
	c := g.group(t, 2, same(options()))[0]
	require.NoError(t, holding(c, make([]float32, 1024), func(b backend.Buffer) error {
		k := call{what: sum, rank: c.rank, P: c.size, dst: b, src: b}
		got := testing.AllocsPerRun(1000, func() {
			require.Report(t, require.Err(c.admit(nil, &k)))
			c.newWork()
			k.use = byOneShot
			c.memory.placeOperands(&c.exchange, &k)
		})
		require.Check(t, got == 0, "%v allocations for each call", got)
		return nil
	}))
}
