//go:build gpu

package wire

import (
	"errors"
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/places"
)

// BenchmarkGPUAllReduce compares sums of f32 as they are with those of 16 bits, with
// NCCL, in one run: "of-dense" is the time as a share of the dense one. On emulated
// devices, only the small operands end soon.
func BenchmarkGPUAllReduce(b *testing.B) {
	for _, n := range []int{1 << 20, 1 << 25} {
		for _, P := range []int{2, 4} {
			b.Run(fmt.Sprintf("%dMi/P=%d", n>>20, P), func(b *testing.B) {
				dense := benchmarkSums(b, "dense", P, n, 0, 0)
				for _, half := range halves {
					benchmarkSums(b, half.String(), P, n, half, dense)
				}
			})
		}
	}
}

// benchmarkSums returns the seconds of a call; half is 0 for dense ones.
func benchmarkSums(b *testing.B, name string, P, n int, half backend.DType, dense float64) (seconds float64) {
	b.Run(name, func(b *testing.B) {
		at(b, places.GPUs, P, max(half, backend.F16), func(c *Communicator) error {
			comm := backend.Communicator(c)
			if half == 0 {
				comm = c.inner
			}
			return sums(b, comm, n)
		})
		seconds = b.Elapsed().Seconds() / float64(b.N)
		if dense > 0 {
			b.ReportMetric(seconds/dense, "of-dense")
		}
	})
	return seconds
}

// sums makes the calls of one rank. All ranks are measured together.
func sums(b *testing.B, c backend.Communicator, n int) error {
	q, err := c.Device().NewQueue()
	if err != nil {
		return err
	}
	defer q.Close()
	memory, err := c.Alloc(4 * n)
	if err != nil {
		return err
	}
	x := memory.As(backend.F32)
	calls := func(n int) error {
		var last backend.Work
		for range n {
			var err error
			if last, err = c.Start(q, reduction(backend.AllReduce, backend.Sum), x, x); err != nil {
				return err
			}
		}
		return last.Join(b.Context())
	}
	const settled = 3 // calls: the first one makes memory
	if err := errors.Join(calls(settled), backend.Barrier(c)); err != nil {
		return err
	}
	if c.Rank() == 0 {
		b.ResetTimer()
	}
	err = errors.Join(calls(b.N), backend.Barrier(c))
	if c.Rank() == 0 {
		b.StopTimer()
	}
	return err
}
