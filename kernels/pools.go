package kernels

import (
	"math"

	"github.com/euryale-ml/euryale/internal/workers"
)

// pooling finds the largest pixels of windows, or adds gradients to them: dx is nil, or y is dy.
type pooling[T float] struct {
	Images
	x, y, dx []T
	perPart  int // planes
}

// pixelsOfPart is how many pixels of windows a part sees at least: about 50 us.
const pixelsOfPart = 1 << 15

func runPools[T float](pool *workers.Pool, p pooling[T]) {
	planes := p.Batch * p.C
	p.perPart = pixelsOfPart/(p.OutH*p.OutW*p.KernelH*p.KernelW+1) + 1
	workers.Run(pool, (planes+p.perPart-1)/p.perPart, p)
}

// Run implements [workers.Task].
func (p *pooling[T]) Run(part, _ int) {
	pixels, places := p.H*p.W, p.OutH*p.OutW
	first := part * p.perPart
	for plane := first; plane < min(first+p.perPart, p.Batch*p.C); plane++ {
		x, y := p.x[plane*pixels:][:pixels], p.y[plane*places:][:places]
		if p.dx == nil {
			p.plane(x, y)
		} else {
			p.planeGrad(x, y, p.dx[plane*pixels:][:pixels])
		}
	}
}

func (p *pooling[T]) plane(x, y []T) {
	for at := range y {
		y[at] = leastFinite[T]()
		if pixel := p.largest(x, at/p.OutW, at%p.OutW); pixel >= 0 {
			if y[at] = x[pixel]; p.Rectified {
				y[at] *= positive(x[pixel])
			}
		}
	}
}

func (p *pooling[T]) planeGrad(x, dy, dx []T) {
	clear(dx)
	for at, g := range dy {
		if pixel := p.largest(x, at/p.OutW, at%p.OutW); pixel >= 0 {
			if p.Rectified {
				g *= positive(x[pixel])
			}
			dx[pixel] += g
		}
	}
}

// largest returns the place of the first largest pixel of a window, -1 if there is none.
func (p *pooling[T]) largest(x []T, oh, ow int) int {
	h, w := oh*p.StrideH-p.PadH, ow*p.StrideW-p.PadW
	firstH, endH := inside(h, p.DilationH, p.KernelH, p.H)
	firstW, endW := inside(w, p.DilationW, p.KernelW, p.W)
	at, most := -1, leastFinite[T]()
	for k := firstH; k < endH; k++ {
		row := (h+k*p.DilationH)*p.W + w
		for k := firstW; k < endW; k++ {
			pixel := row + k*p.DilationW
			seen := x[pixel]
			if p.Rectified {
				seen = max(seen, 0)
			}
			if seen > most {
				at, most = pixel, seen
			}
		}
	}
	return at
}

// inside returns which pixels of a row of a window of n, from place on and step apart, are among size.
func inside(place, step, n, size int) (first, end int) {
	if place < 0 {
		first = (-place + step - 1) / step
	}
	if end = n; place+(n-1)*step >= size {
		end = (size - place + step - 1) / step
	}
	return first, end
}

// positive returns 1 where x is positive or zero, 0 elsewhere.
func positive[T float](x T) T {
	if x >= 0 {
		return 1
	}
	return 0
}

func leastFinite[T float]() T {
	var least T
	switch p := any(&least).(type) {
	case *float32:
		*p = -math.MaxFloat32
	case *float64:
		*p = -math.MaxFloat64
	}
	return least
}
