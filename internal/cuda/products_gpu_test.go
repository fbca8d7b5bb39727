//go:build gpu

package cuda

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// openProducts opens a queue and its products, with cuBLAS or without.
func openProducts(t testing.TB, d *Device, cublas bool) (*Queue, *Products) {
	t.Helper()
	if !cublas {
		t.Setenv("EURYALE_CUBLAS", "off")
	}
	q := must[backend.Queue](t)(d.NewQueue()).(*Queue)
	p := must[*Products](t)(q.NewProducts())
	t.Cleanup(func() {
		ok(t, p.Close())
		ok(t, q.Close())
	})
	if cublas && !strings.HasPrefix(p.Library(), "cuBLAS") {
		if os.Getenv("REQUIRE_GPU") == "1" {
			t.Fatalf("REQUIRE_GPU=1: %s", p.Library())
		}
		t.Skip(p.Library())
	}
	return q, p
}

// integers returns n numbers from -2 to 2 of a dtype, on the host.
func integers(t testing.TB, d backend.DType, n int) backend.Buffer {
	t.Helper()
	numbers := make([]float32, n)
	for i := range numbers {
		numbers[i] = float32((i*7+i/5)%5 - 2)
	}
	b := backend.Of(make([]float64, n)).As(d).Slice(0, n)
	ok(t, kernels.Host{}.Cast(b, backend.Of(numbers)))
	return b
}

// TestProductsOnGPU: cuBLAS and our kernels compute what the loop on the host does.
func TestProductsOnGPU(t *testing.T) {
	for _, cublas := range []bool{true, false} {
		t.Run(fmt.Sprintf("cublas=%v", cublas), func(t *testing.T) {
			d := openDevice(t, 0)
			q, p := openProducts(t, d, cublas)
			t.Log(p.Library())
			ok(t, p.Prepare())
			for _, types := range [][2]backend.DType{
				{backend.F32, backend.F32}, {backend.F64, backend.F64}, {backend.F16, backend.F16},
				{backend.BF16, backend.BF16}, {backend.F16, backend.F32}, {backend.BF16,
					backend.F32},
			} {
				for _, shape := range [][4]int{{1, 1, 1, 1}, {1, 7, 5, 3}, {3, 33, 65, 40},
					{1, 130, 140, 70}, {2, 4, 6, 0}, {1, 4, 24, 16}, {1, 16, 8, 264}} {
					for flags := range 4 {
						compareProduct(t, q, p, types, shape, flags)
					}
				}
			}
		})
	}
}

// compareProduct multiplies on the device and on the host.
func compareProduct(t *testing.T, q *Queue, p *Products, types [2]backend.DType, shape [4]int,
	flags int) {
	t.Helper()
	const more = 8
	host := kernels.Product{Batch: shape[0], M: shape[1], N: shape[2], K: shape[3], Alpha: 0.5,
		Beta: float64(flags % 2)}
	matrix := func(d backend.DType, rows, columns int, transposed bool) (onHost,
		onDevice kernels.Matrix) {
		if transposed {
			rows, columns = columns, rows
		}
		m := kernels.Matrix{Pitch: columns + more, Stride: rows*(columns+more) + more,
			Transposed: transposed}
		onHost, onDevice = m, m
		onHost.Buffer = integers(t, d, max(shape[0]*m.Stride, 1))
		onDevice.Buffer = must[backend.Buffer](t)(q.Alloc(onHost.Buffer.NBytes())).As(d)
		t.Cleanup(func() { ok(t, q.Free(onDevice.Buffer)) })
		ok(t, q.Move(onDevice.Buffer, onHost.Buffer))
		return onHost, onDevice
	}
	device := host
	host.A, device.A = matrix(types[0], host.M, host.K, flags&1 != 0)
	host.B, device.B = matrix(types[0], host.K, host.N, flags&2 != 0)
	host.C, device.C = matrix(types[1], host.M, host.N, false)
	ok(t, kernels.Host{}.Multiply(host))
	ok(t, p.Multiply(device))
	got := backend.Of(make([]float64, host.C.Buffer.Len())).As(types[1]).Slice(
		0, host.C.Buffer.Len())
	ok(t, q.Move(got, device.C.Buffer))
	require.Check(t, bytes.Equal(got.Bytes(), host.C.Buffer.Bytes()),
		"%v of %v, transposed %02b: device and host differ", shape, types, flags)
}

