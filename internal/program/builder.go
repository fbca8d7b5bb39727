package program

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Value names a value of a [Builder].
type Value int

// Tensor is the shape and the dtype of a value.
type Tensor struct {
	Shape []int
	DType backend.DType
}

// Builder adds the values of a program. Each primitive returns a new value, which depends on its
// arguments alone. A Builder does not check them: who calls it knows that shapes and dtypes fit.
//
// The first primitives compute element by element, and fold. Their operands may differ in axes of
// length 1, which are repeated, and in missing first axes, which have length 1 then. Neighbours
// with one shape become one loop; what has one element for each row of that shape joins it, too.
type Builder interface {
	// Of returns the shape and the dtype of a value.
	Of(x Value) Tensor
	// InRange reports whether integers, such as lengths, are in range for sure, because they were
	// looked at before the run. Others are not known then.
	InRange(integers Value) bool
	// Number is a constant of the dtype of another value, without axes.
	Number(number float64, like Value) Value
	// Do is a function of package fuse, with the dtype of the last operand: comparisons give 1 or
	// 0 of it. The first operand of Where may have any dtype; other operands have one dtype.
	Do(f fuse.Op, x ...Value) Value
	// Cast is x in another dtype: floats become integers by truncation.
	Cast(d backend.DType, x Value) Value
	// Locate is, in I64, the place of the element along an axis where x is not 0, and the length of
	// the axis elsewhere. x, of any dtype, has the whole axis.
	Locate(axis int, x Value) Value
	// Select is x where a label is the place of the element along an axis, and y elsewhere. Labels
	// are integers, x and y have one dtype, and at least one of the three has the whole axis.
	Select(axis int, labels, x, y Value) Value
	// Dropout is x / (1-p) where the random number of the element is at least p, and 0 elsewhere.
	// The numbers come from fuse.Uniform for the key (seed, op), the step, the first sample plus
	// the place along the first axis, and the element of the sample.
	Dropout(p float64, seed, op uint32, x, step, first Value) Value
	// Reduce folds axes by Sum, Max or Min. They stay, with length 1.
	Reduce(op backend.ReduceOp, x Value, axes ...int) Value

	// Reshape has the elements of x in row-major order.
	Reshape(x Value, shape ...int) Value
	// Permute makes axis i of axis axes[i] of x.
	Permute(x Value, axes ...int) Value
	// Broadcast repeats axes of length 1.
	Broadcast(x Value, shape ...int) Value
	// Slice takes n elements of an axis: start, start+step, ...
	Slice(x Value, axis, start, step, n int) Value
	// Unslice is the gradient of Slice: zeros with n elements along the axis, among them those of
	// x.
	Unslice(x Value, axis, start, step, n int) Value
	// Concat joins values along an axis.
	Concat(axis int, x ...Value) Value
	// Gather takes the elements of an axis that a list of integers names.
	Gather(x, list Value, axis int) Value
	// GatherGrad is the gradient of Gather: zeros with n elements along the axis, to which those of
	// dy are added in the order of the list.
	GatherGrad(dy, list Value, axis, n int) Value
	// Put is x with other elements of an axis, those that a list of integers names: rows, in the
	// order of the list.
	Put(x, list, rows Value, axis int) Value

	// MatMul multiplies matrices, the last two axes, of which transA and transB exchange those of
	// an operand. All other axes are equal.
	MatMul(transA, transB bool, a, b Value) Value
	// Attention has the meaning of kernels.Attention of q [b, h, queries, d], k [b, g, keys, d] and
	// v [b, g, keys, e], of a mask with the axes of the scores, or 1, and of lengths [b]. lse is
	// for the gradient.
	Attention(o Attention, x ...Value) (y, lse Value)
	// AttentionGrad are the gradients of Attention, from q, k, v, y, lse, dy, mask and lengths.
	AttentionGrad(o Attention, x ...Value) (dq, dk, dv Value)
	// LSTM has the meaning of kernels.LSTM, where the machine has a kernel for that: else it is not
	// ok, and adds nothing. Operands are input, h0, c0 and weights, as matrices.
	LSTM(reverse bool, input, h0, c0, weights Value) (all, kept Value, ok bool)
	// LSTMGrad is the gradient of LSTM, from its results, dy, dc and weights: that of the gates'
	// operands, and of c0 behind them, as a matrix.
	LSTMGrad(reverse bool, all, kept, dy, dc, weights Value) Value
	// Patches makes of images [b, c, h, w] their patches [b, oh, ow, c*kh*kw].
	Patches(w Window, images Value) Value
	// Images is the gradient of Patches: it adds patches up to images of a height and width.
	Images(w Window, patches Value, height, width int) Value
	// Convolve has the meaning of kernels.Convolution, of the two operands of the pass.
	Convolve(c Convolution, x, y Value) Value
	// MaxPool is the largest pixel of each window inside of images [b, c, h, w], NaN if one is.
	MaxPool(w Window, images Value) Value
	// MaxPoolGrad is the gradient of MaxPool from its images and dy.
	MaxPoolGrad(w Window, images, dy Value) Value
}

// Attention are the parameters of an attention: see kernels.Attention.
type Attention struct {
	Causal         bool
	Scale, SoftCap float64
	Mask, Lengths  bool // are operands
}

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
