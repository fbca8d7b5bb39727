// Products of a few rows, up to 16, by a matrix of bf16, as when text is generated token by token:
// fewrows_LAYOUT_OUT for up to 8 rows, and fewrowsmore_LAYOUT_OUT. The matrix is read once, and is
// all that takes time, so this is about many bytes that are on their way at once.
//
// A warp goes along K and reads 8 chunks of 16 bytes a thread at a time, each thread those that it
// multiplies itself: nothing is exchanged before the sums. In a product of fragments, which index
// of K an element has does not matter as long as both operands agree. So a thread takes eight
// neighbours along K where the fragment has four and four others, and as with K, so with columns.
// The matrix is the left operand, of 16 rows, which are columns of C, and the rows are the right
// one, of 8.
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
// ByColumn says that neighbours in memory are those along K: a row for each column of C. Else a
// thread's chunks are of eight columns, of eight elements of K.
template <bool ByColumn, u32 Rows> struct FewWeights {
	static constexpr u32 columns = 16 * Rows, deep = 4 / Rows, step = few_depth * deep;
	static_assert(ByColumn || Rows == 4, "a chunk is eight columns, of eight threads");

	const bf16 *from;
	u64 pitch, left_n, k;

	DEVICE FewWeights(const bf16 *w, u64 first, const FewRows &p) : pitch(p.w_pitch), k(p.k) {
		u32 group = thread_x() % 32 / 4, at = thread_x() % 4 * chunk;
		u64 n = first + (ByColumn ? group : group * chunk);
		left_n = n < p.n ? p.n - n : 0;
		from = ByColumn ? w + n * pitch + at : w + at * pitch + n;
	}

	// Chunk c of a step from element `at` of K on, and whether it is there.
	DEVICE const bf16 *place(u64 at, u32 c) const {
		return ByColumn ? from + c % (2 * Rows) * 8 * pitch + at + c / (2 * Rows) * few_depth
						: from + (at + c) * pitch;
	}
	DEVICE bool there(u64 at, u32 c) const {
		u64 own = at + thread_x() % 4 * chunk;
		return ByColumn ? c % (2 * Rows) * 8 < left_n && own + c / (2 * Rows) * few_depth < k
						: left_n > 0 && own + c < k;
	}

	// The left operand for columns i of the tile, of part s of the step.
	static DEVICE void fragment(u32 (&a)[4], const u32 (&x)[few_chunks][4], u32 i, u32 s) {
		if (ByColumn) {
			u32 c = s / 2 * 2 * Rows + 2 * i, word = s % 2 * 2;
			a[0] = x[c][word], a[1] = x[c + 1][word];
			a[2] = x[c][word + 1], a[3] = x[c + 1][word + 1];
			return;
		}
#pragma unroll
		for (u32 e = 0; e < 4; e++)
			a[e] = pick(x[4 * s + e / 2 * 2][i], x[4 * s + e / 2 * 2 + 1][i],
				e % 2 ? 0x7632 : 0x5410);
	}

	// The column of a thread's sum e of columns i.
	static DEVICE u32 column(u32 i, u32 e) {
		u32 group = thread_x() % 32 / 4;
		return ByColumn ? 16 * i + e / 2 * 8 + group : 8 * group + 2 * i + e / 2;
	}
};

// The next steps of this thread's chunks, in shared memory, where nobody else reads them.
template <u32 Stages> struct FewAhead {
	b128 (*room)[few_threads];
	u32 stage = 0;
	static constexpr u32 ahead = Stages;
	DEVICE explicit FewAhead(b128 (*room)[few_threads]) : room(room) {}

	template <class W> DEVICE void copy(const W &w, u64 at) {
#pragma unroll
		for (u32 c = 0; c < few_chunks; c++) {
			bool there = w.there(at, c);
			copy_async_if(there, &room[stage * few_chunks + c][thread_x()],
				there ? w.place(at, c) : w.from);
		}
		end_of_group();
		stage = stage + 1 == Stages ? 0 : stage + 1;
	}
	DEVICE void take(u32 (&x)[few_chunks][4]) {
		wait_for_all_groups_but<Stages - 1>();
#pragma unroll
		for (u32 c = 0; c < few_chunks; c++)
			load(x[c], reinterpret_cast<const u32 *>(&room[stage * few_chunks + c][thread_x()]));
	}
};