// TestProductsInGraphsOnGPU: a captured product runs again and again.
func TestProductsInGraphsOnGPU(t *testing.T) {
	for _, cublas := range []bool{true, false} {
		d := openDevice(t, 0)
		q, p := openProducts(t, d, cublas)
		const n = 64
		m := func() kernels.Matrix {
			b := must[backend.Buffer](t)(q.Alloc(4 * n * n)).As(backend.F32)
			t.Cleanup(func() { ok(t, q.Free(b)) })
			ok(t, q.Fill(b, f32(1)))
			return kernels.Matrix{Buffer: b, Pitch: n}
		}
		x := kernels.Product{M: n, N: n, K: n, A: m(), B: m(), C: m(), Alpha: 1, Beta: 1}
		ok(t, p.Multiply(x)) // loads what is loaded on first use
		ok(t, q.Fill(x.C.Buffer, 0))
		g := must[*backend.Graph](t)(q.Capture(func() error { return p.Multiply(x) }))
		for range 3 {
			must[backend.Work](t)(g.Launch(nil))
		}
		got := make([]float32, n*n)
		ok(t, q.Move(backend.Of(got), x.C.Buffer))
		if got[0] != 3*n || got[n*n-1] != 3*n {
			t.Errorf("%s: three replays added up to %v, want %d", p.Library(), got[0], 3*n)
		}
		ok(t, g.Close())
	}
}

// BenchmarkProductsOnGPU prints TFLOP/s.
func BenchmarkProductsOnGPU(b *testing.B) {
	for _, c := range []struct {
		in, out backend.DType
		tf32    bool
	}{{backend.F32, backend.F32, false}, {backend.F32, backend.F32, true}, {backend.BF16,
		backend.F32, false}, {backend.BF16, backend.BF16, false},
		{backend.F64, backend.F64, false}} {
		for _, shape := range [][4]int{{1, 4096, 4096, 4096}, {1, 1024, 1024, 1024},
			{1, 64, 4096, 4096}, {128, 512, 512, 64}} {
			for _, transposed := range []bool{false, true} {
				for _, cublas := range []bool{true, false} {
					if c.tf32 && !cublas {
						continue
					}
					name := fmt.Sprintf("%v-%v/tf32=%v/%dx%dx%dx%d/bt=%v/cublas=%v", c.in, c.out,
						c.tf32, shape[0], shape[1], shape[2], shape[3], transposed, cublas)
					b.Run(name, func(b *testing.B) {
						benchmarkProduct(b, c.in, c.out, c.tf32, shape, transposed, cublas)
					})
				}
			}
		}
	}
}

func benchmarkProduct(b *testing.B, in, out backend.DType, tf32 bool, shape [4]int, transposed,
	cublas bool) {
	d := openDevice(b, 0)
	q, p := openProducts(b, d, cublas)
	matrix := func(t backend.DType, rows, columns int, transposed bool) kernels.Matrix {
		if transposed {
			rows, columns = columns, rows
		}
		buffer := must[backend.Buffer](b)(q.Alloc(shape[0] * rows * columns * t.Size())).As(t)
		b.Cleanup(func() { ok(b, q.Free(buffer)) })
		return kernels.Matrix{Buffer: buffer, Pitch: columns, Stride: rows * columns,
			Transposed: transposed}
	}
	x := kernels.Product{Batch: shape[0], M: shape[1], N: shape[2], K: shape[3], Alpha: 1,
		TF32: tf32}
	x.A, x.B, x.C = matrix(in, x.M, x.K, false), matrix(in, x.K, x.N, transposed),
		matrix(out, x.M, x.N, false)
	run := func(n int) {
		for range n {
			ok(b, p.Multiply(x))
		}
		e := must[backend.Event](b)(q.Record())
		ok(b, e.Join(context.Background()))
	}
	run(3)
	b.ResetTimer()
	run(b.N)
	flop := 2 * float64(shape[0]) * float64(shape[1]) * float64(shape[2]) * float64(shape[3])
	b.ReportMetric(flop*float64(b.N)/b.Elapsed().Seconds()/1e12, "TFLOP/s")
}
