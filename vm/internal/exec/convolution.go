package exec

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// ConvolutionScratch implements [Device]: room for the patches of one image.
func (Host) ConvolutionScratch(c kernels.Convolution) (int, error) {
	return c.OutH * c.OutW * c.Columns() * c.DType.Size(), nil
}

// Convolve implements [Device] by products of the patches of one image after the other, as Gorgonia
// computes convolutions of all at once.
func (h Host) Convolve(c kernels.Convolution, dst, a, b, scratch backend.Buffer) error {
	if err := (kernels.Check{}).Convolve(c, dst, a, b); err != nil {
		return err
	}
	if c.Pass == kernels.FilterGradient {
		clear(dst.Bytes())
	}
	for n := range c.Batch {
		if err := h.convolveImage(c, n, dst, a, b, scratch); err != nil {
			return err
		}
	}
	return nil
}

// convolveImage computes what is of image n.
func (h Host) convolveImage(c kernels.Convolution, n int, dst, a, b, scratch backend.Buffer) error {
	one, places, columns := c.Images, c.OutH*c.OutW, c.Columns()
	one.Batch = 1
	patches := scratch.As(c.DType).Slice(0, places*columns)
	image := func(x backend.Buffer) backend.Buffer { return x.Slice(n*c.C*c.H*c.W, (n+1)*c.C*c.H*c.W) }
	result := func(y backend.Buffer) kernels.Matrix { // [Filters, places]
		return kernels.Matrix{Buffer: y.Slice(n*c.Filters*places, (n+1)*c.Filters*places), Pitch: places}
	}
	rows := func(x backend.Buffer) kernels.Matrix { return kernels.Matrix{Buffer: x, Pitch: columns} }
	p := kernels.Product{Alpha: 1}
	switch c.Pass {
	case kernels.Forward: // y = w patches^T
		p.M, p.N, p.K = c.Filters, places, columns
		p.A, p.B, p.C = rows(b), rows(patches), result(dst)
		p.B.Transposed = true
	case kernels.FilterGradient: // dw += dy patches
		p.M, p.N, p.K, p.Beta = c.Filters, columns, places, 1
		p.A, p.B, p.C = result(b), rows(patches), rows(dst)
	case kernels.InputGradient: // patches = dy^T w
		p.M, p.N, p.K = places, columns, c.Filters
		p.A, p.B, p.C = result(a), rows(b), rows(patches)
		p.A.Transposed = true
		if err := h.Multiply(p); err != nil {
			return err
		}
		return h.Col2Im(image(dst), patches, one)
	}
	if err := h.Im2Col(patches, image(a), one); err != nil {
		return err
	}
	return h.Multiply(p)
}
