// The elementary functions of programs, as device functions NAME_DTYPE whose bodies are copied
// into generated kernels. The errors that the tests hold them to are below 4 units of
// the last place.

#include "../../internal/kernels/cuda/functions.cuh"

DEVICE f64 magnitude(f64 x) { return bits_as<f64>(bits_as<u64>(x) & 0x7fffffffffffffff); }
DEVICE f32 magnitude(f32 x) { return bits_as<f32>(bits_as<u32>(x) & 0x7fffffff); }
// polynomial returns a + x*b + x*x*c and so on, by Horner's rule.
template <class T> DEVICE T polynomial(T x, T a, T b) { return a + x * b; }
template <class T, class... Rest> DEVICE T polynomial(T x, T a, T b, Rest... rest) {
	return a + x * polynomial(x, b, rest...);
}
DEVICE f64 with_sign(f64 x, f64 of) {
	return bits_as<f64>(bits_as<u64>(x) | (bits_as<u64>(of) & 0x8000000000000000));
}
DEVICE f32 with_sign(f32 x, f32 of) {
	return bits_as<f32>(bits_as<u32>(x) | (bits_as<u32>(of) & 0x80000000));
}

// ---- exponentials of 32 bits without branches ----
//
// By the device's own approximations of 2^x and 1/x, which are right up to two units and one in the
// last place: loops over 16-bit floats, such as a GELU or a cross-entropy, are bound by their
// instructions and not by memory.

// x y + z, as 0 below 0 and for what is no number, and 1 above 1.
DEVICE f32 saturated(f32 x, f32 y, f32 z) {
	f32 r;
	asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(x), "f"(y), "f"(z));
	return r;
}

// e^x = 2^k 2^r, where k is the integer nearest to x log2 e, but -126 to 126: 2^r takes the rest,
// also if that is infinite.
// Origin: NVIDIA libdevice
DEVICE f32 straight_exponential(f32 x) {
	// log2 e / 252; the exponent is in the last bits
	f32 k = fused(saturated(x, 5.72498003e-3f, 0.5f), 252.0f, 12582913.0f);
	f32 r = fused(x, 1.92596303e-8f, fused(x, 1.44269502f, 12583039.0f - k));
	return __nvvm_ex2_approx_ftz_f(r) * bits_as<f32>(bits_as<u32>(k) << 23);
}
DEVICE f64 straight_exponential(f64 x) { return exponential(x); }

// A polynomial, or 1 - 2/(e^2|x| + 1), where errors of e^2|x| shrink.
// Origin: Cephes, for the polynomial
DEVICE f32 straight_tangent(f32 x) {
	f32 s = x * x;
	f32 p = -5.70498872745e-3f;
	p = fused(p, s, 2.06390887954e-2f);
	p = fused(p, s, -5.37397155531e-2f);
	p = fused(p, s, 1.33314422036e-1f);
	p = fused(p, s, -3.33332819422e-1f);
	p = fused(p * s, x, x);
	f32 e = __nvvm_ex2_approx_ftz_f(magnitude(x) * 2.88539004f);
	f32 y = fused(-2.0f, __nvvm_rcp_approx_ftz_f(e + 1.0f), 1.0f);
	return magnitude(x) < 0.625f ? p : with_sign(y, x);
}
DEVICE f64 straight_tangent(f64 x) { return hyperbolic_tangent(x); }

DEVICE f32 straight_logistic(f32 x) {
	f32 e = straight_exponential(-magnitude(x)), r = __nvvm_rcp_approx_ftz_f(1.0f + e);
	return x < 0 ? e * r : r;
}
DEVICE f64 straight_logistic(f64 x) { return logistic(x); }

// ---- sine and cosine ----

// An angle k pi/2 + r with |r| <= pi/4.
struct Angle {
	i32 k;
	f64 r;
};

// The high word of a product.
DEVICE u64 high(u64 x, u64 y) { return (u64)((unsigned __int128)x * y >> 64); }

