package kernels

// patching copies patches out of images, or adds them up to images. A part is one image.
type patching[T float] struct {
	Images
	patches, images []T
	add             bool
}

// Run implements [workers.Task].
func (p *patching[T]) Run(image, _ int) {
	pixels := p.images[image*p.C*p.H*p.W:][:p.C*p.H*p.W]
	if p.add {
		clear(pixels)
	}
	at := image * p.OutH * p.OutW * p.C * p.KernelH * p.KernelW
	for oh := range p.OutH {
		for ow := range p.OutW {
			for plane := range p.C {
				p.patch(p.patches[at:][:p.KernelH*p.KernelW], pixels[plane*p.H*p.W:][:p.H*p.W],
					oh*p.StrideH-p.PadH, ow*p.StrideW-p.PadW)
				at += p.KernelH * p.KernelW
			}
		}
	}
}

// patch copies or adds what a window shows of a plane, from a row and a column on.
func (p *patching[T]) patch(patch, plane []T, h, w int) {
	for ; len(patch) > 0; h += p.DilationH {
		run := patch[:p.KernelW]
		patch = patch[p.KernelW:]
		switch inside := h >= 0 && h < p.H; {
		case inside && p.DilationW == 1 && w >= 0 && w+p.KernelW <= p.W:
			p.wholeRun(run, plane[h*p.W+w:])
		case inside:
			p.run(run, plane[h*p.W:][:p.W], w)
		case !p.add:
			clear(run)
		}
	}
}

// wholeRun is run of neighbouring pixels, all inside of the image.
func (p *patching[T]) wholeRun(run, pixels []T) {
	pixels = pixels[:len(run)]
	if p.add {
		for k, x := range run {
			pixels[k] += x
		}
		return
	}
	for k := range run {
		run[k] = pixels[k]
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
