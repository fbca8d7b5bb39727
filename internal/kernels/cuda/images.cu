// What convolutions and poolings need besides products: im2col_DTYPE and its gradient col2im_DTYPE,
// maxpool_DTYPE and its gradient maxpoolgrad_DTYPE.
//
// A gradient is gathered: each pixel adds up what belongs to it, in the order of the host. So there
// are no atomics, and the bits equal the host's.

#include "number.cuh"

// ---- kernels ----

struct Axis {
	i32 size, out, kernel, pad, stride, dilation;

	// The pixel that element k of the window at a place shows; it may be outside of the image.
	DEVICE i32 pixel(i32 place, i32 k) const { return place * stride - pad + k * dilation; }
	DEVICE bool has(i32 pixel) const { return pixel >= 0 && pixel < size; }

	// The first place whose window may show a pixel, and the one after the last.
	DEVICE i32 first(i32 pixel) const {
		i32 reach = pixel + pad - (kernel - 1) * dilation;
		return reach <= 0 ? 0 : (reach + stride - 1) / stride;
	}
	DEVICE i32 last(i32 pixel) const { return least((pixel + pad) / stride + 1, out); }

	// Which element of the window at a place shows the pixel, -1 if none does.
	DEVICE i32 element(i32 place, i32 pixel) const {
		i32 from = pixel + pad - place * stride;
		return from >= 0 && from % dilation == 0 && from / dilation < kernel ? from / dilation : -1;
	}

	// Whether no pixel is in two windows. Then cells of `stride` pixels, each of which begins with
	// the window of its place if there is one, cover the image.
	DEVICE bool apart() const { return (kernel - 1) * dilation < stride; }
	DEVICE i32 cells() const { return (size + pad + stride - 1) / stride; }
};

// The digits of a number, the last one first. Division is slow, that of 64 bits very.
struct Digits {
	u64 rest;
	DEVICE u32 next(u32 size) {
		u64 before = rest;
		rest = before >> 32 ? before / size : (u32)before / size;
		return (u32)before - (u32)rest * size;
	}
};

// for b, oh, ow, c, kh, kw { dst[b,oh,ow,c,kh,kw] = src[b,c,h,w], or 0 outside of the image }
template <class T> DEVICE void im2col(T *dst, const T *src, u64 batch, u64 planes, Axis y, Axis x) {
	u64 n = batch * planes * y.out * x.out * y.kernel * x.kernel;
	for (u64 at = thread_index(); at < n; at += thread_count()) {
		Digits d = {at};
		u32 kw = d.next(x.kernel), kh = d.next(y.kernel), c = d.next(planes), ow = d.next(x.out),
			oh = d.next(y.out);
		i32 h = y.pixel(oh, kh), w = x.pixel(ow, kw);
		dst[at] =
			y.has(h) && x.has(w) ? src[((d.rest * planes + c) * y.size + h) * x.size + w] : T(0);
	}
}

// for b, c, h, w { dst[b,c,h,w] = sum over the places oh, ow that show it of src[b,oh,ow,c,kh,kw] }
template <class T> DEVICE void col2im(T *dst, const T *src, u64 batch, u64 planes, Axis y, Axis x) {
	u64 n = batch * planes * y.size * x.size;
	for (u64 at = thread_index(); at < n; at += thread_count()) {
		Digits d = {at};
		i32 w = d.next(x.size), h = d.next(y.size), c = d.next(planes);
		T sum = 0;
		for (i32 oh = y.first(h); oh < y.last(h); oh++) {
			i32 kh = y.element(oh, h);
			for (i32 ow = x.first(w); kh >= 0 && ow < x.last(w); ow++) {
				i32 kw = x.element(ow, w);
				if (kw >= 0)
					sum = plus(sum,
						src[((((d.rest * y.out + oh) * x.out + ow) * planes + c) * y.kernel + kh) *
								x.kernel +
							kw]);
			}
		}
		dst[at] = sum;
	}
}

DEVICE f32 least_of(f32) { return bits_as<f32>(0xff800000); } // -Inf
DEVICE f64 least_of(f64) { return bits_as<f64>(0xfff0000000000000); }

// The place of the largest pixel of a window in its plane, -1 if none is inside of the image, and
// its value: of Relu of the pixels if it is rectified. NaN is the largest of all; of several that
// are the largest the first one counts, but the last NaN. Side is the length of the window's sides,
// 0 for any: if it is known, all pixels are on their way at the same time.
template <i32 Side, class T>
DEVICE i32 largest(T &most, const T *plane, Axis y, Axis x, i32 oh, i32 ow, bool rectified) {
	i32 at = -1;
	most = least_of(T());
	for (i32 kh = 0; kh < (Side > 0 ? Side : y.kernel); kh++)
		for (i32 kw = 0; kw < (Side > 0 ? Side : x.kernel); kw++) {
			i32 h = y.pixel(oh, kh), w = x.pixel(ow, kw);
			bool inside = y.has(h) && x.has(w);
			T pixel = inside ? plane[h * x.size + w] : least_of(T());
			if (rectified && pixel < 0)
				pixel = 0;
			if (inside && (at < 0 || pixel > most || pixel != pixel))
				at = h * x.size + w, most = pixel;
		}
	return at;
}

