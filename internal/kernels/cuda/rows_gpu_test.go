//go:build gpu

package cuda

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// BenchmarkGPURows takes rows of the table of a language model, and adds them: bytes of the rows
// that are read and written, and of the table's gradient.
func BenchmarkGPURows(b *testing.B) {
	const count, width, most = 50257, 1024, 65536
	loaded, s, ctx, memory := benchmarkGPU(b, 4*width*(count+most)+8*most)
	kernel := New(loaded.Launcher(s))
	table := backend.OnDevice(backend.F32, memory, count*width)
	taken := memory + 4*count*width
	at := taken + 4*most*width
	for _, n := range []int{8192, most} {
		for _, test := range []struct {
			name string
			draw func() int
		}{
			{"uniform", func() int { return rand.IntN(count) }},
			// a tenth of the rows has half of the indices
			{"skewed", func() int { return int(float64(count) * pow4(rand.Float64())) }},
		} {
			list := make([]int64, n)
			for k := range list {
				list[k] = int64(test.draw())
			}
			r := kernels.Rows{Before: 1, Count: count, Width: width}
			rows, indices := backend.OnDevice(backend.F32, taken, n*width),
				backend.OnDevice(backend.I64, at, n)
			for name, run := range map[string]func() error{
				"take": func() error { return kernel.TakeRows(rows, table, indices, r) },
				"add":  func() error { return kernel.AddRows(table, rows, indices, r) },
			} {
				b.Run(fmt.Sprint(name, " ", n, " ", test.name), func(b *testing.B) {
					runtime.LockOSThread() // this is another goroutine
					defer runtime.UnlockOSThread()
					err := errors.Join(cu.SetCurrentContext(ctx), cu.MemcpyHtoD(cu.DevicePtr(at),
						unsafe.Pointer(&list[0]), int64(8*n)), run(), s.Synchronize())
					b.SetBytes(int64(8 * n * width))
					if name == "add" {
						b.SetBytes(int64(4 * (n + count) * width))
					}
					b.ResetTimer()
					for range b.N {
						err = errors.Join(err, run())
					}
					require.NoError(b, errors.Join(err, s.Synchronize()))
				})
			}
		}
	}
}

func pow4(x float64) float64 { return x * x * x * x }
