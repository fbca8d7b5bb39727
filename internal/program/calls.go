package program

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// called adds a value that a kernel computes, and what it gives besides.
func (r *recorder) called(
	y Tensor, call kernel, besides []Tensor, x ...Value,
) (v Value, others []Value) {
	v = r.add(node{Tensor: y, args: x, call: call, besides: besides})
	for i, t := range besides {
		others = append(others, r.add(node{Tensor: t, args: []Value{v}, result: i + 1}))
	}
	return v, others
}

// rows returns an axis as rows of tables.
func rows(shape []int, axis int) kernels.Rows {
	return kernels.Rows{Before: size(shape[:axis]), Count: shape[axis], Width: size(shape[axis+1:])}
}

// Gather implements [Builder].
func (r *recorder) Gather(x, list Value, axis int) Value {
	of, at := r.Of(x), rows(r.Of(x).Shape, axis)
	shape := slices.Concat(of.Shape[:axis], r.Of(list).Shape, of.Shape[axis+1:])
	v, _ := r.called(Tensor{shape, of.DType}, func(dst, src []backend.Buffer) error {
		return kernels.Host{}.TakeRows(dst[0], src[0], src[1], at)
	}, nil, x, list)
	return v
}

// GatherGrad implements [Builder].
func (r *recorder) GatherGrad(dy, list Value, axis, n int) Value {
	of := r.Of(dy)
	shape := slices.Concat(of.Shape[:axis], []int{n}, of.Shape[axis+len(r.Of(list).Shape):])
	at := rows(shape, axis)
	v, _ := r.called(Tensor{shape, of.DType}, func(dst, src []backend.Buffer) error {
		return kernels.Host{}.AddRows(dst[0], src[0], src[1], at)
	}, nil, dy, list)
	return v
}

// Put implements [Builder].
func (r *recorder) Put(x, list, put Value, axis int) Value {
	at := rows(r.Of(x).Shape, axis)
	v, _ := r.called(r.Of(x), func(dst, src []backend.Buffer) error {
		copy(dst[0].Bytes(), src[0].Bytes())
		return kernels.Host{}.PutRows(dst[0], src[2], src[1], at)
	}, nil, x, list, put)
	return v
}

// MatMul implements [Builder].
func (r *recorder) MatMul(transA, transB bool, a, b Value) Value {
	x, y := r.Of(a), r.Of(b)
	last := len(x.Shape) - 1
	m, k, n := x.Shape[last-1], x.Shape[last], y.Shape[last]
	if transA {
		m, k = k, m
	}
	if transB {
		n = y.Shape[last-1]
	}
	p := kernels.Product{
		Batch: size(x.Shape[:last-1]), M: m, N: n, K: k, Alpha: 1,
		A: kernels.Matrix{Pitch: x.Shape[last], Stride: m * k, Transposed: transA},
		B: kernels.Matrix{Pitch: y.Shape[last], Stride: k * n, Transposed: transB},
		C: kernels.Matrix{Pitch: n, Stride: m * n},
	}
	shape := append(slices.Clone(x.Shape[:last-1]), m, n)
	v, _ := r.called(Tensor{shape, x.DType}, func(dst, src []backend.Buffer) error {
		p := p
		p.A.Buffer, p.B.Buffer, p.C.Buffer = src[0], src[1], dst[0]
		return kernels.Host{}.Multiply(p)
	}, nil, a, b)
	return v
}

// attention returns what is known of an attention before it runs, of which others are the mask and
// the lengths.
func (r *recorder) attention(o Attention, q, k, v Value, others []Value) (a kernels.Attention,
	y, lse Tensor) {
	of, keys, size := r.Of(q), r.Of(k).Shape, r.Of(v).Shape[3]
	s := of.Shape
	a = kernels.Attention{
		Batch: s[0], Heads: s[1], Queries: s[2], Keys: keys[2], Size: s[3],
		Group: s[1] / keys[1], ValueSize: size,
		Causal: o.Causal, Scale: o.Scale, SoftCap: o.SoftCap,
	}
	if o.Mask {
		m := r.Of(others[0]).Shape
		steps := strided{shape: m, strides: rowMajor(m)}.along(m)
		a.Mask = kernels.Mask{Batch: steps[0], Head: steps[1], Row: steps[2], Key: steps[3]}
	}
	return a, Tensor{with(s, 3, size), of.DType}, Tensor{s[:3], of.DType}
}

// heads returns an operand of attention that lies in row-major order.
func heads(b backend.Buffer, heads, n, size int) kernels.HeadRows {
	return kernels.HeadRows{Buffer: b, Batch: heads * n * size, Head: n * size, Row: size}
}

// bound returns an attention of q, k, v, y and lse, and of the mask and the lengths.
func (o Attention) bound(a kernels.Attention, x, others []backend.Buffer) kernels.Attention {
	shared := a.Heads / a.Group
	a.Q, a.K = heads(x[0], a.Heads, a.Queries, a.Size), heads(x[1], shared, a.Keys, a.Size)
	a.V = heads(x[2], shared, a.Keys, a.ValueSize)
	a.Y, a.LSE = heads(x[3], a.Heads, a.Queries, a.ValueSize), x[4]
	if o.Mask {
		a.Mask.Buffer, others = others[0], others[1:]
	}
	if o.Lengths {
		a.Lengths = others[0]
	}
	return a
}

