package cuda

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func peersOf(size int) *Peers {
	return &Peers{Size: size, Limit: time.Second, Packets: 1 << 20, Lines: 1 << 16,
		Staging: 1 << 20, Neighbours: [4]int{1, 2, 3, 4}}
}

// exchanges makes every call among peers of n elements.
func exchanges(k Kernels, d backend.DType, n int) error {
	var errs []error
	for size := 2; size <= MaxPeers; size++ {
		p := peersOf(size)
		x, y := device(d, 1<<40, n), device(d, 1<<41, n)
		all := device(d, 1<<42, n*size)
		errs = append(errs, k.Exchange(p, &PeerCall{Way: AllGather, Dst: all, Src: x}))
		errs = append(errs, k.Exchange(p, &PeerCall{Way: AllToAll, Dst: device(d, 1<<43, n*size),
			Src: all}))
		if n*d.Size() <= p.room(LL128) {
			errs = append(errs, k.Exchange(p, &PeerCall{Way: AllToAll, InLines: true,
				Dst: device(d, 1<<43, n*size), Src: all}),
				k.Exchange(p, &PeerCall{Way: AllGather, InLines: true, Dst: all, Src: x}))
		}
		for _, op := range backend.ReduceOps() {
			if !Adds(d, op) {
				continue
			}
			for _, way := range []Way{LL, LL128, LL128TwoShot, OneShot, TwoShot} {
				if n*d.Size() <= p.room(way) {
					errs = append(errs, k.Exchange(p, &PeerCall{Way: way, Op: op, Dst: y, Src: x}))
				}
			}
			errs = append(errs, k.Exchange(p, &PeerCall{Way: ReduceScatter, Op: op, Dst: y,
				Src: all}))
			if n*d.Size() <= p.room(LL128) {
				errs = append(errs, k.Exchange(p, &PeerCall{Way: ReduceScatter, InLines: true,
					Op: op, Dst: y, Src: all}))
			}
			if d == backend.F32 {
				errs = append(errs, k.Exchange(p, &PeerCall{Way: ReduceScatter, Op: op, Tree: true,
					Dst: y, Src: all}),
					k.Exchange(p, &PeerCall{Way: OneShot, Op: op, Tree: true, Dst: y, Src: x}),
					k.Exchange(p, &PeerCall{Way: TwoShot, Op: op, Tree: true, Dst: y, Src: x}))
			}
			if size == meshRanks {
				errs = append(errs, k.Exchange(p, &PeerCall{Way: Mesh, Op: op, Dst: y, Src: x}))
			}
		}
	}
	return errors.Join(errs...)
}

func TestGridsGrowWithTheSize(t *testing.T) {
	v := newValidator(t)
	for _, test := range []struct {
		way         Way
		nbytes      int
		grid, block uint32
	}{
		{LL, 4, 1, 256}, {LL, 2048, 1, 256}, {LL, 2052, 2, 256}, {LL, 64 << 10, 32, 256},
		{LL, 1 << 20, 128, 256},
		{LL128, 4, 1, 512}, {LL128, 64 * 120, 1, 512}, {LL128, 64*120 + 4, 2, 512}, {LL128TwoShot,
			4, 1, 32}, {LL128TwoShot, 4*64*120 + 4, 17, 32}, {LL128TwoShot, 1 << 20, 128, 160},
		{LL128TwoShot, 1 << 30, 128, 512},
		{OneShot, 4, 1, 512}, {OneShot, 8192, 1, 512}, {OneShot, 8196, 2, 512}, {OneShot, 1 << 20,
			128, 512},
		{TwoShot, 4, 1, 512}, {TwoShot, 32 << 10, 1, 512}, {TwoShot, 32<<10 + 4, 2, 512},
		{TwoShot, 1 << 30, 128, 512},
		{ReduceScatter, 16 << 10, 2, 512}, {AllGather, 16 << 10, 2, 512}, {AllToAll, 64 << 10, 2,
			512}, {AllToAll, 1 << 30, 128, 512},
	} {
		x := PeerCall{Way: test.way, Dst: device(backend.F32, 1<<40, test.nbytes/4),
			Src: device(backend.F32, 1<<41, test.nbytes/4)}
		switch test.way {
		case ReduceScatter:
			x.Src = device(backend.F32, 1<<41, test.nbytes)
		case AllGather:
			x.Dst = device(backend.F32, 1<<40, test.nbytes)
		}
		err := New(v).Exchange(peersOf(4), &x)
		require.Check(t, err == nil && v.last.Grid.X == test.grid && v.last.Block.X == test.block,
			"%v of %d bytes: grid %d of %d threads, want %d of %d: %v", test.way, test.nbytes,
			v.last.Grid.X, v.last.Block.X, test.grid, test.block, err)
	}
}

