// Products of matrices: gemm_IN_OUT, and gemmsmall_IN_OUT in smaller tiles, for results that are
// too small to give every multiprocessor one of the large ones.
//
// See tiles.cuh for those of all floats but 16-bit ones on tensor cores.

#include "tensor.cuh"
#include "tiles.cuh"

// ---- kernels ----

// The steps of a matrix's indices in memory, in elements: of the index that C has, too, of that
// along K, and from one matrix of a batch to the next.
struct Steps {
	u64 outer, inner, batch;
};

struct Product {
	u64 m, n, k, batch;
	u64 pitch, stride; // of C
	f64 alpha, beta;
};

// Writes one element of C, whose sum is x.
template <class D, class T> DEVICE void finish(D &c, T x, const Product &p) {
	T y = x * T(p.alpha);
	if (p.beta != 0)
		y = y + T(p.beta) * Number<D>::widen(c);
	c = Number<D>::narrow(y);
}

// Side x depth elements on the way from memory to a tile. Neighbours in memory go to neighbours
// among the threads, whichever index is the fast one. A thread's elements differ in the other
// index, by `every`.
template <class S, u32 Side> struct Fetched {
	static constexpr u32 count = Side * depth / tile_threads;
	S x[count];
	const S *from; // the thread's first element of the first step
	u64 step;      // from one element of the thread to the next
	u64 along_k;   // from one step to the next
	u32 first;     // the index in which elements differ, of the first one
	u32 other;     // and the other index
	bool fast_k;
	u64 outers;

	DEVICE Fetched(const S *p, Steps steps, u64 outers) : outers(outers) {
		fast_k = steps.inner == 1;
		u32 run = fast_k ? depth : Side;
		first = thread_x() / run, other = thread_x() % run;
		u64 slow = fast_k ? steps.outer : steps.inner;
		from = p + first * slow + other * (fast_k ? steps.inner : steps.outer);
		step = every() * slow;
		along_k = depth * steps.inner;
	}

	DEVICE u32 every() const { return fast_k ? tile_threads / depth : tile_threads / Side; }

	// Reads the next step, of which `inners` elements along K are there.
	DEVICE void read(u64 inners) {
		u64 limit = fast_k ? outers : inners;
		bool there = other < (fast_k ? inners : outers);
		const S *p = from;
		u32 at = first;
#pragma unroll
		for (u32 i = 0; i < count; i++, p += step, at += every()) {
			x[i] = S{};
			if (there && at < limit)
				x[i] = *p;
		}
		from += along_k;
	}

	template <class T> DEVICE void put(OperandStep<T, Side> &tile) const {
		T *to = fast_k ? &tile[other][first] : &tile[first][other];
		u32 step = fast_k ? every() : every() * (Side + 4);
#pragma unroll
		for (u32 i = 0; i < count; i++)
			to[i * step] = Number<S>::widen(x[i]);
	}
};

// Writes a thread's sums of a tile of which some rows and columns are there.
template <class D, class T, u32 Side, u32 Each>
DEVICE void write(const Sums<T, Side, Side, Each, Each> &sums, D *c, const Product &p, u64 rows,
	u64 columns) {
#pragma unroll
	for (u32 i = 0; i < Each; i++) {
		u32 row = sums.row(i);
#pragma unroll
		for (u32 j = 0; j < Each; j++) {
			u32 column = sums.column(j);
			if (row >= rows || column >= columns)
				continue;
			finish(c[row * p.pitch + column], sums.x[i][j], p);
		}
	}
}

// for b, i, j { c[b](i, j) = alpha * sum over k of a[b](i, k) * b[b](k, j) + beta * c[b](i, j) }
template <class T, u32 Side, u32 Each, class D, class S>
DEVICE void gemm(D *c, const S *a, const S *b, Steps of_a, Steps of_b, const Product &p) {
	SHARED OperandStep<T, Side> left[2], right[2];
	u64 down = (p.m + Side - 1) / Side, row = block_x() % down * Side,
		column = block_x() / down * Side;
	for (u64 n = block_y(); n < p.batch; n += blocks_y()) {
		const S *from_a = a + n * of_a.batch + row * of_a.outer,
				*from_b = b + n * of_b.batch + column * of_b.outer;
		Fetched<S, Side> next_a(from_a, of_a, p.m - row), next_b(from_b, of_b, p.n - column);
		Sums<T, Side, Side, Each, Each> sums = {};
		u32 now = 0;
		auto read = [&](u64 k) {
			next_a.read(p.k - k);
			next_b.read(p.k - k);
		};
		auto put = [&](u32 to) {
			next_a.put(left[to]);
			next_b.put(right[to]);
		};
		if (p.k > 0) {
			read(0);
			put(0);
		}
		barrier();
		for (u64 k = 0; k < p.k; k += depth, now ^= 1) {
			bool more = k + depth < p.k;
			if (more)
				read(k + depth);
			sums.add(left[now], right[now]);
			if (more)
				put(now ^ 1);
			barrier();
		}
		write(sums, c + n * p.stride + row * p.pitch + column, p, p.m - row, p.n - column);
	}
}

