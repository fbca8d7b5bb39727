package kernels

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/workers"
)

// Convolution is a convolution of images x [Batch, C, H, W] with filters w [Filters, C, KernelH,
// KernelW] to y [Batch, Filters, OutH, OutW], or one of its gradients:
//
//	for b, f, oh, ow { y[b,f,oh,ow] = sum over c, kh, kw of x[b,c,h,w] * w[f,c,kh,kw] }
//
// with the pixels (h, w) of [Images]. Several Groups are separate convolutions, each with its share
// of the planes and of the filters, which are then [Filters, C/Groups, KernelH, KernelW]. Pixels
// outside of the image are zeros. (It is the correlation, as everywhere in machine learning.) The
// sum has the dtype, f32 or f64; for bf16 it is in f32, and rounded once. Each implementation adds
// in its own order, with or without fused multiply-adds, and gives bitwise identical results in
// every run; all agree where the sums are exact.
type Convolution struct {
	Images
	Filters int
	Groups  int // 0 is 1
	Pass    Pass
	DType   backend.DType

	// TF32 permits a device to round f32 operands to 10 bits of mantissa, for its tensor cores.
	TF32 bool

	// ChannelsLast says that memory has x as [Batch, H, W, C], w as [Filters, KernelH, KernelW,
	// C/Groups] and y as [Batch, OutH, OutW, Filters], as tensor cores read them. The host computes
	// with copies in the usual order.
	ChannelsLast bool

	// Epilogue, if it is not nil, runs after the convolution, on the host only.
	Epilogue Epilogue
}

// Pass says what a convolution computes, and from which two operands.
type Pass uint8

// The passes of a convolution.
const (
	Forward        Pass = iota // y, from x and w
	InputGradient              // dx, from dy and w
	FilterGradient             // dw, from x and dy
)

// String returns the name of the pass.
func (p Pass) String() string {
	return [...]string{Forward: "convolution", InputGradient: "convolution-input-grad",
		FilterGradient: "convolution-filter-grad"}[p]
}

// Parts returns the number of groups.
func (c *Convolution) Parts() int { return max(c.Groups, 1) }

// Columns returns the number of elements of one filter.
func (c *Convolution) Columns() int { return c.C / c.Parts() * c.KernelH * c.KernelW }

// lengths returns the numbers of elements of x, w and y.
func (c *Convolution) lengths() (x, w, y int) {
	return c.pixels(), c.Filters * c.Columns(), c.Batch * c.Filters * c.OutH * c.OutW
}

// Convolve checks its arguments: dst, and the operands in the order of the pass.
func (c Check) Convolve(v Convolution, dst, a, b backend.Buffer) error {
	if v.Filters < 0 || v.Pass > FilterGradient {
		return fmt.Errorf("%w: pass %d of %d filters", backend.ErrArgument, v.Pass, v.Filters)
	}
	if n := v.Parts(); v.Groups < 0 || v.C%n != 0 || v.Filters%n != 0 {
		return fmt.Errorf("%w: %d planes and %d filters in %d groups", backend.ErrArgument, v.C,
			v.Filters, v.Groups)
	}
	if dst.DType() != v.DType {
		return fmt.Errorf("%w: %v of %v into %v", backend.ErrArgument, v.Pass, v.DType, dst.DType())
	}
	x, w, y := v.lengths()
	lengths := [...][]int{Forward: {y, x, w}, InputGradient: {x, y, w},
		FilterGradient: {w, x, y}}[v.Pass]
	return c.imagesOf(v.Pass.String(), v.Images, true, lengths, []backend.Buffer{dst, a, b})
}

