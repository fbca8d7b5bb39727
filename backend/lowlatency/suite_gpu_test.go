//go:build gpu

package lowlatency

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/check"
	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/backend/nccl"
	"github.com/euryale-ml/euryale/backend/trace"
	"github.com/euryale-ml/euryale/kernels"
)

// lacking skips a test that the machine is too small for, or fails where
// REQUIRE_GPU=1.
func lacking(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("REQUIRE_GPU") == "1" {
		t.Fatalf("REQUIRE_GPU=1: %s", what)
	}
	t.Skip(what)
}

// gpus are the devices of a test, up to four.
type gpus []*cuda.Device

func needGPUs(t testing.TB, atLeast int) gpus {
	t.Helper()
	all, err := cuda.Devices()
	if err != nil {
		lacking(t, err.Error())
	}
	t.Cleanup(func() {
		for _, d := range all {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	if len(all) < atLeast {
		lacking(t, fmt.Sprintf("%d GPUs, the test needs %d", len(all), atLeast))
	}
	return all[:min(len(all), 4)]
}

// sizes are the groups with a device for each rank.
func (g gpus) sizes() []int { return []int{2, 3, 4}[:len(g)-1] }

// forced are options that do not depend on what is measured or found.
func forced(a Algorithm) Options {
	return Options{Force: a, Link: FullyConnected, Halved: 1, Timeout: 30 * time.Second}
}

// overNCCL returns a group of NCCL with low latency.
func (g gpus) overNCCL(size int, timeout time.Duration, o Options) (*backendtest.Group, error) {
	b := nccl.New(func(ordinal int) (nccl.Device, error) { return g[ordinal], nil })
	group, err := backendtest.Over(b)(size, timeout)
	if err != nil {
		return nil, err
	}
	return group, wrapAll(group.Comms, o)
}

// wrapAll wraps the ranks of a group, together.
func wrapAll(comms []backend.Communicator, o Options) error {
	errs := make([]error, len(comms))
	var all sync.WaitGroup
	for r, inner := range comms {
		all.Go(func() {
			c, err := New(inner, o)
			if err == nil && c.Refused() != "" {
				err = errors.New(c.Refused())
			}
			if errs[r] = err; c != nil {
				comms[r] = c
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// group is overNCCL for a test, which closes it.
func (g gpus) group(t testing.TB, size int, o Options) []*Communicator {
	t.Helper()
	group, err := g.overNCCL(size, time.Minute, o)
	if err != nil {
		t.Fatal(err)
	}
	return owned(t, group)
}

func owned(t testing.TB, group *backendtest.Group) []*Communicator {
	comms := make([]*Communicator, len(group.Comms))
	for r := range comms {
		comms[r] = group.Comms[r].(*Communicator)
	}
	t.Cleanup(func() {
		closeAll(t, comms)
		if err := group.Close(); err != nil {
			t.Error(err)
		}
	})
	return comms
}

// copy copies between the host and the device that has the memory.
func (g gpus) copy(dst, src backend.Buffer) error {
	if dst.Len() == 0 {
		return nil // another device could wait for a kernel of another rank
	}
	onDevice := dst
	if src.Device() {
		onDevice = src
	}
	for _, d := range g {
		if d.Holds(onDevice.Addr()) {
			a := d.Default().Kernels().(backend.Arithmetic)
			return errors.Join(a.Move(dst, src), drain(context.Background(), d.Default()))
		}
	}
	return fmt.Errorf("no device has memory at %#x", onDevice.Addr())
}

func TestCommunicatorOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, force := range Algorithms()[1:] {
		t.Run(force.String(), func(t *testing.T) {
			backendtest.Run(t, backendtest.Options{
				Sizes: g.sizes(), OwnOrder: true, Copy: g.copy, // what is NCCL's has its order
				New: func(size int, timeout time.Duration) (*backendtest.Group, error) {
					group, err := g.overNCCL(size, timeout, forced(force))
					if err != nil {
						return nil, err
					}
					for r, c := range group.Comms {
						group.Comms[r] = trace.New(check.New(c), 100)
					}
					return group, nil
				},
			})
		})
	}
}

// inputs are random operands of one call, by rank, as bytes of a type.
func inputs(random *rand.Rand, d backend.DType, size, n int) [][]byte {
	all := make([][]byte, size)
	for r := range all {
		floats := make([]float32, n)
		for i := range floats {
			floats[i] = float32(random.NormFloat64() * float64(uint(1)<<random.IntN(12)))
		}
		all[r] = make([]byte, n*d.Size())
		b := backend.Of(all[r]).As(d)
		if d == backend.F32 {
			b = backend.Of(floats)
			copy(all[r], b.Bytes())
			continue
		}
		if err := (kernels.Host{}).Cast(b, backend.Of(floats)); err != nil {
			panic(err) // the lengths are right
		}
	}
	return all
}

// serialBytes is the result in rank order, as package kernels says.
func serialBytes(op backend.ReduceOp, d backend.DType, xs [][]byte) ([]byte, error) {
	y := make([]byte, len(xs[0]))
	var srcs []backend.Buffer
	for _, x := range xs {
		srcs = append(srcs, backend.Of(x).As(d))
	}
	return y, kernels.Host{}.Reduce(op, backend.Of(y).As(d), srcs...)
}

// halvedResult is the result of operands and an average that travel as half.
func halvedResult(op backend.ReduceOp, half backend.DType, xs [][]byte) ([]byte, error) {
	n, factor, k := len(xs[0])/4, 1.0, kernels.Host{}
	room := func() backend.Buffer { return backend.Of(make([]byte, 2*n)).As(half) }
	average, srcs := room(), make([]backend.Buffer, len(xs))
	var errs []error
	for r, x := range xs {
		srcs[r] = room()
		errs = append(errs, k.Cast(srcs[r], backend.Of(x).As(backend.F32)))
	}
	if op == backend.Sum {
		factor = float64(len(xs))
	}
	y := make([]byte, 4*n)
	errs = append(errs, k.Reduce(backend.Avg, average, srcs...), k.Widen(backend.Of(y).As(backend.F32), average, factor))
	return y, errors.Join(errs...)
}

// eachWay runs f with every algorithm, on all ranks at a time.
func eachWay(t *testing.T, comms []*Communicator, f func(c *Communicator, a Algorithm) error) {
	t.Helper()
	for _, a := range comms[0].Link().Algorithms()[1:] {
		for _, c := range comms {
			c.plan.Force = a
		}
		each(t, comms, func(c *Communicator) error {
			if err := f(c, a); err != nil {
				return fmt.Errorf("%v: %w", a, err)
			}
			return nil
		})
	}
}

// sameBits compares every algorithm with the host, over random inputs, sizes,
// alignments, in place and not, in ordinary memory and in that of Alloc. Half of the
// calls of f32 travel as 16 bits, where there is a kernel for that.
func sameBits(t *testing.T, comms []*Communicator, queues []backend.Queue, trials int) {
	const most = 40000 // bytes
	eachWay(t, comms, func(c *Communicator, a Algorithm) error {
		random, q := rand.New(rand.NewPCG(7, 9)), queues[c.Rank()]
		memory, err := c.Device().Alloc(4 * most)
		if err != nil {
			return err
		}
		defer c.Device().Free(memory)
		window, err := c.Alloc(4 * most) // together, after everyone has its memory
		if err != nil {
			return err
		}
		k := q.Kernels().(backend.Arithmetic)
		for trial := range trials {
			d := []backend.DType{backend.F32, backend.F16, backend.BF16}[random.IntN(3)]
			op := []backend.ReduceOp{backend.Sum, backend.Avg}[random.IntN(2)]
			n := 1 + random.IntN(most/4)
			xs := inputs(random, d, c.Size(), n)
			what := backend.Collective{Kind: backend.AllReduce, Op: op}
			want, err := serialBytes(op, d, xs)
			if d == backend.F32 && c.lines() && random.IntN(2) == 0 {
				what.Wire = []backend.DType{backend.F16, backend.BF16}[random.IntN(2)]
				want, err = halvedResult(op, what.Wire, xs)
			}
			if err != nil {
				return err
			}
			own := rand.New(rand.NewPCG(uint64(trial), uint64(c.Rank()))) // others have other places
			from := []backend.Buffer{memory, window}[own.IntN(2)].As(d)
			lo := own.IntN(3) * own.IntN(17)
			src := from.Slice(lo, lo+n)
			dst := src
			if own.IntN(2) == 0 {
				lo = from.Len()/2 + own.IntN(3)*own.IntN(17)
				dst = from.Slice(lo, lo+n)
			}
			got := make([]byte, len(want))
			if err := k.Move(src.As(backend.U8), backend.Of(xs[c.Rank()])); err != nil {
				return err
			}
			w, err := c.Start(q, what, dst, src)
			if err != nil {
				return err
			}
			if err := errors.Join(w.Join(context.Background()), k.Move(backend.Of(got), dst.As(backend.U8)), drain(context.Background(), q)); err != nil {
				return err
			}
			if !bytes.Equal(got, want) {
				return fmt.Errorf("trial %d: %v of %d %v has other bits than the host's", trial, what, n, d)
			}
		}
		return nil
	})
}

func defaults(comms []*Communicator) []backend.Queue {
	var queues []backend.Queue
	for _, c := range comms {
		queues = append(queues, c.Device().Default())
	}
	return queues
}

// trials are few with -test.short, which is for compute-sanitizer.
func trials() int {
	switch {
	case os.Getenv("EURYALE_FULL") == "1":
		return 1000
	case testing.Short():
		return 10
	}
	return 100
}

func TestAlgorithmsGiveTheSameBitsOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, size := range g.sizes() {
		comms := g.group(t, size, forced(TwoShot))
		sameBits(t, comms, defaults(comms), trials())
	}
}

// backToBack starts calls with new values without waiting, while ranks are late at
// random, and looks at every result.
func backToBack(t *testing.T, comms []*Communicator, queues []backend.Queue, calls int) {
	const n, batch = 1000, 500
	eachWay(t, comms, func(c *Communicator, a Algorithm) error {
		q := queues[c.Rank()]
		k := q.Kernels().(backend.Arithmetic)
		memory, err := c.Device().Alloc(4 * n * (batch + 1))
		if err != nil {
			return err
		}
		defer c.Device().Free(memory)
		// The driver may not give memory to one rank while a kernel waits for it.
		if err := vote(c.inner, nil); err != nil {
			return err
		}
		x, results := memory.As(backend.F32).Slice(0, n), memory.As(backend.F32).Slice(n, n*(batch+1))
		random := rand.New(rand.NewPCG(11, uint64(c.Rank())))
		ys := make([]float32, n*batch)
		for first := 0; first < calls; first += batch {
			for i := range batch {
				if err := k.Fill(x, float64((first+i)%1000*(c.Rank()+1))); err != nil {
					return err
				}
				if _, err := c.Start(q, sum, x, x); err != nil {
					return err
				}
				if err := k.Copy(results.Slice(i*n, (i+1)*n), x); err != nil {
					return err
				}
				if random.IntN(50) == 0 {
					time.Sleep(time.Duration(random.IntN(200)) * time.Microsecond)
				}
			}
			if err := errors.Join(k.Move(backend.Of(ys), results), drain(context.Background(), q)); err != nil {
				return err
			}
			for i, y := range ys {
				if want := float32((first + i/n) % 1000 * c.Size() * (c.Size() + 1) / 2); y != want {
					return fmt.Errorf("call %d, element %d: %v, want %v", first+i/n, i%n, y, want)
				}
			}
		}
		return nil
	})
}

func TestBackToBackCallsOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, size := range g.sizes() {
		comms := g.group(t, size, forced(TwoShot))
		backToBack(t, comms, defaults(comms), 100*trials())
	}
}

// loose is a communicator of ranks that may share a device, which NCCL does not
// allow. It carries calls, and is slow at everything else.
type loose struct {
	backend.Communicator // package host's
	dev                  *cuda.Device
	over                 chan struct{}
	once                 sync.Once
}

func (c *loose) Device() backend.Device                       { return c.dev }
func (c *loose) Ended() <-chan struct{}                       { return c.over }
func (c *loose) Unwrap() []backend.Communicator               { return []backend.Communicator{c.Communicator} }
func (c *loose) end()                                         { c.once.Do(func() { close(c.over) }) }
func (c *loose) Abort(cause error)                            { c.end(); c.Communicator.Abort(cause) }
func (c *loose) Close() error                                 { c.end(); return c.Communicator.Close() }
func (c *loose) Split(int, int) (backend.Communicator, error) { return nil, backend.ErrUnsupported }

func (c *loose) Start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	if q == nil {
		q = c.dev.Default()
	}
	k := q.Kernels().(backend.Arithmetic)
	x, y := make([]byte, src.NBytes()), make([]byte, dst.NBytes())
	err := errors.Join(k.Move(backend.Of(x), src.As(backend.U8)), drain(context.Background(), q))
	if err == nil {
		err = backend.Run(c.Communicator, what, backend.Of(y).As(dst.DType()), backend.Of(x).As(src.DType()))
	}
	if err == nil {
		err = errors.Join(k.Move(dst.As(backend.U8), backend.Of(y)), drain(context.Background(), q))
	}
	return backend.Done(err), nil
}

func (c *loose) Carry(q backend.Queue, _ backend.Collective, _ int, _, _ backend.Buffer, launch func(backend.Queue, uintptr) error) (backend.Work, error) {
	if err := launch(q, 0); err != nil {
		return nil, err
	}
	e, err := q.Record()
	return eventWork{e}, err
}

type eventWork struct{ backend.Event }

func (w eventWork) Wait(q backend.Queue) error { return q.Wait(w.Event) }

// sharing returns size ranks on the devices, several on each, and a queue for each.
// Their kernels must have room on a device together.
func (g gpus) sharing(t *testing.T, size int, o Options) ([]*Communicator, []backend.Queue) {
	t.Helper()
	group, err := backendtest.Over(host.New())(size, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	queues := make([]backend.Queue, size)
	for r, c := range group.Comms {
		dev := g[r%len(g)]
		group.Comms[r] = &loose{Communicator: c, dev: dev, over: make(chan struct{})}
		if queues[r], err = dev.NewQueue(); err != nil {
			t.Fatal(err)
		}
	}
	o.SharedDevices, o.Blocks, o.Staging = true, 8, 1<<20
	if err := wrapAll(group.Comms, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // before the communicators are closed
		for _, q := range queues {
			if err := q.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return owned(t, group), queues
}

func TestSeveralRanksShareAGPU(t *testing.T) {
	g := needGPUs(t, 1)
	for _, size := range []int{2, 3, 5, 6, 7, 8} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			comms, queues := g.sharing(t, size, forced(TwoShot))
			sameBits(t, comms, queues, trials()/5)
			backToBack(t, comms, queues, 10*trials())
		})
	}
}

// A cube mesh whose ranks share devices: kernels use those pads that they would reach.
func TestCubeMeshOfRanksThatShareAGPU(t *testing.T) {
	g := needGPUs(t, 1)
	o := forced(Mesh)
	o.Link = CubeMesh
	comms, queues := g.sharing(t, cubeSize, o)
	sameBits(t, comms, queues, trials()/5)
	backToBack(t, comms, queues, 10*trials())
	for _, c := range comms {
		if u := c.Usage(); u.Mesh == 0 || u.Inner != 0 {
			t.Errorf("rank %d: %+v", c.Rank(), u)
		}
	}
}

// Graphs are launched between calls of Start, and take their rounds from the device.
func TestGraphsReplayOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, size := range g.sizes() {
		comms := g.group(t, size, forced(Flagged))
		for _, n := range []int{100, 20000, 100000} { // in packets, in lines, and in lines of two shots
			each(t, comms, func(c *Communicator) error { return replay(c, n, 10*trials()/(1+n/10000)) })
		}
	}
}

// replay adds up results of a graph that is launched many times, and of calls in
// between.
func replay(c *Communicator, n, times int) error {
	q := c.Device().Default().(*cuda.Queue)
	k := q.Kernels().(backend.Arithmetic)
	memory, err := c.Device().Alloc(3 * 4 * n)
	if err != nil {
		return err
	}
	part := func(i int) backend.Buffer { return memory.As(backend.F32).Slice(i*n, (i+1)*n) }
	x, y, total := part(0), part(1), part(2)
	step := func(reduce func() error) error {
		return errors.Join(k.Fill(x, float64(c.Rank()+1)), reduce(), k.Binary(backend.Add, total, total, y))
	}
	// Kernels may not wait for this rank while its memory is being taken.
	if err := errors.Join(k.Zero(memory), drain(context.Background(), q), vote(c.inner, nil)); err != nil {
		return err
	}
	graph, err := q.Capture(func() error { return step(func() error { return c.Enqueue(q, sum, y, x) }) })
	if err != nil {
		return err
	}
	for i := range times {
		if i%10 != 0 {
			err = graph.Launch()
		} else {
			err = step(func() error { _, err := c.Start(q, sum, y, x); return err })
		}
		if err != nil {
			return err
		}
	}
	got := make([]float32, n)
	if err := errors.Join(k.Move(backend.Of(got), total), drain(context.Background(), q)); err != nil {
		return err
	}
	want := float32(times * c.Size() * (c.Size() + 1) / 2)
	if i := slices.IndexFunc(got, func(v float32) bool { return v != want }); i >= 0 {
		return fmt.Errorf("element %d of %d after %d launches is %v, want %v", i, n, times, got[i], want)
	}
	return errors.Join(graph.Close(), vote(c.inner, nil), c.Device().Free(memory))
}

// A kernel that waits for a rank that has started nothing ends when the host says so,
// or after its limit, and the device goes on.
func TestKernelsEndOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, limit := range []time.Duration{300 * time.Millisecond, time.Minute} {
		for _, a := range Algorithms()[1:] {
			o := forced(a)
			o.Timeout = limit
			comms := g.group(t, 2, o)
			c := comms[0]
			x, err := c.Device().Alloc(4096)
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			w, err := c.Start(nil, sum, x.As(backend.F32), x.As(backend.F32))
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(50 * time.Millisecond)
			want := backend.ErrTimeout
			if limit > time.Second {
				want = backend.ErrAborted
				c.Abort(errors.New("enough"))
			}
			if limit < time.Second { // until the kernel has ended; NCCL's own watch is more patient
				if err := drain(context.Background(), c.Device().Default()); err != nil {
					t.Fatal(err)
				}
				err = c.failure(&sum)
			} else {
				err = w.Join(context.Background())
			}
			if took := time.Since(began); !errors.Is(err, want) || took > 2*time.Second {
				t.Errorf("%v, %v: %v after %v", a, limit, err, took)
			}
			if err := errors.Join(c.Device().Default().Kernels().Zero(x), drain(context.Background(), c.Device().Default()), c.Device().Free(x)); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestGroupsLeaveNoMemoryOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	var before int
	for cycle := range 10 {
		t.Run("", func(t *testing.T) { g.group(t, 2, forced(TwoShot)) })
		if n := g[0].MemoryStats().InUse; cycle == 0 {
			before = n
		} else if n != before {
			t.Fatalf("%d bytes are in use after cycle %d, %d after the first", n, cycle, before)
		}
	}
}