func TestGridsCanBeLimited(t *testing.T) {
	v := newValidator(t)
	p := peersOf(2)
	p.Blocks = 3
	x := device(backend.F32, 1<<40, 1<<20)
	err := New(v).Exchange(p, &PeerCall{Way: TwoShot, Dst: x, Src: x})
	require.Check(t, err == nil && v.last.Grid.X == 3, "grid %v, %v", v.last.Grid, err)
}

func TestExchangesSayWhatIsWrong(t *testing.T) {
	x, y, host := device(backend.F32, 1<<40, 8), device(backend.F32, 1<<41, 16),
		backend.Of(make([]float32, 8))
	small := peersOf(2)
	small.Packets, small.Lines = 3, 1
	x2 := y.Slice(0, 8)
	for name, test := range map[string]struct {
		p    *Peers
		x    PeerCall
		want error
	}{
		"one rank":   {peersOf(1), PeerCall{Way: OneShot, Dst: x, Src: x}, backend.ErrArgument},
		"nine ranks": {peersOf(9), PeerCall{Way: OneShot, Dst: x, Src: x}, backend.ErrArgument},
		"lengths":    {peersOf(2), PeerCall{Way: OneShot, Dst: y, Src: x}, backend.ErrArgument},
		"chunks": {peersOf(4), PeerCall{Way: ReduceScatter, Dst: x, Src: y},
			backend.ErrArgument},
		"types": {peersOf(2), PeerCall{Way: OneShot, Dst: x.As(backend.I32), Src: x},
			backend.ErrArgument},
		"host memory": {peersOf(2), PeerCall{Way: OneShot, Dst: x, Src: host}, backend.ErrArgument},
		"no way":      {peersOf(2), PeerCall{Dst: x, Src: x}, backend.ErrArgument},
		"no room":     {small, PeerCall{Way: LL, Dst: x, Src: x}, backend.ErrArgument},
		"wrong op": {peersOf(2), PeerCall{Way: OneShot, Op: backend.Max, Dst: x, Src: x},
			backend.ErrUnsupported},
		"no mesh": {peersOf(4), PeerCall{Way: Mesh, Dst: x, Src: x}, backend.ErrArgument},
		"no neighbours": {&Peers{Size: 8, Neighbours: [4]int{1, 2, 2, 4}},
			PeerCall{Way: Mesh, Dst: x, Src: x}, backend.ErrArgument},
		"a tree of packets": {peersOf(2), PeerCall{Way: LL, Tree: true, Dst: x, Src: x},
			backend.ErrUnsupported},
		"odd elements": {peersOf(2), PeerCall{Way: AllToAll, Dst: y.As(backend.U8),
			Src: y.As(backend.U8).Slice(0, 64)}, backend.ErrArgument},
		"a piece of too many lines": {small,
			PeerCall{Way: AllToAll, InLines: true, Dst: x, Src: x2}, backend.ErrArgument},
		"a tree of lines": {peersOf(2), PeerCall{Way: ReduceScatter, InLines: true, Tree: true,
			Dst: x, Src: y}, backend.ErrUnsupported},
		"one shot in lines": {peersOf(2), PeerCall{Way: OneShot, InLines: true, Dst: x, Src: x},
			backend.ErrUnsupported},
		"no rows": {peersOf(2), PeerCall{Way: AllToAll, Dst: x, Src: y.Slice(0, 8),
			Rows: &backend.Rows{}}, backend.ErrArgument},
		"a piece too large": {peersOf(2), PeerCall{Way: AllToAll, Dst: device(backend.F32, 1<<42,
			1<<29+9), Src: device(backend.F32, 1<<41, 2), Splits: []int{1, 1, 1<<29 + 8, 1}},
			backend.ErrArgument},
		"wrong numbers": {peersOf(2), PeerCall{Way: TwoShot, Dst: x.As(backend.F64),
			Src: x.As(backend.F64)}, backend.ErrUnsupported},
	} {
		require.Fails(t, name, New(newValidator(t)).Exchange(test.p, &test.x), test.want)
	}
}

func TestLinesAreForDevicesThatWriteThemAtOnce(t *testing.T) {
	for capability, want := range map[int]bool{70: true, 75: false, 80: true, 86: false, 89: false,
		90: true, 100: true, 120: true} {
		got := WholeLines(capability)
		require.Check(t, got == want, "compute capability %d: %v", capability, got)
	}
}

