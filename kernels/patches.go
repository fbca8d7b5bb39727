package kernels

import "github.com/euryale-ml/euryale/internal/workers"

// patching copies patches out of images, or adds them up to images. A part is one image.
type patching[T float] struct {
	Images
	patches, images []T
	add             bool
}

func runPatches[T float](pool *workers.Pool, p patching[T]) { workers.Run(pool, p.Batch, p) }

// Run implements [workers.Task].
func (p *patching[T]) Run(image, _ int) {
	pixels := p.images[image*p.C*p.H*p.W:][:p.C*p.H*p.W]
	if p.add {
		clear(pixels)
	}
	at := image * p.OutH * p.OutW * p.C * p.KernelH * p.KernelW
	for oh := range p.OutH {
		for ow := range p.OutW {
			for row := range p.C * p.KernelH {
				h := oh*p.StrideH - p.PadH + row%p.KernelH*p.DilationH
				run := p.patches[at:][:p.KernelW]
				at += p.KernelW
				if h >= 0 && h < p.H {
					p.run(run, pixels[(row/p.KernelH*p.H+h)*p.W:][:p.W], ow*p.StrideW-p.PadW)
				} else if !p.add {
					clear(run)
				}
			}
		}
	}
}

// run copies or adds what a row of a window shows of a row of pixels, from a column on.
func (p *patching[T]) run(run, pixels []T, w int) {
	for k := range run {
		switch inside := w >= 0 && w < len(pixels); {
		case p.add && inside:
			pixels[w] += run[k]
		case inside:
			run[k] = pixels[w]
		case !p.add:
			run[k] = 0
		}
		w += p.DilationW
	}
}
