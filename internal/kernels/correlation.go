package kernels

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/workers"
)

// correlation computes a convolution by products of patches. Each pass moves a window over images
// with zeros around them:
//
//   - Forward: y = w patches(x);
//   - InputGradient: dx = flipped w patches(dy). With strides, pixels of dx that are a stride apart
//     see the same part of the window, so each such phase of dx is a separate convolution. With
//     dilations too, the pixels of dy are a stride apart instead, with zeros between them;
//   - FilterGradient: dw^T = the sum of patches(x) dy^T.
//
// The work is cut into units: a few small images, or some rows of places of a large one. If the
// images have many planes, a unit takes a block of these at a time. So patches fit into the
// second-level cache. (Im2col of whole batches, as in Caffe, goes through memory.)
type correlation[T float] struct {
	level simd.Level
	pool  *workers.Pool
	pass  Pass
	frame
	window

	batch, planes, h, w int      // of the images that the window moves over
	filters             int      // of the result, or of dy
	groups              int      // of planes and filters, of which this is one
	together, band      int      // images and rows of places of a unit
	block               int      // planes at a time
	perPart             int      // units of a part
	epilogue            Epilogue // of each unit
	src, dst            []T
	weights             []T // [filters, columns], or dy
	turned              []T // dy as [batch, places, filters], where several blocks read it
	to                  phase
}

// phase says which pixels of an image of h x w the results are.
type phase struct {
	frame
	h, w int
}

// frame is where the pixels of an image are among others.
type frame struct{ top, left, stepH, stepW int }

// window is what moves over a frame.
type window struct {
	kernelH, kernelW, dilationH, dilationW, strideH, strideW, outH, outW int
}

const (
	// patchesOfUnit bounds the patches of a unit, in elements: 256 KiB of f32.
	patchesOfUnit = 64 << 10
	// placesOfUnit bounds the places of a unit of several images: a product has reached good speed
	// by then.
	placesOfUnit = 256
	// placesOfTile is how many places a narrow tile of a product has. If the last tile has fewer,
	// the rest is wasted.
	placesOfTile = 16
	// flopsOfPart is the least work of a part: about 20 us.
	flopsOfPart = 2 << 20
	// flopsOfRow is the cost of copying what one pixel of the window shows of a row of places:
	// about 5 ns.
	flopsOfRow = 500
	// partialSums is how many sums of filters there are: the order of additions is the same for any
	// number of workers.
	partialSums = 16
	// weightsOfSum bounds the weights that get partial sums. The gradients of more weights are
	// divided among the workers by planes: for 128 images of 512 planes of 4 x 4 this takes 130 ms,
	// and partial sums 870.
	weightsOfSum = 64 << 10
	// A band of fewer than placesOfBand places is too small: if patches of all planes allow no
	// larger one, a product takes a block of the planes at a time.
	placesOfBand = 64
	// overwrite is how many elements CopyRows may write behind a row.
	overwrite = 8
)

// convolve computes a convolution.
func convolve[T float](pool *workers.Pool, level simd.Level, v *Convolution, dst, a, b []T) {
	c := correlation[T]{
		level: level, pool: pool, pass: v.Pass,
		window: window{v.KernelH, v.KernelW, v.DilationH, v.DilationW, v.StrideH, v.StrideW, v.OutH,
			v.OutW},
		frame: frame{v.PadH, v.PadW, 1, 1},
		batch: v.Batch, planes: v.C / v.Parts(), h: v.H, w: v.W, filters: v.Filters / v.Parts(),
		groups: v.Parts(), src: a, dst: dst, weights: b,
		to: phase{frame{0, 0, 1, 1}, v.OutH, v.OutW},
	}
	phased := false
	if v.Pass == InputGradient {
		c.frame = frame{(v.KernelH-1)*v.DilationH - v.PadH, (v.KernelW-1)*v.DilationW - v.PadW,
			v.StrideH, v.StrideW}
		c.strideH, c.strideW, c.outH, c.outW = 1, 1, v.H, v.W
		c.planes, c.h, c.w, c.filters = c.filters, v.OutH, v.OutW, c.planes
		c.to.h, c.to.w = v.H, v.W
		phased = v.StrideH*v.StrideW > 1 && v.DilationH*v.DilationW == 1
	}
	if len(dst) == 0 || len(a) == 0 || len(b) == 0 {
		clear(dst) // sums of nothing
		if v.Epilogue != nil {
			v.Epilogue.All()
		}
		return
	}
	if isDepthwise(v) {
		depthwise[T]{correlation: c}.run(a, b)
		if v.Epilogue != nil {
			v.Epilogue.All()
		}
		return
	}
	c.chooseUnits()
	if e := v.Epilogue; e != nil && v.Pass != FilterGradient && c.bands() == 1 && c.groups == 1 &&
		!phased && e.Divides(c.parts(), c.filters*c.outH*c.outW) {
		c.epilogue = e
	}
	if phased && (v.KernelH < v.StrideH || v.KernelW < v.StrideW) {
		clear(dst) // of pixels that no window sees
	}
	for group := range c.groups {
		c.group(v, group, phased, dst, a, b)
	}
	if v.Epilogue != nil && c.epilogue == nil {
		v.Epilogue.All()
	}
}

