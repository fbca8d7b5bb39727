package cuda

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// convolveTile is a tile of convolve.cu.
type convolveTile struct {
	name          string
	rows, columns int
	speed         float64 // of sums, by that of the medium tile
}

// passes returns what it is for: a wide one of gradients by filters would take too many registers.
func (t convolveTile) passes() []kernels.Pass {
	all := []kernels.Pass{kernels.Forward, kernels.InputGradient, kernels.FilterGradient}
	if t.name == "wide" {
		return all[:2]
	}
	return all
}

// The tiles of convolve.cu, by dtype. Speeds were measured with 64 images of 256x28x28 on an H100,
// where the medium tile of f32 has 34 TFLOP/s.
var convolveTiles = map[backend.DType][]convolveTile{
	backend.F32: {{"large", 128, 128, 1.27}, {"wide", 64, 256, 1.18}, {"medium", 64, 128, 1},
		{"small", 32, 128, 0.79}, {"narrow", 32, 32, 0.35}},
	backend.F64: {{"medium", 64, 64, 0.5}},
}

// What a launch costs on an H100: in multiply-adds of one multiprocessor by the medium tile of f32.
const (
	convolveMultiprocessors = 132
	// convolveAlone is how fast a multiprocessor is that has one block alone.
	convolveAlone = 0.85
	// convolveAround is how much of K a block could do while it begins and ends.
	convolveAround = 32
	// A launch of convolvesum, and each byte that it reads or writes.
	convolveSum, convolveSumByte = 400e3, 0.05
)

// convolveDepth is how far a step of convolve.cu goes along K.
const convolveDepth = 8

// Of so many parts, or more, a block of convolvesum adds up so few elements at a time.
const convolveSumParts, convolveSumWidth = 16, 32

// convolving is how a convolution is launched: as a product of matrices M x K and K x N.
type convolving struct {
	m, n, k int
	groups  int     // each of such a product
	rests   int     // each of as many, of K at most: by what strides leave of pixels
	share   float64 // of k, on average of the rests
	whole   int     // elements of the result
	tile    convolveTile
	part    int // of K, that one block adds up
	parts   int
}

// convolvingOf chooses the tile and the parts that take least time on an H100: of sizes alone, and
// so the same ones on every device, so that the bits are the same.
func convolvingOf(c kernels.Convolution) convolving {
	groups, taps := c.Parts(), c.KernelH*c.KernelW
	channels, filters := c.C/groups, c.Filters/groups
	g := convolving{m: filters, n: c.Batch * c.OutH * c.OutW, k: channels * taps, rests: 1,
		share: 1, groups: groups, whole: c.Batch * c.Filters * c.OutH * c.OutW}
	switch c.Pass {
	case kernels.InputGradient:
		g.m, g.n = channels, c.Batch*over(c.H, c.StrideH)*over(c.W, c.StrideW)
		g.k = filters * reach(c.KernelH, c.StrideH, c.DilationH) *
			reach(c.KernelW, c.StrideW, c.DilationW)
		g.rests, g.whole = c.StrideH*c.StrideW, c.Batch*c.C*c.H*c.W
		g.share = float64(filters*taps) / float64(max(g.rests*g.k, 1))
	case kernels.FilterGradient:
		g.n, g.k, g.whole = channels*taps, c.Batch*c.OutH*c.OutW, c.Filters*c.Columns()
	}
	best, least := g, math.Inf(1)
	for _, tile := range convolveTiles[c.DType] {
		if !slices.Contains(tile.passes(), c.Pass) {
			continue
		}
		for blocks := range 8 { // of each multiprocessor; 0: K is whole
			g.divide(tile, blocks)
			if cost := g.cost(c.DType); cost < least {
				best, least = g, cost
			}
		}
	}
	return best
}

// reach returns how many of the taps of a row or a column reach a pixel at most.
func reach(taps, stride, dilation int) int {
	a, b := stride, dilation
	for b > 0 {
		a, b = b, a%b
	}
	return over(taps, stride/a)
}

// tiles returns how many tiles there are, of all groups and rests.
func (g *convolving) tiles() int {
	return over(g.m, g.tile.rows) * over(g.n, g.tile.columns) * g.groups * g.rests
}

// divide takes a tile, and cuts K into parts, so that a multiprocessor of an H100 has so many
// blocks; 0 leaves it whole.
func (g *convolving) divide(tile convolveTile, blocks int) {
	g.tile = tile
	most := min(blocks*convolveMultiprocessors/max(g.tiles(), 1),
		(maxBlocks-1)/g.groups/g.rests)
	most = max(most, 1)
	g.part = max(over(over(g.k, most), convolveDepth), 1) * convolveDepth
	g.parts = max(over(g.k, g.part), 1)
}

