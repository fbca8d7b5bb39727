//go:build gpu

package hierarchy

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// gpus are the devices of a test, four or two.
type gpus []*cuda.Device

func needGPUs(t testing.TB) gpus {
	t.Helper()
	all, err := cuda.Devices()
	if err != nil {
		testenv.Lacking(t, err.Error())
	}
	t.Cleanup(func() {
		for _, d := range all {
			require.Report(t, d.Close())
		}
	})
	if len(all) < 2 {
		t.Skipf("%d GPU, the test needs two or four", len(all))
	}
	g := gpus(all[:2])
	if len(all) >= 4 {
		g = all[:4]
	}
	if err := g.flat().Available(); err != nil {
		testenv.Lacking(t, err.Error())
	}
	return g
}

// layouts are those that the devices can stand for, the one of several machines
// that have several devices, if any, first.
func (g gpus) layouts() []Layout {
	if len(g) == 2 {
		return []Layout{Grid(2, 1), Grid(1, 2)}
	}
	return []Layout{Grid(2, 2), gridOf(2, 2, machineMinor), Grid(4, 1),
		Grid(1, 4)}
}

func (g gpus) flat() backend.Backend {
	return gpu.New(func(ordinal int) (gpu.Device, error) { return g[ordinal], nil })
}

// connected returns ranks with a device each, which are closed with the test.
func (g gpus) connected(t testing.TB, l Layout, o Options,
	wrap func(backend.Communicator) backend.Communicator) []backend.Communicator {
	t.Helper()
	group, err := backendtest.Over(layeredBackend{g.flat(), l, o, wrap})(len(g), time.Minute)
	require.NoError(t, err)
	t.Cleanup(func() {
		backendtest.Each(t, group.Comms, func(c backend.Communicator) error {
			err := c.Close()
			if r := recorderOf(c); r != nil {
				err = errors.Join(err, r.Close())
			}
			return err
		})
		require.NoError(t, group.Close())
	})
	return group.Comms
}

// memory returns memory of every device until the test ends. It is there before
// the ranks are, because the driver may make one who asks for memory wait for the
// kernels of others.
func (g gpus) memory(t testing.TB, nbytes int) []backend.Buffer {
	t.Helper()
	all := make([]backend.Buffer, len(g))
	for i, d := range g {
		var err error
		if all[i], err = d.Alloc(nbytes); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			require.NoError(t, d.Free(all[i]))
		})
	}
	return all
}

// copy copies between the host and the device that has the memory, to its end.
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
			return errors.Join(d.Default().Move(dst, src), drained(d.Default()))
		}
	}
	return fmt.Errorf("no device has memory at %#x", onDevice.Addr())
}

func TestHierarchyOnGPU(t *testing.T) {
	g := needGPUs(t)
	for _, l := range g.layouts() {
		for options, o := range onDevices() {
			t.Run(fmt.Sprintf("%v, %s", l, options), func(t *testing.T) {
				memory := g.memory(t, 8*len(g)*longest)
				comms := g.connected(t, l, o, group.Compared)
				backendtest.Each(t, comms, func(c backend.Communicator) error {
					return everyCallEqualsFlat(c.(*Communicator), memory[c.Rank()], longest)
				})
			})
		}
	}
}

// By the device's clock, nothing begins before what it waits for has begun, and nothing on
// a queue before what is ahead of it has ended.
func TestSpansAreInTheOrderOfThePhasesOnGPU(t *testing.T) {
	const buckets = 3
	g := needGPUs(t)
	for _, l := range g.layouts()[:len(g)/2] {
		t.Run(l.String(), func(t *testing.T) {
			memory := g.memory(t, 4*longest*buckets)
			o := ofSlices()
			o.SliceBytes, o.Spans = 4*longest/4, 1000
			backendtest.Each(t, g.connected(t, l, o, group.Compared),
				func(b backend.Communicator) error {
					c, x := b.(*Communicator), memory[b.Rank()].As(backend.F32)
					began := time.Now()
					for i := range buckets {
						bucket := equalPart(x, i, buckets)
						testranks.NoError(backend.Run(c, allReduce, bucket, bucket))
					}
					return errors.Join(pastTheStamps(c), inOrder(c, buckets, began, time.Now()))
				})
		})
	}
}

