// Division by a number of the host: divide_DTYPE.

#include "number.cuh"

// ---- kernels ----

DEVICE f16 divided(f16 x, u64 by) { return narrow_f16(widen(x) / (f32)by); }
DEVICE bf16 divided(bf16 x, u64 by) { return narrow_bf16(widen(x) / (f32)by); }
// A byte cannot hold every divisor.
DEVICE u8 divided(u8 x, u64 by) { return by > 255 ? 0 : over(x, (u8)by); }
template <class T> DEVICE T divided(T x, u64 by) { return over(x, (T)by); }

// for i < n { dst[i] = src[i] / by }; dst may be src
template <class T> DEVICE void divide(T *dst, const T *src, u64 n, u64 by) {
	constexpr int N = 16 / sizeof(T);
	each<N>(n, aligned(ADDRESS(dst) | ADDRESS(src), 16), [=](auto count, u64 i) {
		T x[decltype(count)::value];
		load(x, src + i);
		for (T &e : x)
			e = divided(e, by);
		store(dst + i, x);
	});
}

#define DIVIDE(T) \
	KERNEL(divide_##T, 256, T *dst, const T *src, u64 n, u64 by) { divide(dst, src, n, by); }
DIVIDE(f16)
DIVIDE(bf16)
DIVIDE(f32)
DIVIDE(f64)
DIVIDE(i32)
DIVIDE(i64)
DIVIDE(u8)

// ---- launch ----
//
// Any one-dimensional grid.