// The next step of them, in registers.
struct FewNext {
	u32 next[few_chunks][4];
	static constexpr u32 ahead = 1;
	DEVICE explicit FewNext(b128 (*)[few_threads]) {}

	template <class W> DEVICE void copy(const W &w, u64 at) {
#pragma unroll
		for (u32 c = 0; c < few_chunks; c++) {
			next[c][0] = next[c][1] = next[c][2] = next[c][3] = 0;
			if (w.there(at, c))
				load(next[c], reinterpret_cast<const u32 *>(w.place(at, c)));
		}
	}
	DEVICE void take(u32 (&x)[few_chunks][4]) {
#pragma unroll
		for (u32 c = 0; c < few_chunks; c++)
#pragma unroll
			for (u32 i = 0; i < 4; i++)
				x[c][i] = next[c][i];
	}
};

// for i, j { c(i, j) = alpha * sum over k of x(i, k) * w(k, j) + beta * c(i, j) }
template <class W, class R, u32 Eights, class D>
DEVICE void few_rows(D *c, const bf16 *x, const bf16 *w, f32 *partial, u32 *tickets,
	const FewRows &p, u64 early) {
	constexpr u32 Rows = W::columns / 16, sums = 8 * Eights * W::columns;
	constexpr u32 room = few_warps * sums * 4 / (few_threads * 16),
				  ring = few_chunks * R::ahead;
	SHARED b128 shared[room > ring ? room : ring][few_threads];
	u32 warp = thread_x() / 32, lane = thread_x() % 32;
	u64 first = (u64)block_x() * W::columns, steps = (p.k + W::step - 1) / W::step;
	u64 part = (steps + blocks_y() - 1) / blocks_y(), end = least((block_y() + 1) * part, steps),
		now = block_y() * part + warp;
	W weights(w, first, p);
	if (early & 2)
#pragma unroll
		for (u32 a = 0; a < R::ahead; a++)
#pragma unroll
			for (u32 i = 0; i < few_chunks; i++)
				if (u64 at = (now + a * few_warps) * W::step;
					now + a * few_warps < end && weights.there(at, i))
					prefetch(weights.place(at, i));
	await_predecessors();
	if (early & 1)
		release_successors();
	R ahead(shared);
	auto copy = [&](u64 step) INLINE { ahead.copy(weights, step < end ? step * W::step : p.k); };
	u32 rows[W::deep][Eights][4];
	auto read = [&](u64 step) INLINE {
#pragma unroll
		for (u32 d = 0; d < W::deep; d++)
#pragma unroll
			for (u32 e = 0; e < Eights; e++) {
				u64 row = e * 8 + lane / 4, at = step * W::step + d * few_depth + lane % 4 * chunk;
				rows[d][e][0] = rows[d][e][1] = rows[d][e][2] = rows[d][e][3] = 0;
				if (row < p.m && step < end && at < p.k)
					load(rows[d][e], reinterpret_cast<const u32 *>(x + row * p.x_pitch + at));
			}
	};
#pragma unroll
	for (u32 a = 0; a < R::ahead; a++)
		copy(now + a * few_warps);
	read(now);
	f32 sum[Rows][Eights][4] = {};
#pragma unroll 1
	for (; now < end; now += few_warps) {
		u32 own[few_chunks][4], of_rows[W::deep][Eights][4];
		ahead.take(own);
#pragma unroll
		for (u32 d = 0; d < W::deep; d++)
#pragma unroll
			for (u32 e = 0; e < Eights; e++)
#pragma unroll
				for (u32 i = 0; i < 4; i++)
					of_rows[d][e][i] = rows[d][e][i];
		copy(now + R::ahead * few_warps);
		read(now + few_warps);
#pragma unroll
		for (u32 s = 0; s < 2 * W::deep; s++)
#pragma unroll
			for (u32 i = 0; i < Rows; i++) {
				u32 a[4];
				W::fragment(a, own, i, s);
#pragma unroll
				for (u32 e = 0; e < Eights; e++)
					multiply_fragments(bf16{}, sum[i][e], a, of_rows[s / 2][e][s % 2 * 2],
						of_rows[s / 2][e][s % 2 * 2 + 1]);
			}
	}
	wait_for_all_groups_but<0>();
	barrier();
	// sums of all warps, by row and column
	f32 *all = reinterpret_cast<f32 *>(shared);
#pragma unroll
	for (u32 i = 0; i < Rows; i++)
#pragma unroll
		for (u32 e = 0; e < Eights; e++)
#pragma unroll
			for (u32 j = 0; j < 4; j++)
				all[warp * sums + (8 * e + lane % 4 * 2 + j % 2) * W::columns + W::column(i, j)] =
					sum[i][e][j];
	barrier();
	f32 *left = partial + ((u64)block_x() * blocks_y()) * sums;
	for (u32 i = thread_x(); i < p.m * W::columns; i += few_threads) {
		f32 x = all[i];
#pragma unroll
		for (u32 from = 1; from < few_warps; from++)
			x = x + all[from * sums + i];
		u64 column = first + i % W::columns;
		if (blocks_y() > 1)
			left[block_y() * sums + i] = x;
		else if (column < p.n)
			finish_few(c[i / W::columns * p.c_pitch + column], x, p);
	}
	if (blocks_y() == 1)
		return;
	if (!is_last(&tickets[block_x()], blocks_y(), reinterpret_cast<u32 *>(shared)))
		return;
	for (u32 i = thread_x(); i < p.m * W::columns; i += few_threads) {
		f32 x = left[i];
#pragma unroll 4
		for (u32 from = 1; from < blocks_y(); from++)
			x = x + left[from * sums + i];
		u64 column = first + i % W::columns;
		if (column < p.n)
			finish_few(c[i / W::columns * p.c_pitch + column], x, p);
	}
}

