// The combination of several sources, element by element, in their order:
// reduce_OP_DTYPE for up to 8 sources, reducemany_OP_DTYPE for up to 256.

#include "number.cuh"

// ---- kernels ----

// Sources is passed by value.
template <int max> struct Sources {
	u64 count;
	const void *at[max];
};

struct Sum {
	template <class T> static DEVICE T combine(T x, T y) { return plus(x, y); }
	template <class T> static DEVICE T finish(T x, u64) { return x; }
};

struct Avg {
	template <class T> static DEVICE T combine(T x, T y) { return plus(x, y); }
	template <class T> static DEVICE T finish(T x, u64 n) { return over(x, (T)n); }
	// A byte cannot hold every n; no sum of bytes reaches n then.
	static DEVICE u8 finish(u8 x, u64 n) { return n > 255 ? 0 : over(x, (u8)n); }
};

struct Prod {
	template <class T> static DEVICE T combine(T x, T y) { return times(x, y); }
	template <class T> static DEVICE T finish(T x, u64) { return x; }
};

struct Min {
	template <class T> static DEVICE T combine(T x, T y) { return lesser(x, y); }
	template <class T> static DEVICE T finish(T x, u64) { return x; }
};

struct Max {
	template <class T> static DEVICE T combine(T x, T y) { return greater(x, y); }
	template <class T> static DEVICE T finish(T x, u64) { return x; }
};

// combine does N elements. It reads `ahead` sources at a time, so that their
// loads are under way together.
template <class Op, class T, int N, int ahead, int max>
DEVICE void combine(T *dst, const Sources<max> &srcs, u64 i) {
	typedef Number<T> Num;
	typename Num::Wide acc[N] = {};
#pragma unroll 1
	for (u64 first = 0; first < srcs.count; first += ahead) {
		T x[ahead][N];
#pragma unroll
		for (int s = 0; s < ahead; s++)
			if (first + s < srcs.count)
				load(x[s], static_cast<const T *>(srcs.at[first + s]) + i);
#pragma unroll
		for (int s = 0; s < ahead; s++)
			if (first + s < srcs.count)
				for (int k = 0; k < N; k++) {
					auto wide = Num::widen(x[s][k]);
					acc[k] = first + s == 0 ? wide : Op::combine(acc[k], wide);
				}
	}
	T y[N];
	for (int k = 0; k < N; k++)
		y[k] = Num::narrow(Op::finish(acc[k], srcs.count));
	store(dst + i, y);
}

// for i < n { acc = srcs[0][i]; for s in srcs[1:] { acc = Op(acc, s[i]) }; dst[i] = acc }
//
// dst may be one of the sources: an element is read from all before it is
// written.
template <class Op, class T> DEVICE void reduce(T *dst, u64 n, const Sources<8> &srcs) {
	constexpr int N = 16 / sizeof(T);
	u64 address = ADDRESS(dst);
	for (u64 s = 0; s < 8; s++)
		address |= s < srcs.count ? ADDRESS(srcs.at[s]) : 0;
	u64 whole = aligned(address, 16) ? n / N : 0;
	for (u64 i = thread_index(); i < whole; i += thread_count())
		combine<Op, T, N, 4>(dst, srcs, i * N);
#pragma unroll 1
	for (u64 i = whole * N + thread_index(); i < n; i += thread_count())
		combine<Op, T, 1, 1>(dst, srcs, i);
}

// The same for more sources than a process has peers on one machine: plain and
// small.
template <class Op, class T> DEVICE void reducemany(T *dst, u64 n, const Sources<256> &srcs) {
#pragma unroll 1
	for (u64 i = thread_index(); i < n; i += thread_count())
		combine<Op, T, 1, 1>(dst, srcs, i);
}

#define REDUCE(op, Op, T) \
	KERNEL(reduce_##op##_##T, 256, T *dst, u64 n, Sources<8> srcs) { reduce<Op>(dst, n, srcs); } \
	KERNEL(reducemany_##op##_##T, 256, T *dst, u64 n, Sources<256> srcs) { \
		reducemany<Op>(dst, n, srcs); \
	}

#define REDUCE_ALL(T)        \
	REDUCE(sum, Sum, T)  \
	REDUCE(avg, Avg, T)  \
	REDUCE(prod, Prod, T) \
	REDUCE(min, Min, T)  \
	REDUCE(max, Max, T)

REDUCE_ALL(f16)
REDUCE_ALL(bf16)
REDUCE_ALL(f32)
REDUCE_ALL(f64)
REDUCE_ALL(i32)
REDUCE_ALL(i64)
REDUCE_ALL(u8)

// ---- launch ----
//
// Any one-dimensional grid. The sources are parameters, not a table in memory,
// so that nothing has to be kept until the kernel has run.
