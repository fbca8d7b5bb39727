package cuda

import (
	"errors"
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// someConvolutions work on someImages, and others fill small tiles, with more than one step.
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
	if _, slow := m.(*emulator); !slow { // with strides and without; and many parts
		many := shapes[len(shapes)-1]
		many.Batch, many.Filters = 512, 140
		strided := many
		strided.OutH, strided.OutW, strided.StrideH, strided.StrideW = 4, 4, 2, 2
		shapes = append(shapes, many, strided)
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
	need, err := b.device.ConvolutionScratch(c)
	if err != nil {
		b.t.Fatal(err)
	}
	b.convolveBy(c, need, fmt.Sprintf("%v of %+v", c.Pass, c), b.device.Convolve)
}

// convolveBy compares a way to convolve, with so many bytes of scratch, with the host's.
func (b *bench) convolveBy(c kernels.Convolution, need int, name string,
	by func(c kernels.Convolution, dst, a, b, scratch backend.Buffer) error) {
	b.t.Helper()
	x, w, y := c.Batch*c.C*c.H*c.W, c.Filters*c.Columns(), c.Batch*c.Filters*c.OutH*c.OutW
	n := [...][3]int{kernels.Forward: {y, x, w}, kernels.InputGradient: {x, y, w},
		kernels.FilterGradient: {w, x, y}}[c.Pass]
	dst, left, right := b.alloc(c.DType, n[0], 1), b.alloc(c.DType, n[1], 0),
		b.alloc(c.DType, n[2], 1)
	b.small(left)
	b.small(right)
	guarded := b.used
	scratch := b.alloc(backend.U8, need, 0)
	b.used = guarded // what is in the scratch is not compared
	b.run(name, dst,
		func() error { return by(c, dst.device, left.device, right.device, scratch.device) },
		func() error { return b.host.Convolve(c, dst.host, left.host, right.host) })
}

// testConvolutionTiles: every tile, with K whole and in parts, gives what others give: at the edges
// of images and of tiles, with strides, dilations and groups.
func testConvolutionTiles(t *testing.T, m machine) {
	b := newBench(t, m, 19)
	i := kernels.Images{Batch: 2, C: 6, H: 7, W: 9, OutH: 4, OutW: 3, KernelH: 3, KernelW: 2,
		PadH: 1, PadW: 0, StrideH: 2, StrideW: 3, DilationH: 1, DilationW: 2}
	some := []kernels.Convolution{{Images: i, Filters: 70}, {Images: i, Filters: 4, Groups: 2}}
	i.OutW, i.StrideW, i.DilationH, i.DilationW, i.OutH = 8, 1, 2, 1, 2
	some = append(some, kernels.Convolution{Images: i, Filters: 5})
	i = kernels.Images{Batch: 5, C: 9, H: 6, W: 8, OutH: 6, OutW: 8, KernelH: 3, KernelW: 3,
		PadH: 1, PadW: 1, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}
	some = append(some, kernels.Convolution{Images: i, Filters: 66})
	for _, d := range []backend.DType{backend.F32, backend.F64} {
		for _, tile := range convolveTiles[d] {
			for n, c := range some {
				for _, c.Pass = range tile.passes() {
					c.DType = d
					g := convolvingOf(c)
					g.tile = tile
					for _, g.part = range []int{g.k, 24} {
						g.parts = over(g.k, g.part)
						b.reset(uint64(n))
						name := fmt.Sprintf("%v of %+v in %s tiles, %d parts", c.Pass, c,
							tile.name, g.parts)
						b.convolveBy(c, g.scratch(d), name, func(c kernels.Convolution,
							dst, x, y, scratch backend.Buffer) error {
							return b.device.convolveBy(g, c, dst, x, y, scratch)
						})
					}
				}
			}
		}
	}
}

// What convolve.cu cannot index or launch is refused, and nothing panics.
func TestConvolutionsBeyondTheKernelsAreErrors(t *testing.T) {
	i := kernels.Images{Batch: 1, C: 1, H: 9, W: 9, OutH: 1, OutW: 1, KernelH: 1, KernelW: 1,
		StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}
	for name, test := range map[string]struct {
		want   error
		change func(c *kernels.Convolution)
	}{
		"no stride": {backend.ErrArgument, func(c *kernels.Convolution) { c.StrideW = 0 }},
		"a tensor":  {backend.ErrUnsupported, func(c *kernels.Convolution) { c.Batch = 1 << 31 }},
		"rows":      {backend.ErrUnsupported, func(c *kernels.Convolution) { c.OutH = 1 << 30 }},
		"a padding": {backend.ErrUnsupported, func(c *kernels.Convolution) { c.PadW = 1 << 31 }},
		"a grid": {backend.ErrUnsupported, func(c *kernels.Convolution) {
			c.C, c.Filters, c.Groups, c.StrideH, c.StrideW = 1<<14, 1<<14, 1<<14, 2, 2
		}},
	} {
		c := kernels.Convolution{Images: i, Filters: 1, Pass: kernels.InputGradient,
			DType: backend.F32}
		require.NoError(t, require.Err((Kernels{}).ConvolutionScratch(c)))
		test.change(&c)
		require.Fails(t, fmt.Sprintf("%s: error is", name),
			require.Err((Kernels{}).ConvolutionScratch(c)), test.want)
	}
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
	scratch, filters := device(backend.U8, 1<<43, 1<<20), 64*min(n, 1)
	i := kernels.Images{Batch: 64, C: 64, H: 1, W: 1, OutH: 1, OutW: 1, KernelH: 1, KernelW: 1,
		StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1}
	var errs []error
	for _, d := range []backend.DType{backend.F32, backend.F64} {
		x, w, y := device(d, 1<<40, i.Batch*i.C), device(d, 1<<41, filters*i.C),
			device(d, 1<<42, i.Batch*filters)
		c := kernels.Convolution{Images: i, Filters: filters, DType: d}
		errs = append(errs, k.Convolve(c, y, x, w, scratch))
		for _, tile := range convolveTiles[d] {
			for _, c.Pass = range tile.passes() {
				dst, second := y, w
				if c.Pass == kernels.FilterGradient {
					dst, second = w, y
				}
				g := convolvingOf(c)
				if g.tile, g.part, g.parts = tile, 32, 2; n > 0 {
					errs = append(errs, k.convolveBy(g, c, dst, x, second, scratch))
				}
			}
		}
	}
	return errors.Join(errs...)
}
