// Casts between floats, to nearest even: cast_FROM_TO.

#include "number.cuh"

// ---- kernels ----

DEVICE void convert(f16 x, f32 &y) { y = widen(x); }
DEVICE void convert(bf16 x, f32 &y) { y = widen(x); }
DEVICE void convert(f16 x, f64 &y) { y = widen(widen(x)); }
DEVICE void convert(bf16 x, f64 &y) { y = widen(widen(x)); }
DEVICE void convert(f32 x, f64 &y) { y = widen(x); }
DEVICE void convert(f64 x, f32 &y) { y = narrow_f32(x); }
DEVICE void convert(f32 x, f16 &y) { y = narrow_f16(x); }
DEVICE void convert(f32 x, bf16 &y) { y = narrow_bf16(x); }
DEVICE void convert(f64 x, f16 &y) { y = narrow_f16(to_odd(x)); }
DEVICE void convert(f64 x, bf16 &y) { y = narrow_bf16(to_odd(x)); }
// Also from a type to itself: signalling NaNs become quiet.
DEVICE void convert(f16 x, f16 &y) { y = narrow_f16(widen(x)); }
DEVICE void convert(f16 x, bf16 &y) { y = narrow_bf16(widen(x)); }
DEVICE void convert(bf16 x, f16 &y) { y = narrow_f16(widen(x)); }
DEVICE void convert(bf16 x, bf16 &y) { y = narrow_bf16(widen(x)); }

// for i < n { dst[i] = To(src[i]) }
template <class To, class From> DEVICE void cast(To *dst, const From *src, u64 n) {
	each_between(dst, src, n, [](To &y, From x) { convert(x, y); });
}

#define CAST(From, To) \
	KERNEL(cast_##From##_##To, 256, To *dst, const From *src, u64 n) { cast(dst, src, n); }
CAST(f16, f16)
CAST(f16, bf16)
CAST(f16, f32)
CAST(f16, f64)
CAST(bf16, f16)
CAST(bf16, bf16)
CAST(bf16, f32)
CAST(bf16, f64)
CAST(f32, f16)
CAST(f32, bf16)
CAST(f32, f64)
CAST(f64, f16)
CAST(f64, bf16)
CAST(f64, f32)

// ---- launch ----
//
// Any one-dimensional grid; 16 bytes of the smaller type for each thread fill the
// memory system.
