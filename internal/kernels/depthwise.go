package kernels

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/workers"
)

// depthwise computes a convolution each of whose groups has one plane of images. Patches of one
// plane are too few rows for a product that is worth copying them. Instead, each row of the window
// is a product whose operand is a plane among zeros, as it lies: row k of the operand is the pixels
// from k on.
//
//   - Forward and InputGradient: a row of weights by pixels is all places of some rows, and what is
//     between them, which is left out;
//   - FilterGradient: all rows of dy that see a row of pixels, by these, is all weights at once.
//
// Strides skip pixels. To read only those that count, a plane is stored as several phases: each has
// the rows that are a stride apart and, except for FilterGradient, the columns.
type depthwise[T float] struct {
	correlation[T]
	phases        int // of columns
	height, width int // of a phase
}

// pixelsOfBand bounds how many sums are under way, so that they stay in the first-level cache.
const pixelsOfBand = 2048

// isDepthwise reports whether depthwise computes a convolution, and faster than correlation.
func isDepthwise(v *Convolution) bool {
	return v.Parts() > 1 && v.Parts() == v.C &&
		(v.Pass != FilterGradient || v.DilationW == 1)
}

// run computes all groups.
func (d depthwise[T]) run(a, b []T) {
	d.src, d.weights, d.phases = a, b, d.strideW
	d.height, d.width = ceil(d.frameH(d.outH), d.strideH), ceil(d.frameW(), d.strideW)
	flops := 2 * d.size() * d.planes * d.filters * d.kernelH * d.kernelW
	if d.pass == FilterGradient {
		d.phases, d.width = 1, d.width*d.strideW
		d.perPart = flopsOfPart/(flops*d.batch) + 1
		workers.Run(d.pool, ceil(d.groups, d.perPart), d)
		return
	}
	d.perPart = flopsOfPart/flops + 1
	workers.Run(d.pool, ceil(d.batch*d.groups, d.perPart), d)
}

// size returns how many elements a plane among zeros has.
func (d *depthwise[T]) size() int { return d.strideH * d.phases * d.height * d.width }

// Run implements [workers.Task].
func (d *depthwise[T]) Run(part, worker int) {
	size := d.size()
	if d.pass == FilterGradient {
		step, far := apart(d.strideH, d.dilationH)
		rows := 2*(ceil(d.kernelH, step)-1)*far + d.outH // of dy, and zeros before and behind them
		results := rows * d.width / d.strideW
		all := workers.Scratch[T](d.pool, worker, size+results+d.kernelH*d.kernelW)
		for g := part * d.perPart; g < min((part+1)*d.perPart, d.groups); g++ {
			for f := range d.filters {
				d.gradient(g, f, all[:size], all[size:size+results], all[size+results:])
			}
		}
		return
	}
	sums := max(pixelsOfBand, d.width) * d.filters
	all := workers.Scratch[T](d.pool, worker, d.planes*size+sums)
	framed, sum := all[:d.planes*size], all[d.planes*size:]
	rows := max(pixelsOfBand/d.width, 1)
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
	clear(to)
	for y := range d.h {
		row := y*d.stepH + d.top
		if row < 0 || row/d.strideH >= d.height {
			continue
		}
		line := to[(row%d.strideH*d.phases*d.height+row/d.strideH)*d.width:]
		pixels := d.src[(plane*d.h+y)*d.w:][:d.w]
		if d.phases == 1 {
			d.layRow(line[:d.width], pixels)
			continue
		}
		for phase := range d.phases { // whose pixels are as far apart as they lie
			first := (phase + (d.phases-1)*d.left) % d.phases
			to := line[phase*d.height*d.width:][:d.width][min((first+d.left)/d.phases, d.width):]
			for i, x := 0, first; i < len(to) && x < len(pixels); i, x = i+1, x+d.phases {
				to[i] = pixels[x]
			}
		}
	}
}