#if AMPERE

// Tensor cores multiply 16-bit floats, and add in f32. A block has eight warps, two along M by four
// along N, and goes along K in steps of `wide_depth`. While one step is multiplied, the next two
// are copied to shared memory as they lie in memory: rows of K where K is the fast index, and
// otherwise rows of the other index, which ldmatrix then transposes.

constexpr u32 wide_depth = 32; // elements of 16 bits
constexpr u32 stages = 3;                 // steps in shared memory: 48 KiB, which every device has

// Writes two neighbours of C, at once if they are aligned, of which the first one's column is s.
template <class D>
DEVICE void finish_pair(D *c, f32 x, f32 y, const Product &p, u64 s, bool pairs) {
	if (s + 1 < p.n && pairs) {
		D both[2];
		if (p.beta != 0)
			load(both, c);
		finish(both[0], x, p);
		finish(both[1], y, p);
		store(c, both);
		return;
	}
	if (s < p.n)
		finish(c[0], x, p);
	if (s + 1 < p.n)
		finish(c[1], y, p);
}

// A step of one operand in shared memory, [Side][wide_depth] or [wide_depth][Side], in chunks of 16
// bytes. Chunks of a row change places so that the eight that ldmatrix reads at a time, one of each
// row, lie in different banks.
template <class S, u32 Side> struct Step {
	static constexpr u32 chunks = Side * wide_depth / chunk, each = chunks / tile_threads;

	static DEVICE u32 in_row(bool fast_k) { return (fast_k ? wide_depth : Side) / chunk; }
	static DEVICE u32 place(u32 row, u32 at, bool fast_k) {
		return row * in_row(fast_k) + (at ^ (fast_k ? row / 2 % 4 : row % 8));
	}

	// This thread's chunks on the way there: the first one's place, and the distance to the next.
	const S *from;
	u64 step, along_k, slows, fasts;
	u32 row, at;
	bool fast_k, vectors;

	DEVICE Step(const S *p, Steps s, u64 outers, bool vectors) : vectors(vectors) {
		fast_k = s.inner == 1;
		u64 slow = fast_k ? s.outer : s.inner;
		row = thread_x() / in_row(fast_k), at = thread_x() % in_row(fast_k);
		from = p + row * slow + at * chunk;
		step = tile_threads / in_row(fast_k) * slow;
		along_k = wide_depth * s.inner;
		slows = fasts = outers;
	}

	// Begins to copy the next step, of which `inners` elements along K are there, with zeros after
	// the last ones.
	DEVICE void copy(b128 *to, u64 inners) {
		u64 rows = fast_k ? slows : inners, columns = fast_k ? inners : fasts;
		const S *p = from;
#pragma unroll
		for (u32 i = 0; i < each; i++, p += step) {
			u32 r = row + i * (tile_threads / in_row(fast_k)), c = at * chunk;
			b128 *dst = to + place(r, at, fast_k);
			if (vectors && r < rows && c + chunk <= columns) {
				copy_async(dst, reinterpret_cast<const b128 *>(p));
				continue;
			}
#pragma unroll 1
			for (u32 j = 0; j < chunk; j++)
				reinterpret_cast<S *>(dst)[j] = r < rows && c + j < columns ? p[j] : S{};
		}
		from += along_k;
	}

	// Reads 16 of the outer index by 16 of K for all threads of a warp. The matrices of 8 by 8 come
	// in the order that an operand A wants: outer first, then K; for_b is the other order.
	static DEVICE void fragment(u32 (&x)[4], const b128 *tile, bool fast_k, u32 outer, u32 k,
		bool for_b) {
		u32 lane = thread_x() % 32, row = lane % 8, first = lane / 8 % 2 * 8,
			second = lane / 16 * 8;
		outer += for_b ? second : first, k += for_b ? first : second;
		if (fast_k)
			load_matrices<false>(x, tile + place(outer + row, k / chunk, true));
		else
			load_matrices<true>(x, tile + place(k + row, outer / chunk, false));
	}
};