// The angle of a finite |x| > 2^30, by Payne and Hanek: 128 bits of x * 4/pi, of which the
// multiples of 8 are left out. Words is how many words of 4/pi the type of x can need; they are
// constants of instructions, since the body of a function is all that a kernel gets of it.
// Origin: own, the digits of 4/pi
template <i32 Words> DEVICE Angle far_angle(f64 x) {
	constexpr u64 four_over_pi[] = {
		0x0000000000000001, 0x45f306dc9c882a53, 0xf84eafa3ea69bb81, 0xb6c52b3278872083,
		0xfca2c757bd778ac3, 0x6e48dc74849ba5c0, 0x0c925dd413a32439, 0xfc3bd63962534e7d,
		0xd1046bea5d768909, 0xd338e04d68befc82, 0x7323ac7306a673e9, 0x3908bf177bf25076,
		0x3ff12fffbc0b301f, 0xde5e2316b414da3e, 0xda6cfd9e4f96136e, 0x9e8c7ecd3cbfd45a,
		0xea4f758fd7cbe2f6, 0x7a0e73ef14a525d4, 0xd7f6bf623f1aba10, 0xac06608df8f6d757,
	};
	u64 b = bits_as<u64>(x), m = (b & 0xfffffffffffff) | 0x10000000000000;
	u32 place = (u32)(b >> 52 & 0x7ff) - 1075 + 61, digit = place / 64, shift = place % 64;
	u64 z0 = four_over_pi[0], z1 = four_over_pi[1], z2 = four_over_pi[2], z3 = four_over_pi[3];
#pragma unroll
	for (u32 i = 4; i < Words; i++)
		if (i <= digit + 3)
			z0 = z1, z1 = z2, z2 = z3, z3 = four_over_pi[i];
	z0 = z0 << shift | z1 >> 1 >> (63 - shift);
	z1 = z1 << shift | z2 >> 1 >> (63 - shift);
	z2 = z2 << shift | z3 >> 1 >> (63 - shift);
	u64 low = z1 * m, lo = low + high(z2, m), hi = z0 * m + high(z1, m) + (lo < low ? 1 : 0);
	i32 eighths = (i32)(hi >> 61);
	hi = hi << 3 | lo >> 61;
	lo <<= 3;
	bool beyond = eighths & 1; // the next multiple of pi/2 is nearer
	if (beyond) {
		lo = 0 - lo;
		hi = 0 - hi - (lo != 0 ? 1 : 0);
		eighths++;
	}
	// of |x|, in units of pi/4
	f64 r = ((f64)hi * 5.42101086242752217004e-20 + (f64)lo * 2.93873587705571876992e-39) *
		7.85398163397448278999e-01;
	bool negative = b >> 63;
	return Angle{negative ? -(eighths / 2) : eighths / 2, beyond != negative ? -r : r};
}

// sin(x + quarter * pi/2), where pi/2 is in three parts up to 2^30: the first difference is exact.
// Origin: FreeBSD msun, for the polynomials
template <i32 Words> DEVICE f64 wave(f64 x, i32 quarter) {
	if (!(magnitude(x) <= 1.7976931348623157e308))
		return nan_f64();
	f64 k = nearest(x * 6.36619772367581382433e-01);
	f64 r = fused(-k, 1.57079632679489655800e+00, x);
	r = fused(-k, 6.12323399573676603587e-17, r);
	r = fused(-k, -1.49738490485916983e-33, r);
	Angle angle = {(i32)k, r};
	if (magnitude(x) > 1073741824.0)
		angle = far_angle<Words>(x);
	r = angle.r;
	i32 q = angle.k + quarter;
	f64 z = r * r, y;
	if (q & 1) {
		f64 c = z * polynomial(z, 4.16666666666666019037e-02, -1.38888888888741095749e-03,
			2.48015872894767294178e-05, -2.75573143513906633035e-07, 2.08757232129817482790e-09,
			-1.13596475577881948265e-11);
		f64 half = 0.5 * z, w = 1.0 - half;
		y = w + (((1.0 - w) - half) + z * c);
	} else {
		f64 s = polynomial(z, -1.66666666666666324348e-01, 8.33333333332248946124e-03,
			-1.98412698298579493134e-04, 2.75573137070700676789e-06, -2.50507602534068634195e-08,
			1.58969099521155010221e-10);
		y = r + r * (z * s);
	}
	return q & 2 ? -y : y;
}
DEVICE f64 angle_wave(f64 x, i32 quarter) { return wave<20>(x, quarter); }
DEVICE f32 angle_wave(f32 x, i32 quarter) { return narrow_f32(wave<6>((f64)x, quarter)); }
template <class T> DEVICE T sine(T x) { return x == 0 ? x : angle_wave(x, 0); } // -0 stays
template <class T> DEVICE T cosine(T x) { return angle_wave(x, 1); }

// ---- the error function ----

