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
	at := 0
	for oh := range p.OutH {
		rows := p.rowsOf(oh)
		for ow := range p.OutW {
			pixel := p.largest(x, rows, ow)
			switch {
			case pixel < 0:
				y[at] = leastFinite[T]()
			case p.Rectified:
				y[at] = x[pixel] * positive(x[pixel])
			default:
				y[at] = x[pixel]
			}
			at++
		}
	}
}

func (p *pooling[T]) planeGrad(x, dy, dx []T) {
	clear(dx)
	apart := p.StrideH > (p.KernelH-1)*p.DilationH && p.StrideW > (p.KernelW-1)*p.DilationW // no pixel is in two windows
	at := 0
	for oh := range p.OutH {
		rows := p.rowsOf(oh)
		for ow := range p.OutW {
			if pixel := p.largest(x, rows, ow); pixel >= 0 {
				if dx[pixel] += dy[at]; p.Rectified && apart {
					dx[pixel] *= positive(x[pixel])
				}
			}
			at++
		}
	}
	if p.Rectified && !apart {
		for at := range dx {
			dx[at] *= positive(x[at])
		}
	}
}

// rows are those of a window that are inside of the image: where the first pixel of the first one would
// be without padding on the left, and how many there are.
type rows struct{ first, count int }

func (p *pooling[T]) rowsOf(oh int) rows {
	h := oh*p.StrideH - p.PadH
	first, end := inside(h, p.DilationH, p.KernelH, p.H)
	return rows{(h+first*p.DilationH)*p.W - p.PadW, end - first}
}

// largest returns the place of the first largest pixel of a window, -1 if there is none.
func (p *pooling[T]) largest(x []T, r rows, ow int) int {
	w := ow * p.StrideW
	first, end := inside(w-p.PadW, p.DilationW, p.KernelW, p.W)
	if r.count <= 0 || end <= first {
		return -1
	}
	row, width := r.first+w+first*p.DilationW, end-first
	at, most := -1, leastFinite[T]()
	if p.Rectified { // what is negative is not larger than the first pixel
		at, most = row, max(x[row], 0)
	}
	for range r.count {
		pixel := row
		for range width {
			seen := x[pixel]
			if seen > most { // no branch, since nobody can foretell it
				at = pixel
			}
			most = max(most, seen)
			pixel += p.DilationW
		}
		row += p.DilationH * p.W
	}
	if most != most {
		return p.largestNumber(x, r.count, width, r.first+w+first*p.DilationW)
	}
	return at
}

// largestNumber is largest for windows with NaN.
func (p *pooling[T]) largestNumber(x []T, count, width, row int) int {
	at, most := -1, leastFinite[T]()
	for range count {
		for k := range width {
			seen := x[row+k*p.DilationW]
			if p.Rectified {
				seen = max(seen, 0)
			}
			if seen > most {
				at, most = row+k*p.DilationW, seen
			}
		}
		row += p.DilationH * p.W
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
