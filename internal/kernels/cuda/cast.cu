// Casts between floats, to nearest even: cast_FROM_TO.

#include "number.cuh"

// ---- kernels ----

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
