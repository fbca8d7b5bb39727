package kernels

import (
	"github.com/euryale-ml/euryale/internal/workers"
	"github.com/euryale-ml/euryale/kernels/internal/simd"
)

// depthwise computes a convolution each of whose groups has one plane of images. Patches of one
// plane are too few rows for a product that is worth copying them. A row of the window is a product
// instead, whose operand is a plane among zeros as it lies: its row k are the pixels from k on.
//
//   - Forward and InputGradient: a row of weights by pixels is all places of some rows, and what is
//     between them, which is left out;
//   - FilterGradient: all rows of dy that see a row of pixels, by these, is all weights at once.
type depthwise[T float] struct{ correlation[T] }

// pixelsOfBand bounds how many sums are under way, so that they stay in the first-level cache.
const pixelsOfBand = 2048

// isDepthwise reports whether depthwise computes a convolution, and faster than correlation.
func isDepthwise(v *Convolution) bool {
	return v.Parts() > 1 && v.Parts() == v.C && v.StrideW <= 2 &&
		(v.Pass != FilterGradient || v.DilationW == 1)
}

// run computes all groups.
func (d depthwise[T]) run(a, b []T) {
	d.src, d.weights = a, b
	flops := 2 * d.frameH(d.outH) * d.frameW() * d.planes * d.filters * d.kernelH * d.kernelW
	if d.pass == FilterGradient {
		d.perPart = flopsOfPart/(flops*d.batch) + 1
		workers.Run(d.pool, ceil(d.groups, d.perPart), d)
		return
	}
	d.perPart = flopsOfPart/flops + 1
	workers.Run(d.pool, ceil(d.batch*d.groups, d.perPart), d)
}

// Run implements [workers.Task].
func (d *depthwise[T]) Run(part, worker int) {
	size := d.frameH(d.outH) * d.frameW()
	if d.pass == FilterGradient {
		front, taps := (d.kernelH-1)*d.dilationH*d.frameW(), d.kernelH*d.kernelW
		all := workers.Scratch[T](d.pool, worker, 2*size+front+taps)
		for g := part * d.perPart; g < min((part+1)*d.perPart, d.groups); g++ {
			for f := range d.filters {
				d.gradient(g, f, all[:size], all[size:2*size+front], all[2*size+front:])
			}
		}
		return
	}
	sums := max(pixelsOfBand, d.frameW()) * d.filters
	all := workers.Scratch[T](d.pool, worker, d.planes*size+sums)
	framed, sum := all[:d.planes*size], all[d.planes*size:]
	rows := 1
	if d.strideH == 1 {
		rows = max(pixelsOfBand/d.frameW(), 1)
	}
	for n := part * d.perPart; n < min((part+1)*d.perPart, d.batch*d.groups); n++ {
		for p := range d.planes {
			d.layPlane(framed[p*size:][:size], n*d.planes+p)
		}
		for row := 0; row < d.outH; row += rows {
			d.places(n, row, min(rows, d.outH-row), framed, sum)
		}
	}
}

// layPlane puts a plane of the images among zeros.
func (d *depthwise[T]) layPlane(to []T, plane int) {
	width := d.frameW()
	clear(to)
	for y := range d.h {
		if at := (y*d.stepH + d.top) * width; at >= 0 && at < len(to) {
			d.layRow(to[at:][:width], d.src[(plane*d.h+y)*d.w:][:d.w])
		}
	}
}

// places computes some rows of places of a group of an image.
func (d *depthwise[T]) places(n, row, rows int, framed, sums []T) {
	width, taps, group := d.frameW(), d.kernelH*d.kernelW, n%d.groups
	p := simd.Product[T]{
		M: d.filters, N: (rows-1)*width + (d.outW-1)*d.strideW + 1, K: d.kernelW, Alpha: 1,
		ARow: taps, AStep: 1, BStep: d.dilationW, C: sums,
	}
	p.CPitch = p.N
	for plane := range d.planes {
		weights := d.weights[(group*d.filters*d.planes+plane)*taps:]
		pixels := framed[plane*d.frameH(d.outH)*width:]
		for k := range d.kernelH {
			p.A, p.B = weights[k*d.kernelW:], pixels[(row*d.strideH+k*d.dilationH)*width:]
			if d.pass == InputGradient { // the window is turned
				p.A, p.AStep = weights[taps-1-k*d.kernelW:], -1
			}
			simd.Multiply(d.level, &p)
			p.Beta = 1
		}
	}
	for f := range d.filters {
		to := d.dst[((n*d.filters+f)*d.outH+row)*d.outW:][:rows*d.outW]
		for r := range rows {
			line, from := to[r*d.outW:][:d.outW], sums[f*p.N+r*width:]
			if d.strideW == 1 {
				copy(line, from)
				continue
			}
			for i := range line {
				line[i] = from[i*d.strideW]
			}
		}
	}
}

// gradient computes that of a filter of a group.
func (d *depthwise[T]) gradient(group, f int, framed, results, sums []T) {
	width, size := d.frameW(), d.kernelH*d.kernelW
	clear(results)
	filter := group*d.filters + f
	front := (d.kernelH - 1) * d.dilationH * width
	p := simd.Product[T]{
		M: d.kernelH, N: d.kernelW, K: len(framed) - d.kernelW + 1, Alpha: 1,
		A: results, ARow: d.dilationH * width, AStep: 1, B: framed, BStep: 1,
		C: sums, CPitch: d.kernelW,
	}
	for image := range d.batch {
		d.layPlane(framed, image*d.groups+group)
		dy := d.weights[(image*d.groups*d.filters+filter)*d.outH*d.outW:]
		for row := range d.outH {
			to, from := results[front+row*d.strideH*width:], dy[row*d.outW:][:d.outW]
			if d.strideW == 1 {
				copy(to, from)
				continue
			}
			for i, x := range from {
				to[i*d.strideW] = x
			}
		}
		simd.Multiply(d.level, &p)
		p.Beta = 1
	}
	to := d.dst[filter*size:][:size]
	for k := range d.kernelH { // the last row of the window comes first
		copy(to[(d.kernelH-1-k)*d.kernelW:][:d.kernelW], sums[k*d.kernelW:])
	}
}
