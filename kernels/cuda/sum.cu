// Sums along an axis: sumrows_DTYPE along the last one, sumcolumns_DTYPE along
// another. The order of the additions depends on the shape alone, so a sum has
// the same bits on every device and every time.
//
// The axis of n elements is cut into segments, and each is summed: one launch
// sums an axis of one segment, another sums the sums of several.

#include "number.cuh"

// ---- kernels ----

// Adds up what the threads of a block hold, in a tree: those whose place is at
// distances of `step` to `step*count`, a power of two. The result is with the first.
template <class T> DEVICE T tree(T (&held)[256], T x, u32 place, u32 index, u32 step, u32 count) {
	held[place] = x;
	barrier();
	for (u32 half = count / 2; half > 0; half /= 2) {
		if (index < half)
			held[place] = plus(held[place], held[place + half * step]);
		barrier();
	}
	return held[place];
}

// Elements of a strided run, every `every`-th one from the first on.
template <class T> DEVICE T run(const T *src, u64 stride, u64 first, u64 n, u64 every) {
	T sum = 0;
#pragma unroll 4
	for (u64 i = first; i < n; i += every)
		sum = plus(sum, src[i * stride]);
	return sum;
}

// src [rows, n], dst [rows, segments]:
// for r, s { dst[r, s] = sum of src[r, s*segment : min((s+1)*segment, n)] }
template <class T> DEVICE void sumrows(T *dst, const T *src, u64 rows, u64 n, u64 segment) {
	SHARED T held[256];
	u64 segments = (n + segment - 1) / segment, outputs = rows * segments;
	u32 x = thread_x(), y = thread_y();
	// Every thread of a block takes every turn, because of the barriers.
	for (u64 first = (u64)block_x() * threads_y(); first < outputs; first += (u64)blocks_x() * threads_y()) {
		u64 out = first + y;
		T sum = 0;
		if (out < outputs) {
			u64 r = out / segments, lo = (out - r * segments) * segment;
			sum = run(src + r * n + lo, 1, x, least(segment, n - lo), threads_x());
		}
		sum = tree(held, sum, y * threads_x() + x, x, 1, threads_x());
		if (x == 0 && out < outputs)
			dst[out] = sum;
		barrier();
	}
}

// src [outer, n, inner], dst [outer, segments, inner]:
// for o, s, c { dst[o, s, c] = sum of src[o, s*segment : min((s+1)*segment, n), c] }
template <class T> DEVICE void sumcolumns(T *dst, const T *src, u64 outer, u64 n, u64 inner, u64 segment) {
	SHARED T held[256];
	u64 segments = (n + segment - 1) / segment, across = (inner + threads_x() - 1) / threads_x();
	u32 x = thread_x(), y = thread_y();
	for (u64 t = block_x(); t < outer * segments * across; t += blocks_x()) {
		u64 out = t / across, c = (t - out * across) * threads_x() + x;
		u64 o = out / segments, lo = (out - o * segments) * segment;
		T sum = 0;
		if (c < inner)
			sum = run(src + (o * n + lo) * inner + c, inner, y, least(segment, n - lo), threads_y());
		sum = tree(held, sum, y * threads_x() + x, y, threads_x(), threads_y());
		if (y == 0 && c < inner)
			dst[out * inner + c] = sum;
		barrier();
	}
}

#define SUM(T)                                                                                         \
	KERNEL(sumrows_##T, 256, T *dst, const T *src, u64 rows, u64 n, u64 segment) {                 \
		sumrows(dst, src, rows, n, segment);                                                   \
	}                                                                                              \
	KERNEL(sumcolumns_##T, 256, T *dst, const T *src, u64 outer, u64 n, u64 inner, u64 segment) {  \
		sumcolumns(dst, src, outer, n, inner, segment);                                        \
	}
SUM(f32)
SUM(f64)
SUM(i32)
SUM(i64)
SUM(u8)

// ---- launch ----
//
// A block has 256 threads, in powers of two: sumrows as many on the x axis as a
// segment has elements and the rest for more outputs; sumcolumns up to 32 on the
// x axis for columns and the rest along the summed axis. Both numbers follow
// from the shape, as the order of additions must.