// pastTheStamps waits until the device has got to the stamp behind each phase, which the
// next phase does not wait for.
func pastTheStamps(c *Communicator) error {
	var errs []error
	for _, q := range c.queues {
		if q != nil {
			errs = append(errs, drained(q))
		}
	}
	return errors.Join(errs...)
}

// inOrder checks the spans of so many calls, one at a time.
func inOrder(c *Communicator, calls int, began, ended time.Time) error {
	const (
		clock  = time.Microsecond     // its steps
		origin = 5 * time.Millisecond // the host saw it so late at most, on a busy machine
	)
	wrong := func(s, before Span) error {
		return fmt.Errorf("%v of slice %d of call %d from %v to %v, but %v of slice %d of call "+
			"%d from %v to %v",
			s.Phase, s.Slice, s.Call, s.Start, s.End, before.Phase, before.Slice, before.Call,
			before.Start, before.End)
	}
	type slice struct{ call, slice int }
	number, ofSlice, onQueue := 0, map[slice]Span{}, map[backend.Queue]Span{}
	var last Span
	for _, s := range spansOf(c) { // by their starts
		if s.Phase == remainderPhase {
			continue
		}
		if s.Call < last.Call {
			return wrong(s, last)
		}
		if before, some := ofSlice[slice{s.Call, s.Slice}]; some && s.Phase <= before.Phase {
			return wrong(s, before)
		}
		if before := onQueue[c.queues[s.Phase]]; s.Start.Before(before.End.Add(-clock)) {
			return wrong(s, before)
		}
		if s.End.Before(s.Start) || s.Start.Before(began.Add(-origin)) ||
			s.End.After(ended.Add(origin)) {
			return fmt.Errorf("%v of call %d from %v to %v: the host saw all calls from %v to %v",
				s.Phase, s.Call, s.Start, s.End, began, ended)
		}
		number, last, ofSlice[slice{s.Call, s.Slice}], onQueue[c.queues[s.Phase]] = number+1,
			s, s, s
	}
	perSlice := 5
	if c.plan.Layout.Devices() == 1 {
		perSlice = 3
	}
	if len(ofSlice) < 4*calls || number != len(ofSlice)*perSlice {
		return fmt.Errorf("%d phases of %d slices of %d calls", number, len(ofSlice), calls)
	}
	return nil
}

// The whole suite makes so many groups that it takes minutes.
func TestCommunicatorOnGPU(t *testing.T) {
	if !full() {
		t.Skip("EURYALE_FULL=1 runs the suite")
	}
	g := needGPUs(t)
	backendtest.Run(t, backendtest.Options{
		New:   backendtest.Over(layeredBackend{g.flat(), g.layouts()[0], always(), group.Compared}),
		Sizes: []int{len(g)}, OwnOrder: true, Copy: g.copy,
		Tree: func(_ backend.Kind, d backend.DType, ranks int) bool {
			return ranks <= 2 || d != backend.F16 && d != backend.BF16
		},
	})
}

// The last rank leaves out one phase, so that kernels of the others wait on their
// devices. Each group shows that the devices are well after the group before.
func TestAbortInEveryPhaseOnGPU(t *testing.T) {
	g := needGPUs(t)
	l := g.layouts()[0]
	for _, call := range phasesOf {
		if call.what.Kind == backend.AllToAll && l.Devices() == 1 {
			continue // it runs flat
		}
		for i, phase := range call.phases {
			if computes(phase) ||
				l.Devices() == 1 && (phase == reducePhase || phase == gatherPhase) {
				continue
			}
			if phase == remainderPhase && call.what.Kind != backend.AllReduce {
				continue // an empty call, in which no kernel waits
			}
			t.Run(fmt.Sprintf("%v, %v", call.what.Kind, phase), func(t *testing.T) {
				abortsIn(t, g, l, call.what, phase, i%len(g))
			})
		}
	}
	t.Run("afterwards", func(t *testing.T) {
		memory := g.memory(t, 8*len(g)*longest)
		backendtest.Each(t, g.connected(t, l, always(), group.Compared),
			func(c backend.Communicator) error {
				return equalsFlatOnDevice(c.(*Communicator), memory[c.Rank()], allReduce,
					backend.F32,
					longest)
			})
	})
}