// group computes a group, of parts of all operands.
func (c correlation[T]) group(v *Convolution, group int, phased bool, dst, a, b []T) {
	c.src = a[group*c.planes*c.h*c.w:]
	weights := v.Columns() * v.Filters / c.groups
	switch results := group * c.filters * c.to.h * c.to.w; {
	case v.Pass == FilterGradient:
		c.dst, c.weights = dst[group*weights:][:weights], b[results:]
		c.sumFilters()
	case phased:
		c.dst, c.weights = dst[results:], b[group*weights:][:weights]
		for n := range v.StrideH * v.StrideW {
			c.inPhase(v, n/v.StrideW, n%v.StrideW)
		}
	default:
		c.dst, c.weights = dst[results:], b[group*weights:][:weights]
		if v.Pass == InputGradient {
			c.weights = c.flip(taps{v.KernelH, v.KernelW, frame{0, 0, 1, 1}})
		}
		workers.Run(c.pool, c.parts(), c)
	}
}

// sumFilters computes the gradient of filters.
func (c correlation[T]) sumFilters() {
	if c.blocks() > 1 {
		c.turned = workers.Scratch[T](c.pool, workers.Shared, c.batch*c.filters*c.outH*c.outW)
		workers.Run(c.pool, c.batch, turning[T]{c})
		workers.Run(c.pool, c.blocks(), c)
		return
	}
	parts, to := min(c.parts(), partialSums), c.dst
	c.perPart = (c.units() + parts - 1) / parts
	parts = c.parts()
	c.dst = workers.Scratch[T](c.pool, workers.Shared, parts*len(to))
	workers.Run(c.pool, parts, c)
	workers.Run(c.pool, c.filters, filterSum[T]{to, c.dst, c.columns(), c.filters, parts})
}

// turning makes turned of dy, an image at a time.
type turning[T float] struct{ correlation[T] }

// Run implements [workers.Task].
func (t *turning[T]) Run(image, _ int) {
	places := t.outH * t.outW
	simd.TransposeRows(t.level, t.turned[image*places*t.filters:],
		t.weights[image*t.groups*t.filters*places:], t.filters, places, t.filters, places)
}

// inPhase computes the gradient of the pixels of images that see pixels of the window from (h, w)
// on, in steps of the strides.
func (c correlation[T]) inPhase(v *Convolution, h, w int) {
	k := taps{ceil(v.KernelH-h, v.StrideH), ceil(v.KernelW-w, v.StrideW),
		frame{h, w, v.StrideH, v.StrideW}}
	c.to.frame = frame{modulo(h-v.PadH, v.StrideH), modulo(w-v.PadW, v.StrideW), v.StrideH,
		v.StrideW}
	c.outH, c.outW = ceil(v.H-c.to.top, v.StrideH), ceil(v.W-c.to.left, v.StrideW)
	if min(k.h, k.w, c.outH, c.outW) <= 0 {
		return
	}
	c.frame = frame{k.h - 1 - (c.to.top+v.PadH-h)/v.StrideH,
		k.w - 1 - (c.to.left+v.PadW-w)/v.StrideW, 1, 1}
	c.window = window{v.KernelH, v.KernelW, 1, 1, 1, 1, c.outH, c.outW}
	c.weights = c.flip(k)
	c.kernelH, c.kernelW = k.h, k.w
	c.chooseUnits()
	workers.Run(c.pool, c.parts(), c)
}

// modulo returns n modulo m, which is not negative.
func modulo(n, m int) int { return (n%m + m) % m }

