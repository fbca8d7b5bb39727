// Products of a few rows, up to 16, by a transposed matrix of bf16, as when text is generated token
// by token: fewrows_COLUMNS_OUT for up to 8 rows, and fewrowsmore_COLUMNS_OUT. The matrix is read
// once, and is all that takes time, so this is about many bytes that are on their way at once.
//
// A warp goes along K and reads 8 chunks of 16 bytes a thread at a time, each thread those that it
// multiplies itself: nothing is exchanged before the sums. The next ones are read to registers
// meanwhile: by way of shared memory it took 1.1 to 2 times as long (H200). In a product of
// fragments, which index of K an element has does not matter as long as both operands agree. So a
// thread takes eight neighbours along K where the fragment has four and four others, and as with K,
// so with columns. The matrix is the left operand, of 16 rows, which are columns of C, and the rows
// are the right one, of 8.
//
// Warps of a block share K, and so do blocks, which then leave their sums in `partial`. The last
// block of a tile adds them up, in the order of K: the bits are the same in every run.

#include "system.cuh"
#include "tensor.cuh"
#include "tickets.cuh"

// ---- kernels ----

struct FewRows {
	u64 m, n, k, x_pitch, w_pitch, c_pitch;
	f64 alpha, beta;
};

constexpr u32 few_threads = 128;

// Writes one element of C, whose sum is x.
template <class D> DEVICE void finish_few(D &c, f32 x, const FewRows &p) {
	f32 y = x * f32(p.alpha);
	if (p.beta != 0)
		y = y + f32(p.beta) * Number<D>::widen(c);
	c = Number<D>::narrow(y);
}

#if TENSOR_CORES

constexpr u32 few_warps = few_threads / 32, few_chunks = 8;
constexpr u32 few_depth = 32; // along K, of a chunk of each of four neighbouring threads

