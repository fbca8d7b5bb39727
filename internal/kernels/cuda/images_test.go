package cuda

import (
	"fmt"
	"math"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// someImages are windows that overlap, that leave gaps, and that reach outside.
func someImages() []kernels.Images {
	return []kernels.Images{
		{Batch: 2, C: 3, H: 8, W: 8, OutH: 4, OutW: 4, KernelH: 2, KernelW: 2, StrideH: 2,
			StrideW: 2, DilationH: 1, DilationW: 1},
		{Batch: 1, C: 2, H: 9, W: 7, OutH: 9, OutW: 7, KernelH: 3, KernelW: 3, PadH: 1, PadW: 1,
			StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1},
		{Batch: 3, C: 1, H: 10, W: 11, OutH: 4, OutW: 3, KernelH: 3, KernelW: 2, PadH: 2, PadW: 1,
			StrideH: 3, StrideW: 5, DilationH: 2, DilationW: 3},
		{Batch: 1, C: 1, H: 1, W: 1, OutH: 2, OutW: 2, KernelH: 2, KernelW: 2, PadH: 2, PadW: 2,
			StrideH: 3, StrideW: 3, DilationH: 1, DilationW: 1},
		{Batch: 2, C: 2, H: 7, W: 9, OutH: 3, OutW: 3, KernelH: 2, KernelW: 2, PadH: 1, StrideH: 2,
			StrideW: 3, DilationH: 1, DilationW: 1},
		{Batch: 0, C: 1, H: 4, W: 4, OutH: 2, OutW: 2, KernelH: 2, KernelW: 2, StrideH: 2,
			StrideW: 2, DilationH: 1, DilationW: 1},
	}
}

func testImages(t *testing.T, m machine) {
	b := newBench(t, m, 17)
	for _, d := range []backend.DType{backend.F32, backend.F64} {
		for _, i := range someImages() {
			places, pixels := i.Batch*i.C*i.OutH*i.OutW, i.Batch*i.C*i.H*i.W
			name := func(kernel string) string { return fmt.Sprintf("%s of %+v %v", kernel, i, d) }
			b.reset(1)
			x, patches, y := b.alloc(d, pixels, 1), b.alloc(d, places*i.KernelH*i.KernelW, 0),
				b.alloc(d, places, 0)
			dx, dy := b.alloc(d, pixels, 0), b.alloc(d, places, 1)
			pools := func() {
				b.run(name("maxpool"), y, func() error {
					return b.device.MaxPool(y.device, x.device, i)
				}, func() error { return b.host.MaxPool(y.host, x.host, i) })
				b.run(name("maxpoolgrad"), dx, func() error {
					return b.device.MaxPoolGrad(dx.device, x.device, dy.device, i)
				}, func() error { return b.host.MaxPoolGrad(dx.host, x.host, dy.host, i) })
			}
			for _, strange := range []bool{false, true} {
				if strange {
					b.spread(x.host, math.NaN(), math.Inf(-1), math.Inf(-1), math.Inf(-1),
						math.Inf(1))
				}
				i.Rectified = false
				pools()
				i.Rectified = true
				pools()
			}
			b.run(name("im2col"), patches, func() error {
				return b.device.Im2Col(patches.device, x.device, i)
			}, func() error { return b.host.Im2Col(patches.host, x.host, i) })
			b.randomise(patches.host)
			b.run(name("col2im"), dx, func() error {
				return b.device.Col2Im(dx.device, patches.device, i)
			}, func() error { return b.host.Col2Im(dx.host, patches.host, i) })
		}
	}
}

// windows makes every call on images of n pixels.
func windows(k Kernels, n int) error {
	var err error
	for _, d := range []backend.DType{backend.F32, backend.F64} {
		i := kernels.Images{Batch: 1, C: 1, H: n, W: 1, OutH: n, OutW: 1, KernelH: 1, KernelW: 1,
			StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}
		x, y, z := device(d, 1<<40, n), device(d, 1<<41, n), device(d, 1<<42, n)
		for _, e := range []error{k.Im2Col(y, x, i), k.Col2Im(y, x, i), k.MaxPool(y, x, i),
			k.MaxPoolGrad(y, x, z, i)} {
			if e != nil {
				err = e
			}
		}
	}
	return err
}
