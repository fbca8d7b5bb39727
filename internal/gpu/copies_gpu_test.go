//go:build gpu

package gpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// Calls by copy engines, in graphs and outside, follow calls by kernels that use the same staging.
func TestCopyEnginesGiveTheBitsOfKernelsOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, size := range g.sizes() {
		comms := g.group(t, size, Options{Link: FullyConnected, Staging: 1 << 20}) // several rounds
		times := max(3, trials()/10)
		each(t, comms, func(c *Communicator) error { return beside(c, times) })
		for _, c := range comms { // which run two of three calls, those that are recorded
			if used, want := c.Usage(), int64(times-(times+2)/3); used.CopyEngines != want {
				t.Errorf("rank %d has %+v, want %d by copy engines", c.Rank(), used, want)
			}
		}
	}
}

// Ranks meet by flags, without kernels. They launch a graph of two calls over and over, late at
// random, and nothing but the flags keeps them together.
func TestRanksMeetByFlagsInReplaysOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, size := range g.sizes() {
		o := forced(byCopyEngines)
		o.Staging = 1 << 14 // a round or two
		comms := g.group(t, size, o)
		if comms[0].waits.Load() == nil {
			t.Fatalf("kernels meet: %s", comms[0].flagless)
		}
		each(t, comms, func(c *Communicator) error { return meets(c, 5*trials()) })
	}
}

// meets adds up the results of a graph of an average and a sum, both in place.
func meets(c *Communicator, times int) error {
	const n = 5000
	q := c.Device().Default().(*cuda.Queue)
	memory := testranks.Must(c.Alloc(3 * 4 * n))
	part := func(i int) backend.Buffer { return memory.As(backend.F32).Slice(i*n, (i+1)*n) }
	x, y, total := part(0), part(1), part(2)
	late := testranks.Must(newLate(c, q))
	defer late.free()
	testranks.NoError(errors.Join(q.Zero(memory), drain(context.Background(), q)))
	graph := testranks.Must(q.Capture(func() error {
		_, err := c.Start(q, backend.Collective{Kind: backend.AllReduce, Op: backend.Avg}, x, x)
		return errors.Join(err, set(q, y, c.Rank()+1), startSum(c, q, y),
			q.Reduce(backend.Sum, total, total, x, y))
	}))
	testranks.NoError(assemble(c))
	random := rand.New(rand.NewPCG(3, uint64(c.Rank())))
	want := float32(0)
	for i := range times {
		average := i % 7 * c.Size()
		err := errors.Join(set(q, x, average*(2*c.Rank())), late.sometimes(random, 3))
		if err == nil {
			_, err = graph.Launch(nil)
		}
		if err != nil {
			return err
		}
		want += float32(average*(c.Size()-1) + c.Size()*(c.Size()+1)/2)
	}
	got := make([]float32, n)
	testranks.NoError(errors.Join(q.Move(backend.Of(got), total), drain(context.Background(),
		q)))
	for i, v := range got {
		if v != want {
			return fmt.Errorf("element %d after %d launches is %v, want %v", i, times, v, want)
		}
	}
	return errors.Join(graph.Close(), assemble(c), c.Free(memory))
}

func startSum(c *Communicator, q backend.Queue, x backend.Buffer) error {
	_, err := c.Start(q, sum, x, x)
	return err
}

// Where a device does not wait for memory kernels meet, on all ranks.
func TestKernelsMeetWhereDevicesCannotWaitOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	if os.Getenv("EMULATED_DEVICES") == "" {
		t.Skip("needs the emulated driver, which can be told to refuse memory operations")
	}
	t.Setenv("EMULATED_MEM_OPS", "refused")
	comms := g.group(t, 2, forced(byCopyEngines))
	for _, c := range comms {
		if c.waits.Load() != nil || c.flagless == "" {
			t.Errorf("rank %d meets by flags", c.Rank())
		}
		if text := c.Explain(sum, backend.F32, besideBytes); !strings.Contains(text, c.flagless) {
			t.Errorf("rank %d does not say why: %s", c.Rank(), text)
		}
	}
	each(t, comms, func(c *Communicator) error { return meets(c, 10) })
}

