package fakedevice

import (
	"context"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// drained calls kernel with the memory behind the buffers once the queue has got there: for
// kernels that the host's queue does not have.
func (q *queue) drained(wrong error, kernel func(b []backend.Buffer) error,
	buffers ...backend.Buffer) error {
	return q.on(wrong, func(on backend.Queue, b []backend.Buffer) error {
		e, err := on.Record()
		if err == nil {
			err = e.Join(context.Background())
		}
		if err != nil {
			return err
		}
		return kernel(b)
	}, buffers...)
}

// Multiply multiplies matrices.
func (q *queue) Multiply(p kernels.Product) error {
	return q.drained(check.Multiply(p), func(b []backend.Buffer) error {
		p := p
		p.A.Buffer, p.B.Buffer, p.C.Buffer = b[0], b[1], b[2]
		return kernels.Host{}.Multiply(p)
	}, p.A.Buffer, p.B.Buffer, p.C.Buffer)
}

// ConvolutionScratch returns 0: convolutions need no scratch.
func (q *queue) ConvolutionScratch(kernels.Convolution) (int, error) { return 0, nil }

// Convolve has the meaning of [kernels.Host.Convolve].
func (q *queue) Convolve(c kernels.Convolution, dst, x, y, _ backend.Buffer) error {
	return q.drained(check.Convolve(c, dst, x, y), func(b []backend.Buffer) error {
		return kernels.Host{}.Convolve(c, b[0], b[1], b[2])
	}, dst, x, y)
}

// Im2Col has the meaning of [kernels.Host.Im2Col].
func (q *queue) Im2Col(dst, src backend.Buffer, i kernels.Images) error {
	return q.drained(check.Im2Col(dst, src, i), func(b []backend.Buffer) error {
		return kernels.Host{}.Im2Col(b[0], b[1], i)
	}, dst, src)
}

// Col2Im has the meaning of [kernels.Host.Col2Im].
func (q *queue) Col2Im(dst, src backend.Buffer, i kernels.Images) error {
	return q.drained(check.Col2Im(dst, src, i), func(b []backend.Buffer) error {
		return kernels.Host{}.Col2Im(b[0], b[1], i)
	}, dst, src)
}

// MaxPool has the meaning of [kernels.Host.MaxPool].
func (q *queue) MaxPool(dst, src backend.Buffer, i kernels.Images) error {
	return q.drained(check.MaxPool(dst, src, i), func(b []backend.Buffer) error {
		return kernels.Host{}.MaxPool(b[0], b[1], i)
	}, dst, src)
}

// MaxPoolGrad has the meaning of [kernels.Host.MaxPoolGrad].
func (q *queue) MaxPoolGrad(dx, x, dy backend.Buffer, i kernels.Images) error {
	return q.drained(check.MaxPoolGrad(dx, x, dy, i), func(b []backend.Buffer) error {
		return kernels.Host{}.MaxPoolGrad(b[0], b[1], b[2], i)
	}, dx, x, dy)
}

// TakeRows has the meaning of [kernels.Host.TakeRows].
func (q *queue) TakeRows(dst, src, indices backend.Buffer, r kernels.Rows) error {
	return q.drained(check.TakeRows(dst, src, indices, r), func(b []backend.Buffer) error {
		return kernels.Host{}.TakeRows(b[0], b[1], b[2], r)
	}, dst, src, indices)
}

// AddRows has the meaning of [kernels.Host.AddRows].
func (q *queue) AddRows(dst, src, indices backend.Buffer, r kernels.Rows) error {
	return q.drained(check.AddRows(dst, src, indices, r), func(b []backend.Buffer) error {
		return kernels.Host{}.AddRows(b[0], b[1], b[2], r)
	}, dst, src, indices)
}

// PutRows has the meaning of [kernels.Host.PutRows].
func (q *queue) PutRows(dst, src, indices backend.Buffer, r kernels.Rows) error {
	return q.drained(check.PutRows(dst, src, indices, r), func(b []backend.Buffer) error {
		return kernels.Host{}.PutRows(b[0], b[1], b[2], r)
	}, dst, src, indices)
}

// Attention has the meaning of [kernels.Host.Attention].
func (q *queue) Attention(a kernels.Attention) error {
	return q.drained(check.Attention(a), func(b []backend.Buffer) error {
		return kernels.Host{}.Attention(onHost(a, b[5:], b))
	}, append([]backend.Buffer{a.Y.Buffer, a.LSE, a.Q.Buffer, a.K.Buffer, a.V.Buffer},
		hiding(a)...)...)
}

// AttentionGrad has the meaning of [kernels.Host.AttentionGrad].
func (q *queue) AttentionGrad(a kernels.AttentionGrad) error {
	return q.drained(check.AttentionGrad(a), func(b []backend.Buffer) error {
		a := a
		a.Attention = onHost(a.Attention, b[10:], b)
		a.DQ.Buffer, a.DK.Buffer, a.DV.Buffer, a.Sums, a.DY.Buffer = b[5], b[6], b[7], b[8], b[9]
		return kernels.Host{}.AttentionGrad(a)
	}, append([]backend.Buffer{a.Y.Buffer, a.LSE, a.Q.Buffer, a.K.Buffer, a.V.Buffer, a.DQ.Buffer,
		a.DK.Buffer, a.DV.Buffer, a.Sums, a.DY.Buffer}, hiding(a.Attention)...)...)
}

// hiding returns the mask, the lengths and the starts of an attention, if there are any.
func hiding(a kernels.Attention) (all []backend.Buffer) {
	for _, b := range []backend.Buffer{a.Mask.Buffer, a.Lengths, a.Starts} {
		if b.Len() > 0 {
			all = append(all, b)
		}
	}
	return all
}

// onHost returns an attention on memory of the host.
func onHost(a kernels.Attention, hides, b []backend.Buffer) kernels.Attention {
	a.Y.Buffer, a.LSE, a.Q.Buffer, a.K.Buffer, a.V.Buffer = b[0], b[1], b[2], b[3], b[4]
	if a.Mask.Buffer.Len() > 0 {
		a.Mask.Buffer, hides = hides[0], hides[1:]
	}
	if a.Lengths.Len() > 0 {
		a.Lengths, hides = hides[0], hides[1:]
	}
	if a.Starts.Len() > 0 {
		a.Starts = hides[0]
	}
	return a
}
