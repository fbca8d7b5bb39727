package kernels

import (
	"math"

	"github.com/euryale-ml/euryale/internal/workers"
	"github.com/euryale-ml/euryale/kernels/internal/simd"
)

// pooling finds the largest pixels of windows, or adds gradients to them: dx is nil, or y is dy.
type pooling[T float] struct {
	Images
	x, y, dx []T
	level    simd.Level
	pool     *workers.Pool
	perPart  int // planes
	together int // planes that are as one, since their rows of places go on from one to the next

	windows simd.Windows // of one plane
	pitch   int          // of the rows that windows see
	framed  int          // elements of a copy of a plane among NaN, for windows that go beyond it; 0 if none does
}

const (
	// pixelsOfPart is how many pixels of windows a part sees at least: about 10 us.
	pixelsOfPart = 1 << 15
	// pixelsTogether is how many of several planes are looked at together, and stay in the first-level cache.
	pixelsTogether = 1 << 12
)

func runPools[T float](pool *workers.Pool, level simd.Level, p pooling[T]) {
	if p.OutH*p.OutW == 0 {
		clear(p.dx)
		return
	}
	seen := window{p.KernelH, p.KernelW, p.DilationH, p.DilationW, p.StrideH, p.StrideW, p.OutH, p.OutW}
	height, width := seen.frameH(p.OutH), seen.frameW()
	p.pitch = p.W
	if p.PadH > 0 || p.PadW > 0 || height > p.H || width > p.W {
		p.pitch, p.framed = width, height*width
	}
	pixels := workers.Scratch[int](pool, workers.Shared, p.KernelH*p.KernelW)
	for k := range pixels {
		pixels[k] = k/p.KernelW*p.DilationH*p.pitch + k%p.KernelW*p.DilationW
	}
	p.windows = simd.Windows{Rows: p.OutH, Columns: p.OutW, Pitch: p.StrideH * p.pitch, Stride: p.StrideW, Pixels: pixels}
	p.level, p.pool, p.together = level, pool, 1
	seenByPlane := p.OutH * p.OutW * len(pixels)
	if p.framed == 0 && p.H == p.OutH*p.StrideH {
		p.together = max(pixelsTogether/seenByPlane, 1)
	}
	p.perPart = ceil(pixelsOfPart, seenByPlane*p.together) * p.together
	workers.Run(pool, ceil(p.Batch*p.C, p.perPart), p)
}

// Run implements [workers.Task].
func (p *pooling[T]) Run(part, worker int) {
	places := p.together * p.OutH * p.OutW
	memory := workers.Scratch[T](p.pool, worker, 2*places+2*p.framed)
	at, most, frame, sums := memory[:places], memory[places:2*places], memory[2*places:][:p.framed], memory[2*places+p.framed:]
	for i := range frame {
		frame[i] = T(math.NaN()) // never the largest
	}
	end := min((part+1)*p.perPart, p.Batch*p.C)
	for plane := part * p.perPart; plane < end; plane += p.together {
		w, size, places := p.windows, p.H*p.W, p.OutH*p.OutW
		n := min(p.together, end-plane)
		w.Rows *= n
		x, y := p.x[plane*size:][:n*size], p.y[plane*places:][:n*places]
		seen := x
		if p.framed > 0 {
			p.inside(func(row, pixels []T) { copy(row, pixels) }, frame, x)
			seen = frame
		}
		if p.dx == nil {
			simd.Largest(p.level, y, at, seen, &w, p.negative())
			continue
		}
		simd.Largest(p.level, most, at, seen, &w, p.negative())
		dx := p.dx[plane*size:][:n*size]
		clear(dx)
		if p.framed == 0 {
			p.add(dx, seen, y, at, &w)
			continue
		}
		clear(sums)
		p.add(sums, seen, y, at, &w)
		p.inside(func(row, pixels []T) { copy(pixels, row) }, sums, dx)
	}
}

// negative returns what pixels below 0 are multiplied by.
func (p *pooling[T]) negative() T {
	if p.Rectified {
		return 0
	}
	return 1
}

// inside calls f with each row of a plane that lies in the frame, and its place there.
func (p *pooling[T]) inside(f func(row, pixels []T), frame, plane []T) {
	n := min(p.W, p.pitch-p.PadW)
	for h := range p.H {
		if at := (h+p.PadH)*p.pitch + p.PadW; n > 0 && at+n <= len(frame) {
			f(frame[at:][:n], plane[h*p.W:][:n])
		}
	}
}

// add adds gradients dy to those of the first largest pixels of windows, numbers at of each.
func (p *pooling[T]) add(dx, x, dy, at []T, w *simd.Windows) {
	apart := p.StrideH > (p.KernelH-1)*p.DilationH && p.StrideW > (p.KernelW-1)*p.DilationW // no pixel is in two windows
	negative := p.negative()
	simd.Give(p.level, dx, x, dy, at, w, apart, negative)
	if p.Rectified && !apart {
		for i, pixel := range x {
			if !(pixel >= 0) {
				dx[i] *= negative
			}
		}
	}
}