template <u32 Side, class D, class S>
DEVICE void gemm_tensor(D *c, const S *a, const S *b, Steps of_a, Steps of_b, const Product &p) {
	typedef Step<S, Side> Op;
	constexpr u32 M = Side / 2 / 16, N = Side / 4 / 16; // fragments of a warp: 16 rows, 16 columns
	SHARED b128 left[stages][Op::chunks], right[stages][Op::chunks];
	u64 down = (p.m + Side - 1) / Side, row = block_x() % down * Side,
		column = block_x() / down * Side;
	u32 warp = thread_x() / 32, warp_row = warp % 2 * (Side / 2),
		warp_column = warp / 2 * (Side / 4);
	auto vectors = [](const S *x, Steps s) {
		return aligned(ADDRESS(x), 16) && (s.outer * s.inner | s.batch) % chunk == 0;
	};
	bool vectors_a = vectors(a, of_a), vectors_b = vectors(b, of_b), fast_a = of_a.inner == 1,
		 fast_b = of_b.inner == 1;
	for (u64 n = block_y(); n < p.batch; n += blocks_y()) {
		Op next_a(a + n * of_a.batch + row * of_a.outer, of_a, p.m - row, vectors_a);
		Op next_b(b + n * of_b.batch + column * of_b.outer, of_b, p.n - column, vectors_b);
		bool pairs = aligned(ADDRESS(c) | (n * p.stride | p.pitch) * sizeof(D), 2 * sizeof(D));
		f32 sums[M][2 * N][4] = {};
		u64 ahead = 0; // what is copied, or on its way, along K
		auto copy = [&](u32 to) {
			if (ahead < p.k) {
				next_a.copy(left[to], p.k - ahead);
				next_b.copy(right[to], p.k - ahead);
			}
			ahead += wide_depth;
			end_of_group();
		};
		for (u32 i = 0; i + 1 < stages; i++)
			copy(i);
		u32 now = 0;
		for (u64 k = 0; k < p.k; k += wide_depth) {
			wait_for_all_groups_but<stages - 2>();
			// everyone's copies are there, and nobody reads the stage that is copied to next
			barrier();
			copy((now + stages - 1) % stages);
#pragma unroll
			for (u32 at = 0; at < wide_depth; at += 16) {
				u32 x[M][4], y[N][4];
#pragma unroll
				for (u32 i = 0; i < M; i++)
					Op::fragment(x[i], left[now], fast_a, warp_row + i * 16, at, false);
#pragma unroll
				for (u32 j = 0; j < N; j++)
					Op::fragment(y[j], right[now], fast_b, warp_column + j * 16, at, true);
#pragma unroll
				for (u32 i = 0; i < M; i++)
#pragma unroll
					for (u32 j = 0; j < 2 * N; j++)
						multiply_fragments(S{}, sums[i][j], x[i], y[j / 2][j % 2 * 2],
							y[j / 2][j % 2 * 2 + 1]);
			}
			now = (now + 1) % stages;
		}
		barrier();
#pragma unroll
		for (u32 i = 0; i < M; i++)
#pragma unroll
			for (u32 j = 0; j < 2 * N; j++)
#pragma unroll
				for (u32 e = 0; e < 4; e += 2) {
					u64 r = row + warp_row + i * 16 + e / 2 * 8 + thread_x() % 32 / 4,
						s = column + warp_column + j * 8 + thread_x() % 4 * 2;
					if (r < p.m)
						finish_pair(c + n * p.stride + r * p.pitch + s, sums[i][j][e],
							sums[i][j][e + 1], p, s, pairs);
				}
	}
}

#endif

#define GEMM_IN_TILES(name, by, S, D) \
	PAIRED_KERNEL(name, 256, D *c, const S *a, const S *b, u64 m, u64 n, u64 k, u64 batch, \
		u64 pitch, u64 stride, u64 a_outer, u64 a_inner, u64 a_batch, u64 b_outer, u64 b_inner, \
		u64 b_batch, f64 alpha, f64 beta) { \
		by(c, a, b, Steps{a_outer, a_inner, a_batch}, Steps{b_outer, b_inner, b_batch}, \
			Product{m, n, k, batch, pitch, stride, alpha, beta}); \
	}
#define GEMM(S, D, large, small)                         \
	GEMM_IN_TILES(gemm_##S##_##D, large, S, D)       \
	GEMM_IN_TILES(gemmsmall_##S##_##D, small, S, D)

GEMM(f64, f64, (gemm<f64, 64, 4>), (gemm<f64, 32, 2>))
GEMM(f32, f32, (gemm<f32, 128, 8>), (gemm<f32, 64, 4>))
#if AMPERE
#define GEMM_HALF(S, D) GEMM(S, D, gemm_tensor<128>, gemm_tensor<64>)
#else
#define GEMM_HALF(S, D) GEMM(S, D, (gemm<f32, 128, 8>), (gemm<f32, 64, 4>))
#endif
GEMM_HALF(f16, f32)
GEMM_HALF(f16, f16)
GEMM_HALF(bf16, f32)
GEMM_HALF(bf16, bf16)

// ---- launch ----
//
// 256 threads. The x axis of the grid has a block for each tile of C, the y axis the batch.