// taps are pixels of a window: h x w of them.
type taps struct {
	h, w int
	frame
}

// flip returns the weights with which gradients of images are a convolution, [C, Filters, h, w] of
// taps: they are filters here, and planes.
func (c *correlation[T]) flip(k taps) []T {
	to := workers.Scratch[T](c.pool, workers.Shared, c.filters*c.planes*k.h*k.w)
	workers.Run(c.pool, c.filters, flipping[T]{c.weights, to, c.window, k, c.filters, c.planes})
	return to
}

// flipping makes the weights of a filter at a time.
type flipping[T float] struct {
	from, to []T
	window
	taps
	filters, planes int
}

// Run implements [workers.Task].
func (f *flipping[T]) Run(filter, _ int) {
	to := f.to[filter*f.planes*f.taps.h*f.taps.w:]
	for plane := range f.planes {
		from := f.from[(plane*f.filters+filter)*f.kernelH*f.kernelW:][:f.kernelH*f.kernelW]
		for y := f.taps.h - 1; y >= 0; y-- {
			row := from[(f.top+y*f.stepH)*f.kernelW+f.left:]
			for x := f.taps.w - 1; x >= 0; x-- {
				to[0], to = row[x*f.stepW], to[1:]
			}
		}
	}
}

// columns returns the number of elements of a patch.
func (c *correlation[T]) columns() int { return c.planes * c.kernelH * c.kernelW }

// bands returns the number of bands of an image, units that of all units, blocks that of blocks of
// planes.
func (c *correlation[T]) bands() int  { return ceil(c.outH, c.band) }
func (c *correlation[T]) units() int  { return ceil(c.batch, c.together) * c.bands() }
func (c *correlation[T]) blocks() int { return ceil(c.planes, c.block) }

// parts returns the number of parts of a group.
func (c *correlation[T]) parts() int { return ceil(c.units(), c.perPart) }

// chooseUnits chooses what a unit is, how many planes a block has, and how many units a part.
func (c *correlation[T]) chooseUnits() {
	places, pixels := c.outH*c.outW, c.kernelH*c.kernelW
	most, enough := patchesOfUnit/c.columns(), placesOfUnit
	c.together, c.band, c.block = 1, c.outH, c.planes
	inBlock := max(patchesOfUnit/placesOfUnit/pixels, 1)
	switch {
	case c.pass == FilterGradient && c.columns()*c.filters > weightsOfSum:
		c.block = evenly(c.planes, min(inBlock, ceil(c.planes, enoughParts)), 1)
	case c.pass != FilterGradient && most < placesOfBand:
		c.block = evenly(c.planes, inBlock, 1)
		enough = min(enough, ceil(c.batch*places, enoughParts))
	}
	most = patchesOfUnit / (c.block * pixels)
	switch {
	case places > most:
		c.band = max(most/c.outW, 1)
	case c.blocks() > 1: // what all blocks read again counts
		c.together = max(min(c.batch, min(enough, most)/places), 1)
	default:
		for n := 1; n <= c.batch && n*places <= min(enough, most); n++ {
			if filled(n*places) > filled(c.together*places)*1.03 {
				c.together = n
			}
		}
	}
	flops := c.columns() * c.together * c.band * (2*c.outW*c.filters + flopsOfRow)
	c.perPart = flopsOfPart/flops + 1
}

// filled returns which share of the columns of a product's tiles is used.
func filled(places int) float64 {
	return float64(places) / float64((places+placesOfTile-1)/placesOfTile*placesOfTile)
}

// Run implements [workers.Task]: a part is some units, or a block of planes of all of them.
func (c *correlation[T]) Run(part, worker int) {
	u := unit[T]{correlation: c}
	u.reserve(worker)
	if c.turned != nil {
		u.sumBlock(part)
		return
	}
	first := part * c.perPart
	for n := first; n < min(first+c.perPart, c.units()); n++ {
		u.is(n)
		if c.pass == FilterGradient {
			u.cutOut(0)
			u.addFilters(part, n == first)
		} else {
			u.filter()
		}
		if c.epilogue != nil {
			size := c.filters * c.outH * c.outW
			c.epilogue.Elements(u.image*size, (u.image+u.images)*size, worker)
		}
	}
}

