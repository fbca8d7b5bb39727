package cuda

import (
	"errors"
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// convolveTile is a tile of convolve.cu.
type convolveTile struct {
	name          string
	rows, columns int
}

// The tiles of convolve.cu, by dtype, the largest first, and one for results of few columns.
var convolveTiles = map[backend.DType][]convolveTile{
	backend.F32: {{"large", 128, 128}, {"medium", 64, 128}, {"small", 32, 128}},
	backend.F64: {{"medium", 64, 64}, {"small", 32, 64}},
}

var convolveNarrow = convolveTile{"narrow", 32, 32}

// convolveBlocks is how many blocks run at a time: three on each multiprocessor of an H100 or H200.
const convolveBlocks = 396

// convolveDepth is how far a step of convolve.cu goes along K.
const convolveDepth = 8

// convolveSumWidth is how many elements a block of convolvesum adds up at a time.
const convolveSumWidth = 32

// convolving is how a convolution is launched: as a product of matrices M x K and K x N.
type convolving struct {
	m, n, k int
	groups  int // each of such a product
	tile    convolveTile
	part    int // of K, that one block adds up
	parts   int
}

// convolvingOf chooses tile and parts, of sizes alone: the same ones on every device, so that the
// bits are the same.
func convolvingOf(c kernels.Convolution) convolving {
	groups, taps := c.Parts(), c.KernelH*c.KernelW
	channels, filters := c.C/groups, c.Filters/groups
	g := convolving{m: filters, n: c.Batch * c.OutH * c.OutW, k: channels * taps}
	switch c.Pass {
	case kernels.InputGradient:
		g = convolving{m: channels, n: c.Batch * c.H * c.W, k: filters * taps}
	case kernels.FilterGradient:
		g = convolving{m: filters, n: channels * taps, k: c.Batch * c.OutH * c.OutW}
	}
	g.groups = groups
	tiles := convolveTiles[c.DType]
	for _, g.tile = range tiles {
		half := g.tile.rows / 2
		if g.m > half && (g.tiles() >= 2*enoughTiles || g.tile.rows <= 64) {
			break
		}
	}
	if g.n <= convolveNarrow.columns && c.DType == backend.F32 {
		g.tile = convolveNarrow
	}
	g.part, g.parts = g.k, 1
	if c.Pass == kernels.FilterGradient {
		g.divide()
	}
	return g
}

// tiles returns how many tiles there are, of all groups.
func (g *convolving) tiles() int {
	return over(g.m, g.tile.rows) * over(g.n, g.tile.columns) * g.groups
}

// divide cuts K into parts, so that there are as many blocks as run at a time. A part has at least
// 32 steps, which pay for writing it and adding it up.
func (g *convolving) divide() {
	most := max(convolveBlocks/max(g.tiles(), 1), 1)
	g.part = max(over(over(g.k, most), convolveDepth), 32) * convolveDepth
	g.parts = max(over(g.k, g.part), 1)
}

// ConvolutionScratch returns how many bytes of scratch [Kernels.Convolve] needs: for the parts of
// gradients by filters.
//
// Errors: ErrUnsupported for tensors of 2^31 elements and more.
func (k Kernels) ConvolutionScratch(c kernels.Convolution) (int, error) {
	if c.DType == backend.BF16 {
		c.DType = backend.F32
		n, err := k.ConvolutionScratch(c)
		for _, m := range operands(c) {
			n += roomFor(m * c.DType.Size())
		}
		return n, err
	}
	g := convolvingOf(c)
	if most := math.MaxInt32; c.Batch*c.C*c.H*c.W > most ||
		c.Batch*c.Filters*c.OutH*c.OutW > most || c.Filters*c.Columns() > most {
		return 0, fmt.Errorf("%w: %v of %+v: a tensor has more than 2^31 elements",
			backend.ErrUnsupported, c.Pass, c.Images)
	}
	if g.parts == 1 {
		return 0, nil
	}
	return g.parts * g.groups * g.m * g.n * c.DType.Size(), nil
}

// operands returns how many elements images, filters and results have.
func operands(c kernels.Convolution) [3]int {
	return [3]int{c.Batch * c.C * c.H * c.W, c.Filters * c.Columns(),
		c.Batch * c.Filters * c.OutH * c.OutW}
}

// roomFor rounds a number of bytes up to where another operand may begin.
func roomFor(n int) int { return over(n, 256) * 256 }

// Convolve has the meaning of [kernels.Host.Convolve] with fused multiply-adds. The patches are
// never in memory. Those of bf16 are computed of copies in f32. scratch has the bytes that
// [Kernels.ConvolutionScratch] says.
//
// Errors: those of [kernels.Check] and of ConvolutionScratch; ErrArgument if scratch is too small.
func (k Kernels) Convolve(c kernels.Convolution, dst, a, b, scratch backend.Buffer) error {
	if err := check.Convolve(c, dst, a, b); err != nil || dst.Len() == 0 {
		return err
	}
	need, err := k.ConvolutionScratch(c)
	if err != nil {
		return err
	}
	if scratch.NBytes() < need {
		return fmt.Errorf("%w: %v: %d bytes of scratch, want %d", backend.ErrArgument, c.Pass,
			scratch.NBytes(), need)
	}
	if c.ChannelsLast {
		return fmt.Errorf("%w: %v with channels last", backend.ErrUnsupported, c.Pass)
	}
	if c.DType == backend.BF16 {
		return k.convolveWide(c, dst, a, b, scratch)
	}
	g, to := convolvingOf(c), dst
	if g.parts > 1 {
		to = scratch.As(backend.U8).Slice(0, need).As(c.DType)
	}
	if err := k.launchConvolve(c, g, to, a, b); err != nil || g.parts == 1 {
		return err
	}
	sum := Launch{Entry: Entry{Verb: "convolvesum", Type: c.DType.String()},
		Block: Size{threads, 1}}
	sum.Grid = Size{blocks(dst.Len(), convolveSumWidth), 1}
	sum.pass(word(dst), word(to), uint64(dst.Len()), uint64(g.parts))
	return k.launcher.Launch(sum)
}

// convolveWide computes a convolution of bf16: of copies in f32, to one that is rounded.
func (k Kernels) convolveWide(c kernels.Convolution, dst, a, b, scratch backend.Buffer) error {
	c.DType = backend.F32
	rest := scratch.As(backend.U8)
	wide := func(n int) backend.Buffer {
		b := rest.Slice(0, 4*n).As(backend.F32)
		rest = rest.Slice(roomFor(4*n), rest.Len())
		return b
	}
	y, x, w := wide(dst.Len()), wide(a.Len()), wide(b.Len())
	return errors.Join(k.Cast(x, a), k.Cast(w, b), k.Convolve(c, y, x, w, rest), k.Cast(dst, y))
}

func (k Kernels) launchConvolve(c kernels.Convolution, g convolving, dst, a,
	b backend.Buffer) error {
	verb, left, image := "convolve", b, a // the filters, and what is looked at
	if c.Pass == kernels.FilterGradient {
		verb = "convolvefilters"
	}
	call := Launch{Entry: Entry{Verb: verb, Op: g.tile.name, Type: c.DType.String()},
		Block: Size{threads, 1}}
	call.Grid = Size{uint32(g.tiles() / g.groups), uint32(g.parts * g.groups)}
	call.pass(word(dst), word(left), word(image), uint64(c.Pass), uint64(g.part))
	for _, n := range []int{c.Batch, c.C, c.Filters, c.H, c.W, c.OutH, c.OutW, c.KernelH, c.KernelW,
		c.PadH, c.PadW, c.StrideH, c.StrideW, c.DilationH, c.DilationW, g.groups} {
		call.pass(uint64(n))
	}
	return k.launcher.Launch(call)
}