// Attention implements [Builder].
func (r *recorder) Attention(o Attention, x ...Value) (y, lse Value) {
	a, of, statistics := r.attention(o, x[0], x[1], x[2], x[3:])
	y, besides := r.called(of, func(dst, src []backend.Buffer) error {
		return kernels.Host{}.Attention(o.bound(a, slices.Concat(src[:3], dst), src[3:]))
	}, []Tensor{statistics}, x...)
	return y, besides[0]
}

// AttentionGrad implements [Builder].
func (r *recorder) AttentionGrad(o Attention, x ...Value) (dq, dk, dv Value) {
	a, _, sums := r.attention(o, x[0], x[1], x[2], x[6:])
	shared := a.Heads / a.Group
	dq, besides := r.called(r.Of(x[0]), func(dst, src []backend.Buffer) error {
		return kernels.Host{}.AttentionGrad(kernels.AttentionGrad{
			Attention: o.bound(a, src, src[6:]), DY: heads(src[5], a.Heads, a.Queries, a.ValueSize),
			DQ: heads(dst[0], a.Heads, a.Queries, a.Size),
			DK: heads(dst[1], shared, a.Keys, a.Size),
			DV: heads(dst[2], shared, a.Keys, a.ValueSize), Sums: dst[3],
		})
	}, []Tensor{r.Of(x[1]), r.Of(x[2]), sums}, x...)
	return dq, besides[0], besides[1]
}

// LSTM implements [Builder]: there is no kernel, but loops.
func (*recorder) LSTM(bool, Value, Value, Value, Value) (all, kept Value, ok bool) {
	return 0, 0, false
}

// LSTMGrad implements [Builder]: nothing calls it.
func (*recorder) LSTMGrad(bool, Value, Value, Value, Value, Value) Value { return 0 }

// images returns a window on images of b x c planes.
func (w Window) images(b, c, h, width int) kernels.Images {
	rows, columns := w.Places(h, width)
	return kernels.Images{
		Batch: b, C: c, H: h, W: width, OutH: rows, OutW: columns,
		KernelH: w.Kernel[0], KernelW: w.Kernel[1], PadH: w.Pad[0], PadW: w.Pad[1],
		StrideH: w.Stride[0], StrideW: w.Stride[1], DilationH: w.Dilation[0],
		DilationW: w.Dilation[1],
	}
}

// Patches implements [Builder].
func (r *recorder) Patches(w Window, images Value) Value {
	of := r.Of(images)
	i := w.images(of.Shape[0], of.Shape[1], of.Shape[2], of.Shape[3])
	shape := []int{i.Batch, i.OutH, i.OutW, i.C * i.KernelH * i.KernelW}
	v, _ := r.called(Tensor{shape, of.DType}, func(dst, src []backend.Buffer) error {
		return kernels.Host{}.Im2Col(dst[0], src[0], i)
	}, nil, images)
	return v
}

// Images implements [Builder].
func (r *recorder) Images(w Window, patches Value, height, width int) Value {
	of := r.Of(patches)
	i := w.images(of.Shape[0], of.Shape[3]/(w.Kernel[0]*w.Kernel[1]), height, width)
	shape := []int{i.Batch, i.C, height, width}
	v, _ := r.called(Tensor{shape, of.DType}, func(dst, src []backend.Buffer) error {
		return kernels.Host{}.Col2Im(dst[0], src[0], i)
	}, nil, patches)
	return v
}

// Convolve implements [Builder].
func (r *recorder) Convolve(c Convolution, x, y Value) Value {
	a, b := r.Of(x), r.Of(y)
	to := Tensor{c.Shape(a.Shape, b.Shape), a.DType}
	images, results := a.Shape, to.Shape
	switch c.Pass {
	case kernels.InputGradient:
		images, results = results, images
	case kernels.FilterGradient:
		results = b.Shape
	}
	k := kernels.Convolution{
		Images:  c.images(images[0], images[1], images[2], images[3]),
		Filters: results[1], Groups: c.Groups, Pass: c.Pass, DType: a.DType,
	}
	k.OutH, k.OutW = results[2], results[3]
	v, _ := r.called(to, func(dst, src []backend.Buffer) error {
		return kernels.Host{}.Convolve(k, dst[0], src[0], src[1])
	}, nil, x, y)
	return v
}

// MaxPool implements [Builder].
func (r *recorder) MaxPool(w Window, images Value) Value {
	of := r.Of(images)
	i := w.images(of.Shape[0], of.Shape[1], of.Shape[2], of.Shape[3])
	v, _ := r.called(Tensor{[]int{i.Batch, i.C, i.OutH, i.OutW}, of.DType},
		func(dst, src []backend.Buffer) error {
			return kernels.Host{}.MaxPool(dst[0], src[0], i)
		}, nil, images)
	return v
}

// MaxPoolGrad implements [Builder].
func (r *recorder) MaxPoolGrad(w Window, images, dy Value) Value {
	of := r.Of(images)
	i := w.images(of.Shape[0], of.Shape[1], of.Shape[2], of.Shape[3])
	v, _ := r.called(of, func(dst, src []backend.Buffer) error {
		return kernels.Host{}.MaxPoolGrad(dst[0], src[0], src[1], i)
	}, nil, images, dy)
	return v
}