// A rank that is told to stop while it waits runs the rest of its graph, and must not pass for one
// that has added up: the call of the other rank, which comes late, fails.
func TestRankThatStopsWaitingSignalsNobodyOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for range 3 {
		gate := g.newGate(t)
		comms := g.group(t, 2, forced(byCopyEngines))
		works := make([]backend.Work, 2)
		each(t, comms, func(c *Communicator) error {
			memory := testranks.Must(c.Alloc(4096))
			x, q := memory.As(backend.F32), c.Device().Default().(*cuda.Queue)
			graph, err := q.Capture(func() error { return startSum(c, q, x) })
			if err == nil {
				err = errors.Join(set(q, x, 1), assemble(c))
			}
			if err == nil && c.Rank() == 1 {
				err = gate.shut(q)
			}
			if err != nil {
				return err
			}
			works[c.Rank()], err = graph.Launch(nil)
			return err
		})
		comms[0].Abort(errors.New("enough"))
		if err := works[0].Join(context.Background()); !errors.Is(err, backend.ErrAborted) {
			t.Errorf("a call that rank 1 has not come to passes for done: %v", err)
		}
		require.Report(t, drain(context.Background(), g.all[0].Default()))
		require.Report(t, errors.Join(gate.open(g.all[0].Default()), drain(context.Background(),
			g.all[1].Default())))
		if err := works[1].Join(context.Background()); !errors.Is(err, backend.ErrAborted) {
			t.Errorf("on rank 1, whom rank 0 has left: %v", err)
		}
	}
}

// A rank is told to stop while it launches graphs, of which the first waits for another rank, until
// the driver takes no more of them.
func TestWaitsOfManyLaunchesEndOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	comms := g.group(t, 2, forced(byCopyEngines))
	var graph *backend.Graph
	each(t, comms, func(c *Communicator) error {
		memory := testranks.Must(c.Alloc(4096))
		x, q := memory.As(backend.F32), c.Device().Default().(*cuda.Queue)
		captured, err := q.Capture(func() error {
			return errors.Join(startSum(c, q, x), startSum(c, q, x))
		})
		if c.Rank() == 0 {
			graph = captured
		}
		return err
	})
	var launched atomic.Int64
	ended := make(chan error, 1)
	go func() {
		for {
			last, err := graph.Launch(nil)
			if err == nil && launched.Add(1) == 400 { // it takes as many
				err = last.Join(context.Background())
			}
			if err != nil {
				ended <- err
				return
			}
		}
	}()
	for before := int64(-1); launched.Load() != before; time.Sleep(200 * time.Millisecond) {
		before = launched.Load()
	}
	began := time.Now()
	comms[0].Abort(errors.New("enough"))
	select {
	case err := <-ended:
		if !errors.Is(err, backend.ErrAborted) {
			t.Error(err)
		}
	case <-time.After(proctest.Within(5 * time.Second)):
		t.Fatalf("launch %d does not end", launched.Load()+1)
	}
	require.Report(t, drain(context.Background(), g.all[0].Default()))
	took := time.Since(began)
	require.Check(t, took <= proctest.Within(5*time.Second), "it took %v", took)
}

// Copy engines write to one place of the window of each rank.
func TestCopiesToOtherPlacesOnRanksAreAMismatchOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	comms := g.group(t, 2, Options{Link: FullyConnected})
	each(t, comms, func(c *Communicator) error {
		q := c.Device().Default().(*cuda.Queue)
		memory := testranks.Must(c.Alloc(besideBytes + 256))
		x := memory.Slice(256*c.Rank(), 256*c.Rank()+besideBytes).As(backend.F32)
		graph := testranks.Must(q.Capture(func() error {
			_, err := c.Start(q, backend.Collective{Kind: backend.AllReduce, Beside: true}, x, x)
			return err
		}))
		testranks.NoError(assemble(c))
		w, err := graph.Launch(nil)
		if err == nil {
			err = w.Join(context.Background())
		}
		if mismatch := (*backend.MismatchError)(nil); !errors.As(err, &mismatch) {
			return fmt.Errorf("%v, want a MismatchError", err)
		}
		return nil
	})
}