// for b, c, oh, ow { dst[b,c,oh,ow] = max over kh, kw of src[b,c,h,w] }
template <i32 Side, class T>
DEVICE void maxpool(T *dst, const T *src, u64 planes, Axis y, Axis x, bool rectified) {
	u64 n = planes * y.out * x.out;
	for (u64 at = thread_index(); at < n; at += thread_count()) {
		Digits d = {at};
		i32 ow = d.next(x.out), oh = d.next(y.out);
		T most;
		largest<Side>(most, src + d.rest * y.size * x.size, y, x, oh, ow, rectified);
		dst[at] = most;
	}
}

// for b, c, h, w { dx[b,c,h,w] = sum of dy over the windows whose largest pixel it is }
// of windows that are apart: a thread writes one cell, of Side x Side pixels if that is not 0.
template <i32 Side, class T>
DEVICE void maxpoolgrad_apart(T *dx, const T *src, const T *dy, u64 planes, Axis y, Axis x,
	bool rectified) {
	u64 n = planes * y.cells() * x.cells();
	for (u64 at = thread_index(); at < n; at += thread_count()) {
		Digits d = {at};
		i32 ow = d.next(x.cells()), oh = d.next(y.cells()), winner = -1;
		const T *plane = src + d.rest * y.size * x.size;
		T gradient = 0, most;
		if (oh < y.out && ow < x.out) {
			T whole = plus(T(0), dy[(d.rest * y.out + oh) * x.out + ow]);
			winner = largest<Side>(most, plane, y, x, oh, ow, rectified);
			if (winner >= 0 && !(rectified && plane[winner] < 0))
				gradient = whole;
		}
		T *to = dx + d.rest * y.size * x.size;
		for (i32 i = 0; i < (Side > 0 ? Side : y.stride); i++)
			for (i32 j = 0; j < (Side > 0 ? Side : x.stride); j++) {
				i32 h = oh * y.stride - y.pad + i, w = ow * x.stride - x.pad + j;
				if (y.has(h) && x.has(w))
					to[h * x.size + w] = h * x.size + w == winner ? gradient : T(0);
			}
	}
}

// The same of windows that overlap: a thread looks for one pixel in all of its windows.
template <class T>
DEVICE void maxpoolgrad(T *dx, const T *src, const T *dy, u64 planes, Axis y, Axis x,
	bool rectified) {
	if (y.apart() && x.apart()) {
		if (y.kernel == 2 && x.kernel == 2 && y.stride == 2 && x.stride == 2)
			return maxpoolgrad_apart<2>(dx, src, dy, planes, y, x, rectified);
		return maxpoolgrad_apart<0>(dx, src, dy, planes, y, x, rectified);
	}
	u64 n = planes * y.size * x.size;
	for (u64 at = thread_index(); at < n; at += thread_count()) {
		Digits d = {at};
		i32 w = d.next(x.size), h = d.next(y.size);
		T sum = 0, most;
		for (i32 oh = y.first(h); oh < y.last(h); oh++)
			for (i32 ow = x.first(w); ow < x.last(w); ow++)
				if (y.element(oh, h) >= 0 && x.element(ow, w) >= 0 &&
					largest<0>(most, src + d.rest * y.size * x.size, y, x, oh, ow, rectified) ==
						h * x.size + w)
					sum = plus(sum, dy[(d.rest * y.out + oh) * x.out + ow]);
		dx[at] = rectified && src[at] < 0 ? T(0) : sum;
	}
}

#define AXES \
	i64 h, i64 w, i64 out_h, i64 out_w, i64 kernel_h, i64 kernel_w, i64 pad_h, i64 pad_w, \
		i64 stride_h, i64 stride_w, i64 dilation_h, i64 dilation_w
#define Y_AXIS Axis{(i32)h, (i32)out_h, (i32)kernel_h, (i32)pad_h, (i32)stride_h, (i32)dilation_h}
#define X_AXIS Axis{(i32)w, (i32)out_w, (i32)kernel_w, (i32)pad_w, (i32)stride_w, (i32)dilation_w}
#define IMAGES(T) \
	KERNEL(im2col_##T, 256, T *dst, const T *src, u64 batch, u64 planes, AXES) { \
		im2col(dst, src, batch, planes, Y_AXIS, X_AXIS); \
	} \
	KERNEL(col2im_##T, 256, T *dst, const T *src, u64 batch, u64 planes, AXES) { \
		col2im(dst, src, batch, planes, Y_AXIS, X_AXIS); \
	} \
	KERNEL(maxpool_##T, 256, T *dst, const T *src, u64 batch, u64 planes, AXES, u64 rectified) { \
		if (kernel_h == 2 && kernel_w == 2) \
			maxpool<2>(dst, src, batch * planes, Y_AXIS, X_AXIS, rectified); \
		else maxpool<0>(dst, src, batch * planes, Y_AXIS, X_AXIS, rectified); \
	} \
	KERNEL(maxpoolgrad_##T, 256, T *dx, const T *x, const T *dy, u64 batch, u64 planes, AXES, \
		u64 rectified) { \
		maxpoolgrad(dx, x, dy, batch * planes, Y_AXIS, X_AXIS, rectified); \
	}
IMAGES(f32)
IMAGES(f64)

// ---- launch ----
//
// 256 threads, one for each element that is written, or for each cell of gradients of windows that
// are apart.
