// Arithmetic on elements, bit for bit that of package kernels: 16-bit floats
// are widened, computed with in 32 bits, and rounded once to nearest even;
// integers wrap.
#pragma once

#include "device.cuh"

DEVICE f32 widen(bf16 h) { return bits_as<f32>((u32)h.bits << 16); }

// Of a number; narrow_bf16 is also of NaN, and keeps the top of its payload, quiet.
DEVICE bf16 nearest_bf16(f32 x) {
	u32 b = bits_as<u32>(x);
	return bf16{(u16)((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}

DEVICE bf16 narrow_bf16(f32 x) {
	u32 b = bits_as<u32>(x);
	if ((b & 0x7fffffff) > 0x7f800000)
		return bf16{(u16)(b >> 16 | 0x40)};
	return nearest_bf16(x);
}

// The instruction is right but for NaNs, whose payload is kept here. Elsewhere,
// exponent and mantissa move into place; the multiplication corrects the
// exponent's bias and normalises subnormals.
DEVICE f32 widen(f16 h) {
	u32 sign = (u32)(h.bits & 0x8000) << 16, b = (u32)(h.bits & 0x7fff) << 13;
	if (b > 0x7c00u << 13)
		return bits_as<f32>(sign | b | 0x7f800000);
#if defined(__CUDA__) || defined(__NVCC__)
	f32 x;
	asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h.bits));
	return x;
#else
	if (b == 0x7c00u << 13) // Inf
		return bits_as<f32>(sign | 0x7f800000);
	return bits_as<f32>(sign | bits_as<u32>(bits_as<f32>(b) * 0x1p112f));
#endif
}

DEVICE f16 narrow_f16(f32 x) {
	u32 b = bits_as<u32>(x), magnitude = b & 0x7fffffff;
	u16 sign = (u16)(b >> 16 & 0x8000);
	if (magnitude > 0x7f800000) // NaN: keep the top of its payload, quiet
		return f16{(u16)(sign | 0x7e00 | (magnitude >> 13 & 0x1ff))};
#if defined(__CUDA__) || defined(__NVCC__)
	u16 h;
	asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
	return f16{h};
#else
	if (magnitude >= 0x47800000) // 2^16: rounds to Inf at the latest
		return f16{(u16)(sign | 0x7c00)};
	if (magnitude < 0x38800000) { // 2^-14: smaller ones are subnormal
		f32 sum = bits_as<f32>(magnitude) + 0.5f; // the bits are now at the bottom
		return f16{(u16)(sign | (bits_as<u32>(sum) - 0x3f000000))};
	}
	magnitude += 0xfff + (magnitude >> 13 & 1) - (112u << 23);
	return f16{(u16)(sign | magnitude >> 13)};
#endif
}

// Between 32 and 64 bits. What a conversion instruction makes of the payload of
// a NaN is not said; here it is kept, and the NaN made quiet.

DEVICE f64 widen(f32 x) {
	u32 b = bits_as<u32>(x);
	if ((b & 0x7fffffff) > 0x7f800000)
		return bits_as<f64>(
			(u64)(b & 0x80000000) << 32 | 0x7ff8000000000000 | (u64)(b & 0x7fffff) << 29);
	return x;
}

DEVICE f32 narrow_f32(f64 x) {
	u64 b = bits_as<u64>(x);
	if ((b & 0x7fffffffffffffff) > 0x7ff0000000000000)
		return bits_as<f32>((u32)(b >> 32 & 0x80000000) | 0x7fc00000 | (u32)(b >> 29 & 0x3fffff));
	return (f32)x;
}

// Rounds so that rounding the result once more, to 16 bits, is right: an
// inexact result gets an odd last bit.
DEVICE f32 to_odd(f64 x) {
	f32 y = narrow_f32(x);
	f64 back = y;
	if (back == x || x != x || back - back != 0) // exact, NaN, Inf
		return y;
	u32 b = bits_as<u32>(y);
	bool away = bits_as<u32>(y) >> 31 ? back < x : back > x;
	return bits_as<f32>((away ? b - 1 : b) | 1);
}

// convert casts one float to another type.

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

// Number is what is known of an element type: the type it is computed in, and
// the way there and back.
template <class T> struct Number {
	typedef T Wide;
	static DEVICE T widen(T x) { return x; }
	static DEVICE T narrow(T x) { return x; }
};
template <> struct Number<f16> {
	typedef f32 Wide;
	static DEVICE f32 widen(f16 x) { return ::widen(x); }
	static DEVICE f16 narrow(f32 x) { return narrow_f16(x); }
};
template <> struct Number<bf16> {
	typedef f32 Wide;
	static DEVICE f32 widen(bf16 x) { return ::widen(x); }
	static DEVICE bf16 narrow(f32 x) { return narrow_bf16(x); }
};

// Sums and products. Signed integers wrap, so they are computed unsigned.

DEVICE f32 plus(f32 x, f32 y) { return x + y; }
DEVICE f64 plus(f64 x, f64 y) { return x + y; }
DEVICE i32 plus(i32 x, i32 y) { return (i32)((u32)x + (u32)y); }
DEVICE i64 plus(i64 x, i64 y) { return (i64)((u64)x + (u64)y); }
DEVICE u8 plus(u8 x, u8 y) { return (u8)(x + y); }

DEVICE f32 minus(f32 x, f32 y) { return x - y; }
DEVICE f64 minus(f64 x, f64 y) { return x - y; }
DEVICE i32 minus(i32 x, i32 y) { return (i32)((u32)x - (u32)y); }
DEVICE i64 minus(i64 x, i64 y) { return (i64)((u64)x - (u64)y); }
DEVICE u8 minus(u8 x, u8 y) { return (u8)(x - y); }

DEVICE f32 times(f32 x, f32 y) { return x * y; }
DEVICE f64 times(f64 x, f64 y) { return x * y; }
DEVICE i32 times(i32 x, i32 y) { return (i32)((u32)x * (u32)y); }
DEVICE i64 times(i64 x, i64 y) { return (i64)((u64)x * (u64)y); }
DEVICE u8 times(u8 x, u8 y) { return (u8)(x * y); }

// Division: truncated for integers, which give 0 when divided by 0.
DEVICE f32 over(f32 x, f32 y) { return x / y; }
DEVICE f64 over(f64 x, f64 y) { return x / y; }
DEVICE i32 over(i32 x, i32 y) { return y == 0 ? 0 : y == -1 ? minus(0, x) : x / y; }
DEVICE i64 over(i64 x, i64 y) { return y == 0 ? 0 : y == -1 ? minus((i64)0, x) : x / y; }
DEVICE u8 over(u8 x, u8 y) { return y == 0 ? 0 : x / y; }

// The smaller and the larger one: NaN if either is, -0 before +0.
template <class T> DEVICE T lesser(T x, T y) { return x < y ? x : y; }
template <class T> DEVICE T greater(T x, T y) { return x > y ? x : y; }

// For floats: x + y is the NaN; zeros of either sign are equal, so their signs
// are combined.
DEVICE f32 lesser(f32 x, f32 y) {
	if (x != x || y != y)
		return x + y;
	if (x == y)
		return bits_as<f32>(bits_as<u32>(x) | bits_as<u32>(y));
	return x < y ? x : y;
}
DEVICE f64 lesser(f64 x, f64 y) {
	if (x != x || y != y)
		return x + y;
	if (x == y)
		return bits_as<f64>(bits_as<u64>(x) | bits_as<u64>(y));
	return x < y ? x : y;
}
DEVICE f32 greater(f32 x, f32 y) {
	if (x != x || y != y)
		return x + y;
	if (x == y)
		return bits_as<f32>(bits_as<u32>(x) & bits_as<u32>(y));
	return x > y ? x : y;
}
DEVICE f64 greater(f64 x, f64 y) {
	if (x != x || y != y)
		return x + y;
	if (x == y)
		return bits_as<f64>(bits_as<u64>(x) & bits_as<u64>(y));
	return x > y ? x : y;
}
