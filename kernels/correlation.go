package kernels

import (
	"github.com/euryale-ml/euryale/internal/workers"
	"github.com/euryale-ml/euryale/kernels/internal/simd"
)

// correlation computes a convolution by products of patches. Each pass moves a window over images
// with zeros around them:
//
//   - Forward: y = w patches(x);
//   - InputGradient: dx = flipped w patches(dy), where the pixels of dy are as far apart as the
//     strides, with zeros between them, and the window goes in steps of 1;
//   - FilterGradient: dw^T = the sum of patches(x) dy^T.
//
// The work is cut into units: a few small images, or some rows of places of a large one, so that
// their patches fit into the second-level cache. (Im2col of whole batches, as in Caffe, goes
// through memory.)
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
	perPart             int      // units of a part
	epilogue            Epilogue // of each unit
	src, dst            []T
	weights             []T // [filters, columns], or dy
}

// frame is where the pixels of an image are among the zeros.
type frame struct{ top, left, stepH, stepW int }

// window is what moves over a frame.
type window struct {
	kernelH, kernelW, dilationH, dilationW, strideH, strideW, outH, outW int
}

const (
	// patchesOfUnit bounds the patches of a unit, in elements: 256 KiB of f32.
	patchesOfUnit = 64 << 10
	// placesOfUnit bounds the places of a unit of several images: a product has good speed by then.
	placesOfUnit = 256
	// placesOfTile is how many places a narrow tile of a product has. Those of the last one are
	// wasted where there are fewer.
	placesOfTile = 16
	// flopsOfPart is how much work a part has at least: about 20 us.
	flopsOfPart = 2 << 20
	// flopsOfRow is what it costs to copy what one pixel of the window shows of a row of places:
	// about 5 ns.
	flopsOfRow = 500
	// partialSums is how many sums of filters there are: the order of additions is the same for any
	// number of workers.
	partialSums = 16
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
	}
	if v.Pass == InputGradient {
		c.frame = frame{(v.KernelH-1)*v.DilationH - v.PadH, (v.KernelW-1)*v.DilationW - v.PadW,
			v.StrideH, v.StrideW}
		c.strideH, c.strideW, c.outH, c.outW = 1, 1, v.H, v.W
		c.planes, c.h, c.w, c.filters = c.filters, v.OutH, v.OutW, c.planes
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
	parts := c.parts()
	if e := v.Epilogue; e != nil && v.Pass != FilterGradient && c.bands() == 1 && c.groups == 1 &&
		e.Divides(parts, c.filters*c.outH*c.outW) {
		c.epilogue = e
	}
	for group := range c.groups {
		c.group(v, group, dst, a, b)
	}
	if v.Epilogue != nil && c.epilogue == nil {
		v.Epilogue.All()
	}
}

// group computes a group, of parts of all operands.
func (c correlation[T]) group(v *Convolution, group int, dst, a, b []T) {
	c.src = a[group*c.planes*c.h*c.w:]
	weights := c.filters * c.columns()
	results := group * c.filters * c.outH * c.outW
	if v.Pass != FilterGradient {
		c.dst, c.weights = dst[results:], b[group*weights:][:weights]
		if v.Pass == InputGradient {
			c.weights = c.flipped(c.weights)
		}
		workers.Run(c.pool, c.parts(), c)
		return
	}
	dst, c.weights = dst[group*weights:], b[results:]
	parts := min(c.parts(), partialSums)
	c.perPart = (c.units() + parts - 1) / parts
	parts = c.parts()
	c.dst = workers.Scratch[T](c.pool, workers.Shared, parts*weights)
	workers.Run(c.pool, parts, c)
	workers.Run(c.pool, c.filters, filterSum[T]{dst, c.dst, c.columns(), c.filters, parts})
}

// flipped returns the weights with which gradients of images are a convolution, [C, Filters,
// KernelH, KernelW]: they are filters here, and planes.
func (c *correlation[T]) flipped(weights []T) []T {
	to, window := workers.Scratch[T](c.pool, workers.Shared, len(weights)), c.kernelH*c.kernelW
	for f := range c.planes {
		for p := range c.filters {
			from, turned := weights[(f*c.filters+p)*window:][:window],
				to[(p*c.planes+f)*window:][:window]
			for k, x := range from {
				turned[window-1-k] = x
			}
		}
	}
	return to
}

// columns returns the number of elements of a patch.
func (c *correlation[T]) columns() int { return c.planes * c.kernelH * c.kernelW }