// unit is work of one product, or of one for each block.
type unit[T float] struct {
	*correlation[T]
	image, images int // which
	row, rows     int // of places
	width         int // how many places: columns of patches
	plane, depth  int // of the block: the first, and how many

	framed  []T // images among zeros, as far as the rows of places see them
	patches []T // [columns of the block, width]
	other   []T // results that are spread later, or dy^T
	strip   []T // rows of weights that compete for lines of a cache
}

// is makes u a unit.
func (u *unit[T]) is(n int) {
	u.image = n / u.bands() * u.together
	u.images = min(u.together, u.batch-u.image)
	u.row = n % u.bands() * u.band
	u.rows = min(u.band, u.outH-u.row)
	u.width = u.images * u.rows * u.outW
}

// pixels returns how many pixels a window has.
func (w *window) pixels() int { return w.kernelH * w.kernelW }

// reserve takes memory for the largest unit.
func (u *unit[T]) reserve(worker int) {
	c := u.correlation
	width := c.together * c.band * c.outW
	framed := c.together * c.block * c.frameH(c.band) * c.frameW()
	patches := c.block*c.pixels()*width + overwrite
	other, strip := 0, simd.TileRows(c.level)*(max(c.block*c.pixels(), width)+padding)
	switch {
	case c.turned != nil:
		other = c.block * c.pixels() * c.filters
	case c.spreads() || c.pass == FilterGradient:
		other = c.filters * width
	}
	all := workers.Scratch[T](c.pool, worker, framed+patches+other+strip)
	u.framed, all = all[:framed], all[framed:]
	u.patches, all = all[:patches], all[patches:]
	u.other, u.strip = all[:other], all[other:]
}

// spreads reports whether the results of a unit lie differently from the results of a product.
func (c *correlation[T]) spreads() bool { return c.together > 1 || c.to.stepH*c.to.stepW > 1 }

// frameH and frameW return how many rows and columns some rows of places see.
func (w *window) frameH(rows int) int { return (rows-1)*w.strideH + (w.kernelH-1)*w.dilationH + 1 }
func (w *window) frameW() int {
	return (w.outW-1)*w.strideW + (w.kernelW-1)*w.dilationW + 1
}

// lay puts the images among zeros.
func (u *unit[T]) lay() {
	height, width := u.frameH(u.rows), u.frameW()
	clear(u.framed)
	for n := range u.images * u.depth {
		at := (u.image+n/u.depth)*u.groups*u.planes + u.plane + n%u.depth
		from, to := u.src[at*u.h*u.w:][:u.h*u.w], u.framed[n*height*width:][:height*width]
		for y := range u.h {
			if at := y*u.stepH + u.top - u.row*u.strideH; at >= 0 && at < height {
				u.layRow(to[at*width:][:width], from[y*u.w:][:u.w])
			}
		}
	}
}

// layRow puts a row of pixels among zeros.
func (c *correlation[T]) layRow(to, from []T) {
	if c.stepW == 1 && c.left >= 0 {
		if c.left < len(to) {
			copy(to[c.left:], from)
		}
		return
	}
	for x, pixel := range from {
		if at := x*c.stepW + c.left; at >= 0 && at < len(to) {
			to[at] = pixel
		}
	}
}

// cutOut makes the patches of the block from a plane on: a row for each pixel of the window, with
// what it shows at all places.
func (u *unit[T]) cutOut(plane int) {
	u.plane, u.depth = plane, min(u.block, u.planes-plane)
	u.lay()
	height, width := u.frameH(u.rows), u.frameW()
	to := u.patches
	for plane := range u.depth {
		for k := range u.pixels() {
			for image := range u.images {
				first := (image*u.depth+plane)*height*width + k/u.kernelW*u.dilationH*width +
					k%u.kernelW*u.dilationW
				u.show(to, u.framed[first:], u.strideH*width)
				to = to[u.rows*u.outW:]
			}
		}
	}
}

// show copies what one pixel of the window shows of an image whose rows are pitch apart. It may
// write behind that.
func (u *unit[T]) show(to, from []T, pitch int) {
	if u.strideW == 1 && u.outW <= simd.CopyWidth[T]() {
		simd.CopyRows(u.level, to, from, u.outW, pitch, u.rows, u.outW)
		return
	}
	for row := range u.rows {
		line := to[row*u.outW:][:u.outW]
		if u.strideW == 1 {
			copy(line, from[row*pitch:])
			continue
		}
		for i := range line {
			line[i] = from[row*pitch+i*u.strideW]
		}
	}
}

