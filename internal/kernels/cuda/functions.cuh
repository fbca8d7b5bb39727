// Elementary functions, without a library. They use only operations that IEEE
// 754 defines, so they have the same bits on every device; the largest errors,
// in units of the last place, are those that the tests hold them to.
#pragma once

#include "number.cuh"

#if defined(__NVCC__)
DEVICE f32 fused(f32 x, f32 y, f32 z) { return __fmaf_rn(x, y, z); }
DEVICE f64 fused(f64 x, f64 y, f64 z) { return __fma_rn(x, y, z); }
DEVICE f32 square_root(f32 x) { return __fsqrt_rn(x); }
DEVICE f64 square_root(f64 x) { return __dsqrt_rn(x); }
#elif defined(__CUDA__)
DEVICE f32 fused(f32 x, f32 y, f32 z) { return __nvvm_fma_rn_f(x, y, z); }
DEVICE f64 fused(f64 x, f64 y, f64 z) { return __nvvm_fma_rn_d(x, y, z); }
DEVICE f32 square_root(f32 x) { return __nvvm_sqrt_rn_f(x); }
DEVICE f64 square_root(f64 x) { return __nvvm_sqrt_rn_d(x); }
#else
DEVICE f32 fused(f32 x, f32 y, f32 z) { return __builtin_fmaf(x, y, z); }
DEVICE f64 fused(f64 x, f64 y, f64 z) { return __builtin_fma(x, y, z); }
DEVICE f32 square_root(f32 x) { return __builtin_sqrtf(x); }
DEVICE f64 square_root(f64 x) { return __builtin_sqrt(x); }
#endif

DEVICE f32 infinity_f32() { return bits_as<f32>(0x7f800000); }
DEVICE f64 infinity_f64() { return bits_as<f64>(0x7ff0000000000000); }
DEVICE f32 nan_f32() { return bits_as<f32>(0x7fc00000); }
DEVICE f64 nan_f64() { return bits_as<f64>(0x7ff8000000000000); }

// x * 2^e, in two steps so that a subnormal result is rounded once.
DEVICE f32 times_power_of_two(f32 x, i32 e) {
	i32 half = e >> 1;
	return x * bits_as<f32>((half + 127) << 23) * bits_as<f32>((e - half + 127) << 23);
}
DEVICE f64 times_power_of_two(f64 x, i32 e) {
	i32 half = e >> 1;
	return x * bits_as<f64>((u64)(half + 1023) << 52) * bits_as<f64>((u64)(e - half + 1023) << 52);
}

// The integer nearest to x, as a float: adding this constant leaves no room for
// a fraction. |x| < 2^21.
DEVICE f32 nearest(f32 x) { return x + 12582912.0f - 12582912.0f; }
DEVICE f64 nearest(f64 x) { return x + 6755399441055744.0 - 6755399441055744.0; }

// ---- 32 bits ----

// e^x = 2^k e^r with |r| <= ln 2 / 2. Error below 1 unit.
// Origin: Norbert Juffa
DEVICE f32 exponential(f32 x) {
	if (x != x)
		return x;
	if (x > 88.7228394f)
		return infinity_f32();
	if (x < -104.0f)
		return 0;
	f32 k = nearest(x * 1.44269502f);
	f32 r = fused(k, -6.93145752e-1f, x); // ln 2 in two parts
	r = fused(k, -1.42860677e-6f, r);
	f32 p = 1.37805939e-3f;
	p = fused(p, r, 8.37312452e-3f);
	p = fused(p, r, 4.16695364e-2f);
	p = fused(p, r, 1.66664720e-1f);
	p = fused(p, r, 4.99999851e-1f);
	p = fused(p, r, 1.0f);
	p = fused(p, r, 1.0f);
	return times_power_of_two(p, (i32)k);
}

// ln x = k ln 2 + ln (1 + f) with 2/3 <= 1 + f < 4/3. Error below 1 unit.
// Origin: Norbert Juffa
DEVICE f32 logarithm(f32 x) {
	if (!(x > 0))
		return x == 0 ? -infinity_f32() : nan_f32();
	if (x == infinity_f32())
		return x;
	f32 k = 0;
	if (x < 1.17549435e-38f) { // subnormal
		x *= 8388608.0f;
		k = -23;
	}
	i32 b = bits_as<i32>(x), e = (b - 0x3f2aaaab) & 0xff800000;
	k += (f32)(e >> 23);
	f32 f = bits_as<f32>(b - e) - 1.0f, s = f * f;
	f32 p = -0.130310059f, q = 0.140869141f;
	p = fused(p, s, -0.121483512f);
	q = fused(q, s, 0.139814854f);
	p = fused(p, s, -0.166846126f);
	q = fused(q, s, 0.200120345f);
	p = fused(p, s, -0.249996200f);
	p = fused(q, f, p);
	p = fused(p, f, 0.333331972f);
	p = fused(p, f, -0.5f);
	p = fused(p, s, f);
	return fused(k, 0.693147182f, p);
}

