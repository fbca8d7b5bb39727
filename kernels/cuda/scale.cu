// Multiplication by a number of the host: scale_DTYPE.

#include "number.cuh"

// ---- kernels ----

DEVICE f16 scaled(f16 x, f64 factor) { return narrow_f16(widen(x) * (f32)factor); }
DEVICE bf16 scaled(bf16 x, f64 factor) { return narrow_bf16(widen(x) * (f32)factor); }
DEVICE f32 scaled(f32 x, f64 factor) { return x * (f32)factor; }
DEVICE f64 scaled(f64 x, f64 factor) { return x * factor; }

// Products out of range become the smallest integer, as on x86.
DEVICE i32 scaled(i32 x, f64 factor) {
	f64 y = (f64)x * factor;
	return y > -0x1p31 - 1 && y < 0x1p31 ? (i32)y : (i32)0x80000000;
}
DEVICE i64 scaled(i64 x, f64 factor) {
	f64 y = (f64)x * factor;
	return y >= -0x1p63 && y < 0x1p63 ? (i64)y : (i64)0x8000000000000000;
}
DEVICE u8 scaled(u8 x, f64 factor) {
	return (u8)scaled((i32)x, factor);
}

// for i < n { dst[i] = src[i] * factor }; dst may be src
template <class T> DEVICE void scale(T *dst, const T *src, u64 n, f64 factor) {
	constexpr int N = 16 / sizeof(T);
	each<N>(n, aligned(ADDRESS(dst) | ADDRESS(src), 16), [=](auto count, u64 i) {
		T x[decltype(count)::value];
		load(x, src + i);
		for (T &e : x)
			e = scaled(e, factor);
		store(dst + i, x);
	});
}

#define SCALE(T) \
	KERNEL(scale_##T, 256, T *dst, const T *src, u64 n, f64 factor) { scale(dst, src, n, factor); }
SCALE(f16)
SCALE(bf16)
SCALE(f32)
SCALE(f64)
SCALE(i32)
SCALE(i64)
SCALE(u8)

// ---- launch ----
//
// Any one-dimensional grid.
