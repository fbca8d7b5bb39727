// Arithmetic and comparisons of two operands: OP_DTYPE. An operand whose address
// is 0 is the scalar, whose bits are a parameter. Comparisons give 1 or 0, in
// the type of the operands.

#include "functions.cuh"

// ---- kernels ----

struct Add { template <class T> static DEVICE T of(T x, T y) { return plus(x, y); } };
struct Sub { template <class T> static DEVICE T of(T x, T y) { return minus(x, y); } };
struct Mul { template <class T> static DEVICE T of(T x, T y) { return times(x, y); } };
struct Div { template <class T> static DEVICE T of(T x, T y) { return over(x, y); } };
struct Pow { template <class T> static DEVICE T of(T x, T y) { return power(x, y); } };
struct Gt { template <class T> static DEVICE T of(T x, T y) { return x > y; } };
struct Gte { template <class T> static DEVICE T of(T x, T y) { return x >= y; } };
struct Lt { template <class T> static DEVICE T of(T x, T y) { return x < y; } };
struct Lte { template <class T> static DEVICE T of(T x, T y) { return x <= y; } };
struct Eq { template <class T> static DEVICE T of(T x, T y) { return x == y; } };
struct Ne { template <class T> static DEVICE T of(T x, T y) { return x != y; } };

template <int N, class T> DEVICE void load_or(T (&x)[N], const T *p, u64 i, T scalar) {
	if (p) {
		load(x, p + i);
		return;
	}
	for (T &e : x)
		e = scalar;
}

// for i < n { dst[i] = Op(x[i], y[i]) }; dst may be x or y
template <class Op, int N, class T>
DEVICE void binary(T *dst, const T *x, const T *y, u64 n, u64 scalar) {
	T s = bits_as<T>((typename Bits<sizeof(T)>::type)scalar);
	each<N>(n, aligned(ADDRESS(dst) | ADDRESS(x) | ADDRESS(y), 16), [=](auto count, u64 i) {
		T a[decltype(count)::value], b[decltype(count)::value];
		load_or(a, x, i, s);
		load_or(b, y, i, s);
		for (int k = 0; k < decltype(count)::value; k++)
			a[k] = Op::of(a[k], b[k]);
		store(dst + i, a);
	});
}

#define BINARY_OF(op, Op, T, N)                                                              \
	KERNEL(op##_##T, 256, T *dst, const T *x, const T *y, u64 n, u64 scalar) {           \
		binary<Op, N>(dst, x, y, n, scalar);                                         \
	}
#define BINARY(op, Op, T) BINARY_OF(op, Op, T, 16 / sizeof(T))
#define BINARY_ALL(T)       \
	BINARY(add, Add, T) \
	BINARY(sub, Sub, T) \
	BINARY(mul, Mul, T) \
	BINARY(div, Div, T) \
	BINARY(gt, Gt, T)   \
	BINARY(gte, Gte, T) \
	BINARY(lt, Lt, T)   \
	BINARY(lte, Lte, T) \
	BINARY(eq, Eq, T)   \
	BINARY(ne, Ne, T)
BINARY_ALL(f32)
BINARY_ALL(f64)
BINARY_ALL(i32)
BINARY_ALL(i64)
BINARY_ALL(u8)
// A power is long: one at a time keeps the code short.
BINARY_OF(pow, Pow, f32, 1)
BINARY_OF(pow, Pow, f64, 1)

// ---- launch ----
//
// Any one-dimensional grid.
