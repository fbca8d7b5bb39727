//go:build gpu

package gpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/observe"
)

// gpus are the devices of a test, up to four, and a backend of NCCL alone.
type gpus struct {
	*Backend
	all []*cuda.Device
}

// needGPUs opens atLeast devices, and up to four.
func needGPUs(t testing.TB, atLeast int) *gpus {
	t.Helper()
	g := &gpus{Backend: New(nil)}
	g.Options = &Options{Off: true}
	if err := g.Available(); err != nil {
		lacking(t, err.Error())
	}
	n := require.Value(g.lib.devices())(t)
	if n < atLeast {
		t.Skipf("%d GPUs, the test needs %d", n, atLeast)
	}
	for ordinal := range min(n, 4) {
		d := require.Value(cuda.Open(ordinal))(t)
		g.all = append(g.all, d)
	}
	g.open = func(ordinal int) (Device, error) { return g.all[ordinal], nil }
	t.Cleanup(func() {
		for _, d := range g.all {
			require.Report(t, d.Close())
		}
	})
	return g
}

// copy copies between the host and the device that has the memory, to its end.
// Another one could wait for a kernel of another rank.
func (g *gpus) copy(dst, src backend.Buffer) error {
	if dst.Len() == 0 {
		return nil
	}
	onDevice := dst
	if src.Device() {
		onDevice = src
	}
	for _, d := range g.all {
		if d.Holds(onDevice.Addr()) {
			return copyOn(d, dst, src)
		}
	}
	return fmt.Errorf("no device has memory at %#x", onDevice.Addr())
}

func copyOn(d *cuda.Device, dst, src backend.Buffer) error {
	if err := d.Default().Move(dst, src); err != nil {
		return err
	}
	return drain(context.Background(), d.Default())
}

// sizes are the groups with a device for each rank, of two and more.
func (g *gpus) sizes() []int { return []int{2, 3, 4}[:len(g.all)-1] }

// nccl returns a group of NCCL alone, which the test closes.
func (g *gpus) nccl(t testing.TB, P int, timeout time.Duration) []backend.Communicator {
	t.Helper()
	group := require.Value(backendtest.Over(g.Backend)(P, timeout))(t)
	t.Cleanup(func() {
		closeAll(t, group.Comms)
		require.NoError(t, group.Close())
	})
	return group.Comms
}

func TestNCCLOnGPU(t *testing.T) {
	g := needGPUs(t, 1)
	record := func(c backend.Communicator) backend.Communicator {
		return backend.WithHooks(c, observe.New(c.Rank(), 100))
	}
	backendtest.Run(t, backendtest.Options{
		New: backendtest.Over(g.Backend, group.Compared, record), Sizes: append([]int{1},
			g.sizes()...), OwnOrder: true, Copy: g.copy, Tree: treeOf,
	})
}

func TestNCCLOfTwoMachinesOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	backendtest.RunWrapper(t, backendtest.Options{
		New: backendtest.Over(machines{g.Backend}, group.Compared), Sizes: []int{2}, OwnOrder: true,
		Copy: g.copy,
	})
}

func TestNCCLAllocatesNothingOnGPU(t *testing.T) {
	g := needGPUs(t, 1)
	c := g.nccl(t, 1, time.Minute)[0] // AllocsPerRun counts the whole process
	require.NoError(t, with(c, 1000, func(x backend.Buffer) error {
		got := testing.AllocsPerRun(1000, func() {
			require.Report(t, backend.Run(c, allReduce, x, x))
		})
		if got > 0 {
			return fmt.Errorf("%v allocations for each call", got)
		}
		return nil
	}))
}

func TestNCCLRefusesRanksOfOneDeviceOnGPU(t *testing.T) {
	g := needGPUs(t, 1)
	g.open = func(int) (Device, error) { return g.all[0], nil }
	_, err := backendtest.Over(g.Backend)(2, time.Minute)
	require.Check(t, errors.Is(err, backend.ErrUnsupported), "got %v", err)
}

// TestNCCLAbortLeavesADeviceThatWorksOnGPU aborts a kernel that waits for a peer, and calls
// that are queued behind it.
func TestNCCLAbortLeavesADeviceThatWorksOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	for _, calls := range []int{1, 20} {
		comms := g.nccl(t, 2, time.Minute)
		err := with(comms[0], 1<<20, func(x backend.Buffer) error {
			var last backend.Work
			for range calls {
				w, err := comms[0].Start(nil, allReduce, x, x)
				if err != nil {
					return err
				}
				last = w
			}
			time.Sleep(20 * time.Millisecond)
			began := time.Now()
			comms[0].Abort(errors.New("enough"))
			if err := last.Join(context.Background()); !errors.Is(err, backend.ErrAborted) {
				return fmt.Errorf("got %w", err)
			}
			if took := time.Since(began); took > proctest.Within(time.Second) {
				return fmt.Errorf("the abort took %v", took)
			}
			return copyOn(g.all[0], backend.Of(make([]float32, 1<<20)), x)
		})
		require.Check(t, err == nil, "%d calls: %v", calls, err)
	}
}