// bands returns the number of bands of an image, units that of all units.
func (c *correlation[T]) bands() int { return (c.outH + c.band - 1) / c.band }
func (c *correlation[T]) units() int { return (c.batch + c.together - 1) / c.together * c.bands() }

// parts returns the number of parts of a group.
func (c *correlation[T]) parts() int { return (c.units() + c.perPart - 1) / c.perPart }

// chooseUnits chooses what a unit is, and how many of them a part.
func (c *correlation[T]) chooseUnits() {
	places := c.outH * c.outW
	c.together, c.band = 1, c.outH
	if most := patchesOfUnit / c.columns(); places > most {
		c.band = max(most/c.outW, 1)
	} else {
		for n := 1; n <= c.batch && n*places <= min(placesOfUnit, most); n++ {
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

// Run implements [workers.Task].
func (c *correlation[T]) Run(part, worker int) {
	u := unit[T]{correlation: c}
	u.reserve(worker)
	first := part * c.perPart
	for n := first; n < min(first+c.perPart, c.units()); n++ {
		u.image = n / c.bands() * c.together
		u.images = min(c.together, c.batch-u.image)
		u.row = n % c.bands() * c.band
		u.rows = min(c.band, c.outH-u.row)
		u.width = u.images * u.rows * c.outW
		u.lay()
		u.cutOut()
		if c.pass == FilterGradient {
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

// unit is work of one product.
type unit[T float] struct {
	*correlation[T]
	image, images int // which
	row, rows     int // of places
	width         int // how many places: columns of patches

	framed  []T // images among zeros, as far as the rows of places see them
	patches []T // [columns, width]
	other   []T // results of several images, or dy^T
}

// reserve takes memory for the largest unit.
func (u *unit[T]) reserve(worker int) {
	c := u.correlation
	framed := c.together * c.planes * c.frameH(c.band) * c.frameW()
	patches := c.columns()*c.together*c.band*c.outW + overwrite
	other := 0
	if c.together > 1 || c.pass == FilterGradient {
		other = c.filters * c.together * c.band * c.outW
	}
	all := workers.Scratch[T](c.pool, worker, framed+patches+other)
	u.framed, u.patches, u.other = all[:framed], all[framed:framed+patches], all[framed+patches:]
}

// frameH and frameW return how many rows and columns some rows of places see.
func (w *window) frameH(rows int) int { return (rows-1)*w.strideH + (w.kernelH-1)*w.dilationH + 1 }
func (w *window) frameW() int {
	return (w.outW-1)*w.strideW + (w.kernelW-1)*w.dilationW + 1
}

// lay puts the images among zeros.
func (u *unit[T]) lay() {
	height, width := u.frameH(u.rows), u.frameW()
	clear(u.framed)
	for plane := range u.images * u.planes {
		at := (u.image+plane/u.planes)*u.groups*u.planes + plane%u.planes
		from, to := u.src[at*u.h*u.w:][:u.h*u.w], u.framed[plane*height*width:][:height*width]
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

// cutOut makes the patches: a row for each pixel of the window, with what it shows at all places.
func (u *unit[T]) cutOut() {
	height, width := u.frameH(u.rows), u.frameW()
	to := u.patches
	for plane := range u.planes {
		for k := range u.kernelH * u.kernelW {
			for image := range u.images {
				first := (image*u.planes+plane)*height*width + k/u.kernelW*u.dilationH*width +
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
	columns, places := u.columns(), u.outH*u.outW
	p := simd.Product[T]{
		M: u.filters, N: u.width, K: columns, Alpha: 1,
		A: u.weights, ARow: columns, AStep: 1, B: u.patches, BStep: u.width,
	}
	if u.images == 1 {
		p.C, p.CPitch = u.dst[u.image*u.groups*u.filters*places+u.row*u.outW:], places
		simd.Multiply(u.level, &p)
		return
	}
	p.C, p.CPitch = u.other, u.width
	simd.Multiply(u.level, &p)
	for image := range u.images {
		to := u.dst[(u.image+image)*u.groups*u.filters*places:]
		for f := range u.filters {
			copy(to[f*places:][:places], u.other[f*u.width+image*places:])
		}
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
	p := simd.Product[T]{
		M: columns, N: u.filters, K: u.width, Alpha: 1, Beta: 1,
		A: u.patches, ARow: u.width, AStep: 1, B: u.other, BStep: u.filters,
		C: u.dst[part*columns*u.filters:], CPitch: u.filters,
	}
	if first {
		p.Beta = 0
	}
	simd.Multiply(u.level, &p)
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
