// 16-bit floats to wider ones, scaled: widen_FROM_TO. It is a cast and a scale in
// one pass over memory.

#include "number.cuh"

// ---- kernels ----

DEVICE void wider(f32 &y, f32 x, f64 factor) { y = times(x, (f32)factor); }
DEVICE void wider(f64 &y, f32 x, f64 factor) { y = times(widen(x), factor); }

// for i < n { dst[i] = To(src[i]) * factor }
template <class To, class From> DEVICE void widen_all(To *dst, const From *src, u64 n, f64 factor) {
	each_between(dst, src, n, [=](To &y, From x) { wider(y, widen(x), factor); });
}

#define WIDEN(From, To)                                                            \
	KERNEL(widen_##From##_##To, 256, To *dst, const From *src, u64 n, f64 factor) { \
		widen_all(dst, src, n, factor);                                    \
	}
WIDEN(f16, f32)
WIDEN(f16, f64)
WIDEN(bf16, f32)
WIDEN(bf16, f64)

// ---- launch ----
//
// As that of a cast.