// TestNCCLLeavesNoMemoryOnGPU connects and aborts, with a call stuck on one rank.
func TestNCCLLeavesNoMemoryOnGPU(t *testing.T) {
	g := needGPUs(t, 2)
	cycles := 10
	if os.Getenv("EURYALE_FULL") == "1" {
		cycles = 100
	}
	free := func() int {
		n, _, err := g.all[0].FreeMemory()
		require.NoError(t, err)
		return n
	}
	var before int
	for cycle := range cycles {
		t.Run("", func(t *testing.T) {
			comms := g.nccl(t, 2, time.Minute)
			require.NoError(t, with(comms[0], 1000, func(x backend.Buffer) error {
				if _, err := comms[0].Start(nil, allReduce, x, x); err != nil {
					return err
				}
				comms[0].Abort(errors.New("enough"))
				return nil
			}))
		})
		if cycle == 1 {
			before = free()
		}
	}
	if grown := before - free(); grown > 1<<20 {
		t.Errorf("device memory grew by %d bytes from the 2nd to the last of %d cycles", grown,
			cycles)
	}
}

// BenchmarkNCCL times all-reduces that are started back to back, with the
// wrappers that Init puts around: host is the time of one Start, and the time of
// an operation that of one call on the device, whichever is longer. "bare" is
// ncclAllReduce through cgo and nothing else.
func BenchmarkNCCL(b *testing.B) {
	g := needGPUs(b, 2)
	sizes := []int{1 << 10, 64 << 10, 1 << 20, 32 << 20}
	if os.Getenv("EURYALE_FULL") == "1" {
		sizes = []int{1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20,
			64 << 20, 256 << 20, 1 << 30}
	}
	for _, P := range g.sizes() {
		comms := g.nccl(b, P, time.Minute)
		whole := make([]backend.Communicator, P)
		for r, c := range comms {
			whole[r] = backend.WithHooks(group.Compared(c), observe.New(c.Rank(), 2048))
		}
		for _, nbytes := range sizes {
			for name, start := range map[string]starter{"start": ours, "bare": bare} {
				b.Run(fmt.Sprintf("P=%d/bytes=%d/%s", P, nbytes, name), func(b *testing.B) {
					b.SetBytes(int64(nbytes))
					b.ReportAllocs()
					backendtest.Each(b, whole, func(c backend.Communicator) error {
						return with(c, nbytes/4, func(x backend.Buffer) error {
							return benchBackToBack(b, c, x, start)
						})
					})
				})
			}
		}
	}
}

func ours(whole backend.Communicator, _ *Communicator, x backend.Buffer) error {
	_, err := whole.Start(nil, allReduce, x, x)
	return err
}

func bare(_ backend.Communicator, c *Communicator, x backend.Buffer) error {
	k := call{what: allReduce, count: x.Len(), dtype: x.DType(), rank: c.rank, P: c.size, dst: x,
		src: x}
	c.steps = k.steps(c.steps[:0])
	return c.engine.run(c.last.Stream(), c.steps, 0)
}

// starter starts a call, by a communicator or by what is inside it.
type starter func(whole backend.Communicator, c *Communicator, x backend.Buffer) error

// benchBackToBack starts calls in rounds that no queue of the driver is too short for.
func benchBackToBack(b *testing.B, whole backend.Communicator, x backend.Buffer,
	start starter) error {
	const round = 100
	c, _ := backend.As[*Communicator](whole)
	unbind, err := c.dev.Bind()
	if err != nil {
		return err
	}
	defer unbind()
	if err := errors.Join(start(whole, c, x), backend.Barrier(whole)); err != nil {
		return err
	}
	if c.rank == 0 {
		b.ResetTimer()
	}
	var host time.Duration
	for left := b.N; left > 0; left -= round {
		began := time.Now()
		for range min(left, round) {
			if err := start(whole, c, x); err != nil {
				return err
			}
		}
		host += time.Since(began)
		e, err := c.last.Record()
		if err != nil {
			return err
		}
		if err := e.Join(context.Background()); err != nil {
			return err
		}
	}
	if c.rank == 0 {
		b.StopTimer()
		b.ReportMetric(float64(host.Nanoseconds())/float64(b.N), "host-ns/op")
	}
	return nil
}