// hears waits until a rank knows of the end.
func hears(c *Communicator) error {
	select {
	case <-c.ctx.Done():
		return nil
	case <-time.After(10 * time.Second):
		return errors.New("it has not heard of the abort")
	}
}

// errWeather is why ranks abort.
var errWeather = errors.New("the weather")

// desertion makes the ranks wait in a phase that the last rank leaves out, until rank
// from aborts.
type desertion struct {
	layout   Layout
	what     backend.Collective
	phase    phase
	from     int
	after    time.Duration // until which all others are waiting
	leaveOut atomic.Bool
}

func (d *desertion) hook(p *probe, _ backend.Queue) (backend.Work, error) {
	if d.leaveOut.Load() && p.phase == d.phase && p.rank == d.layout.Size()-1 {
		return backend.Finished(nil), nil
	}
	return nil, nil
}

// wait is what a rank does, in memory for equalsFlatOnDevice. It tells rank from's test
// when it aborts, and returns whether the call was still waiting then.
func (d *desertion) wait(c *Communicator, memory backend.Buffer, aborts func()) (waited bool,
	err error) {
	// NCCL connects at the first call, on the host.
	if err := equalsFlatOnDevice(c, memory, allReduce, backend.F32, elements); err != nil {
		return false, err
	}
	if c.Rank() == d.layout.Size()-1 {
		d.leaveOut.Store(true)
		defer d.leaveOut.Store(false)
	}
	n := elements
	if d.what.Kind != backend.AllReduce {
		n /= c.Size()
	}
	nsrc, ndst := lengths(d.what, c.Size(), n)
	src, dst := equalPart(memory, 0, 2).As(backend.F32).Slice(0, nsrc), equalPart(memory, 1, 2).As(
		backend.F32).Slice(0, ndst)
	w, err := c.Start(nil, d.what, dst, src)
	if c.Rank() == d.from {
		time.Sleep(d.after)
		aborts()
		c.Abort(errWeather)
	}
	if err == nil {
		err = w.Join(context.Background())
	}
	if err != nil && !errors.Is(err, backend.ErrAborted) {
		return false, fmt.Errorf("the error is %w", err)
	} // without one it is through, as ranks of another machine may be
	return err != nil, hears(c)
}

// usable checks that the communicator has ended and its device has not.
func usable(c *Communicator, memory backend.Buffer) error {
	q := c.Device().Default()
	return errors.Join(ended(c), q.Zero(memory), drained(q))
}

// abortsIn makes the ranks wait in a phase, until rank from aborts.
func abortsIn(t *testing.T, g gpus, l Layout, what backend.Collective, phase phase, from int) {
	d := desertion{layout: l, what: what, phase: phase, from: from, after: 50 * time.Millisecond}
	memory := g.memory(t, 8*len(g)*longest)
	comms := g.connected(t, l, ofSlices(), probes(l, d.hook))
	var began time.Time
	var woken atomic.Int32
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		waited, err := d.wait(c.(*Communicator), memory[c.Rank()], func() { began = time.Now() })
		if waited {
			woken.Add(1)
		}
		return err
	})
	if took := time.Since(began); took > proctest.Within(time.Second) {
		t.Errorf("it took %v until all ranks were awake", took)
	}
	require.Check(t, woken.Load() != 0, "nobody was waiting")
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		return usable(c.(*Communicator), memory[c.Rank()])
	})
}
