package program

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// Attention are the parameters of an attention: see kernels.Attention.
type Attention = ir.Attention

// Window says which pixels of an image are seen at each place: a kernel whose pixels are as far
// apart as Dilation says, the padding before (Pad) and behind (After) the image, and the stride, of
// height and width.
type Window struct{ Kernel, Pad, After, Stride, Dilation [2]int }

// Reach returns how many pixels a window is high, or wide.
func (w Window) Reach(axis int) int { return (w.Kernel[axis]-1)*w.Dilation[axis] + 1 }

// Places returns at how many places an image of height h and width w is seen.
func (w Window) Places(h, width int) (rows, columns int) {
	at := func(i, n int) int { return (n+w.Pad[i]+w.After[i]-w.Reach(i))/w.Stride[i] + 1 }
	return at(0, h), at(1, width)
}

// Convolution are the parameters of a convolution: see kernels.Convolution. Image are the height
// and the width of gradients by images.
type Convolution struct {
	Window
	Groups int
	Pass   kernels.Pass
	Image  [2]int
}

// Shape returns the shape of the result, given those of the operands.
func (c Convolution) Shape(x, y []int) []int {
	switch c.Pass {
	case kernels.Forward:
		rows, columns := c.Places(x[2], x[3])
		return []int{x[0], y[0], rows, columns}
	case kernels.InputGradient:
		return []int{x[0], y[1] * c.Groups, c.Image[0], c.Image[1]}
	}
	return []int{y[1], x[1] / c.Groups, c.Kernel[0], c.Kernel[1]}
}

// MatMul multiplies matrices, the last two axes, of which transA and transB exchange those of
// an operand. All other axes are equal.
func (b *Builder) MatMul(transA, transB bool, x, y Value) Value {
	op := ir.MatMul{TransA: transA, TransB: transB}
	shape, _ := ir.Product(b.value(x).Shape, b.value(y).Shape, op)
	return b.addValue(op, shape, x, y)
}

// Attention has the meaning of kernels.Attention of q [b, h, queries, d], k [b, g, keys, d] and
// v [b, g, keys, e], of a mask with the axes of the scores, or 1, and of lengths [b]. lse is
// for the gradient.
func (b *Builder) Attention(o Attention, x ...Value) (y, lse Value) {
	of, shape := b.value(x[0]), b.value(x[0]).Shape
	y = b.Add(ir.Attention(o), shape.With(3, b.value(x[2]).Shape.At(3)), of.DType, x...)
	return y, b.Add(ir.Result{Index: 1}, shape.Without(3), ir.Statistics(of.DType), y)
}

// AttentionGrad are the gradients of Attention, from q, k, v, y, lse, dy, mask and lengths.
func (b *Builder) AttentionGrad(o Attention, x ...Value) (dq, dk, dv Value) {
	dq = b.Add(ir.AttentionGrad(o), b.value(x[0]).Shape, b.value(x[0]).DType, x...)
	dk = b.addValue(ir.Result{Index: 1}, b.value(x[1]).Shape, dq)
	dv = b.addValue(ir.Result{Index: 2}, b.value(x[2]).Shape, dq)
	return dq, dk, dv
}

// LSTM has the meaning of kernels.LSTM, where the machine has a kernel for that: else it is not
// ok, and adds nothing. Operands are input, h0, c0 and weights, as matrices.
func (b *Builder) LSTM(reverse bool, input, h0, c0, weights Value) (all, kept Value, ok bool) {
	v, shape := b.value(h0), b.value(h0).Shape
	batch, size := shape.At(0), shape.At(1)
	steps := b.value(input).Shape.At(0) / max(batch, 1)
	if b.Recurs == nil || v.DType != backend.F32 || steps < 1 || !b.Recurs(batch, size) {
		return 0, 0, false
	}
	all = b.addValue(ir.LSTM{Reverse: reverse}, ir.Of(steps+2, batch, size), input, h0, c0, weights)
	return all, b.addValue(ir.Result{Index: 1}, ir.Of(steps, 5, batch, size), all), true
}

// LSTMGrad is the gradient of LSTM, from its results, dy, dc and weights: that of the gates'
// operands, and of c0 behind them, as a matrix.
func (b *Builder) LSTMGrad(reverse bool, all, kept, dy, dc, weights Value) Value {
	shape := b.value(all).Shape
	gates := ir.Of((shape.At(0)-1)*shape.At(1), 4*shape.At(2))
	return b.addValue(ir.LSTM{Grad: true, Reverse: reverse}, gates, all, kept, dy, dc, weights)
}

func windowOf(w Window) ir.Window {
	return ir.Window{
		H: w.Kernel[0], W: w.Kernel[1], PadH: w.Pad[0], PadW: w.Pad[1],
		MoreH: w.After[0] - w.Pad[0], MoreW: w.After[1] - w.Pad[1],
		StrideH: w.Stride[0], StrideW: w.Stride[1], DilationH: w.Dilation[0],
		DilationW: w.Dilation[1],
	}
}

// Patches makes of images [b, c, h, w] their patches [b, oh, ow, c*kh*kw].
func (b *Builder) Patches(w Window, images Value) Value {
	s := b.value(images).Shape
	rows, columns := w.Places(s.At(2), s.At(3))
	shape := ir.Of(s.At(0), rows, columns, s.At(1)*w.Kernel[0]*w.Kernel[1])
	return b.addValue(ir.Im2Col{Window: windowOf(w)}, shape, images)
}

// Images is the gradient of Patches: it adds patches up to images of a height and width.
func (b *Builder) Images(w Window, patches Value, height, width int) Value {
	s := b.value(patches).Shape
	planes := s.At(3) / (w.Kernel[0] * w.Kernel[1])
	shape := ir.Of(s.At(0), planes, height, width)
	return b.addValue(ir.Col2Im{Window: windowOf(w)}, shape, patches)
}

// Convolve has the meaning of kernels.Convolution, of the two operands of the pass.
func (b *Builder) Convolve(c Convolution, x, y Value) Value {
	shape := c.Shape(b.value(x).Shape.Slice(), b.value(y).Shape.Slice())
	op := ir.Convolution{Pass: c.Pass, Window: windowOf(c.Window), Groups: c.Groups}
	return b.addValue(op, ir.Of(shape...), x, y)
}

// MaxPool is the largest pixel of each window inside of images [b, c, h, w], NaN if one is.
func (b *Builder) MaxPool(w Window, images Value) Value {
	s := b.value(images).Shape
	rows, columns := w.Places(s.At(2), s.At(3))
	return b.addValue(ir.MaxPool{Window: windowOf(w)}, s.With(2, rows).With(3, columns), images)
}

// MaxPoolGrad is the gradient of MaxPool from its images and dy.
func (b *Builder) MaxPoolGrad(w Window, images, dy Value) Value {
	return b.addValue(ir.MaxPoolGrad{Window: windowOf(w)}, b.value(images).Shape, images, dy)
}