// filter computes the results of the unit.
func (u *unit[T]) filter() {
	p := simd.Product[T]{
		M: u.filters, N: u.width, Alpha: 1, ARow: u.columns(), AStep: 1, B: backend.Of(u.patches),
		BStep: u.width, C: u.other, CPitch: u.width,
	}
	if !u.spreads() {
		places := u.outH * u.outW
		p.C, p.CPitch = u.dst[u.image*u.groups*u.filters*places+u.row*u.outW:], places
	}
	for plane := 0; plane < u.planes; plane += u.block {
		u.cutOut(plane)
		p.A, p.K = u.weights[plane*u.pixels():], u.depth*u.pixels()
		u.multiply(p)
		p.Beta = 1
	}
	if u.spreads() {
		u.spread()
	}
}

// spread puts results where they belong.
func (u *unit[T]) spread() {
	results := u.other
	for image := range u.images {
		for f := range u.filters {
			plane := (u.image+image)*u.groups*u.filters + f
			to := u.dst[plane*u.to.h*u.to.w:][:u.to.h*u.to.w]
			from := results[f*u.width+image*u.rows*u.outW:][:u.rows*u.outW]
			if u.to.stepH*u.to.stepW == 1 {
				copy(to[u.row*u.outW:], from)
				continue
			}
			for row := range u.rows {
				at := to[((u.row+row)*u.to.stepH+u.to.top)*u.to.w+u.to.left:]
				for i, x := range from[row*u.outW:][:u.outW] {
					at[i*u.to.stepW] = x
				}
			}
		}
	}
}

// multiply computes a product whose A may lie badly for caches: then strips of it are copied.
func (u *unit[T]) multiply(p simd.Product[T]) {
	if readable(Matrix{Pitch: p.ARow}, p.M, p.K, sizeOf[T]()) {
		simd.Multiply(u.level, &p)
		return
	}
	whole := p
	for row := 0; row < whole.M; row += p.M {
		p.M, p.A, p.ARow = min(simd.TileRows(u.level), whole.M-row), u.strip, p.K+padding
		for i := range p.M {
			copy(u.strip[i*p.ARow:][:p.K], whole.A[(row+i)*whole.ARow:])
		}
		p.C = whole.C[row*p.CPitch:]
		simd.Multiply(u.level, &p)
	}
}

// addFilters adds the gradient of filters to the sum of a part, [columns, filters].
func (u *unit[T]) addFilters(part int, first bool) {
	columns, places := u.columns(), u.outH*u.outW
	for image := range u.images {
		from := u.weights[(u.image+image)*u.groups*u.filters*places+u.row*u.outW:]
		simd.TransposeRows(u.level, u.other[image*u.rows*u.outW*u.filters:], from, u.filters,
			places, u.filters, u.rows*u.outW)
	}
	u.addBlock(u.other, u.dst[part*columns*u.filters:], first)
}

// addBlock adds patches dy^T to sums, or writes it.
func (u *unit[T]) addBlock(turned, sums []T, first bool) {
	p := simd.Product[T]{
		M: u.depth * u.pixels(), N: u.filters, K: u.width, Alpha: 1, Beta: 1,
		A: u.patches, ARow: u.width, AStep: 1, B: backend.Of(turned), BStep: u.filters,
		C: sums, CPitch: u.filters,
	}
	if first {
		p.Beta = 0
	}
	u.multiply(p)
}

// sumBlock computes the gradient of filters for a block of planes.
func (u *unit[T]) sumBlock(block int) {
	plane := block * u.block
	for n := range u.units() {
		u.is(n)
		u.cutOut(plane)
		from := (u.image*u.outH + u.row) * u.outW * u.filters
		u.addBlock(u.turned[from:], u.other, n == 0)
	}
	simd.TransposeRows(u.level, u.dst[plane*u.pixels():], u.other, u.columns(), u.filters,
		u.depth*u.pixels(), u.filters)
}

// filterSum adds up the sums of all parts, one filter at a time.
type filterSum[T float] struct {
	dst, sums               []T // [filters, columns], [parts, columns, filters]
	columns, filters, parts int
}

// Run implements [workers.Task].
func (s *filterSum[T]) Run(filter, _ int) {
	for k := range s.columns {
		var sum T
		for part := range s.parts {
			sum += s.sums[(part*s.columns+k)*s.filters+filter]
		}
		s.dst[filter*s.columns+k] = sum
	}
}
