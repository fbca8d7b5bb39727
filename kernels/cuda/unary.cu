// Functions of one operand: OP_DTYPE.

#include "functions.cuh"

// ---- kernels ----

struct Neg { template <class T> static DEVICE T of(T x) { return minus((T)0, x); } };
template <> DEVICE f32 Neg::of(f32 x) { return -x; } // 0 - 0 is not -0
template <> DEVICE f64 Neg::of(f64 x) { return -x; }
struct Abs { template <class T> static DEVICE T of(T x) { return x < 0 ? minus((T)0, x) : x; } };
template <> DEVICE u8 Abs::of(u8 x) { return x; }
template <> DEVICE f32 Abs::of(f32 x) { return bits_as<f32>(bits_as<u32>(x) & 0x7fffffff); }
template <> DEVICE f64 Abs::of(f64 x) { return bits_as<f64>(bits_as<u64>(x) & 0x7fffffffffffffff); }
struct Sign { template <class T> static DEVICE T of(T x) { return x > 0 ? (T)1 : x < 0 ? (T)-1 : x; } };
template <> DEVICE u8 Sign::of(u8 x) { return x > 0; }
struct Square { template <class T> static DEVICE T of(T x) { return times(x, x); } };
struct Relu { template <class T> static DEVICE T of(T x) { return x < 0 ? (T)0 : x; } }; // NaN stays
template <> DEVICE u8 Relu::of(u8 x) { return x; }
struct Ceil { template <class T> static DEVICE T of(T x) { return ceiling_of(x); } };
struct Floor { template <class T> static DEVICE T of(T x) { return floor_of(x); } };
struct Expm1 { template <class T> static DEVICE T of(T x) { return exponential_less_one(x); } };
struct Log1p { template <class T> static DEVICE T of(T x) { return logarithm_of_one_plus(x); } };
struct Log2 { template <class T> static DEVICE T of(T x) { return binary_logarithm(x); } };
struct Softplus { template <class T> static DEVICE T of(T x) { return soft_plus(x); } };
struct Inverse { template <class T> static DEVICE T of(T x) { return over((T)1, x); } };
struct Sqrt { template <class T> static DEVICE T of(T x) { return square_root(x); } };
struct Exp { template <class T> static DEVICE T of(T x) { return exponential(x); } };
struct Log { template <class T> static DEVICE T of(T x) { return logarithm(x); } };
struct Tanh { template <class T> static DEVICE T of(T x) { return hyperbolic_tangent(x); } };
struct Sigmoid { template <class T> static DEVICE T of(T x) { return logistic(x); } };

// for i < n { dst[i] = Op(x[i]) }; dst may be x
template <class Op, class T> DEVICE void unary(T *dst, const T *x, u64 n) {
	constexpr int N = 16 / sizeof(T);
	each<N>(n, aligned(ADDRESS(dst) | ADDRESS(x), 16), [=](auto count, u64 i) {
		T a[decltype(count)::value];
		load(a, x + i);
		for (T &e : a)
			e = Op::of(e);
		store(dst + i, a);
	});
}

#define UNARY(op, Op, T) \
	KERNEL(op##_##T, 256, T *dst, const T *x, u64 n) { unary<Op>(dst, x, n); }
#define UNARY_ALL(T)              \
	UNARY(neg, Neg, T)        \
	UNARY(abs, Abs, T)        \
	UNARY(sign, Sign, T)      \
	UNARY(square, Square, T)  \
	UNARY(relu, Relu, T)
#define UNARY_FLOAT(T)            \
	UNARY(inverse, Inverse, T) \
	UNARY(sqrt, Sqrt, T)      \
	UNARY(ceil, Ceil, T)      \
	UNARY(floor, Floor, T)    \
	UNARY(expm1, Expm1, T)    \
	UNARY(log1p, Log1p, T)    \
	UNARY(log2, Log2, T)      \
	UNARY(softplus, Softplus, T) \
	UNARY(exp, Exp, T)        \
	UNARY(log, Log, T)        \
	UNARY(tanh, Tanh, T)      \
	UNARY(sigmoid, Sigmoid, T)
UNARY_ALL(f32)
UNARY_ALL(f64)
UNARY_ALL(i32)
UNARY_ALL(i64)
UNARY_ALL(u8)
UNARY_FLOAT(f32)
UNARY_FLOAT(f64)

// ---- launch ----
//
// Any one-dimensional grid.