// x times a polynomial in x^2, or 1 - e^-q(|x|).
// Origin: own, both polynomials are minimax
DEVICE f32 error_function(f32 x) {
	f32 a = magnitude(x);
	if (a != a)
		return x;
	if (a < 1.0f) {
		f32 s = x * x, p = 7.875874871388078e-05f;
		p = fused(p, s, -0.000801686430349946f);
		p = fused(p, s, 0.005189087241888046f);
		p = fused(p, s, -0.02685421146452427f);
		p = fused(p, s, 0.11283594369888306f);
		p = fused(p, s, -0.3761262595653534f);
		p = fused(p, s, 0.1283791065216064f);
		return fused(p, x, x);
	}
	if (a >= 4.0f)
		return with_sign(1.0f, x);
	f32 q = -1.6371513993362896e-06f;
	q = fused(q, a, 4.605804133461788e-05f);
	q = fused(q, a, -0.0005968056502752006f);
	q = fused(q, a, 0.004759596195071936f);
	q = fused(q, a, -0.026421135291457176f);
	q = fused(q, a, 0.11008008569478989f);
	q = fused(q, a, 0.6318260431289673f);
	q = fused(q, a, 1.1302334070205688f);
	q = fused(q, a, -0.0003201380604878068f);
	return with_sign(1.0f - straight_exponential(-q), x);
}

// Origin: FreeBSD msun, for intervals and polynomials
DEVICE f64 error_function(f64 x) {
	f64 a = magnitude(x);
	if (a != a)
		return x;
	if (a < 0.84375) {
		f64 z = x * x;
		f64 r = polynomial(z, 1.28379167095512558561e-01, -3.25042107247001499370e-01,
			-2.84817495755985104766e-02, -5.77027029648944159157e-03, -2.37630166566501626084e-05);
		f64 s = polynomial(z, 1.0, 3.97917223959155352819e-01, 6.50222499887672944485e-02,
			5.08130628187576562776e-03, 1.32494738004321644526e-04, -3.96022827877536812320e-06);
		return x + x * (r / s);
	}
	if (a < 1.25) {
		f64 s = a - 1.0;
		f64 p = polynomial(s, -2.36211856075265944077e-03, 4.14856118683748331666e-01,
			-3.72207876035701323847e-01, 3.18346619901161753674e-01, -1.10894694282396677476e-01,
			3.54783043256182359371e-02, -2.16637559486879084300e-03);
		f64 q = polynomial(s, 1.0, 1.06420880400844228286e-01, 5.40397917702171048937e-01,
			7.18286544141962662868e-02, 1.26171219808761642112e-01, 1.36370839120290507362e-02,
			1.19844998467991074170e-02);
		return with_sign(8.45062911510467529297e-01 + p / q, x);
	}
	if (a >= 6.0)
		return with_sign(1.0, x);
	f64 s = 1.0 / (a * a), r, t;
	if (a < 2.85714285714285714286) {
		r = polynomial(s, -9.86494403484714822705e-03, -6.93858572707181764372e-01,
			-1.05586262253232909814e+01, -6.23753324503260060396e+01, -1.62396669462573470355e+02,
			-1.84605092906711035994e+02, -8.12874355063065934246e+01, -9.81432934416914548592e+00);
		t = polynomial(s, 1.0, 1.96512716674392571292e+01, 1.37657754143519042600e+02,
			4.34565877475229228821e+02, 6.45387271733267880336e+02, 4.29008140027567833386e+02,
			1.08635005541779435134e+02, 6.57024977031928170135e+00, -6.04244152148580987438e-02);
	} else {
		r = polynomial(s, -9.86494292470009928597e-03, -7.99283237680523006574e-01,
			-1.77579549177547519889e+01, -1.60636384855821916062e+02, -6.37566443368389627722e+02,
			-1.02509513161107724954e+03, -4.83519191608651397019e+02);
		t = polynomial(s, 1.0, 3.03380607434824582924e+01, 3.25792512996573918826e+02,
			1.53672958608443695994e+03, 3.19985821950859553908e+03, 2.55305040643316442583e+03,
			4.74528541206955367215e+02, -2.24409524465858183362e+01);
	}
	f64 z = upper(a);
	f64 tail = exponential(-z * z - 0.5625) * exponential((z - a) * (z + a) + r / t);
	return with_sign(1.0 - tail / a, x);
}

// ---- what is copied ----

#define FUNCTION(name, of, T) \
	extern "C" __attribute__((device, noinline)) T name##_##T(T x) { return of(x); }
#define FUNCTIONS(T)                            \
	FUNCTION(exp, straight_exponential, T)           \
	FUNCTION(expm1, exponential_less_one, T) \
	FUNCTION(log, logarithm, T)             \
	FUNCTION(log2, binary_logarithm, T)     \
	FUNCTION(log1p, logarithm_of_one_plus, T) \
	FUNCTION(tanh, straight_tangent, T)   \
	FUNCTION(sigmoid, straight_logistic, T)          \
	FUNCTION(softplus, soft_plus, T)        \
	FUNCTION(sin, sine, T)                  \
	FUNCTION(cos, cosine, T)                \
	FUNCTION(erf, error_function, T)        \
	extern "C" __attribute__((device, noinline)) T pow_##T(T x, T y) { return power(x, y); }
FUNCTIONS(f32)
FUNCTIONS(f64)
