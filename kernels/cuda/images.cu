// What convolutions and poolings need besides products: im2col_DTYPE and its gradient col2im_DTYPE,
// maxpool_DTYPE and its gradient maxpoolgrad_DTYPE.
//
// A gradient is gathered: each pixel adds up what belongs to it, in the order of the host. So there are
// no atomics, and the bits are those of the host.

#include "number.cuh"

// ---- kernels ----

struct Axis {
	i64 size, out, kernel, pad, stride, dilation;

	// The pixel that element k of the window at a place shows; it may be outside of the image.
	DEVICE i64 pixel(i64 place, i64 k) const { return place * stride - pad + k * dilation; }
	DEVICE bool has(i64 pixel) const { return pixel >= 0 && pixel < size; }

	// The first place whose window may show a pixel, and the one after the last.
	DEVICE i64 first(i64 pixel) const {
		i64 reach = pixel + pad - (kernel - 1) * dilation;
		return reach <= 0 ? 0 : (reach + stride - 1) / stride;
	}
	DEVICE i64 last(i64 pixel) const { return least((pixel + pad) / stride + 1, out); }

	// Which element of the window at a place shows the pixel, -1 if none does.
	DEVICE i64 element(i64 place, i64 pixel) const {
		i64 from = pixel + pad - place * stride;
		return from >= 0 && from % dilation == 0 && from / dilation < kernel ? from / dilation : -1;
	}
};

// for b, oh, ow, c, kh, kw { dst[b,oh,ow,c,kh,kw] = src[b,c,h,w], or 0 outside of the image }
template <class T> DEVICE void im2col(T *dst, const T *src, u64 batch, u64 planes, Axis y, Axis x) {
	u64 n = batch * planes * y.out * x.out * y.kernel * x.kernel;
	for (u64 at = thread_index(); at < n; at += thread_count()) {
		u64 rest = at, kw = rest % x.kernel, kh = (rest /= x.kernel) % y.kernel, c = (rest /= y.kernel) % planes;
		u64 ow = (rest /= planes) % x.out, oh = (rest /= x.out) % y.out, b = rest / y.out;
		i64 h = y.pixel(oh, kh), w = x.pixel(ow, kw);
		dst[at] = y.has(h) && x.has(w) ? src[((b * planes + c) * y.size + h) * x.size + w] : T(0);
	}
}

// for b, c, h, w { dst[b,c,h,w] = sum over the places oh, ow that show it of src[b,oh,ow,c,kh,kw] }
template <class T> DEVICE void col2im(T *dst, const T *src, u64 batch, u64 planes, Axis y, Axis x) {
	u64 n = batch * planes * y.size * x.size;
	for (u64 at = thread_index(); at < n; at += thread_count()) {
		i64 w = at % x.size, h = at / x.size % y.size;
		u64 plane = at / x.size / y.size, c = plane % planes, b = plane / planes;
		T sum = 0;
		for (i64 oh = y.first(h); oh < y.last(h); oh++) {
			i64 kh = y.element(oh, h);
			for (i64 ow = x.first(w); kh >= 0 && ow < x.last(w); ow++) {
				i64 kw = x.element(ow, w);
				if (kw >= 0)
					sum = plus(sum, src[((((b * y.out + oh) * x.out + ow) * planes + c) * y.kernel + kh) * x.kernel + kw]);
			}
		}
		dst[at] = sum;
	}
}

DEVICE f32 least_finite(f32) { return bits_as<f32>(0xff7fffff); }
DEVICE f64 least_finite(f64) { return bits_as<f64>(0xffefffffffffffff); }

// The place of the first largest pixel of a window in its plane, -1 if there is none, and its value.
template <class T> DEVICE i64 largest(T &most, const T *plane, Axis y, Axis x, i64 oh, i64 ow) {
	i64 at = -1;
	most = least_finite(T());
	for (i64 kh = 0; kh < y.kernel; kh++)
		for (i64 kw = 0; kw < x.kernel; kw++) {
			i64 h = y.pixel(oh, kh), w = x.pixel(ow, kw);
			if (!y.has(h) || !x.has(w))
				continue;
			T pixel = plane[h * x.size + w];
			if (pixel > most)
				at = h * x.size + w, most = pixel;
		}
	return at;
}

// for b, c, oh, ow { dst[b,c,oh,ow] = max over kh, kw of src[b,c,h,w] }
template <class T> DEVICE void maxpool(T *dst, const T *src, u64 planes, Axis y, Axis x) {
	u64 n = planes * y.out * x.out;
	for (u64 at = thread_index(); at < n; at += thread_count()) {
		T most;
		largest(most, src + at / x.out / y.out * y.size * x.size, y, x, at / x.out % y.out, at % x.out);
		dst[at] = most;
	}
}

// for b, c, h, w { dx[b,c,h,w] = sum of dy over the windows whose first largest pixel it is }
template <class T> DEVICE void maxpoolgrad(T *dx, const T *src, const T *dy, u64 planes, Axis y, Axis x) {
	u64 n = planes * y.size * x.size;
	for (u64 at = thread_index(); at < n; at += thread_count()) {
		i64 w = at % x.size, h = at / x.size % y.size;
		u64 plane = at / x.size / y.size;
		T sum = 0, most;
		for (i64 oh = y.first(h); oh < y.last(h); oh++)
			for (i64 ow = x.first(w); ow < x.last(w); ow++)
				if (y.element(oh, h) >= 0 && x.element(ow, w) >= 0 &&
					largest(most, src + plane * y.size * x.size, y, x, oh, ow) == h * x.size + w)
					sum = plus(sum, dy[(plane * y.out + oh) * x.out + ow]);
		dx[at] = sum;
	}
}

#define AXES                                                                                              \
	i64 h, i64 w, i64 out_h, i64 out_w, i64 kernel_h, i64 kernel_w, i64 pad_h, i64 pad_w, i64 stride_h, \
		i64 stride_w, i64 dilation_h, i64 dilation_w
#define Y_AXIS Axis{h, out_h, kernel_h, pad_h, stride_h, dilation_h}
#define X_AXIS Axis{w, out_w, kernel_w, pad_w, stride_w, dilation_w}
#define IMAGES(T)                                                                                         \
	KERNEL(im2col_##T, 256, T *dst, const T *src, u64 batch, u64 planes, AXES) {                      \
		im2col(dst, src, batch, planes, Y_AXIS, X_AXIS);                                          \
	}                                                                                                 \
	KERNEL(col2im_##T, 256, T *dst, const T *src, u64 batch, u64 planes, AXES) {                      \
		col2im(dst, src, batch, planes, Y_AXIS, X_AXIS);                                          \
	}                                                                                                 \
	KERNEL(maxpool_##T, 256, T *dst, const T *src, u64 batch, u64 planes, AXES) {                     \
		maxpool(dst, src, batch * planes, Y_AXIS, X_AXIS);                                        \
	}                                                                                                 \
	KERNEL(maxpoolgrad_##T, 256, T *dx, const T *x, const T *dy, u64 batch, u64 planes, AXES) {       \
		maxpoolgrad(dx, x, dy, batch * planes, Y_AXIS, X_AXIS);                                   \
	}
IMAGES(f32)
IMAGES(f64)

// ---- launch ----
//
// 256 threads, one for each element that is written.