// places computes some rows of places of a group of an image.
func (d *depthwise[T]) places(n, row, rows int, framed, sums []T) {
	taps, group := d.kernelH*d.kernelW, n%d.groups
	step, far := apart(d.phases, d.dilationW)
	p := simd.Product[T]{
		M: d.filters, N: (rows-1)*d.width + d.outW, Alpha: 1, ARow: taps, AStep: step,
		BStep: far, C: sums,
	}
	p.CPitch = p.N
	for plane := range d.planes {
		weights := d.weights[(group*d.filters*d.planes+plane)*taps:]
		for k := range d.kernelH * step {
			y, x := k/step*d.dilationH, k%step*d.dilationW
			if p.K = ceil(d.kernelW-k%step, step); p.K == 0 {
				continue
			}
			phase := (plane*d.strideH+y%d.strideH)*d.phases + x%d.phases
			p.A = weights[k/step*d.kernelW+k%step:]
			p.B = backend.Of(framed[(phase*d.height+row+y/d.strideH)*d.width+x/d.phases:])
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
			copy(to[r*d.outW:][:d.outW], sums[f*p.N+r*d.width:])
		}
	}
}

// apart returns in which steps taps that are dilated see one phase of rows or columns, and how far
// apart they see it.
func apart(stride, dilation int) (step, far int) {
	for step = 1; step*dilation%stride != 0; step++ {
	}
	return step, step * dilation / stride
}

// gradient computes the gradient of a filter of a group. Rows of dy are as far apart as those of a
// phase, over the stride, since the window goes by it; it is a product for all rows of the window
// that see one phase.
func (d *depthwise[T]) gradient(group, f int, framed, results, sums []T) {
	pitch, filter := d.width/d.strideW, group*d.filters+f
	step, far := apart(d.strideH, d.dilationH)
	front := (len(results) - d.outH*pitch) / 2
	clear(results)
	p := simd.Product[T]{N: d.kernelW, Alpha: 1, ARow: far * pitch, AStep: 1, BStep: d.strideW,
		CPitch: d.kernelW}
	for image := range d.batch {
		d.layPlane(framed, image*d.groups+group)
		dy := d.weights[(image*d.groups*d.filters+filter)*d.outH*d.outW:]
		for row := range d.outH {
			copy(results[front+row*pitch:], dy[row*d.outW:][:d.outW])
		}
		p.C = sums
		for k := range min(step, d.kernelH) {
			p.M = ceil(d.kernelH-k, step)
			moved := (p.M - 1) * p.ARow
			p.K, p.A = moved+(d.outH-1)*pitch+d.outW, results[front-moved:]
			row := k*d.dilationH%d.strideH*d.height + k*d.dilationH/d.strideH
			p.B = backend.Of(framed[row*d.width:])
			simd.Multiply(d.level, &p)
			p.C = p.C[p.M*d.kernelW:]
		}
		p.Beta = 1
	}
	to := d.dst[filter*d.kernelH*d.kernelW:][:d.kernelH*d.kernelW]
	for k := range min(step, d.kernelH) { // the last row of the window comes first
		rows := ceil(d.kernelH-k, step)
		for i := range rows {
			copy(to[(k+(rows-1-i)*step)*d.kernelW:], sums[i*d.kernelW:][:d.kernelW])
		}
		sums = sums[rows*d.kernelW:]
	}
	if slices.ContainsFunc(to, func(x T) bool { return x-x != 0 }) {
		d.exactly(to, group, filter)
	}
}

// exactly is gradient by loops. Between the rows of dy are zeros: times pixels that are not finite,
// these would make the sums NaN.
func (d *depthwise[T]) exactly(to []T, group, filter int) {
	clear(to)
	for n := range d.batch * d.outH * d.outW {
		image, y, x := n/d.outW/d.outH, n/d.outW%d.outH*d.strideH-d.top, n%d.outW*d.strideW-d.left
		dy := d.weights[((image*d.groups*d.filters+filter)*d.outH+n/d.outW%d.outH)*d.outW+n%d.outW]
		for k := range to {
			h, w := y+k/d.kernelW*d.dilationH, x+k%d.kernelW*d.dilationW
			if h >= 0 && h < d.h && w >= 0 && w < d.w {
				to[k] += dy * d.src[((image*d.groups+group)*d.h+h)*d.w+w]
			}
		}
	}
}