// Convolve computes a convolution into dst. Each worker needs 256 KiB of memory for patches.
// Together they need memory for filters in another order, for 16 sums of the gradient of filters,
// or from 64 Ki weights on for dy in another order. Convolutions of bf16 are computed from copies
// in f32.
func (h Host) Convolve(v Convolution, dst, a, b backend.Buffer) error {
	if err := (Check{}).Convolve(v, dst, a, b); err != nil {
		return err
	}
	pool, level := h.pool(), simd.Best()
	if v.ChannelsLast {
		return h.convolveTurned(v, dst, a, b)
	}
	switch v.DType {
	case backend.BF16:
		h.convolveWide(v, dst, a, b)
	case backend.F32:
		convolve(pool, level, &v, backend.View[float32](dst), backend.View[float32](a),
			backend.View[float32](b))
	default:
		convolve(pool, level, &v, backend.View[float64](dst), backend.View[float64](a),
			backend.View[float64](b))
	}
	return nil
}

// convolveWide computes a convolution of bf16: from copies in f32, into one that is rounded.
func (h Host) convolveWide(v Convolution, dst, a, b backend.Buffer) {
	all := backend.Of(workers.Scratch[float32](h.pool(), workers.Operands,
		dst.Len()+a.Len()+b.Len()))
	y, x, w := all.Slice(0, dst.Len()), all.Slice(dst.Len(), dst.Len()+a.Len()),
		all.Slice(dst.Len()+a.Len(), all.Len())
	after := v.Epilogue
	v.Epilogue = nil
	cast(x, a)
	cast(w, b)
	convolve(h.pool(), simd.Best(), &v, backend.View[float32](y), backend.View[float32](x),
		backend.View[float32](w))
	cast(dst, y)
	if after != nil {
		after.All()
	}
}

// Shapes returns the shapes of x, w and y, with the channels as the second axis.
func (c *Convolution) Shapes() (x, w, y [4]int) {
	return [4]int{c.Batch, c.C, c.H, c.W},
		[4]int{c.Filters, c.C / c.Parts(), c.KernelH, c.KernelW},
		[4]int{c.Batch, c.Filters, c.OutH, c.OutW}
}

// Operands returns the shapes of the result and of both operands of the pass.
func (c *Convolution) Operands() [3][4]int {
	x, w, y := c.Shapes()
	return [...][3][4]int{Forward: {y, x, w}, InputGradient: {x, y, w},
		FilterGradient: {w, x, y}}[c.Pass]
}

// ChannelsSecond returns dims and strides for [backend.Arithmetic.CopyStrided] that make a tensor
// of shape [N, C, H, W] from one that has its channels last.
func ChannelsSecond(shape [4]int) (dims, strides []int) {
	c, h, w := shape[1], shape[2], shape[3]
	return shape[:], []int{h * w * c, 1, w * c, c}
}

// ChannelsBehind returns dims and strides that make a tensor with its channels last from one of
// shape [N, C, H, W].
func ChannelsBehind(shape [4]int) (dims, strides []int) {
	n, c, h, w := shape[0], shape[1], shape[2], shape[3]
	return []int{n, h, w, c}, []int{c * h * w, w, 1, h * w}
}

// convolveTurned computes a convolution of tensors with their channels last.
func (h Host) convolveTurned(v Convolution, dst, a, b backend.Buffer) error {
	after, shapes := v.Epilogue, v.Operands()
	v.ChannelsLast, v.Epilogue = false, nil
	var turned [3]backend.Buffer
	for i, like := range []backend.Buffer{dst, a, b} {
		turned[i] = backend.Of(make([]byte, like.NBytes())).As(v.DType)
		if dims, strides := ChannelsSecond(shapes[i]); i > 0 {
			if err := h.CopyStrided(turned[i], like, dims, strides); err != nil {
				return err
			}
		}
	}
	if err := h.Convolve(v, turned[0], turned[1], turned[2]); err != nil {
		return err
	}
	dims, strides := ChannelsBehind(shapes[0])
	if err := h.CopyStrided(dst, turned[0], dims, strides); err != nil {
		return err
	}
	if after != nil {
		after.All()
	}
	return nil
}