#else

template <bool ByColumn, u32 Rows> struct FewWeights {
	static constexpr u32 columns = 16 * Rows;
	static constexpr bool by_column = ByColumn;
};
template <u32 Stages> struct FewAhead {};
struct FewNext {};

// The same on ordinary cores, an element by each thread.
template <class W, class R, u32 Eights, class D>
DEVICE void few_rows(D *c, const bf16 *x, const bf16 *w, f32 *, u32 *, const FewRows &p, u64) {
	for (u32 i = thread_x(); i < p.m * W::columns && block_y() == 0; i += few_threads) {
		u64 row = i / W::columns, column = (u64)block_x() * W::columns + i % W::columns;
		f32 sum = 0;
		for (u64 k = 0; k < p.k && column < p.n; k++)
			sum = sum + widen(x[row * p.x_pitch + k]) *
				widen(w[W::by_column ? column * p.w_pitch + k : k * p.w_pitch + column]);
		if (column < p.n)
			finish_few(c[row * p.c_pitch + column], sum, p);
	}
}

#endif

#define FEW_ROWS(name, W, R, eights, D)                                                            \
	SHARING_KERNEL(name, few_threads, 4, D *c, const bf16 *x, const bf16 *w, f32 *partial, \
		u32 *tickets, u64 m, u64 n, u64 k, u64 x_pitch, u64 w_pitch, u64 c_pitch, f64 alpha, \
		f64 beta, u64 early) { \
		few_rows<W, R, eights>(c, x, w, partial, tickets, \
			FewRows{m, n, k, x_pitch, w_pitch, c_pitch, alpha, beta}, early); \
	}
#define EACH_FEW_ROWS(op, ByColumn, Rows, R) \
	FEW_ROWS(fewrows_##op##_f32, BRACED(FewWeights<ByColumn, Rows>), R, 1, f32) \
	FEW_ROWS(fewrows_##op##_bf16, BRACED(FewWeights<ByColumn, Rows>), R, 1, bf16) \
	FEW_ROWS(fewrowsmore_##op##_f32, BRACED(FewWeights<ByColumn, Rows>), R, 2, f32) \
	FEW_ROWS(fewrowsmore_##op##_bf16, BRACED(FewWeights<ByColumn, Rows>), R, 2, bf16)
#define BRACED(...) __VA_ARGS__

EACH_FEW_ROWS(k64, true, 4, FewAhead<3>)
EACH_FEW_ROWS(k32, true, 2, FewAhead<3>)
EACH_FEW_ROWS(k16, true, 1, FewAhead<3>)
EACH_FEW_ROWS(n64, false, 4, FewAhead<3>)
EACH_FEW_ROWS(k64r, true, 4, FewNext)
EACH_FEW_ROWS(n64r, false, 4, FewNext)

// ---- launch ----
//
// 128 threads. The x axis of the grid has a block for each tile of C, the y axis parts of K.
