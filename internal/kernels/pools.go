package kernels

import (
	"math"

	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/workers"
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
	// elements of a copy of a plane among -Inf, for windows that go beyond it; 0 if none does
	framed int
}

const (
	// pixelsOfPart is the least number of pixels of windows that a part sees: about 10 us.
	pixelsOfPart = 1 << 15
	// pixelsTogether is how many pixels of several planes are handled together, so that they stay
	// in the first-level cache.
	pixelsTogether = 1 << 12
)

func runPools[T float](pool *workers.Pool, level simd.Level, p pooling[T]) {
	if p.OutH*p.OutW == 0 {
		clear(p.dx)
		return
	}
	seen := window{p.KernelH, p.KernelW, p.DilationH, p.DilationW, p.StrideH, p.StrideW, p.OutH,
		p.OutW}
	height, width := seen.frameH(p.OutH), seen.frameW()
	p.pitch = p.W
	if p.PadH > 0 || p.PadW > 0 || height > p.H || width > p.W {
		p.pitch, p.framed = width, height*width
	}
	pixels := workers.Scratch[int](pool, workers.Shared, p.KernelH*p.KernelW)
	for k := range pixels {
		pixels[k] = k/p.KernelW*p.DilationH*p.pitch + k%p.KernelW*p.DilationW
	}
	p.windows = simd.Windows{Rows: p.OutH, Columns: p.OutW, Pitch: p.StrideH * p.pitch,
		Stride: p.StrideW, Pixels: pixels}
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
	at, most := memory[:places], memory[places:2*places]
	frame, sums := memory[2*places:][:p.framed], memory[2*places+p.framed:]
	for i := range frame {
		frame[i] = T(math.Inf(-1)) // never the largest, but of windows of -Inf alone
	}
	end := min((part+1)*p.perPart, p.Batch*p.C)
	for plane := part * p.perPart; plane < end; plane += p.together {
		w, size, places := p.windows, p.H*p.W, p.OutH*p.OutW
		n := min(p.together, end-plane)
		w.Rows *= n
		x, y := p.x[plane*size:][:n*size], p.y[plane*places:][:n*places]
		seen, least := x, p.least()
		if p.framed > 0 {
			p.inside(p.see, frame, x)
			seen, least = frame, T(math.Inf(-1))
		}
		if p.dx == nil {
			simd.Largest(p.level, y, at, seen, &w, least)
			continue
		}
		simd.Largest(p.level, most, at, seen, &w, least)
		dx := p.dx[plane*size:][:n*size]
		clear(dx)
		if p.framed == 0 {
			p.add(dx, seen, y, at, &w, least)
			p.rectify(dx, x)
			continue
		}
		clear(sums)
		p.firstInside(most, at)
		p.add(sums, seen, y, at, &w, least)
		p.inside(func(row, pixels []T) { copy(pixels, row) }, sums, dx)
		p.rectify(dx, x)
	}
}

// least returns the number that windows see in place of less.
func (p *pooling[T]) least() T {
	if p.Rectified {
		return 0
	}
	return T(math.Inf(-1))
}

// see copies pixels to a row of the frame, as windows see them.
func (p *pooling[T]) see(row, pixels []T) {
	switch {
	case !p.Rectified:
		copy(row, pixels)
	case !simd.Unary(p.level, simd.Relu, row, pixels):
		simd.UnaryLoop(simd.Relu, row, pixels)
	}
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

// firstInside puts the first pixel inside of the image in the place of the first one, for windows
// of -Inf alone. If none is inside, the gradient goes to the frame.
func (p *pooling[T]) firstInside(most, at []T) {
	if simd.Min(p.level, most) > T(math.Inf(-1)) { // and none is NaN
		return
	}
	for i, m := range most {
		if m != T(math.Inf(-1)) {
			continue
		}
		h, w := i/p.OutW*p.StrideH-p.PadH, i%p.OutW*p.StrideW-p.PadW
		kh, kw := ceil(max(-h, 0), p.DilationH), ceil(max(-w, 0), p.DilationW)
		if kh < p.KernelH && kw < p.KernelW {
			at[i] = T(kh*p.KernelW + kw)
		}
	}
}

// add adds gradients dy to those of the largest pixels of windows, numbers at of each.
func (p *pooling[T]) add(dx, x, dy, at []T, w *simd.Windows, least T) {
	simd.Give(p.level, dx, x, dy, at, w, p.apart(), least)
}

// apart reports whether no pixel is in two windows.
func (p *pooling[T]) apart() bool {
	return p.StrideH > (p.KernelH-1)*p.DilationH && p.StrideW > (p.KernelW-1)*p.DilationW
}

// rectify clears the gradients of pixels below 0, where simd.Give has not.
func (p *pooling[T]) rectify(dx, x []T) {
	if !p.Rectified || p.framed == 0 && p.apart() {
		return
	}
	for i, pixel := range x {
		if pixel < 0 {
			dx[i] = 0
		}
	}
}
