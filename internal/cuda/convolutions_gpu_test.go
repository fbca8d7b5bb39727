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

// openConvolutions opens a queue and its convolutions, with cuDNN or without.
func openConvolutions(t testing.TB, d *Device, cudnn bool) (*Queue, *Convolutions) {
	t.Helper()
	if !cudnn {
		t.Setenv("EURYALE_CUDNN", "off")
	}
	q := must[backend.Queue](t)(d.NewQueue()).(*Queue)
	c := q.NewConvolutions()
	t.Cleanup(func() {
		ok(t, c.Close())
		ok(t, q.Close())
	})
	if library := must[string](t)(c.Library()); cudnn && !strings.HasPrefix(library, "cuDNN") {
		if os.Getenv("EMULATED_DEVICES") != "" {
			t.Fatal(library)
		}
		t.Skip(library)
	}
	return q, c
}

// passes are all passes of a convolution.
func passes(v kernels.Convolution) []kernels.Convolution {
	all := []kernels.Convolution{v, v, v}
	for i, pass := range []kernels.Pass{kernels.Forward, kernels.InputGradient,
		kernels.FilterGradient} {
		all[i].Pass = pass
	}
	return all
}

// lengths returns the numbers of elements of a pass's result and operands.
func lengths(v kernels.Convolution) [3]int {
	x, w, y := v.Batch*v.C*v.H*v.W, v.Filters*v.Columns(), v.Batch*v.Filters*v.OutH*v.OutW
	return [...][3]int{kernels.Forward: {y, x, w}, kernels.InputGradient: {x, y, w},
		kernels.FilterGradient: {w, x, y}}[v.Pass]
}

// square returns a convolution of square images that keeps their size, with filters of 3x3.
func square(batch, channels, size, filters int) kernels.Convolution {
	return kernels.Convolution{Filters: filters, DType: backend.F32, Images: kernels.Images{
		Batch: batch, C: channels, H: size, W: size, OutH: size, OutW: size, KernelH: 3, KernelW: 3,
		PadH: 1, PadW: 1,
		StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1,
	}}
}

// TestConvolutionsOnGPU: cuDNN and our kernels compute what the loop on the host does.
func TestConvolutionsOnGPU(t *testing.T) {
	strided, dilated := square(2, 3, 9, 5), square(2, 3, 9, 5)
	strided.StrideH, strided.StrideW, strided.OutH, strided.OutW = 2, 3, 5, 3
	dilated.DilationH, dilated.DilationW, dilated.OutH, dilated.OutW = 2, 1, 7, 9
	grouped, depthwise, uneven := square(2, 6, 9, 9), square(3, 5, 8, 5), square(2, 3, 8, 4)
	grouped.Groups, depthwise.Groups, uneven.PadH, uneven.PadW = 3, 5, 0, 0
	for _, cudnn := range []bool{true, false} {
		t.Run(fmt.Sprintf("cudnn=%v", cudnn), func(t *testing.T) {
			d := openDevice(t, 0)
			q, c := openConvolutions(t, d, cudnn)
			t.Log(c.Library())
			for _, dtype := range []backend.DType{backend.F32, backend.F64, backend.BF16} {
				for _, v := range []kernels.Convolution{square(1, 1, 1, 1), square(3, 17, 7, 40),
					square(2, 2, 28, 3), strided, dilated, grouped, depthwise, uneven} {
					v.DType = dtype
					for _, v := range passes(v) {
						compareConvolution(t, q, c, v)
						if v.TF32 = dtype == backend.F32; v.TF32 {
							compareConvolution(t, q, c, v)
						}
						v.ChannelsLast = true
						compareConvolution(t, q, c, v)
					}
				}
			}
		})
	}
}

// compareConvolution convolves on the device and on the host.
func compareConvolution(t *testing.T, q *Queue, c *Convolutions, v kernels.Convolution) {
	t.Helper()
	var host, device [3]backend.Buffer
	for i, n := range lengths(v) {
		host[i] = integers(t, v.DType, n)
		device[i] = must[backend.Buffer](t)(q.Alloc(host[i].NBytes())).As(v.DType)
		defer func() { ok(t, q.Free(device[i])) }()
		ok(t, q.Move(device[i], host[i]))
	}
	scratch := convolutionScratch(t, q, c, v)
	ok(t, kernels.Host{}.Convolve(v, host[0], host[1], host[2]))
	ok(t, c.Convolve(v, device[0], device[1], device[2], scratch))
	got := backend.Of(make([]float64, host[0].Len())).As(v.DType).Slice(0, host[0].Len())
	ok(t, q.Move(got, device[0]))
	require.Check(t, bytes.Equal(got.Bytes(), host[0].Bytes()), "%v of %+v: device and host differ",
		v.Pass, v)
}

// convolutionScratch returns what a convolution needs.
func convolutionScratch(t testing.TB, q *Queue, c *Convolutions,
	v kernels.Convolution) backend.Buffer {
	t.Helper()
	n := must[int](t)(c.ConvolutionScratch(v))
	if n == 0 {
		return backend.Buffer{}
	}
	b := must[backend.Buffer](t)(q.Alloc(n))
	t.Cleanup(func() { ok(t, q.Free(b)) })
	return b
}

