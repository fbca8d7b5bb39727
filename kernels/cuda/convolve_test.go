package cuda

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// someConvolutions work on someImages, and others fill tiles of every size, with more than
// one step and part.
func someConvolutions() []kernels.Convolution {
	var all []kernels.Convolution
	for n, i := range someImages() {
		all = append(all, kernels.Convolution{Images: i, Filters: n + 1})
	}
	same := func(batch, c, size, filters int) kernels.Convolution {
		i := kernels.Images{Batch: batch, C: c, H: size, W: size, OutH: size, OutW: size,
			KernelH: 3, KernelW: 3, PadH: 1, PadW: 1, StrideH: 1, StrideW: 1, DilationH: 1,
			DilationW: 1}
		return kernels.Convolution{Images: i, Filters: filters}
	}
	one := same(2, 5, 6, 7)
	one.KernelH, one.KernelW, one.PadH, one.PadW = 1, 1, 0, 0
	groups, depthwise := same(3, 12, 6, 8), same(2, 5, 7, 10)
	groups.Groups, depthwise.Groups = 4, 5
	return append(all, groups, depthwise, one, same(2, 3, 13, 33), same(3, 17, 5, 40),
		same(2, 40, 8, 70))
}

func testConvolutions(t *testing.T, m machine) {
	b := newBench(t, m, 18)
	shapes := someConvolutions()
	if _, slow := m.(*emulator); !slow { // large tiles, and many parts
		many := shapes[len(shapes)-1]
		many.Batch, many.Filters = 512, 140
		shapes = append(shapes, many)
	}
	for _, d := range []backend.DType{backend.F32, backend.F64, backend.BF16} {
		for _, c := range shapes {
			for _, c.Pass = range []kernels.Pass{kernels.Forward, kernels.InputGradient,
				kernels.FilterGradient} {
				c.DType = d
				b.reset(uint64(c.Pass))
				b.convolve(c)
			}
		}
	}
}

func (b *bench) convolve(c kernels.Convolution) {
	b.t.Helper()
	x, w, y := c.Batch*c.C*c.H*c.W, c.Filters*c.Columns(), c.Batch*c.Filters*c.OutH*c.OutW
	n := [...][3]int{kernels.Forward: {y, x, w}, kernels.InputGradient: {x, y, w},
		kernels.FilterGradient: {w, x, y}}[c.Pass]
	need, err := b.device.ConvolutionScratch(c)
	if err != nil {
		b.t.Fatal(err)
	}
	dst, left, right := b.alloc(c.DType, n[0], 1), b.alloc(c.DType, n[1], 0),
		b.alloc(c.DType, n[2], 1)
	b.small(left)
	b.small(right)
	guarded := b.used
	scratch := b.alloc(backend.U8, need, 0)
	b.used = guarded // what is in the scratch is not compared
	b.run(fmt.Sprintf("%v of %+v", c.Pass, c), dst,
		func() error {
			return b.device.Convolve(c, dst.device, left.device, right.device,
				scratch.device)
		},
		func() error { return b.host.Convolve(c, dst.host, left.host, right.host) })
}

// small fills a buffer with integers whose products add up exactly, however many there are.
func (b *bench) small(o operand) {
	numbers := make([]float64, o.host.Len())
	for i := range numbers {
		numbers[i] = float64(b.rnd.IntN(7) - 3)
	}
	if err := b.host.Cast(o.host, backend.Of(numbers)); err != nil {
		b.t.Fatal(err)
	}
}

// convolutions makes a call of every kernel, unless n is 0.
func convolutions(k Kernels, n int) error {
	scratch := device(backend.U8, 1<<43, 1<<20)
	for _, d := range []backend.DType{backend.F32, backend.F64} {
		for _, filters := range []int{1, 32, 64, 1 << 16} {
			for _, pass := range []kernels.Pass{kernels.Forward, kernels.FilterGradient} {
				batch, channels := 64, 1<<7
				switch filters {
				case 1:
					batch = 1 // one column
				case 32:
					batch, channels = 1<<10, 16 // few columns, and K is divided
				}
				filters := filters * min(n, 1)
				i := kernels.Images{Batch: batch, C: channels, H: 1, W: 1, OutH: 1, OutW: 1,
					KernelH: 1, KernelW: 1, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}
				c := kernels.Convolution{Images: i, Filters: filters, Pass: pass, DType: d}
				x, w, y := device(d, 1<<40, batch*i.C), device(d, 1<<41, filters*i.C),
					device(d, 1<<42, batch*filters)
				dst, second := y, w
				if pass == kernels.FilterGradient {
					dst, second = w, y
				}
				if err := k.Convolve(c, dst, x, second, scratch); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
