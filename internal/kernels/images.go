package kernels

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/workers"
)

// Images says what a convolution or a pooling sees: images of C planes of H x W pixels, and a
// window of KernelH x KernelW pixels at OutH x OutW places. The pixel (kh, kw) of the window at
// place (oh, ow) is
//
//	h = oh*StrideH - PadH + kh*DilationH
//	w = ow*StrideW - PadW + kw*DilationW
//
// of the image, or outside of it.
type Images struct {
	Batch, C, H, W       int
	OutH, OutW           int
	KernelH, KernelW     int
	PadH, PadW           int
	StrideH, StrideW     int
	DilationH, DilationW int

	// Rectified makes poolings see Relu of each pixel x: their gradient is by x.
	Rectified bool
}

// pixels returns the number of elements of the images [Batch, C, H, W].
func (i *Images) pixels() int { return i.Batch * i.C * i.H * i.W }

// places returns the number of elements of the results of pooling [Batch, C, OutH, OutW].
func (i *Images) places() int { return i.Batch * i.C * i.OutH * i.OutW }

// patches returns the number of elements of the patches [Batch, OutH, OutW, C, KernelH, KernelW].
func (i *Images) patches() int { return i.places() * i.KernelH * i.KernelW }

// images checks sizes, lengths and dtypes.
func (c Check) images(kernel string, i Images, lengths []int, buffers ...backend.Buffer) error {
	return c.imagesOf(kernel, i, false, lengths, buffers)
}

// imagesOf is images, which may be BF16 if they are convolved.
func (c Check) imagesOf(kernel string, i Images, convolves bool, lengths []int,
	buffers []backend.Buffer) error {
	if min(i.Batch, i.C, i.H, i.W, i.OutH, i.OutW, i.PadH, i.PadW) < 0 ||
		min(i.KernelH, i.KernelW, i.StrideH, i.StrideW, i.DilationH, i.DilationW) < 1 {
		return fmt.Errorf("%w: %s of %+v: sizes and padding are at least 0; kernel, strides and "+
			"dilations at least 1", backend.ErrArgument, kernel, i)
	}
	d := buffers[0].DType()
	if half := d == backend.BF16 && convolves; !half && d != backend.F32 && d != backend.F64 {
		return fmt.Errorf("%w: %s of %v: of f32 and f64 only", backend.ErrUnsupported, kernel, d)
	}
	for n, b := range buffers {
		if b.DType() != d || b.Len() != lengths[n] {
			return fmt.Errorf("%w: %s of %+v: operand %d has %d %v, want %d %v",
				backend.ErrArgument, kernel, i, n, b.Len(), b.DType(), lengths[n], d)
		}
	}
	return c.checkDevice(kernel, buffers...)
}

// Im2Col checks its arguments.
func (c Check) Im2Col(dst, src backend.Buffer, i Images) error {
	return c.images("im2col", i, []int{i.patches(), i.pixels()}, dst, src)
}

// Col2Im checks its arguments.
func (c Check) Col2Im(dst, src backend.Buffer, i Images) error {
	return c.images("col2im", i, []int{i.pixels(), i.patches()}, dst, src)
}

// MaxPool checks its arguments.
func (c Check) MaxPool(dst, src backend.Buffer, i Images) error {
	return c.images("maxpool", i, []int{i.places(), i.pixels()}, dst, src)
}

// MaxPoolGrad checks its arguments.
func (c Check) MaxPoolGrad(dx, x, dy backend.Buffer, i Images) error {
	return c.images("maxpoolgrad", i, []int{i.pixels(), i.pixels(), i.places()}, dx, x, dy)
}

// Im2Col copies patches out of images:
//
//	for b, oh, ow, c, kh, kw { dst[b,oh,ow,c,kh,kw] = src[b,c,h,w], or 0 outside of the image }
func (h Host) Im2Col(dst, src backend.Buffer, i Images) error {
	return h.patches((Check{}).Im2Col(dst, src, i), i, dst, src, false)
}

// Col2Im adds up patches to images, in the order of the patches: it is the gradient of Im2Col.
//
//	dst = 0; for b, oh, ow, c, kh, kw inside of the image { dst[b,c,h,w] += src[b,oh,ow,c,kh,kw] }
func (h Host) Col2Im(dst, src backend.Buffer, i Images) error {
	return h.patches((Check{}).Col2Im(dst, src, i), i, src, dst, true)
}

// MaxPool finds the largest pixel of each window, among those inside of the image:
//
//	for b, c, oh, ow { dst[b,c,oh,ow] = max over kh, kw of src[b,c,h,w] }
//
// of Relu of the pixels if i is Rectified. NaN is the largest of all, as in PyTorch. A window
// without a pixel gives -Inf.
func (h Host) MaxPool(dst, src backend.Buffer, i Images) error {
	return h.pools((Check{}).MaxPool(dst, src, i), i, src, dst, backend.Buffer{})
}

// MaxPoolGrad adds the gradient of each window to the gradient of its largest pixel, in the order
// of the windows. Of several largest pixels the first one counts, but the last NaN, as in PyTorch.
//
//	dx = 0; for b, c, oh, ow { dx[largest pixel of the window] += dy[b,c,oh,ow] }
//	if Rectified { dx = 0 where x < 0 }
func (h Host) MaxPoolGrad(dx, x, dy backend.Buffer, i Images) error {
	return h.pools((Check{}).MaxPoolGrad(dx, x, dy, i), i, x, dy, dx)
}

// patches runs Im2Col or Col2Im, unless wrong says that its arguments are.
func (h Host) patches(wrong error, i Images, patches, images backend.Buffer, add bool) error {
	switch {
	case wrong != nil:
		return wrong
	case images.DType() == backend.F32:
		workers.Run(h.pool(), i.Batch, patching[float32]{i, backend.View[float32](patches),
			backend.View[float32](images), add})
	default:
		workers.Run(h.pool(), i.Batch, patching[float64]{i, backend.View[float64](patches),
			backend.View[float64](images), add})
	}
	return nil
}

// pools runs MaxPool, or MaxPoolGrad if dx is there, unless wrong says that its arguments are.
func (h Host) pools(wrong error, i Images, x, y, dx backend.Buffer) error {
	switch {
	case wrong != nil:
		return wrong
	case x.DType() == backend.F32:
		runPools(h.pool(), simd.Best(), pooling[float32]{Images: i, x: backend.View[float32](x),
			y: backend.View[float32](y), dx: backend.View[float32](dx)})
	default:
		runPools(h.pool(), simd.Best(), pooling[float64]{Images: i, x: backend.View[float64](x),
			y: backend.View[float64](y), dx: backend.View[float64](dx)})
	}
	return nil
}