func TestPlacesAreOfWholeUnits(t *testing.T) {
	for _, test := range []struct {
		addr   uintptr
		nbytes int
		want   bool
	}{{1 << 40, 16, true}, {1<<40 + 8, 16, false}, {1 << 40, 20, false}, {1 << 40, 0, true}} {
		got := Placeable(test.addr, test.nbytes)
		require.Check(t, got == test.want, "%d bytes at %#x: %v", test.nbytes, test.addr, got)
	}
	p := PlaceIn(3, 1<<47)
	require.Check(t, p == 3<<48+1<<47 && p != 0, "place %#x", uint64(p))
}

func TestCallsAmongPeersAllocateNothing(t *testing.T) {
	v := &counting{}
	k, p := New(v), peersOf(2)
	b := device(backend.F32, 1<<40, 1024)
	for _, x := range []PeerCall{
		{Way: TwoShot, Dst: b, Src: b},
		{Way: AllToAll, Dst: b, Src: device(backend.F32, 1<<41, 1024),
			Rows: &backend.Rows{Src: []int{2, 2}, Dst: []int{1, 1}}},
	} {
		if got := testing.AllocsPerRun(100, func() {
			require.Report(t, k.Exchange(p, &x))
		}); got > 0 {
			t.Errorf("%v allocations for each %v", got, x.Way)
		}
	}
}

type counting struct{ n int }

func (c *counting) Launch(Launch) error { c.n++; return nil }

// Several devices run the sources at a time, with random lengths, types, grids,
// alignments, places and delays. EURYALE_FULL=1 makes 1,000 calls of each kind among
// each number of devices.
func TestDevicesExchange(t *testing.T) {
	binary := compiled(t, "emulator/devices.cpp")
	full := os.Getenv("EURYALE_FULL") == "1"
	run := func(args ...any) {
		t.Helper()
		// One that hangs is named, and does not run on.
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, binary, strings.Fields(fmt.Sprintln(args...))...)
		if out, err := cmd.CombinedOutput(); err != nil || string(out) != "ok\n" {
			t.Errorf("%v: %v\n%s", cmd, err, out)
		}
	}
	out, err := exec.Command(binary, "layout", "-", "-").Output()
	windows, row := WindowRow(0)
	hosts, _ := HostRow()
	require.Check(t, err == nil && string(out) == fmt.Sprintln(padBytes, windows, row, hosts,
		StatusBytes), "the layout in the sources is %s, %v", out, err)
	if full {
		for size := 2; size <= MaxPeers; size++ {
			for _, verb := range []string{"ll", "ll128", "ll128twoshot", "oneshot", "twoshot",
				"reducescatter", "allgather", "halved", "mixed"} {
				run("exchange", verb, size, 1000, 0)
			}
			for _, verb := range []string{"treeoneshot", "treetwoshot", "treereducescatter",
				"alltoall", "ll128reducescatter", "ll128allgather", "ll128alltoall"} {
				run("exchange", verb, size, 1000, 0)
			}
		}
		run("exchange", "mesh", 8, 3000, uint32(math.MaxUint32)-100)
	}
	for _, size := range []int{2, 3, MaxPeers} {
		run("exchange", "mixed", size, 150, 0)
	}
	run("exchange", "mesh", 8, 150, 0)
	run("exchange", "halved", 5, 150, 0)
	run("exchange", "treetwoshot", 6, 100, 0)
	run("exchange", "treeoneshot", 7, 100, 0)
	run("exchange", "alltoall", 4, 150, 0)
	run("exchange", "allgather", 3, 100, 0)
	run("exchange", "ll128alltoall", 5, 150, 0)
	run("exchange", "ll128allgather", 2, 100, 0)
	run("exchange", "ll128reducescatter", 4, 100, 0)
	// Where flags start again, and where inboxes are cleaned.
	run("exchange", "ll", 3, 200, uint32(math.MaxUint32)-100)
	run("exchange", "mixed", 3, 200, 1<<30-100)
	for _, verb := range []string{"ll", "ll128", "ll128twoshot", "oneshot", "twoshot", "allgather",
		"alltoall", "halved", "ll128reducescatter", "ll128allgather", "ll128alltoall"} {
		run("missing", verb, 3)
		run("stop", verb, 4)
	}
	run("missing", "mesh", 8)
	run("stop", "mesh", 8)
}