// cost returns about how long it takes: in multiply-adds of one multiprocessor.
func (g *convolving) cost(d backend.DType) float64 {
	blocks := over(g.tiles()*g.parts, convolveMultiprocessors) // of a multiprocessor
	along := float64(g.part)*g.share + convolveAround
	cost := float64(blocks*g.tile.rows*g.tile.columns) * along / g.tile.speed
	if blocks == 1 {
		cost /= convolveAlone
	}
	if g.parts > 1 {
		cost += convolveSum + convolveSumByte*float64((g.parts+1)*g.whole*d.Size())
	}
	return cost
}

// ConvolutionScratch returns how many bytes of scratch [Kernels.Convolve] needs: 58 MiB at most for
// parts, and those of copies of bf16.
//
// Errors: ErrArgument for strides below 1; ErrUnsupported for tensors of 2^31 elements and more,
// for places 2^30 rows or columns apart, and for more groups and strides than a grid has blocks.
func (k Kernels) ConvolutionScratch(c kernels.Convolution) (int, error) {
	_, need, err := convolvingIn(c)
	return need, err
}

// convolvingIn chooses how to launch a convolution, of copies in f32 if it is of bf16, and says how
// many bytes of scratch it needs.
func convolvingIn(c kernels.Convolution) (g convolving, need int, err error) {
	if c.DType == backend.BF16 {
		c.DType = backend.F32
		g, need, err = convolvingIn(c)
		for _, m := range operands(c) {
			need += roomFor(m * c.DType.Size())
		}
		return g, need, err
	}
	if min(c.StrideH, c.StrideW) < 1 {
		return g, 0, fmt.Errorf("%w: %v of %+v: strides are at least 1", backend.ErrArgument,
			c.Pass, c.Images)
	}
	g = convolvingOf(c)
	if why := g.limit(c); why != "" {
		return g, 0, fmt.Errorf("%w: %v of %+v: %s", backend.ErrUnsupported, c.Pass, c.Images, why)
	}
	return g, g.scratch(c.DType), nil
}

// limit returns why convolve.cu cannot compute it, "" if it can: its indices have 32 bits, and the
// y axis of a grid 16.
func (g *convolving) limit(c kernels.Convolution) string {
	height := c.H + c.PadH + c.OutH*c.StrideH + c.KernelH*c.DilationH
	width := c.W + c.PadW + c.OutW*c.StrideW + c.KernelW*c.DilationW
	all := operands(c)
	switch {
	case slices.Max(all[:]) > math.MaxInt32:
		return "a tensor has more than 2^31 elements"
	case max(height, width) >= 1<<30:
		return "places are 2^30 rows or columns apart"
	case g.groups*g.rests >= maxBlocks:
		return fmt.Sprintf("%d groups, each of %d by the strides", g.groups, g.rests)
	}
	return ""
}

// scratch returns how many bytes its parts take.
func (g *convolving) scratch(d backend.DType) int {
	if g.parts == 1 {
		return 0
	}
	return g.parts * g.whole * d.Size()
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
	g, need, err := convolvingIn(c)
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
	return k.convolveBy(g, c, dst, a, b, scratch)
}

// convolveBy convolves in the tiles and parts of g.
func (k Kernels) convolveBy(g convolving, c kernels.Convolution, dst, a, b,
	scratch backend.Buffer) error {
	to := dst
	if g.parts > 1 {
		to = scratch.As(backend.U8).Slice(0, g.scratch(c.DType)).As(c.DType)
	}
	if err := k.launchConvolve(c, g, to, a, b); err != nil || g.parts == 1 {
		return err
	}
	sum := Launch{Entry: Entry{Verb: "convolvesum", Type: c.DType.String()},
		Block: Size{threads, 1}}
	width := threads
	if g.parts >= convolveSumParts {
		width = convolveSumWidth
	}
	sum.Grid = Size{blocks(dst.Len(), width), 1}
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
	call.Grid = Size{uint32(g.tiles() / g.groups / g.rests), uint32(g.parts * g.groups * g.rests)}
	call.pass(word(dst), word(left), word(image), uint64(c.Pass), uint64(g.part))
	for _, n := range []int{c.Batch, c.C, c.Filters, c.H, c.W, c.OutH, c.OutW, c.KernelH, c.KernelW,
		c.PadH, c.PadW, c.StrideH, c.StrideW, c.DilationH, c.DilationW, g.groups} {
		call.pass(uint64(n))
	}
	return k.launcher.Launch(call)
}
