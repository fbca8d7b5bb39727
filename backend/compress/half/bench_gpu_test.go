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
	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/backend/lowlatency"
	"github.com/euryale-ml/euryale/internal/testenv"
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
		for _, nbytes := range []int{64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 128 << 20, 256 << 20} {
			b.Run(fmt.Sprintf("P=%d/KiB=%d", P, nbytes>>10), func(b *testing.B) {
				at(b, testenv.GPUs, P, backend.F16, func(c *Communicator) error { return compare(b, c.Base, nbytes) })
			})
		}
	}
}

// way is what is timed.
type way struct {
	name  string
	comm  backend.Communicator
	times []time.Duration // of rank 0
}

// ways returns them, and what owns them.
func ways(inner backend.Communicator) ([]way, *lowlatency.Communicator, error) {
	low, err := lowlatency.New(inner, lowlatency.Options{Halved: 1, Link: lowlatency.FullyConnected})
	if err == nil && low.Refused() != "" {
		err = errors.New(low.Refused())
	}
	list := []way{{name: "dense", comm: inner}, {name: "dense-chosen", comm: low}}
	for _, half := range halves {
		chosen := over(low, half)
		chosen.transport = backend.Capabilities{}.TransportOf
		list = append(list, way{name: half.String(), comm: over(inner, half)},
			way{name: half.String() + "-chosen", comm: chosen},
			way{name: half.String() + "-fused", comm: over(low, half)})
	}
	return list, low, err
}

// compare times the ways of one rank.
func compare(b *testing.B, inner backend.Communicator, nbytes int) error {
	list, low, err := ways(inner)
	if err != nil {
		return err
	}
	memory, err := low.Alloc(nbytes)
	if err != nil {
		return err
	}
	timer, err := inner.Device().Default().(*cuda.Queue).NewTimer()
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
	if inner.Rank() == 0 {
		report(b, list)
	}
	err = errors.Join(timer.Close(), backend.Barrier(inner))
	for _, w := range list {
		if c, ok := w.comm.(*Communicator); ok {
			err = errors.Join(err, c.Close())
		}
	}
	return errors.Join(err, low.Close())
}

// round times calls that are started back to back; the first one brings the ranks
// together, and makes memory.
func (w *way) round(timer *cuda.Timer, x backend.Buffer) error {
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