// TestConvolutionsInGraphsOnGPU: a captured convolution runs again and again.
func TestConvolutionsInGraphsOnGPU(t *testing.T) {
	grouped, depthwise, uneven := square(2, 6, 9, 9), square(3, 5, 8, 5), square(2, 3, 8, 4)
	grouped.Groups, depthwise.Groups, uneven.PadH, uneven.PadW = 3, 5, 0, 0
	for _, cudnn := range []bool{true, false} {
		t.Run(fmt.Sprintf("cudnn=%v", cudnn), func(t *testing.T) {
			d := openDevice(t, 0)
			q, c := openConvolutions(t, d, cudnn)
			for _, v := range passes(square(4, 3, 8, 5)) {
				v.TF32 = cudnn // for which cuDNN has every pass
				var b [3]backend.Buffer
				for i, n := range lengths(v) {
					b[i] = must[backend.Buffer](t)(q.Alloc(4 * n)).As(backend.F32)
					t.Cleanup(func() { ok(t, q.Free(b[i])) })
					ok(t, q.Fill(b[i], f32(1)))
				}
				scratch := convolutionScratch(t, q, c, v)
				run := func() error { return c.Convolve(v, b[0], b[1], b[2], scratch) }
				ok(t, run()) // loads what is loaded on first use
				want, got := make([]float32, b[0].Len()), make([]float32, b[0].Len())
				ok(t, q.Move(backend.Of(want), b[0]))
				g := must[*backend.Graph](t)(q.Capture(run))
				for range 3 {
					ok(t, q.Zero(b[0]))
					must[backend.Work](t)(g.Launch(nil))
				}
				ok(t, q.Move(backend.Of(got), b[0]))
				require.Check(t, bytes.Equal(backend.Of(got).Bytes(), backend.Of(want).Bytes()) &&
					want[0] != 0, "%v: a replay gives other bits than the call", v.Pass)
				ok(t, g.Close())
			}
		})
	}
}

// BenchmarkConvolutionsOnGPU measures the convolutions of Gorgonia's convnet example on batches of
// 256, and larger ones, in groups and depthwise, too, and prints TFLOP/s.
func BenchmarkConvolutionsOnGPU(b *testing.B) {
	grouped, depthwise := square(64, 256, 28, 256), square(64, 256, 28, 256)
	grouped.Groups, depthwise.Groups = 32, 256
	for _, v := range []kernels.Convolution{square(256, 1, 28, 32), square(256, 32, 14, 64),
		square(256, 64, 7, 128), square(64, 256, 28, 256), grouped, depthwise,
		square(128, 3, 32, 64), square(128, 64, 32, 64), square(128, 512, 4, 512)} {
		for _, v := range passes(v) {
			name := fmt.Sprintf("%dx%dx%dx%d-%d", v.Batch, v.C, v.H, v.W, v.Filters)
			if v.Groups > 1 {
				name += fmt.Sprintf("-by-%d", v.Groups)
			}
			name += fmt.Sprintf("/%v/", v.Pass)
			b.Run(name+"cudnn=true", func(b *testing.B) { benchmarkConvolution(b, v, true) })
			b.Run(name+"cudnn=false", func(b *testing.B) { benchmarkConvolution(b, v, false) })
			v.TF32 = true
			b.Run(name+"tf32", func(b *testing.B) { benchmarkConvolution(b, v, true) })
			v.ChannelsLast = true
			b.Run(name+"tf32-last", func(b *testing.B) { benchmarkConvolution(b, v, true) })
			v.TF32, v.DType = false, backend.BF16
			b.Run(name+"bf16-last", func(b *testing.B) { benchmarkConvolution(b, v, true) })
			v.ChannelsLast = false
			b.Run(name+"bf16", func(b *testing.B) { benchmarkConvolution(b, v, true) })
		}
	}
}

func benchmarkConvolution(b *testing.B, v kernels.Convolution, cudnn bool) {
	d := openDevice(b, 0)
	q, c := openConvolutions(b, d, cudnn)
	var operands [3]backend.Buffer
	one := f32(1)
	if v.DType == backend.BF16 {
		one >>= 16
	}
	for i, n := range lengths(v) {
		operands[i] = must[backend.Buffer](b)(q.Alloc(n * v.DType.Size())).As(v.DType)
		b.Cleanup(func() { ok(b, q.Free(operands[i])) })
		ok(b, q.Fill(operands[i], one))
	}
	scratch := convolutionScratch(b, q, c, v)
	run := func(n int) {
		for range n {
			ok(b, c.Convolve(v, operands[0], operands[1], operands[2], scratch))
		}
		e := must[backend.Event](b)(q.Record())
		ok(b, e.Join(context.Background()))
	}
	run(3)
	b.ResetTimer()
	run(b.N)
	flop := 2 * float64(v.Batch*v.OutH*v.OutW) * float64(v.Filters*v.Columns())
	b.ReportMetric(flop*float64(b.N)/b.Elapsed().Seconds()/1e12, "TFLOP/s")
}

// TestChannelsStayWithoutCUDNNOnGPU: kernels of ours would convolve copies.
func TestChannelsStayWithoutCUDNNOnGPU(t *testing.T) {
	d := openDevice(t, 0)
	_, c := openConvolutions(t, d, true)
	if !d.ChannelsLast() {
		t.Error("with ", must[string](t)(c.Library()))
	}
	for _, without := range []string{"off", t.TempDir()} {
		t.Setenv("EURYALE_CUDNN", without)
		require.Check(t, !d.ChannelsLast(), "EURYALE_CUDNN=%s", without)
	}
}