// Small arguments by a polynomial in x^2; error below 2 units.
// Origin: Cephes
DEVICE f32 hyperbolic_tangent(f32 x) {
	f32 a = bits_as<f32>(bits_as<u32>(x) & 0x7fffffff);
	if (a < 0.625f) {
		f32 s = x * x;
		f32 p = -5.70498872745e-3f;
		p = fused(p, s, 2.06390887954e-2f);
		p = fused(p, s, -5.37397155531e-2f);
		p = fused(p, s, 1.33314422036e-1f);
		p = fused(p, s, -3.33332819422e-1f);
		return fused(p * s, x, x);
	}
	f32 y = 1.0f - 2.0f / (exponential(2 * a) + 1.0f);
	return x < 0 ? -y : x != x ? x : y;
}

// 1 / (1 + e^-x), by an exponential that does not overflow. Error below 3 units.
DEVICE f32 logistic(f32 x) {
	f32 e = exponential(x < 0 ? x : -x);
	return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// ---- 64 bits ----

// Error below 1 unit.
// Origin: FreeBSD msun
DEVICE f64 exponential(f64 x) {
	if (x != x)
		return x;
	if (x > 709.782712893383973096)
		return infinity_f64();
	if (x < -745.13321910194110842)
		return 0;
	f64 k = nearest(x * 1.44269504088896338700);
	f64 hi = x - k * 6.93147180369123816490e-01, lo = k * 1.90821492927058770002e-10;
	f64 r = hi - lo, s = r * r;
	f64 c = r -
		s *
			(1.66666666666666019037e-01 +
				s *
					(-2.77777777770155933842e-03 +
						s *
							(6.61375632143793436117e-05 +
								s *
									(-1.65339022054652515390e-06 +
										s * 4.13813679705723846039e-08))));
	f64 y = 1 - ((lo - (r * c) / (2 - c)) - hi);
	return times_power_of_two(y, (i32)k);
}

// Error below 1 unit.
// Origin: FreeBSD msun
DEVICE f64 logarithm(f64 x) {
	if (!(x > 0))
		return x == 0 ? -infinity_f64() : nan_f64();
	if (x == infinity_f64())
		return x;
	f64 k = 0;
	if (x < 2.2250738585072014e-308) { // subnormal
		x *= 18014398509481984.0;
		k = -54;
	}
	// sqrt(2)/2 <= 1 + f
	i64 b = bits_as<i64>(x), e = (b - 0x3fe6a09e667f3bcd) & 0xfff0000000000000;
	k += (f64)(i32)(e >> 52);
	f64 f = bits_as<f64>(b - e) - 1.0, half = 0.5 * f * f;
	f64 s = f / (2.0 + f), z = s * s, w = z * z;
	f64 t1 = w *
		(3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
	f64 t2 = z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01 +
		w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
	return k * 6.93147180369123816490e-01 -
		((half - (s * (half + t1 + t2) + k * 1.90821492927058770002e-10)) - f);
}

// Small arguments by a quotient of polynomials in x^2. Error below 2 units.
// Origin: Cephes
DEVICE f64 hyperbolic_tangent(f64 x) {
	f64 a = bits_as<f64>(bits_as<u64>(x) & 0x7fffffffffffffff);
	if (a < 0.625) {
		f64 s = x * x;
		f64 p = (-9.64399179425052238628e-1 * s - 9.92877231001918586564e1) * s -
			1.61468768441708447952e3;
		f64 q = ((s + 1.12811678491632931402e2) * s + 2.23548839060100448583e3) * s +
			4.84406305325125486048e3;
		return x + x * s * (p / q);
	}
	f64 y = 1.0 - 2.0 / (exponential(2 * a) + 1.0);
	return x < 0 ? -y : x != x ? x : y;
}

// Error below 3 units.
DEVICE f64 logistic(f64 x) {
	f64 e = exponential(x < 0 ? x : -x);
	return (x < 0 ? e : 1.0) / (1.0 + e);
}

// The upper half of a float's bits, so that products of two are exact.
DEVICE f64 upper(f64 x) { return bits_as<f64>(bits_as<u64>(x) & 0xffffffff00000000); }

// x^y for finite x > 0 and finite y: 2^(y log2 x), with the logarithm in two
// parts. Error below 1 unit.
// Origin: FreeBSD msun
DEVICE f64 positive_power(f64 x, f64 y) {
	i32 n = 0;
	if (x < 2.2250738585072014e-308) {
		x *= 9007199254740992.0;
		n = -53;
	}
	i32 high = (i32)(bits_as<u64>(x) >> 32);
	n += (high >> 20) - 1023;
	i32 fraction = high & 0xfffff;
	high = fraction | 0x3ff00000;
	// x is now in [sqrt(3)/2, sqrt(3)), and compared to 1 or 1.5
	i32 k = 0;
	if (fraction > 0x3988e && fraction < 0xbb67a)
		k = 1;
	else if (fraction >= 0xbb67a) {
		n++;
		high -= 0x100000;
	}
	x = bits_as<f64>((u64)high << 32 | (u32)bits_as<u64>(x));
	f64 base = k ? 1.5 : 1.0;

	// s = (x - base) / (x + base), in two parts
	f64 u = x - base, v = 1.0 / (x + base), s = u * v, s_hi = upper(s);
	f64 t_hi = bits_as<f64>((u64)((u32)(high >> 1 | 0x20000000) + 0x80000 + (k << 18)) << 32);
	f64 t_lo = x - (t_hi - base);
	f64 s_lo = v * ((u - s_hi * t_hi) - s_hi * t_lo);
	// ln x - ln base = 2s + 2/3 s^3 + ...
	f64 s2 = s * s;
	f64 r = s2 * s2 * (5.99999999999994648725e-01 + s2 * (4.28571428578550184252e-01 +
		s2 * (3.33333329818377432918e-01 + s2 * (2.72728123808534006489e-01 +
		s2 * (2.30660745775561754067e-01 + s2 * 2.06975017800338417784e-01)))));
	r += s_lo * (s_hi + s);
	s2 = s_hi * s_hi;
	t_hi = upper(3.0 + s2 + r);
	t_lo = r - ((t_hi - 3.0) - s2);
	u = s_hi * t_hi;
	v = s_lo * t_hi + t_lo * s;
	f64 p_hi = upper(u + v), p_lo = v - (p_hi - u);
	// times 2 / (3 ln 2), plus log2 of the base and n
	f64 z_hi = 9.61796700954437255859e-01 * p_hi;
	f64 z_lo = -7.02846165095275826516e-09 * p_hi + p_lo * 9.61796693925975554329e-01 +
		(k ? 1.35003920212974897128e-08 : 0);
	f64 log_base = k ? 5.84962487220764160156e-01 : 0, t = n;
	f64 t1 = upper(((z_hi + z_lo) + log_base) + t);
	f64 t2 = z_lo - (((t1 - t) - log_base) - z_hi);

	// y times that, in two parts
	f64 y1 = upper(y);
	p_lo = (y - y1) * t1 + y * t2;
	p_hi = y1 * t1;
	f64 z = p_lo + p_hi;
	if (z >= 1024) {
		if (z > 1024 || p_lo + 8.0085662595372944372e-17 > z - p_hi)
			return infinity_f64();
	} else if (z <= -1075) {
		if (z < -1075 || p_lo <= z - p_hi)
			return 0;
	}

	// 2^z
	f64 whole = nearest(z);
	p_hi -= whole;
	t = upper(p_lo + p_hi);
	u = t * 6.93147182464599609375e-01;
	v = (p_lo - (t - p_hi)) * 6.93147180559945286227e-01 + t * -1.90465429995776804525e-09;
	z = u + v;
	f64 w = v - (z - u);
	t = z * z;
	t1 = z -
		t *
			(1.66666666666666019037e-01 +
				t *
					(-2.77777777770155933842e-03 +
						t *
							(6.61375632143793436117e-05 +
								t *
									(-1.65339022054652515390e-06 +
										t * 4.13813679705723846039e-08))));
	r = (z * t1) / (t1 - 2.0) - (w + z * w);
	return times_power_of_two(1.0 - (r - z), (i32)whole);
}

// Whether a finite y is an odd integer; 0 if it is no integer, else 1 or 2.
DEVICE i32 parity(f64 y) {
	f64 a = bits_as<f64>(bits_as<u64>(y) & 0x7fffffffffffffff);
	if (a >= 0x1p53)
		return 2;
	i64 i = (i64)a;
	return (f64)i != a ? 0 : i & 1 ? 1 : 2;
}

// x^y with the special cases of C and Go.
DEVICE f64 power(f64 x, f64 y) {
	if (y == 0 || x == 1)
		return 1;
	if (x != x || y != y)
		return nan_f64();
	f64 a = bits_as<f64>(bits_as<u64>(x) & 0x7fffffffffffffff), inf = infinity_f64();
	if (y == inf || y == -inf)
		return a == 1 ? 1 : (a > 1) == (y > 0) ? inf : 0;
	bool negative = bits_as<u64>(x) >> 63;
	i32 kind = negative ? parity(y) : 2;
	f64 z;
	if (a == 0)
		z = y < 0 ? inf : 0;
	else if (a == inf)
		z = y < 0 ? 0 : inf;
	else if (negative && kind == 0)
		return nan_f64();
	else if (a == 1)
		z = 1;
	else if (y >= 0x1p63 || y <= -0x1p63) // so large that products with it would overflow
		z = (a > 1) == (y > 0) ? inf : 0;
	else
		z = positive_power(a, y);
	return kind == 1 ? -z : z;
}

// e^x - 1 and ln(1 + x): what rounding took from e^x, or from 1 + x, is the same
// in the quotient's two sides (Kahan). Errors below 4 units.
DEVICE f64 exponential_less_one(f64 x) {
	f64 u = exponential(x);
	if (u == 1 || u != u)
		return x;
	f64 v = u - 1;
	return v == -1 || u == infinity_f64() ? v : v * (x / logarithm(u));
}
DEVICE f64 logarithm_of_one_plus(f64 x) {
	f64 u = 1 + x;
	if (u == 1)
		return x;
	return u > 0 && u < infinity_f64() ? logarithm(u) * (x / (u - 1)) : logarithm(u);
}

// log2 x = k + ln m / ln 2 with sqrt(1/2) <= m < sqrt(2), so that powers of two
// are exact. Error below 2 units.
// Origin: own, 1/ln 2 and limits of the type
DEVICE f64 binary_logarithm(f64 x) {
	if (!(x > 0) || x == infinity_f64())
		return logarithm(x);
	f64 k = 0;
	if (x < 2.2250738585072014e-308) { // subnormal
		x *= 18014398509481984.0;
		k = -54;
	}
	i64 b = bits_as<i64>(x), e = (b - 0x3fe6a09e667f3bcd) & 0xfff0000000000000;
	k += (f64)(i32)(e >> 52);
	return k + logarithm(bits_as<f64>(b - e)) * 1.44269504088896338700;
}

// ln(1 + e^x), by an exponential that does not overflow. Error below 4 units.
DEVICE f64 soft_plus(f64 x) {
	f64 rest = logarithm_of_one_plus(exponential(x > 0 ? -x : x));
	return x > 0 ? x + rest : rest;
}

DEVICE f32 exponential_less_one(f32 x) { return narrow_f32(exponential_less_one((f64)x)); }
DEVICE f32 logarithm_of_one_plus(f32 x) { return narrow_f32(logarithm_of_one_plus((f64)x)); }
DEVICE f32 binary_logarithm(f32 x) { return narrow_f32(binary_logarithm((f64)x)); }
DEVICE f32 soft_plus(f32 x) { return narrow_f32(soft_plus((f64)x)); }

// The least integer from x on, and the greatest up to x, with the sign of x.
// From 2^52 on, or 2^23, every float is an integer.
DEVICE f64 floor_of(f64 x) {
	f64 a = bits_as<f64>(bits_as<u64>(x) & 0x7fffffffffffffff);
	if (!(a < 4503599627370496.0) || a == 0)
		return x;
	f64 whole = (f64)(i64)x;
	if (whole > x)
		whole -= 1;
	return bits_as<f64>(bits_as<u64>(whole) | (bits_as<u64>(x) & 0x8000000000000000));
}
DEVICE f32 floor_of(f32 x) {
	f32 a = bits_as<f32>(bits_as<u32>(x) & 0x7fffffff);
	if (!(a < 8388608.0f) || a == 0)
		return x;
	f32 whole = (f32)(i32)x;
	if (whole > x)
		whole -= 1;
	return bits_as<f32>(bits_as<u32>(whole) | (bits_as<u32>(x) & 0x80000000));
}
template <class T> DEVICE T ceiling_of(T x) { return -floor_of(-x); }

DEVICE f32 power(f32 x, f32 y) { return narrow_f32(power((f64)x, (f64)y)); }
