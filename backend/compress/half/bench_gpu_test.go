//go:build gpu

package half

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// BenchmarkGPUAllReduce times sums of f32 in place, in turn, in one run, and reports the
// medians in microseconds by the device's clock, and each as a share of the dense one:
//
//	dense          as they are, by NCCL
//	dense-chosen   as they are, by NCCL or low-latency kernels
//	f16, bf16      cast, NCCL, cast
//	-chosen        cast, NCCL or low-latency kernels, cast
//	-fused         one kernel
//
// Use -benchtime 20x for 20 rounds of each. On emulated devices, only the small operands
// end soon.
func BenchmarkGPUAllReduce(b *testing.B) {
	for _, P := range []int{2, 4} {
		for _, nbytes := range []int{64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20,
			128 << 20, 256 << 20} {
			b.Run(fmt.Sprintf("P=%d/KiB=%d", P, nbytes>>10), func(b *testing.B) {
				devices := devices(b, P)
				dense, chosen := connected(b, devices, gpu.Options{Off: true}),
					connected(b, devices, gpu.Options{Halved: 1, Link: gpu.FullyConnected})
				backendtest.Each(b, chosen, func(c backend.Communicator) error {
					return compare(b, dense[c.Rank()], c.(*gpu.Communicator), nbytes)
				})
			})
		}
	}
}

// devices opens P devices. It skips the benchmark where there are fewer.
func devices(b *testing.B, P int) []*cuda.Device {
	b.Helper()
	all, err := cuda.Devices()
	if err != nil {
		testenv.Lacking(b, err.Error())
	}
	b.Cleanup(func() {
		for _, d := range all {
			require.Report(b, d.Close())
		}
	})
	if len(all) < P {
		b.Skipf("%d GPUs, the benchmark needs %d", len(all), P)
	}
	return all[:P]
}

// connected connects a rank on each device.
func connected(b *testing.B, devices []*cuda.Device, o gpu.Options) []backend.Communicator {
	b.Helper()
	nccl := gpu.New(func(ordinal int) (gpu.Device, error) { return devices[ordinal], nil })
	nccl.Options = &o
	g := require.Value(backendtest.Over(nccl)(len(devices), time.Minute))(b)
	b.Cleanup(func() {
		backendtest.Each(b, g.Comms, backend.Communicator.Close)
		require.NoError(b, g.Close())
	})
	return g.Comms
}

// way is what is timed.
type way struct {
	name  string
	comm  backend.Communicator
	times []time.Duration // of rank 0
}

// ways returns them.
func ways(dense backend.Communicator, low *gpu.Communicator) []way {
	list := []way{{name: "dense", comm: dense}, {name: "dense-chosen", comm: low}}
	for _, half := range halves {
		chosen := over(low, half)
		chosen.transport = backend.Capabilities{}.TransportOf
		list = append(list, way{name: half.String(), comm: over(dense, half)},
			way{name: half.String() + "-chosen", comm: chosen},
			way{name: half.String() + "-fused", comm: over(low, half)})
	}
	return list
}

// compare times the ways of one rank.
func compare(b *testing.B, dense backend.Communicator, low *gpu.Communicator, nbytes int) error {
	if low.Refused() != "" {
		return errors.New(low.Refused())
	}
	list := ways(dense, low)
	memory, err := low.Alloc(nbytes)
	if err != nil {
		return err
	}
	timer, err := bench.NewTimer(dense.Device().Default().(backend.TimedQueue))
	if err != nil {
		return err
	}
	for range b.N {
		for i := range list {
			if err := list[i].round(timer, memory.As(backend.F32)); err != nil {
				return fmt.Errorf("%s: %w", list[i].name, err)
			}
		}
	}
	if low.Usage().Halved == 0 {
		return errors.New("no call was fused")
	}
	if dense.Rank() == 0 {
		report(b, list)
	}
	err = errors.Join(timer.Close(), backend.Barrier(dense))
	for _, w := range list {
		if c, ok := w.comm.(*Communicator); ok {
			err = errors.Join(err, c.Close()) // and the communicator that it wraps
		}
	}
	return err
}

// round times calls that are started back to back; the first one brings the ranks
// together, and makes memory.
func (w *way) round(timer *bench.Timer, x backend.Buffer) error {
	q := w.comm.Device().Default()
	start := func() error {
		_, err := w.comm.Start(q, reduction(backend.AllReduce, backend.Sum), x, x)
		return err
	}
	drain := func() error {
		e, err := q.Record()
		if err != nil {
			return err
		}
		return e.Join(context.Background())
	}
	if err := errors.Join(start(), drain(), backend.Barrier(w.comm), timer.Start()); err != nil {
		return err
	}
	calls := min(50, max(5, 64<<20/x.NBytes()))
	for range calls {
		if err := start(); err != nil {
			return err
		}
	}
	if err := errors.Join(timer.Stop(), drain()); err != nil {
		return err
	}
	took, err := timer.Elapsed()
	w.times = append(w.times, took/time.Duration(calls))
	return err
}

func report(b *testing.B, list []way) {
	dense := 0.0
	for _, w := range list {
		slices.Sort(w.times)
		us := float64(w.times[len(w.times)/2].Nanoseconds()) / 1e3
		if dense == 0 {
			dense = us
		}
		b.ReportMetric(us, w.name+"-us")
		b.ReportMetric(us/dense, w.name+"-of-dense")
	}
	b.ReportMetric(0, "ns/op")
}
