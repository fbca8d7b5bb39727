package program

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
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

// attention returns what is known of an attention before it runs.
func (r *recorder) attention(o Attention, q, k Value) (a kernels.Attention, lse Tensor) {
	of, keys := r.Of(q), r.Of(k).Shape[2]
	s := of.Shape
	a = kernels.Attention{
		Batch: s[0], Heads: s[1], Queries: s[2], Keys: keys, Size: s[3],
		Causal: o.Causal, Scale: o.Scale,
	}
	return a, Tensor{s[:3], of.DType}
}

// heads returns an operand of attention that lies in row-major order.
func heads(a kernels.Attention, b backend.Buffer, n int) kernels.HeadRows {
	return kernels.HeadRows{Buffer: b, Batch: a.Heads * n * a.Size, Head: n * a.Size, Row: a.Size}
}

// bound returns an attention of q, k, v, y and lse.
func bound(a kernels.Attention, x ...backend.Buffer) kernels.Attention {
	a.Q, a.K, a.V = heads(a, x[0], a.Queries), heads(a, x[1], a.Keys), heads(a, x[2], a.Keys)
	a.Y, a.LSE = heads(a, x[3], a.Queries), x[4]
	return a
}

// Attention implements [Builder].
func (r *recorder) Attention(o Attention, q, k, v Value) (y, lse Value) {
	a, statistics := r.attention(o, q, k)
	y, besides := r.called(r.Of(q), func(dst, src []backend.Buffer) error {
		return kernels.Host{}.Attention(bound(a, slices.Concat(src, dst)...))
	}, []Tensor{statistics}, q, k, v)
	return y, besides[0]
}

// AttentionGrad implements [Builder].
func (r *recorder) AttentionGrad(o Attention, q, k, v, y, lse, dy Value) (dq, dk, dv Value) {
	a, sums := r.attention(o, q, k)
	dq, besides := r.called(r.Of(q), func(dst, src []backend.Buffer) error {
		return kernels.Host{}.AttentionGrad(kernels.AttentionGrad{
			Attention: bound(a, src...), DY: heads(a, src[5], a.Queries),
			DQ: heads(a, dst[0], a.Queries), DK: heads(a, dst[1], a.Keys), DV: heads(a, dst[2],
				a.Keys),
			Sums: dst[3],
		})
	}, []Tensor{r.Of(k), r.Of(v), sums}, q, k, v, y, lse, dy)
	return dq, besides[0], besides[1]
}

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
