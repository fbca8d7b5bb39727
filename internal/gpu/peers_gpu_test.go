//go:build gpu

package gpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/cuda"
	compared "github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/observe"
)

// forced are options that do not depend on what is measured or found.
func forced(a Algorithm) Options {
	return Options{Force: a, Link: FullyConnected, Halved: 1, Timeout: 30 * time.Second}
}

// with returns the backend of some options.
func (g *gpus) with(o Options) *Backend {
	b := New(func(ordinal int) (Device, error) { return g.all[ordinal], nil })
	b.Options = &o
	return b
}

// group returns ranks whose kernels reach each other's memory, and which the test closes.
func (g *gpus) group(t testing.TB, size int, o Options) []*Communicator {
	t.Helper()
	group := require.Value(backendtest.Over(g.with(o))(size, time.Minute))(t)
	return owned(t, group)
}

func owned(t testing.TB, group *backendtest.Group) []*Communicator {
	t.Helper()
	comms := make([]*Communicator, len(group.Comms))
	for r := range comms {
		comms[r] = group.Comms[r].(*Communicator)
	}
	t.Cleanup(func() {
		each(t, comms, (*Communicator).Close)
		require.NoError(t, group.Close())
	})
	if why := comms[0].Refused(); why != "" {
		t.Fatal(why)
	}
	return comms
}

func TestCommunicatorOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, force := range FullyConnected.Algorithms()[1:] {
		t.Run(force.String(), func(t *testing.T) {
			backendtest.Run(t, backendtest.Options{
				// there are no kernels for i64
				Sizes: g.sizes(), Integers: backend.F32, Copy: g.copy,
				OwnOrder: true, // what is NCCL's has its order
				Tree:     treeOf,
				New: backendtest.Over(g.with(forced(force)), compared.Compared,
					func(c backend.Communicator) backend.Communicator {
						return backend.WithHooks(c, observe.New(c.Rank(), 100))
					}),
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

// serialBytes is the result in the order of the call, as package kernels says.
func serialBytes(c backend.Collective, d backend.DType, xs [][]byte) ([]byte, error) {
	y := make([]byte, len(xs[0]))
	var srcs []backend.Buffer
	for _, x := range xs {
		srcs = append(srcs, backend.Of(x).As(d))
	}
	return y, reference.ReduceIn(c.Association, c.Op, backend.Of(y).As(d), srcs...)
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
	errs = append(errs, k.Reduce(backend.Avg, average, srcs...),
		k.CastScale(backend.Of(y).As(backend.F32), average, factor))
	return y, errors.Join(errs...)
}

// eachWay runs f with every algorithm that all-reduces, on all ranks at a time.
func eachWay(t *testing.T, comms []*Communicator, f func(c *Communicator, a Algorithm) error) {
	t.Helper()
	for _, a := range comms[0].Link().Algorithms()[1:] {
		if !algorithms[a].runs(backend.AllReduce) {
			continue // NCCL would, which adds in an order of its own
		}
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

// example is a call, the operands of the ranks, and the result.
type example struct {
	what backend.Collective
	d    backend.DType
	xs   [][]byte
	want []byte
}

// examples are random calls. Sizes in bytes are as often between one and two as between
// 256 and 512 Ki; a few are more than a round of any algorithm has, which is rounds bytes.
// Half of the calls of f32 travel as 16 bits, where there is a kernel for that, and a fourth add in
// a tree, where a kernel does.
func examples(c *Communicator, trials, rounds int) ([]example, error) {
	random := rand.New(rand.NewPCG(7, 9))
	all := make([]example, trials)
	for i := range all {
		e := example{d: []backend.DType{backend.F32, backend.F16, backend.BF16}[random.IntN(3)]}
		e.what = backend.Collective{Kind: backend.AllReduce, Op: []backend.ReduceOp{backend.Sum,
			backend.Avg}[random.IntN(2)]}
		nbytes := int(math.Exp2(random.Float64() * 18.6)) // 400 KB
		if i%50 == 49 || i == trials-1 {
			nbytes = rounds + random.IntN(rounds/8)
		}
		n := nbytes/e.d.Size() + 1
		e.xs = inputs(random, e.d, c.Size(), n)
		var err error
		if e.d == backend.F32 && c.plan.lines && random.IntN(2) == 0 {
			e.what.AllowHalf = []backend.DType{backend.F16, backend.BF16}[random.IntN(2)]
			e.want, err = halvedResult(e.what.Op, e.what.AllowHalf, e.xs)
		} else {
			tree := e.what
			tree.Association = backend.Tree
			if e.d == backend.F32 && c.choose(&tree, e.d, n*e.d.Size()) != byNCCL &&
				random.IntN(2) == 0 {
				e.what = tree
			}
			e.want, err = serialBytes(e.what, e.d, e.xs)
		}
		if err != nil {
			return nil, err
		}
		all[i] = e
	}
	return all, nil
}

// sameBits compares every algorithm with the host: see examples. Operands have any
// alignment, are in place and not, in ordinary memory and in that of Alloc; ranks are late
// at random.
func sameBits(t *testing.T, comms []*Communicator, queues []backend.Queue, trials, rounds int) {
	all := require.Value(examples(comms[0], trials, rounds))(t)
	most := 512 << 10
	for _, e := range all {
		most = max(most, len(e.want))
	}
	room := 2 * (most + 1024) // for the operand and the result, wherever they begin
	windows := make([]backend.Buffer, len(comms))
	each(t, comms, func(c *Communicator) (err error) {
		windows[c.Rank()], err = c.Alloc(room)
		return err
	})
	eachWay(t, comms, func(c *Communicator, a Algorithm) error {
		q := queues[c.Rank()]
		memory, err := c.Device().Alloc(room)
		if err != nil {
			return err
		}
		defer c.Device().Free(memory)
		late, err := newLate(c, q)
		if err != nil {
			return err
		}
		defer late.free()
		if err := assemble(c); err != nil { // everyone has its memory
			return err
		}
		k := q
		for trial, e := range all {
			// others have other places
			own := rand.New(rand.NewPCG(uint64(trial), uint64(c.Rank())))
			n := len(e.want) / e.d.Size()
			from := []backend.Buffer{memory, windows[c.Rank()]}[own.IntN(2)].As(e.d)
			lo := own.IntN(3) * own.IntN(17)
			src := from.Slice(lo, lo+n)
			dst := src
			if own.IntN(2) == 0 {
				lo = from.Len()/2 + own.IntN(3)*own.IntN(17)
				dst = from.Slice(lo, lo+n)
			}
			if err := errors.Join(k.Move(src.As(backend.U8), backend.Of(e.xs[c.Rank()])),
				late.sometimes(own, 4)); err != nil {
				return err
			}
			w, err := c.Start(q, e.what, dst, src)
			if err != nil {
				return err
			}
			got := make([]byte, len(e.want))
			if err := errors.Join(w.Join(context.Background()),
				k.Move(backend.Of(got), dst.As(backend.U8)), drain(context.Background(),
					q)); err != nil {
				return err
			}
			if !bytes.Equal(got, e.want) {
				return fmt.Errorf("trial %d: %v of %d %v has other bits than the host's", trial,
					e.what, n, e.d)
			}
		}
		return nil
	})
}

// late makes a rank late on its device, by kernels that take their time.
type late struct {
	dev    backend.Device
	k      backend.Arithmetic
	memory backend.Buffer
}

func newLate(c *Communicator, q backend.Queue) (late, error) {
	memory, err := c.Device().Alloc(64 << 10)
	return late{c.Device(), q, memory}, err
}

// set makes all elements of x, of f32, one number.
func set(q backend.Queue, x backend.Buffer, number int) error {
	return q.(stream).Fill(x, uint64(math.Float32bits(float32(number))))
}

func (l late) free() { l.dev.Free(l.memory) } // it is memory of dev, so there is no error

// sometimes starts them once in so many times: up to 60, of 2 us each. As
// often the host is late, by up to 200 us.
func (l late) sometimes(random *rand.Rand, times int) error {
	var errs []error
	if random.IntN(times) == 0 {
		for range random.IntN(60) {
			errs = append(errs, l.k.Divide(l.memory.As(backend.F32), l.memory.As(backend.F32), 1))
		}
	}
	if random.IntN(times) == 0 {
		time.Sleep(time.Duration(random.IntN(200)) * time.Microsecond)
	}
	return errors.Join(errs...)
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
		comms := g.group(t, size, forced(byTwoShot))
		// Lines have 7.5 MiB in a round, and twice that of f32 as 16 bits.
		sameBits(t, comms, defaults(comms), trials(), 17<<20)
	}
}

// backToBack starts calls of n elements with new values without waiting, while ranks are
// late at random, and looks at every result.
func backToBack(t *testing.T, comms []*Communicator, queues []backend.Queue, calls, n int) {
	batch := min(500, calls, 4_000_000/n)
	eachWay(t, comms, func(c *Communicator, a Algorithm) error {
		q := queues[c.Rank()]
		k := q
		memory, err := c.Device().Alloc(4 * n * (batch + 1))
		if err != nil {
			return err
		}
		defer c.Device().Free(memory)
		late, err := newLate(c, q)
		if err != nil {
			return err
		}
		defer late.free()
		// The driver may not give memory to one rank while a kernel waits for it.
		if err := assemble(c); err != nil {
			return err
		}
		x, results := memory.As(backend.F32).Slice(0, n), memory.As(backend.F32).Slice(
			n, n*(batch+1))
		random := rand.New(rand.NewPCG(11, uint64(c.Rank())))
		ys := make([]float32, n*batch)
		for first := 0; first < calls; first += batch {
			for i := range batch {
				if err := errors.Join(late.sometimes(random, 50),
					set(q, x, (first+i)%1000*(c.Rank()+1))); err != nil {
					return err
				}
				if _, err := c.Start(q, sum, x, x); err != nil {
					return err
				}
				if err := k.Copy(results.Slice(i*n, (i+1)*n), x); err != nil {
					return err
				}
			}
			if err := errors.Join(k.Move(backend.Of(ys), results), drain(context.Background(),
				q)); err != nil {
				return err
			}
			for i, y := range ys {
				if want := float32((first + i/n) % 1000 * c.Size() * (c.Size() + 1) /
					2); y != want {
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
		o := forced(byTwoShot)
		// so that those in lines take several rounds of two shots with barriers
		o.Staging = 64 << 10
		comms := g.group(t, size, o)
		backToBack(t, comms, defaults(comms), 100*trials(), 1000)
		backToBack(t, comms, defaults(comms), 5*trials(), 40_000) // in lines
	}
}

// Ranks start calls of two groups, on two queues, in another order each: kernels of one wait
// for peers while those of the other must begin.
func TestGroupsStartInAnyOrderOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, size := range g.sizes() {
		groups := [][]*Communicator{g.group(t, size, forced(byTwoShot)),
			g.group(t, size, forced(byTwoShot))}
		for _, a := range reducing() {
			for _, group := range groups {
				for _, c := range group {
					c.plan.Force = a
				}
			}
			for _, nbytes := range []int{64 << 10, 2 << 20, 16 << 20} {
				each(t, groups[0], func(c *Communicator) error {
					pair := []*Communicator{c, groups[1][c.Rank()]}
					if c.Rank()%2 == 1 {
						slices.Reverse(pair)
					}
					if err := alternately(c, pair, nbytes/4, trials()/2); err != nil {
						return fmt.Errorf("%v of %d bytes: %w", a, nbytes, err)
					}
					return nil
				})
			}
		}
	}
}

// alternately starts calls of n elements in groups, each on its own queue, and adds up
// their results. Ranks meet in c.
func alternately(c *Communicator, groups []*Communicator, n, calls int) error {
	type lane struct {
		queue    backend.Queue
		x, total backend.Buffer
	}
	lanes := make([]lane, len(groups))
	dev := c.Device()
	for i := range lanes {
		q, err := dev.NewQueue()
		if err != nil {
			return err
		}
		defer q.Close()
		memory, err := dev.Alloc(2 * 4 * n)
		if err != nil {
			return err
		}
		defer dev.Free(memory)
		all := memory.As(backend.F32)
		lanes[i] = lane{q, all.Slice(0, n), all.Slice(n, 2*n)}
		if err := errors.Join(q.Zero(lanes[i].total), drain(context.Background(), q)); err != nil {
			return err
		}
	}
	// The driver may not give memory to one rank while a kernel waits for it.
	if err := assemble(c); err != nil {
		return err
	}
	sent := 0
	for call := range calls {
		value := call%10 + 1
		sent += value
		for i, l := range lanes {
			k := l.queue
			if err := set(k, l.x, value*(groups[i].Rank()+1)); err != nil {
				return err
			}
			if _, err := groups[i].Start(l.queue, sum, l.x, l.x); err != nil {
				return err
			}
			if err := k.Reduce(backend.Sum, l.total, l.total, l.x); err != nil {
				return err
			}
		}
	}
	got := make([]float32, n)
	for i, l := range lanes {
		k := l.queue
		if err := errors.Join(k.Move(backend.Of(got), l.total), drain(context.Background(),
			l.queue)); err != nil {
			return err
		}
		size := groups[i].Size()
		want := float32(sent * size * (size + 1) / 2)
		if j := slices.IndexFunc(got, func(v float32) bool { return v != want }); j >= 0 {
			return fmt.Errorf("element %d of %d after %d calls is %v, want %v", j, n, calls, got[j],
				want)
		}
	}
	return assemble(c)
}

// shared is NCCL among ranks that may share a device, which NCCL does not allow: the fake, on
// memory of devices. It is slow.
type shared struct {
	library // the real one, for its version
	fake    *fake
	size    int
	queues  map[uintptr]*cuda.Queue
}

func (s *shared) splits() error          { return backend.ErrUnsupported }
func (s *shared) devices() (int, error)  { return s.size, nil }
func (s *shared) newID() ([]byte, error) { return s.fake.newID() }

func (s *shared) join(dev Device, id []byte, size, rank int) (ncclComm, error) {
	return &sharedEngine{s.fake.enter(nil, string(id), size, rank), s, dev}, nil
}

type sharedEngine struct {
	*fakeEngine
	shared *shared
	dev    Device
}

// run is done when it returns.
func (e *sharedEngine) run(stream uintptr, steps []ncclStep, event uintptr) error {
	q := e.shared.queues[stream]
	if err := drain(context.Background(), q); err != nil {
		return err
	}
	e.move = func(dst, src backend.Buffer) error {
		return errors.Join(q.Move(dst, src), drain(context.Background(), q))
	}
	e.group(steps)
	if event == 0 {
		return nil
	}
	return e.dev.RecordEvent(stream, event)
}

// sharing returns size ranks on the devices, several on each, and a queue for each.
// Their kernels must have room on a device together.
func (g *gpus) sharing(t *testing.T, size int, o Options) ([]*Communicator, []backend.Queue) {
	t.Helper()
	o.Blocks, o.Staging = 8, 1<<20
	return g.onShared(t, size, o)
}

func (g *gpus) onShared(t testing.TB, size int, o Options) ([]*Communicator, []backend.Queue) {
	t.Helper()
	o.SharedDevices = true
	s := &shared{library: g.lib, fake: newFake(nil), size: size, queues: map[uintptr]*cuda.Queue{}}
	queues := make([]backend.Queue, size)
	for r := range queues {
		dev := g.all[r%len(g.all)]
		q := require.Value(dev.NewQueue())(t)
		queues[r] = q
		for _, q := range []*cuda.Queue{q.(*cuda.Queue), dev.Default().(*cuda.Queue)} {
			s.queues[q.Stream()] = q
		}
	}
	b := g.with(o)
	b.open = func(ordinal int) (Device, error) { return g.all[ordinal%len(g.all)], nil }
	b.load = func() (library, error) { return s, nil }
	b.scratch = 48 << 10
	group := require.Value(backendtest.Over(b)(size, time.Minute))(t)
	comms := owned(t, group)
	t.Cleanup(func() { // before the communicators are closed
		for _, q := range queues {
			require.Report(t, q.Close())
		}
	})
	return comms, queues
}

func TestAlgorithmsForRanksOfOneDeviceOnGPU(t *testing.T) {
	g := needGPUs(t, 1)
	sizes := []int{2, 3, 5, 6, 7, 8}
	if testing.Short() {
		sizes = []int{3}
	}
	for _, size := range sizes {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			comms, queues := g.sharing(t, size, forced(byTwoShot))
			sameBits(t, comms, queues, trials()/5, 2<<20)
			backToBack(t, comms, queues, 10*trials(), 1000)
			permuted(t, comms, queues, trials(), 2<<20)
		})
	}
}

// A cube mesh whose ranks share devices: kernels use those pads that they would reach.
func TestAlgorithmsOfACubeMeshOnGPU(t *testing.T) {
	g := needGPUs(t, 1)
	o := forced(byMesh)
	o.Link = CubeMesh
	comms, queues := g.sharing(t, cubeSize, o)
	sameBits(t, comms, queues, trials()/5, 2<<20)
	backToBack(t, comms, queues, 10*trials(), 1000)
	for _, c := range comms {
		if u := c.Usage(); u.Mesh == 0 || u.NCCL != 0 {
			t.Errorf("rank %d: %+v", c.Rank(), u)
		}
	}
}

// Graphs are launched between calls of Start, and take their rounds from the device.
func TestGraphsReplayOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, size := range g.sizes() {
		for _, way := range []Algorithm{byLL, byLL128TwoShot, byOneShot, byTwoShot} {
			comms := g.group(t, size, forced(way))
			for _, n := range []int{100, 20000, 100000} { // LL in packets, and in lines
				times := 12 * trials() // ten of eleven by the graph
				if testing.Short() {
					times /= 1 + n/10000
				}
				each(t, comms, func(c *Communicator) error { return replay(c, n, times) })
				for _, c := range comms {
					if used := c.used[way].Load(); used == 0 || c.used[byNCCL].Load() > 0 {
						t.Errorf("%v forced: rank %d has %+v", way, c.Rank(), c.Usage())
					}
				}
			}
		}
	}
}

// replay adds up results of a graph that is launched many times, and of calls in
// between.
func replay(c *Communicator, n, times int) error {
	q := c.Device().Default().(*cuda.Queue)
	k := q
	memory, err := c.Device().Alloc(3 * 4 * n)
	if err != nil {
		return err
	}
	part := func(i int) backend.Buffer { return memory.As(backend.F32).Slice(i*n, (i+1)*n) }
	x, y, total := part(0), part(1), part(2)
	step := func(reduce func() error) error {
		return errors.Join(set(q, x, c.Rank()+1), reduce(), k.Reduce(backend.Sum, total, total, y))
	}
	// Kernels may not wait for this rank while its memory is being taken.
	testranks.NoError(errors.Join(k.Zero(memory), drain(context.Background(), q), assemble(c)))
	graph, err := q.Capture(func() error {
		return step(func() error { _, err := c.Start(q, sum, y, x); return err })
	})
	if err != nil {
		return err
	}
	for i := range times {
		if i%10 != 0 {
			_, err = graph.Launch(nil)
		} else {
			err = step(func() error { _, err := c.Start(q, sum, y, x); return err })
		}
		if err != nil {
			return err
		}
	}
	got := make([]float32, n)
	testranks.NoError(errors.Join(k.Move(backend.Of(got), total), drain(context.Background(),
		q)))
	want := float32(times * c.Size() * (c.Size() + 1) / 2)
	if i := slices.IndexFunc(got, func(v float32) bool { return v != want }); i >= 0 {
		return fmt.Errorf("element %d of %d after %d launches is %v, want %v", i, n, times, got[i],
			want)
	}
	return errors.Join(graph.Close(), assemble(c), c.Device().Free(memory))
}

// its is a call in place that the algorithm forced on c runs, and its result.
func its(c *Communicator, x backend.Buffer) (what backend.Collective, y backend.Buffer) {
	if algorithms[c.plan.Force].runs(sum.Kind) {
		return sum, x
	}
	n := x.Len() / c.Size()
	return backend.Collective{Kind: backend.ReduceScatter}, x.Slice(c.Rank()*n, (c.Rank()+1)*n)
}

// A kernel that waits for a rank that has started nothing ends when the host says so,
// or after its limit; the call has failed, on the other rank all later ones have, too, and
// the device goes on.
func TestKernelsEndOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, limit := range []time.Duration{300 * time.Millisecond, time.Minute} {
		for _, a := range FullyConnected.Algorithms()[1:] {
			o := forced(a)
			o.Timeout = limit
			comms := g.group(t, 2, o)
			c, other := comms[0], comms[1]
			x := require.Value(c.Device().Alloc(4096))(t)
			began := time.Now()
			what, y := its(c, x.As(backend.F32))
			w := require.Value(c.Start(nil, what, y, x.As(backend.F32)))(t)
			want := backend.ErrTimeout // which NCCL's own watch would take a minute for
			if limit > time.Second {
				time.Sleep(50 * time.Millisecond)
				want = backend.ErrAborted
				c.Abort(errors.New("enough"))
			}
			if err := w.Join(context.Background()); !errors.Is(err, want) {
				t.Errorf("%v, %v: %v", a, limit, err)
			}
			select {
			case <-other.member.Over():
			case <-time.After(proctest.Within(2 * time.Second)):
				t.Errorf("%v, %v: the other rank has not heard of it", a, limit)
			}
			var sticky *backend.Error
			if _, err := other.Start(nil, sum, x.As(backend.F32), x.As(backend.F32)); !errors.As(
				err, &sticky) || sticky.Peer != 0 || !errors.Is(err, backend.ErrAborted) {
				t.Errorf("%v, %v: on the other rank: %v", a, limit, err)
			}
			if took := time.Since(began); took > proctest.Within(2*time.Second) {
				t.Errorf("%v, %v: it took %v", a, limit, took)
			}
			require.Report(t, errors.Join(c.Device().Default().Zero(x), drain(context.Background(),
				c.Device().Default()), c.Device().Free(x)))
		}
	}
}

// gate holds what is started behind it on a queue: a kernel that waits for one of rank 0.
type gate struct {
	ranks []*Communicator
	x     []backend.Buffer
}

func (g *gpus) newGate(t *testing.T) gate {
	var ga gate
	ga.ranks, _ = g.sharing(t, 2, forced(byOneShot))
	for _, c := range ga.ranks {
		x := require.Value(c.Device().Alloc(64))(t)
		ga.x = append(ga.x, x.As(backend.F32))
		t.Cleanup(func() {
			require.NoError(t, c.Device().Free(x))
		})
	}
	return ga
}

// shut holds the queue of rank 1, and open lets it go on.
func (g gate) shut(q backend.Queue) error {
	_, err := g.ranks[1].Start(q, sum, g.x[1], g.x[1])
	return err
}

func (g gate) open(q backend.Queue) error {
	_, err := g.ranks[0].Start(q, sum, g.x[0], g.x[0])
	return err
}

// A kernel that is behind other work as its group ends writes to the other rank once it
// comes to its turn. That one has closed by then, and its memory must not be another's.
// NCCL is left out: it may wait for the work itself, on all devices of a process.
func TestKernelsBehindOthersWriteToNobodyElseOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, a := range FullyConnected.Algorithms()[1:] {
		t.Run(a.String(), func(t *testing.T) { g.queued(t, a) })
	}
}

func (g *gpus) queued(t *testing.T, a Algorithm) {
	ctx := context.Background()
	gate := g.newGate(t)
	comms, queues := g.sharing(t, 2, forced(a))
	x, err := g.all[1].Alloc(1536)
	require.NoError(t, err)
	floats := x.As(backend.F32)
	require.NoError(t, gate.shut(queues[1]))
	what, y := its(comms[1], floats)
	require.NoError(t, require.Err(comms[1].Start(queues[1], what, y, floats)))
	for _, c := range comms {
		c.Abort(errors.New("enough"))
	}
	size := comms[0].memory.bytes()
	require.Report(t, comms[0].Close())
	n := comms[0].Kept()
	require.Check(t, n == size, "%d bytes are kept, want %d", n, size)
	next, err := g.all[0].Alloc(size) // what is freed is given out again to whom asks for as much
	require.NoError(t, err)
	bytes := make([]byte, size)
	require.Report(t, errors.Join(gate.open(queues[0]), drain(ctx, queues[1]),
		g.copy(backend.Of(bytes), next)))
	i := slices.IndexFunc(bytes, func(b byte) bool { return b != 0 })
	require.Check(t, i < 0, "byte %d of rank 0's memory was written to after it was freed", i)
	require.Report(t, errors.Join(comms[1].Close(), g.all[0].Free(next), g.all[1].Free(x)))
	for _, c := range comms {
		if n := c.Kept(); n != 0 {
			t.Errorf("rank %d keeps %d bytes", c.Rank(), n)
		}
	}
}

// A device may be closed while another rank's kernels could still write to its memory.
func TestKernelsLetDevicesCloseBeforeTheirMemoryOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	observer := require.Value(cuda.Open(0))(t)
	defer observer.Close()
	comms, _ := g.sharing(t, 2, forced(byTwoShot))
	size := comms[0].memory.bytes()
	// which finds nothing that is not freed
	require.Report(t, errors.Join(comms[0].Close(), g.all[0].Close()))
	n := comms[0].Kept()
	require.Check(t, n == size, "%d bytes are kept, want %d", n, size)
	before, _, err := observer.FreeMemory()
	require.NoError(t, err)
	require.Report(t, comms[1].Close())
	for deadline := time.Now().Add(10 * time.Second); comms[0].Kept() > 0; time.Sleep(
		time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the memory is not given back")
		}
	}
	if after, _, err := observer.FreeMemory(); err != nil || after-before < size {
		t.Errorf("the device has %d bytes more, want %d: %v", after-before, size, err)
	}
	require.NoError(t, comms[0].teardowns.wait(proctest.Within(time.Second),
		comms[0].teardowns.all()...))
}

// A kernel that was stopped has ended like any other, and its call was started by all ranks.
// It is not done for that. On the other rank, which has found everything that it needs, it
// may be.
func TestKernelsOfAnAbortedCallAreNotDoneOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, a := range FullyConnected.Algorithms()[1:] {
		t.Run(a.String(), func(t *testing.T) {
			gate := g.newGate(t)
			comms := g.group(t, 2, forced(a))
			require.NoError(t, gate.shut(g.all[1].Default()))
			works, ys := make([]backend.Work, 2), make([]backend.Buffer, 2)
			for r, c := range comms {
				x, err := g.all[r].Alloc(1536)
				require.NoError(t, err)
				defer func() {
					require.Report(t, g.all[r].Free(x))
				}()
				what, y := its(c, x.As(backend.F32))
				require.NoError(t, set(g.all[r].Default(), x.As(backend.F32), 1))
				works[r] = require.Value(c.Start(nil, what, y, x.As(backend.F32)))(t)
				ys[r] = y
			}
			comms[0].Abort(errors.New("enough"))
			if err := works[0].Join(context.Background()); !errors.Is(err, backend.ErrAborted) {
				t.Errorf("a call that rank 1 has not come to passes for done: %v", err)
			}
			require.Report(t, errors.Join(gate.open(g.all[0].Default()), drain(context.Background(),
				g.all[1].Default())))
			y := make([]float32, ys[1].Len())
			err := works[1].Join(context.Background())
			require.Report(t, g.copy(backend.Of(y).As(backend.U8), ys[1].As(backend.U8)))
			wrong := slices.ContainsFunc(y, func(v float32) bool { return v != 2 })
			require.Check(t, errors.Is(err, backend.ErrAborted) || err == nil && !wrong,
				"on rank 1: %v", err)
		})
	}
}

func TestKernelsNoticeHostMemoryOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	b := g.with(forced(byOneShot))
	var said atomic.Int64
	b.Notice = func(string) { said.Add(1) }
	group := require.Value(backendtest.Over(b)(2, time.Minute))(t)
	each(t, owned(t, group), func(c *Communicator) error {
		x := []float32{1, 2}
		for range 2 {
			testranks.NoError(backend.Run(c, sum, backend.Of(x), backend.Of(x)))
		}
		if !slices.Equal(x, []float32{4, 8}) || c.Usage().OneShot != 2 {
			return fmt.Errorf("%v, %+v", x, c.Usage())
		}
		return nil
	})
	n := said.Load()
	require.Check(t, n == 1, "it is said %d times", n)
}

func TestKernelsLeaveNoMemoryOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	inUse := func() (n [2]int) {
		return [2]int{g.all[0].MemoryStats().InUse, g.all[1].MemoryStats().InUse}
	}
	for end, f := range map[string]func(t *testing.T, comms []*Communicator){
		"close": func(*testing.T, []*Communicator) {},
		"abort": func(t *testing.T, comms []*Communicator) {
			b := require.Value(comms[0].Device().Alloc(4096))(t)
			defer comms[0].Device().Free(b)
			w := require.Value(comms[0].Start(nil, sum, b.As(backend.F32), b.As(backend.F32)))(t)
			comms[0].Abort(errors.New("enough"))
			if err := w.Join(context.Background()); !errors.Is(err, backend.ErrAborted) {
				t.Error(err)
			}
		},
	} {
		var before [2]int
		for cycle := range 10 {
			t.Run(end, func(t *testing.T) { f(t, g.group(t, 2, forced(byTwoShot))) })
			if n := inUse(); cycle == 0 {
				before = n
			} else if n != before {
				t.Fatalf("%s: %v bytes are in use after cycle %d, %v after the first", end, n,
					cycle, before)
			}
		}
	}
}