// Asks for a line of memory to come to the second-level cache, which changes nothing.
#if HOPPER
DEVICE void prefetch(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
#else
DEVICE void prefetch(const void *) {}
#endif

// A tile of C: columns first to first + 16 * Rows. A step is few_depth * Deep elements of K.
template <u32 Rows> struct FewWeights {
	static constexpr u32 columns = 16 * Rows, deep = 4 / Rows, step = few_depth * deep;

	const bf16 *from;
	u64 pitch, left_n, k;

	DEVICE FewWeights(const bf16 *w, u64 first, const FewRows &p) : pitch(p.w_pitch), k(p.k) {
		u32 group = thread_x() % 32 / 4, at = thread_x() % 4 * chunk;
		u64 n = first + group;
		left_n = n < p.n ? p.n - n : 0;
		from = w + n * pitch + at;
	}

	// Chunk c of a step from element `at` of K on, and whether it is there.
	DEVICE const bf16 *place(u64 at, u32 c) const {
		return from + c % (2 * Rows) * 8 * pitch + at + c / (2 * Rows) * few_depth;
	}
	DEVICE bool there(u64 at, u32 c) const {
		u64 own = at + thread_x() % 4 * chunk;
		return c % (2 * Rows) * 8 < left_n && own + c / (2 * Rows) * few_depth < k;
	}

	// The left operand for columns i of the tile, of part s of the step.
	static DEVICE void fragment(u32 (&a)[4], const u32 (&x)[few_chunks][4], u32 i, u32 s) {
		u32 c = s / 2 * 2 * Rows + 2 * i, word = s % 2 * 2;
		a[0] = x[c][word], a[1] = x[c + 1][word];
		a[2] = x[c][word + 1], a[3] = x[c + 1][word + 1];
	}

	// Asks for lines of elements first_k to end_k of the tile's columns, some for each thread.
	static DEVICE void prefetch_part(const bf16 *w, u64 first, u64 first_k, u64 end_k,
		const FewRows &p) {
		constexpr u32 line = 64, most = 4; // elements; for a thread, of what the cache has room for
		u64 in_row = end_k > first_k ? (end_k - first_k + line - 1) / line : 0;
#pragma unroll
		for (u32 i = 0; i < most; i++) {
			u64 n = i * few_threads + thread_x();
			u64 row = n % columns, at = n / columns;
			if (at < in_row && first + row < p.n)
				prefetch(w + (first + row) * p.w_pitch + first_k + at * line);
		}
	}

	// The column of a thread's sum e of columns i.
	static DEVICE u32 column(u32 i, u32 e) {
		return 16 * i + e / 2 * 8 + thread_x() % 32 / 4;
	}
};

// for i, j { c(i, j) = alpha * sum over k of x(i, k) * w(k, j) + beta * c(i, j) }
template <class W, u32 Eights, class D>
DEVICE void few_rows(D *c, const bf16 *x, const bf16 *w, f32 *partial, u32 *tickets,
	const FewRows &p, u64 early) {
	constexpr u32 Rows = W::columns / 16, sums = 8 * Eights * W::columns;
	SHARED f32 shared[few_warps][sums];
	u32 warp = thread_x() / 32, lane = thread_x() % 32;
	u64 first = (u64)block_x() * W::columns, steps = (p.k + W::step - 1) / W::step;
	u64 part = (steps + blocks_y() - 1) / blocks_y(), end = least((block_y() + 1) * part, steps),
		now = block_y() * part + warp;
	W weights(w, first, p);
	if (early & 1)
		release_successors();
	if (early & 2)
		W::prefetch_part(w, first, block_y() * part * W::step, least(end * W::step, p.k), p);
	await_predecessors();
	u32 next[few_chunks][4], next_rows[W::deep][Eights][4];
	auto read = [&](u64 step) INLINE {
		bool more = step < end;
#pragma unroll
		for (u32 i = 0; i < few_chunks; i++) {
			next[i][0] = next[i][1] = next[i][2] = next[i][3] = 0;
			if (more && weights.there(step * W::step, i))
				load(next[i], reinterpret_cast<const u32 *>(weights.place(step * W::step, i)));
		}
#pragma unroll
		for (u32 d = 0; d < W::deep; d++)
#pragma unroll
			for (u32 e = 0; e < Eights; e++) {
				u64 row = e * 8 + lane / 4, at = step * W::step + d * few_depth + lane % 4 * chunk;
				u32(&to)[4] = next_rows[d][e];
				to[0] = to[1] = to[2] = to[3] = 0;
				if (more && row < p.m && at < p.k)
					load(to, reinterpret_cast<const u32 *>(x + row * p.x_pitch + at));
			}
	};
	read(now);
	f32 sum[Rows][Eights][4] = {};
#pragma unroll 1
	for (; now < end; now += few_warps) {
		u32 own[few_chunks][4], rows[W::deep][Eights][4];
		__builtin_memcpy(own, next, sizeof own);
		__builtin_memcpy(rows, next_rows, sizeof rows);
		read(now + few_warps);
#pragma unroll
		for (u32 s = 0; s < 2 * W::deep; s++)
#pragma unroll
			for (u32 i = 0; i < Rows; i++) {
				u32 a[4];
				W::fragment(a, own, i, s);
#pragma unroll
				for (u32 e = 0; e < Eights; e++)
					multiply_fragments(bf16{}, sum[i][e], a, rows[s / 2][e][s % 2 * 2],
						rows[s / 2][e][s % 2 * 2 + 1]);
			}
	}
	// sums of all warps, by row and column
#pragma unroll
	for (u32 i = 0; i < Rows; i++)
#pragma unroll
		for (u32 e = 0; e < Eights; e++)
#pragma unroll
			for (u32 j = 0; j < 4; j++)
				shared[warp][(8 * e + lane % 4 * 2 + j % 2) * W::columns + W::column(i, j)] =
					sum[i][e][j];
	barrier();
	// Adds up n sums of four columns, which lie `sums` apart, in order.
	auto add = [&](const f32 *from, u32 n, f32 *to) INLINE {
		for (u32 i = thread_x() * 4; i < p.m * W::columns; i += few_threads * 4) {
			f32 y[4], z[4];
			load(y, from + i);
#pragma unroll 8
			for (u32 other = 1; other < n; other++) {
				load(z, from + other * sums + i);
#pragma unroll
				for (u32 j = 0; j < 4; j++)
					y[j] = y[j] + z[j];
			}
			if (to) {
				store(to + i, y);
				continue;
			}
			u64 column = first + i % W::columns;
#pragma unroll
			for (u32 j = 0; j < 4; j++)
				if (column + j < p.n)
					finish_few(c[i / W::columns * p.c_pitch + column + j], y[j], p);
		}
	};
	if (blocks_y() == 1)
		return add(shared[0], few_warps, nullptr);
	f32 *all = partial + (u64)block_x() * blocks_y() * sums;
	add(shared[0], few_warps, all + block_y() * sums);
	if (is_last(&tickets[block_x()], blocks_y(), reinterpret_cast<u32 *>(shared)))
		add(all, blocks_y(), nullptr);
}

#else

template <u32 Rows> struct FewWeights { static constexpr u32 columns = 16 * Rows; };

// The same on ordinary cores, an element by each thread.
template <class W, u32 Eights, class D>
DEVICE void few_rows(D *c, const bf16 *x, const bf16 *w, f32 *, u32 *, const FewRows &p, u64) {
	for (u32 i = thread_x(); i < p.m * W::columns && block_y() == 0; i += few_threads) {
		u64 row = i / W::columns, column = (u64)block_x() * W::columns + i % W::columns;
		f32 sum = 0;
		for (u64 k = 0; k < p.k && column < p.n; k++)
			sum = sum + widen(x[row * p.x_pitch + k]) * widen(w[column * p.w_pitch + k]);
		if (column < p.n)
			finish_few(c[row * p.c_pitch + column], sum, p);
	}
}

#endif

#define FEW_ROWS(name, W, eights, D, blocks)                                                       \
	SHARING_KERNEL(name, few_threads, blocks, D *c, const bf16 *x, const bf16 *w, f32 *partial, \
		u32 *tickets, u64 m, u64 n, u64 k, u64 x_pitch, u64 w_pitch, u64 c_pitch, f64 alpha, \
		f64 beta, u64 early) { \
		few_rows<W, eights>(c, x, w, partial, tickets, \
			FewRows{m, n, k, x_pitch, w_pitch, c_pitch, alpha, beta}, early); \
	}
#define EACH_FEW_ROWS(columns, Rows) \
	FEW_ROWS(fewrows_##columns##_f32, FewWeights<Rows>, 1, f32, 4) \
	FEW_ROWS(fewrows_##columns##_bf16, FewWeights<Rows>, 1, bf16, 4) \
	FEW_ROWS(fewrowsmore_##columns##_f32, FewWeights<Rows>, 2, f32, 3) \
	FEW_ROWS(fewrowsmore_##columns##_bf16, FewWeights<Rows>, 2, bf16, 3)

EACH_FEW_ROWS(64, 4)
EACH_FEW_ROWS(16, 1)

// ---- launch ----
//
// 128 threads. The x axis of the grid has a block for each tile of C, the y axis parts of K.
