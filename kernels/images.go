package kernels

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// Images says what a convolution or a pooling sees: images of C planes of H x W pixels, and a window of
// KernelH x KernelW pixels at OutH x OutW places. The pixel (kh, kw) of the window at place (oh, ow) is
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

	// Rectified makes poolings see x * (x >= 0) in place of each pixel x: their gradient is by x.
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
	if min(i.Batch, i.C, i.H, i.W, i.OutH, i.OutW, i.PadH, i.PadW) < 0 || min(i.KernelH, i.KernelW, i.StrideH, i.StrideW, i.DilationH, i.DilationW) < 1 {
		return fmt.Errorf("%w: %s of %+v: sizes and padding are at least 0; kernel, strides and dilations at least 1", backend.ErrArgument, kernel, i)
	}
	d := buffers[0].DType()
	if d != backend.F32 && d != backend.F64 {
		return fmt.Errorf("%w: %s of %v: of f32 and f64 only", backend.ErrUnsupported, kernel, d)
	}
	for n, b := range buffers {
		if b.DType() != d || b.Len() != lengths[n] {
			return fmt.Errorf("%w: %s of %+v: operand %d has %d %v, want %d %v", backend.ErrArgument, kernel, i, n, b.Len(), b.DType(), lengths[n], d)
		}
	}
	return c.place(kernel, buffers...)
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
func (Host) Im2Col(dst, src backend.Buffer, i Images) error {
	if err := (Check{}).Im2Col(dst, src, i); err != nil {
		return err
	}
	if dst.DType() == backend.F32 {
		im2col(backend.View[float32](dst), backend.View[float32](src), &i)
	} else {
		im2col(backend.View[float64](dst), backend.View[float64](src), &i)
	}
	return nil
}

// Col2Im adds patches up to images, in the order of the patches: it is the gradient of Im2Col.
//
//	dst = 0; for b, oh, ow, c, kh, kw inside of the image { dst[b,c,h,w] += src[b,oh,ow,c,kh,kw] }
func (Host) Col2Im(dst, src backend.Buffer, i Images) error {
	if err := (Check{}).Col2Im(dst, src, i); err != nil {
		return err
	}
	if dst.DType() == backend.F32 {
		col2im(backend.View[float32](dst), backend.View[float32](src), &i)
	} else {
		col2im(backend.View[float64](dst), backend.View[float64](src), &i)
	}
	return nil
}

// MaxPool finds the largest pixel of each window, of those inside of the image:
//
//	for b, c, oh, ow { dst[b,c,oh,ow] = max over kh, kw of src[b,c,h,w] }
//
// of x * (x >= 0) if i is Rectified. Without a pixel that is larger than the least finite number, that
// number is the result. NaN is never the largest. Both are Gorgonia's rules.
func (Host) MaxPool(dst, src backend.Buffer, i Images) error {
	if err := (Check{}).MaxPool(dst, src, i); err != nil {
		return err
	}
	if dst.DType() == backend.F32 {
		maxPool(backend.View[float32](dst), backend.View[float32](src), &i)
	} else {
		maxPool(backend.View[float64](dst), backend.View[float64](src), &i)
	}
	return nil
}

// MaxPoolGrad adds the gradient of each window to that of its first largest pixel, in the order of the
// windows:
//
//	dx = 0; for b, c, oh, ow { dx[first largest pixel of the window] += dy[b,c,oh,ow] }
//	if Rectified { dx *= (x >= 0) }
func (Host) MaxPoolGrad(dx, x, dy backend.Buffer, i Images) error {
	if err := (Check{}).MaxPoolGrad(dx, x, dy, i); err != nil {
		return err
	}
	if x.DType() == backend.F32 {
		maxPoolGrad(backend.View[float32](dx), backend.View[float32](x), backend.View[float32](dy), &i)
	} else {
		maxPoolGrad(backend.View[float64](dx), backend.View[float64](x), backend.View[float64](dy), &i)
	}
	return nil
}

// eachPatch calls f for each element of each patch in order, with the place of the pixel that it
// shows, or -1 outside of the image.
func (i *Images) eachPatch(f func(patch, pixel int)) {
	patch := 0
	for b := range i.Batch {
		for oh := range i.OutH {
			for ow := range i.OutW {
				for c := range i.C {
					for k := range i.KernelH * i.KernelW {
						h := oh*i.StrideH - i.PadH + k/i.KernelW*i.DilationH
						w := ow*i.StrideW - i.PadW + k%i.KernelW*i.DilationW
						pixel := -1
						if h >= 0 && h < i.H && w >= 0 && w < i.W {
							pixel = ((b*i.C+c)*i.H+h)*i.W + w
						}
						f(patch, pixel)
						patch++
					}
				}
			}
		}
	}
}

func im2col[T float](dst, src []T, i *Images) {
	i.eachPatch(func(patch, pixel int) {
		if dst[patch] = 0; pixel >= 0 {
			dst[patch] = src[pixel]
		}
	})
}

func col2im[T float](dst, src []T, i *Images) {
	clear(dst)
	i.eachPatch(func(patch, pixel int) {
		if pixel >= 0 {
			dst[pixel] += src[patch]
		}
	})
}

// largest returns the place and the value of the first largest pixel of a window, -1 and the least
// finite number if there is none.
func largest[T float](x []T, i *Images, plane, oh, ow int) (int, T) {
	at, most := -1, leastFinite[T]()
	for k := range i.KernelH * i.KernelW {
		h := oh*i.StrideH - i.PadH + k/i.KernelW*i.DilationH
		w := ow*i.StrideW - i.PadW + k%i.KernelW*i.DilationW
		if h < 0 || h >= i.H || w < 0 || w >= i.W {
			continue
		}
		pixel := (plane*i.H+h)*i.W + w
		seen := x[pixel]
		if i.Rectified {
			seen *= positive(seen)
		}
		if seen > most {
			at, most = pixel, seen
		}
	}
	return at, most
}

// positive returns 1 where x is positive or zero, 0 elsewhere.
func positive[T float](x T) T {
	if x >= 0 {
		return 1
	}
	return 0
}

func leastFinite[T float]() T {
	var least T
	switch p := any(&least).(type) {
	case *float32:
		*p = -math.MaxFloat32
	case *float64:
		*p = -math.MaxFloat64
	}
	return least
}

func maxPool[T float](dst, src []T, i *Images) {
	for at := range dst {
		ow, oh, plane := at%i.OutW, at/i.OutW%i.OutH, at/i.OutW/i.OutH
		_, dst[at] = largest(src, i, plane, oh, ow)
	}
}

func maxPoolGrad[T float](dx, x, dy []T, i *Images) {
	clear(dx)
	for at := range dy {
		ow, oh, plane := at%i.OutW, at/i.OutW%i.OutH, at/i.OutW/i.OutH
		if pixel, _ := largest(x, i, plane, oh, ow); pixel >= 0 {
			dx[pixel] += dy[at]
		}
	}
	if i.Rectified {
		for at := range dx {
			dx[at] *= positive(x[at])
		}
	}
}