// beside makes calls beside which a device could compute, and compares them with those of kernels.
func beside(c *Communicator, times int) error {
	const room = besideBytes + 4096
	q := c.Device().Default().(*cuda.Queue)
	memory := testranks.Must(c.Alloc(3 * room))
	late := testranks.Must(newLate(c, q))
	defer late.free()
	testranks.NoError(assemble(c))
	all, own := rand.New(rand.NewPCG(1, 1)), rand.New(rand.NewPCG(2, uint64(c.Rank())))
	for trial := range times {
		d := []backend.DType{backend.F32, backend.F16, backend.BF16}[all.IntN(3)]
		what := backend.Collective{Beside: true, Kind: []backend.Kind{backend.AllReduce,
			backend.ReduceScatter, backend.AllGather}[all.IntN(3)]}
		if what.Kind.Reduces() {
			what.Op = []backend.ReduceOp{backend.Sum, backend.Avg}[all.IntN(2)]
		}
		n := (besideBytes + all.IntN(4000)) / d.Size()
		n += all.IntN(2) * (besideBytes/d.Size() - n) // not always odd
		chunk := (n + c.Size() - 1) / c.Size()
		if what.Kind != backend.AllReduce {
			n = chunk * c.Size()
		}
		part := func(i int) backend.Buffer {
			return memory.Slice(i*room, (i+1)*room).As(d).Slice(0, n)
		}
		x, y, want := part(0), part(1), part(2)
		if all.IntN(2) == 0 {
			y = x
		}
		values := make([]float32, n)
		for i := range values {
			values[i] = float32((i+trial)%7*(c.Rank()+1) - 5)
		}
		load := func() error {
			f, err := c.Device().Alloc(4 * n)
			if err != nil {
				return err
			}
			return errors.Join(q.Move(f.As(backend.F32), backend.Of(values)),
				q.Cast(x, f.As(backend.F32)), drain(context.Background(), q),
				c.Device().Free(f))
		}
		dst, src, reference := y, x, byTwoShot
		ofRank := func(b backend.Buffer) backend.Buffer {
			return b.Slice(c.Rank()*chunk, (c.Rank()+1)*chunk)
		}
		switch what.Kind {
		case backend.ReduceScatter:
			dst, want, reference = ofRank(y), ofRank(want), byOneShot
		case backend.AllGather:
			src, reference = ofRank(x), byOneShot
		}
		call := func() error { _, err := c.Start(q, what, dst, src); return err }
		if trial%3 > 0 {
			graph := testranks.Must(q.Capture(call))
			testranks.NoError(assemble(c)) // all ranks have theirs
			call = func() error {
				w, err := graph.Launch(nil)
				return errors.Join(err, w.Join(context.Background()), graph.Close())
			}
		}
		kernels := what
		kernels.Beside = false
		testranks.NoError(errors.Join(load(), late.sometimes(own, 2)))
		if _, err := c.startBy(q, reference, kernels, want, src); err != nil {
			return err
		}
		testranks.NoError(errors.Join(late.sometimes(own, 2), call()))
		got, expected := make([]byte, dst.NBytes()), make([]byte, dst.NBytes())
		testranks.NoError(errors.Join(q.Move(backend.Of(got), dst.As(backend.U8)),
			q.Move(backend.Of(expected), want.As(backend.U8)),
			drain(context.Background(), q)))
		if !bytes.Equal(got, expected) {
			return fmt.Errorf("trial %d: %v of %d %v has other bits than %v", trial, what, n,
				d, reference)
		}
	}
	return c.Free(memory)
}

// replaying runs what copy engines can in graphs of one call each. Ranks write to each other's
// memory at one place: results come from there, or from memory that others do not reach, in turns.
type replaying struct {
	backend.Base
	rooms  [2]backend.Buffer
	calls  atomic.Int64
	closed sync.Once
}

func newReplaying(c backend.Communicator) (*replaying, error) {
	const room = 1 << 20
	r := &replaying{Base: backend.Wrap(c)}
	var problems [2]error
	r.rooms[0], problems[0] = c.Alloc(room)
	r.rooms[1], problems[1] = c.Device().Alloc(room)
	return r, errors.Join(problems[:]...)
}

func (c *replaying) Close() error {
	err := c.Base.Close()
	c.closed.Do(func() { err = errors.Join(err, c.Device().Free(c.rooms[1])) })
	return err
}

func (c *replaying) Split(color, key int) (backend.Communicator, error) {
	part, err := c.Base.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return newReplaying(part)
}

func (c *replaying) StartChecked(q backend.Queue, what backend.Collective, _ int, dst,
	src backend.Buffer) (backend.Work, error) {
	return c.Start(q, what, dst, src)
}

func (c *replaying) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if q == nil {
		q = c.Device().Default()
	}
	whole := src
	if what.Kind == backend.AllGather {
		whole = dst
	}
	count, err := what.Check(c.Rank(), c.Size(), dst, src)
	on, ok := q.(backend.GraphQueue)
	if err != nil || !ok || on.Recording() != nil || !whole.Device() || whole.Len() == 0 ||
		what.Kind != backend.AllReduce && what.Kind != backend.ReduceScatter &&
			what.Kind != backend.AllGather || what.Kind == backend.AllReduce && what.Splits != nil {
		return c.Base.Start(q, what, dst, src)
	}
	own, in := dst, src
	if what.Kind != backend.ReduceScatter {
		room := c.rooms[0]
		if c.calls.Add(1)%2 == 0 && what.Kind == backend.AllGather {
			room = c.rooms[1]
		}
		own = room.Slice(0, dst.NBytes()).As(dst.DType())
	}
	if lo, hi := what.Chunk(c.Rank(), c.Size(), count); dst.Addr() <= src.Addr() &&
		src.Addr() < dst.Addr()+uintptr(dst.NBytes()) && own.Addr() != dst.Addr() {
		in = own.Slice(lo, hi) // in place
	}
	graph, err := on.Capture(func() error {
		var errs []error
		if in.Addr() != src.Addr() {
			errs = append(errs, q.Copy(in, src))
		}
		_, err := c.Base.Start(q, what, own, in)
		errs = append(errs, err)
		if own.Addr() != dst.Addr() {
			errs = append(errs, q.Copy(dst, own))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return nil, err
	}
	w, err := graph.Launch(nil)
	return w, errors.Join(err, graph.Close())
}

// Even and uneven reduce-scatters and all-gathers, in place and not, and what interrupts them.
func TestCommunicatorByCopyEnginesOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	if os.Getenv("EMULATED_DEVICES") == "" {
		t.Skip("needs the emulated driver: ranks do not make their graphs in step")
	}
	o := forced(byCopyEngines)
	o.Staging = 1 << 12 // several rounds
	sizes := g.sizes()
	if os.Getenv("EURYALE_FULL") != "1" {
		sizes = sizes[len(sizes)-1:]
	}
	// calls that wait for a rank keep the host from making the graph of the next one
	t.Setenv("EURYALE_FULL", "")
	backendtest.RunWrapper(t, backendtest.Options{
		Sizes: sizes, Integers: backend.F32, Copy: g.copy, OwnOrder: true, Tree: treeOf,
		Unverified: true, // of graphs that differ ranks say that
		New: func(size int, timeout time.Duration) (*backendtest.Group, error) {
			group, err := backendtest.Over(g.with(o))(size, timeout)
			if err != nil {
				return nil, err
			}
			backendtest.Each(t, group.Comms, func(c backend.Communicator) error {
				r, err := newReplaying(c)
				if err == nil {
					group.Comms[c.Rank()] = r
				}
				return err
			})
			return group, nil
		},
	})
}
