// Attention and its gradient: attention_SIZE_DTYPE, attentiongradq_SIZE_DTYPE and
// attentiongradkv_SIZE_DTYPE, for heads of up to SIZE elements.
//
// This is FlashAttention-2 (Dao 2023): a block has some queries, goes along the keys, and keeps for each
// query the largest score so far, the sum of the exponentials and the weighted sum of the values, so that
// scores are never in memory. A gradient finds the weights again, from the logarithm of the sum. dq is
// computed by blocks of queries, and dk and dv by blocks of keys: scores are found twice, but there are
// no atomics, and the bits are the same in every run.

#include "functions.cuh"
#include "tensor.cuh"

// ---- kernels ----

struct Heads {
	u64 count, per_batch, queries, keys, size;
	bool causal;
	f64 scale;

	// Query i sees the keys up to i + keys - queries.
	DEVICE bool visible(u64 query, u64 key) const { return key < keys && (!causal || key + queries <= query + keys); }

	// How many keys, from the first one on, the queries up to the last one see.
	DEVICE u64 seen(u64 last) const {
		u64 end = last + 1 + keys;
		return !causal ? keys : end < queries ? 0 : least(end - queries, keys);
	}

	// The first query that sees a key.
	DEVICE u64 first_query(u64 key) const { return causal && key + queries > keys ? key + queries - keys : 0; }
};

// An operand or a result: a row for each query or key of each head. The distances are in elements.
template <class S> struct Rows {
	S *p;
	u64 batch, head, row;
	DEVICE S *at(const Heads &h, u64 n, u64 i) const { return p + n / h.per_batch * batch + n % h.per_batch * head + i * row; }
};

// The turns of a block: each has `rows` of n rows of a head, from `first` on. The last rows come first:
// they see the most keys.
template <u32 rows> struct Turn {
	u64 head, tile, tiles, first;
	DEVICE explicit Turn(u64 n) : head(block_y()), tile(block_x()), tiles((n + rows - 1) / rows) { place(); }
	DEVICE void place() { first = (tiles - 1 - tile) * rows; }
	DEVICE bool more(const Heads &h) const { return head < h.count && tile < tiles; }
	DEVICE void next() {
		tile += blocks_x();
		if (tile >= tiles)
			tile = block_x(), head += blocks_y();
		place();
	}
};

// ---- on ordinary cores ----

// The threads of a block, 16 in a row, have Each x Each scores each.
template <u32 Threads, class T, u32 Size, u32 Each> struct alignas(16) Plain {
	static constexpr u32 rows = Threads / 16 * Each, columns = 16 * Each, depth = 8, wide = Size / 16;
	typedef T Scores[Each][Each]; // of rows row() on and columns column() on
	typedef T Sums[Each][wide];   // of rows row() on and columns place()

	T left[depth][rows + 4], right[depth][columns + 4], weights[columns][rows + 4], part[depth][Size];

	static DEVICE u32 row() { return thread_x() / 16 * Each; }
	static DEVICE u32 column() { return thread_x() % 16 * Each; }
	// Sums of a thread are of four columns, of each 64.
	static DEVICE u32 place(u32 j) { return j / 4 * 64 + thread_x() % 16 * 4 + j % 4; }

	template <u32 n, u32 width, class S> static DEVICE void fill(T (&to)[depth][width], const S *x, u64 step, u64 there, u64 left) {
		for (u32 i = thread_x(); i < n * depth; i += Threads) {
			u32 r = i / depth, c = i % depth;
			to[c][r] = r < there && c < left ? Number<S>::widen(x[r * step + c]) : T(0);
		}
	}

	// x = a bᵀ, of `rows` rows of a and `columns` of b, of which some are there.
	template <class S> DEVICE void scores(Scores &x, const S *a, u64 a_step, u64 a_there, const S *b, u64 b_step, u64 b_there, u64 size) {
#pragma unroll
		for (u32 i = 0; i < Each; i++)
#pragma unroll
			for (u32 j = 0; j < Each; j++)
				x[i][j] = 0;
		for (u64 at = 0; at < size; at += depth) {
			barrier();
			fill<rows>(left, a + at, a_step, a_there, size - at);
			fill<columns>(right, b + at, b_step, b_there, size - at);
			barrier();
#pragma unroll 4
			for (u32 c = 0; c < depth; c++) {
				T u[Each], v[Each];
				load(u, &left[c][row()]);
				load(v, &right[c][column()]);
#pragma unroll
				for (u32 i = 0; i < Each; i++)
#pragma unroll
					for (u32 j = 0; j < Each; j++)
						x[i][j] = fused(u[i], v[j], x[i][j]);
			}
		}
	}

	// o += w z, of all weights w and `columns` rows of z, of which some are there.
	template <class S> DEVICE void add(Sums &o, const Scores &w, const S *z, u64 step, u64 there, u64 size) {
		barrier();
#pragma unroll
		for (u32 i = 0; i < Each; i++)
#pragma unroll
			for (u32 j = 0; j < Each; j++)
				weights[column() + j][row() + i] = w[i][j];
		for (u32 n = 0; n < columns && n < there; n += depth) {
			barrier();
#pragma unroll 2
			for (u32 i = thread_x(); i < depth * Size; i += Threads) {
				u32 r = i / Size, c = i % Size;
				part[r][c] = n + r < there && c < size ? Number<S>::widen(z[(n + r) * step + c]) : T(0);
			}
			barrier();
#pragma unroll 2
			for (u32 r = 0; r < depth; r++) {
				T weight[Each];
				load(weight, &weights[n + r][row()]);
#pragma unroll
				for (u32 j = 0; j < wide; j += 4) {
					T some[4];
					load(some, &part[r][place(j)]);
#pragma unroll
					for (u32 i = 0; i < Each; i++)
#pragma unroll
						for (u32 c = 0; c < 4; c++)
							o[i][j + c] = fused(weight[i], some[c], o[i][j + c]);
				}
			}
		}
	}

	// Writes rows of o times a factor, of which some are there.
	template <class S> static DEVICE void write(S *to, u64 step, const Sums &o, const T (&factor)[Each], u64 there, u64 size) {
#pragma unroll
		for (u32 i = 0; i < Each; i++)
#pragma unroll
			for (u32 j = 0; j < wide; j++) {
				u32 c = place(j);
				if (row() + i < there && c < size)
					to[(row() + i) * step + c] = Number<S>::narrow(o[i][j] * factor[i]);
			}
	}

	// The sum of what the threads of a row have.
	static DEVICE T along_row(T x) {
#pragma unroll
		for (u32 mask = 1; mask < 16; mask *= 2)
			x = x + across(x, mask);
		return x;
	}
	static DEVICE T largest_of_row(T x) {
#pragma unroll
		for (u32 mask = 1; mask < 16; mask *= 2) {
			T y = across(x, mask);
			x = x < y ? y : x;
		}
		return x;
	}
};

DEVICE f32 infinite(f32) { return infinity_f32(); }
DEVICE f64 infinite(f64) { return infinity_f64(); }

// for i { y[i] = sum over j of exp(s[i,j] - lse[i]) v[j], lse[i] = log of the sum over j of exp(s[i,j]) }
// with s[i,j] = scale q[i] k[j]
template <u32 Threads, class T, u32 Size, u32 Each, class S>
DEVICE void attention_plain(Rows<S> y, T *lse, Rows<const S> q, Rows<const S> k, Rows<const S> v, const Heads &h) {
	typedef Plain<Threads, T, Size, Each> P;
	SHARED P p;
	for (Turn<P::rows> t(h.queries); t.more(h); t.next()) {
		u64 n = t.head, first = t.first;
		u64 there = least<u64>(P::rows, h.queries - first), keys = h.seen(first + there - 1);
		typename P::Sums o = {};
		T most[Each], sum[Each];
#pragma unroll
		for (u32 i = 0; i < Each; i++)
			most[i] = -infinite(T()), sum[i] = 0;
		for (u64 key = 0; key < keys; key += P::columns) {
			typename P::Scores x;
			p.scores(x, q.at(h, n, first), q.row, there, k.at(h, n, key), k.row, h.keys - key, h.size);
#pragma unroll
			for (u32 i = 0; i < Each; i++) {
				T now = -infinite(T()), more = 0;
#pragma unroll
				for (u32 j = 0; j < Each; j++) {
					x[i][j] = h.visible(first + P::row() + i, key + P::column() + j) ? x[i][j] * T(h.scale) : -infinite(T());
					now = now < x[i][j] ? x[i][j] : now;
				}
				now = P::largest_of_row(now);
				now = now < most[i] ? most[i] : now;
				T base = now == -infinite(T()) ? T(0) : now, factor = exponential(most[i] - base);
#pragma unroll
				for (u32 j = 0; j < Each; j++) {
					x[i][j] = exponential(x[i][j] - base);
					more = more + x[i][j];
				}
				sum[i] = sum[i] * factor + P::along_row(more);
				most[i] = now;
#pragma unroll
				for (u32 j = 0; j < P::wide; j++)
					o[i][j] = o[i][j] * factor;
			}
			p.add(o, x, v.at(h, n, key), v.row, h.keys - key, h.size);
		}
		T share[Each];
#pragma unroll
		for (u32 i = 0; i < Each; i++) {
			share[i] = sum[i] == 0 ? T(0) : T(1) / sum[i];
			if (thread_x() % 16 == 0 && P::row() + i < there)
				lse[n * h.queries + first + P::row() + i] = most[i] + logarithm(sum[i]);
		}
		P::write(y.at(h, n, first), y.row, o, share, there, h.size);
	}
}

// sums[i] = sum over c of dy[i,c] y[i,c], and dq[i] = scale * sum over j of w[i,j] (dy[i] v[j] - sums[i]) k[j]
// with w[i,j] = exp(s[i,j] - lse[i])
template <u32 Threads, class T, u32 Size, u32 Each, class S>
DEVICE void attention_gradient_q(Rows<S> dq, T *sums, Rows<const S> y, const T *lse, Rows<const S> q, Rows<const S> k, Rows<const S> v, Rows<const S> dy, const Heads &h) {
	typedef Plain<Threads, T, Size, Each> P;
	SHARED P p;
	for (Turn<P::rows> t(h.queries); t.more(h); t.next()) {
		u64 n = t.head, first = t.first;
		u64 there = least<u64>(P::rows, h.queries - first), keys = h.seen(first + there - 1);
		typename P::Sums o = {};
		T log[Each], sum[Each], scale[Each];
#pragma unroll
		for (u32 i = 0; i < Each; i++) {
			u64 at = n * h.queries + first + P::row() + i;
			bool is = P::row() + i < there;
			log[i] = is ? lse[at] : T(0);
			scale[i] = T(h.scale);
			T all = 0;
			for (u64 c = thread_x() % 16; is && c < h.size; c += 16)
				all = fused(Number<S>::widen(dy.at(h, n, first + P::row() + i)[c]), Number<S>::widen(y.at(h, n, first + P::row() + i)[c]), all);
			sum[i] = P::along_row(all);
			if (is && thread_x() % 16 == 0)
				sums[at] = sum[i];
		}
		for (u64 key = 0; key < keys; key += P::columns) {
			typename P::Scores x, d;
			p.scores(x, q.at(h, n, first), q.row, there, k.at(h, n, key), k.row, h.keys - key, h.size);
			p.scores(d, dy.at(h, n, first), dy.row, there, v.at(h, n, key), v.row, h.keys - key, h.size);
#pragma unroll
			for (u32 i = 0; i < Each; i++)
#pragma unroll
				for (u32 j = 0; j < Each; j++) {
					bool is = P::row() + i < there && h.visible(first + P::row() + i, key + P::column() + j);
					x[i][j] = is ? exponential(x[i][j] * scale[i] - log[i]) * (d[i][j] - sum[i]) : T(0);
				}
			p.add(o, x, k.at(h, n, key), k.row, h.keys - key, h.size);
		}
		P::write(dq.at(h, n, first), dq.row, o, scale, there, h.size);
	}
}

// dv[j] = sum over i of w[i,j] dy[i], and dk[j] = scale * sum over i of w[i,j] (dy[i] v[j] - sums[i]) q[i]
template <u32 Threads, class T, u32 Size, u32 Each, class S>
DEVICE void attention_gradient_kv(Rows<S> dk, Rows<S> dv, const T *lse, const T *sums, Rows<const S> q, Rows<const S> k, Rows<const S> v, Rows<const S> dy, const Heads &h) {
	typedef Plain<Threads, T, Size, Each> P;
	SHARED P p;
	for (Turn<P::rows> t(h.keys); t.more(h); t.next()) {
		u64 n = t.head, first = t.first;
		u64 there = least<u64>(P::rows, h.keys - first);
		typename P::Sums of_k = {}, of_v = {};
		for (u64 query = h.first_query(first) / P::columns * P::columns; query < h.queries; query += P::columns) {
			u64 left = h.queries - query;
			typename P::Scores x, d;
			p.scores(x, k.at(h, n, first), k.row, there, q.at(h, n, query), q.row, left, h.size);
			p.scores(d, v.at(h, n, first), v.row, there, dy.at(h, n, query), dy.row, left, h.size);
#pragma unroll
			for (u32 j = 0; j < Each; j++) {
				u64 at = n * h.queries + query + P::column() + j;
				bool is = P::column() + j < left;
				T log = is ? lse[at] : T(0), sum = is ? sums[at] : T(0);
#pragma unroll
				for (u32 i = 0; i < Each; i++) {
					bool both = is && h.visible(query + P::column() + j, first + P::row() + i);
					x[i][j] = both ? exponential(x[i][j] * T(h.scale) - log) : T(0);
					d[i][j] = x[i][j] * (d[i][j] - sum);
				}
			}
			p.add(of_v, x, dy.at(h, n, query), dy.row, left, h.size);
			p.add(of_k, d, q.at(h, n, query), q.row, left, h.size);
		}
		T scale[Each], one[Each];
#pragma unroll
		for (u32 i = 0; i < Each; i++)
			scale[i] = T(h.scale), one[i] = 1;
		P::write(dk.at(h, n, first), dk.row, of_k, scale, there, h.size);
		P::write(dv.at(h, n, first), dv.row, of_v, one, there, h.size);
	}
}

#if TENSOR_CORES

// ---- on tensor cores ----

// Each warp of a block has F fragments of 16 rows, and goes along N rows of the other operands at a time:
// while they are multiplied, the next ones are copied to shared memory. A warp skips rows that all of its
// own do not see. Gradients have twice the threads of the forward pass: more rows share what is copied.

constexpr f32 log2_e = 1.44269504f;

// 2^x, to 2 units of the last place.
DEVICE f32 power_of_two(f32 x) {
#if AMPERE
	f32 y;
	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
#else
	return std::exp2(x);
#endif
}

// Whether all rows can be copied in vectors.
template <class S> DEVICE bool in_vectors(const Rows<S> &x, const Heads &h) { return aligned(ADDRESS(x.p), 16) && (x.batch | x.head | x.row | h.size) % chunk == 0; }

// Rows of Size elements in shared memory, in chunks of 16 bytes. Chunks of a row change places so
// that the eight that ldmatrix reads at a time, one of each row, lie in different banks.
template <u32 Threads, u32 Size> struct Staged {
	static constexpr u32 in_row = Size / chunk;
	static DEVICE u32 place(u32 row, u32 at) { return row * in_row + (at ^ (in_row < 8 ? row / 2 % 4 : row % 8)); }

	// Begins to copy n rows, with zeros for those that are not there.
	template <u32 n> static DEVICE void copy(b128 *to, const bf16 *from, u64 step, u64 there, u64 size, bool vectors) {
		u32 rows = (u32)least<u64>(there, n), columns = (u32)size;
		if (!vectors) {
#pragma unroll 1
			for (u32 i = thread_x(); i < n * Size; i += Threads) {
				u32 row = i / Size, column = i % Size;
				bf16 *dst = reinterpret_cast<bf16 *>(to + place(row, column / chunk)) + column % chunk;
				*dst = row < rows && column < columns ? from[row * step + column] : bf16{};
			}
			return;
		}
		constexpr u32 together = Threads / in_row; // rows
		u32 row = thread_x() / in_row, column = thread_x() % in_row * chunk;
		const bf16 *p = from + row * step + column;
#pragma unroll
		for (u32 i = 0; i < n; i += together) {
			bool is = row + i < rows && column < columns;
			copy_async_if(is, to + place(row + i, column / chunk), is ? p + i * step : from);
		}
	}

	// Writes rows, of which some are there.
	template <u32 n> static DEVICE void write(bf16 *to, u64 step, const b128 *from, u64 there, u64 size, bool vectors) {
		u32 rows = (u32)least<u64>(there, n), columns = (u32)size;
		if (!vectors) {
#pragma unroll 1
			for (u32 i = thread_x(); i < rows * Size; i += Threads) {
				u32 row = i / Size, column = i % Size;
				if (column < columns)
					to[row * step + column] = reinterpret_cast<const bf16 *>(from + place(row, column / chunk))[column % chunk];
			}
			return;
		}
		u32 column = thread_x() % in_row * chunk;
#pragma unroll
		for (u32 row = thread_x() / in_row; row < n; row += Threads / in_row)
			if (row < rows && column < columns)
				*reinterpret_cast<b128 *>(to + row * step + column) = from[place(row, column / chunk)];
	}

	static DEVICE u32 lane() { return thread_x() % 8; }
	static DEVICE u32 first() { return thread_x() / 8 % 2 * 8; }
	static DEVICE u32 second() { return thread_x() / 16 % 2 * 8; }

	// Fragments of 16 by 16: as the left operand, as the right one transposed, and as the right one.
	static DEVICE void left(u32 (&x)[4], const b128 *tile, u32 row, u32 column) {
		load_matrices<false>(x, tile + place(row + first() + lane(), (column + second()) / chunk));
	}
	static DEVICE void right_transposed(u32 (&x)[4], const b128 *tile, u32 row, u32 column) {
		load_matrices<false>(x, tile + place(row + second() + lane(), (column + first()) / chunk));
	}
	static DEVICE void right(u32 (&x)[4], const b128 *tile, u32 row, u32 column) {
		load_matrices<true>(x, tile + place(row + first() + lane(), (column + second()) / chunk));
	}
};

template <u32 Threads, u32 Size, u32 F, u32 N> struct Fragments {
	typedef Staged<Threads, Size> T;
	typedef u32 Own[Size / 16][4];  // 16 rows of this warp
	typedef f32 Scores[N / 8][4];   // of them and N others
	typedef f32 Sums[Size / 8][4];  // weighted sums of N others
	static constexpr u32 spread = Threads / 2, rows = F * spread, chunks = N * T::in_row;
	static DEVICE u32 warp() { return of_warp(thread_x() / 32 * 16); }
	static DEVICE u32 first(u32 f) { return f * spread + warp(); }

	// Element e of fragment f is in this row of the block, and fragment j's in this column.
	static DEVICE u32 row(u32 f, u32 e) { return f * spread + warp() + e / 2 * 8 + thread_x() % 32 / 4; }
	static DEVICE u32 column(u32 j, u32 e) { return j * 8 + thread_x() % 4 * 2 + e % 2; }
	// How many of N columns, from one on, are before the end.
	static DEVICE u32 within(u64 end, u64 from) { return end <= from ? 0 : (u32)least<u64>(end - from, N); }

	// Begins to copy the rows of the block, and reads those of this warp once they are there.
	static DEVICE void copy(b128 *room, const Rows<const bf16> &x, const Heads &h, u64 n, u64 first, u64 there, bool vectors) {
		T::template copy<rows>(room, x.at(h, n, first), x.row, there, h.size, vectors);
		end_of_group();
	}
	static DEVICE void read(Own (&x)[F], const b128 *room) {
#pragma unroll
		for (u32 f = 0; f < F; f++)
#pragma unroll
			for (u32 k = 0; k < Size / 16; k++)
				T::left(x[f][k], room, f * spread + warp(), k * 16);
	}

	// x = a tᵀ
	static DEVICE void scores(Scores &x, const Own &a, const b128 *t) {
#pragma unroll
		for (u32 j = 0; j < N / 8; j++)
#pragma unroll
			for (u32 e = 0; e < 4; e++)
				x[j][e] = 0;
#pragma unroll
		for (u32 k = 0; k < Size / 16; k++)
#pragma unroll
			for (u32 j = 0; j < N / 16; j++) {
				u32 b[4];
				T::right_transposed(b, t, j * 16, k * 16);
				multiply_fragments(bf16{}, x[2 * j], a[k], b[0], b[1]);
				multiply_fragments(bf16{}, x[2 * j + 1], a[k], b[2], b[3]);
			}
	}

	// o += w t: sums of two columns of scores are what a left operand has in a lane, rounded.
	static DEVICE void add(Sums &o, const Scores &w, const b128 *t) {
		u32 a[N / 16][4];
#pragma unroll
		for (u32 k = 0; k < N / 16; k++)
#pragma unroll
			for (u32 i = 0; i < 4; i++)
				a[k][i] = pair_of_bf16(w[2 * k + i / 2][i % 2 * 2], w[2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
		for (u32 k = 0; k < N / 16; k++)
#pragma unroll
			for (u32 j = 0; j < Size / 16; j++) {
				u32 b[4];
				T::right(b, t, k * 16, j * 16);
				multiply_fragments(bf16{}, o[2 * j], a[k], b[0], b[1]);
				multiply_fragments(bf16{}, o[2 * j + 1], a[k], b[2], b[3]);
			}
	}

	// Lays rows of o times a factor out in shared memory.
	static DEVICE void stage(b128 *room, const Sums &o, const f32 (&factor)[2], u32 f) {
#pragma unroll
		for (u32 j = 0; j < Size / 8; j++)
#pragma unroll
			for (u32 r = 0; r < 2; r++)
				reinterpret_cast<u32 *>(room + T::place(row(f, 2 * r), j))[thread_x() % 4] = pair_of_bf16(o[j][2 * r] * factor[r], o[j][2 * r + 1] * factor[r]);
	}
};

// The sum, and the largest, of what the four threads of a row have.
DEVICE f32 along_row(f32 x) {
	x = x + across(x, 1);
	return x + across(x, 2);
}
DEVICE f32 largest_of_row(f32 x) {
	x = __builtin_fmaxf(x, across(x, 1));
	return __builtin_fmaxf(x, across(x, 2));
}

template <u32 Threads, u32 Size, u32 F, u32 N>
DEVICE void attention_tensor(Rows<bf16> y, f32 *lse, Rows<const bf16> q, Rows<const bf16> k, Rows<const bf16> v, const Heads &h) {
	typedef Fragments<Threads, Size, F, N> P;
	SHARED b128 room[2][2][P::chunks]; // keys and values, for now and for next
	static_assert(P::rows <= 2 * N, "one half has room for the queries, too");
	bool vectors_q = in_vectors(q, h), vectors_k = in_vectors(k, h), vectors_v = in_vectors(v, h);
	f32 scale = f32(h.scale) * log2_e;
	for (Turn<P::rows> t(h.queries); t.more(h); t.next()) {
		u64 n = t.head, first = t.first;
		u64 there = least<u64>(P::rows, h.queries - first), keys = h.seen(first + there - 1);
		const bf16 *from_k = k.at(h, n, 0), *from_v = v.at(h, n, 0);
		auto copy = [&](u32 to, u64 key) {
			if (key < keys) {
				P::T::template copy<N>(room[to][0], from_k + key * k.row, k.row, h.keys - key, h.size, vectors_k);
				P::T::template copy<N>(room[to][1], from_v + key * v.row, v.row, h.keys - key, h.size, vectors_v);
			}
			end_of_group();
		};
		typename P::Own own[F];
		barrier(); // nobody reads what is copied over
		P::copy(room[0][0], q, h, n, first, there, vectors_q);
		copy(1, 0);
		wait_for_all_groups_but<1>();
		barrier();
		P::read(own, room[0][0]);
		typename P::Sums o[F] = {};
		f32 most[F][2], sum[F][2] = {};
#pragma unroll
		for (u32 f = 0; f < F; f++)
			most[f][0] = most[f][1] = -infinity_f32();
		u32 now = 1;
		for (u64 key = 0; key < keys; key += N, now ^= 1) {
			wait_for_all_groups_but<0>();
			barrier(); // everyone's copies are there, and nobody reads what is copied over next
			copy(now ^ 1, key + N);
			typename P::Scores x[F];
#pragma unroll
			for (u32 f = 0; f < F; f++)
				P::scores(x[f], own[f], room[now][0]);
#pragma unroll
			for (u32 f = 0; f < F; f++) {
				if (h.seen(first + P::first(f)) < key + N)
#pragma unroll
					for (u32 r = 0; r < 2; r++) {
						u32 seen = P::within(h.seen(first + P::row(f, 2 * r)), key);
#pragma unroll
						for (u32 j = 0; j < N / 8; j++)
#pragma unroll
							for (u32 e = 2 * r; e < 2 * r + 2; e++)
								if (P::column(j, e) >= seen)
									x[f][j][e] = -infinity_f32();
					}
#pragma unroll
				for (u32 r = 0; r < 2; r++) {
					f32 largest = most[f][r];
#pragma unroll
					for (u32 j = 0; j < N / 8; j++)
#pragma unroll
						for (u32 e = 2 * r; e < 2 * r + 2; e++)
							largest = __builtin_fmaxf(largest, x[f][j][e]);
					largest = largest_of_row(largest);
					f32 base = largest == -infinity_f32() ? 0 : -largest * scale;
					f32 factor = power_of_two(fused(most[f][r], scale, base)), more = 0;
#pragma unroll
					for (u32 j = 0; j < N / 8; j++)
#pragma unroll
						for (u32 e = 2 * r; e < 2 * r + 2; e++) {
							x[f][j][e] = power_of_two(fused(x[f][j][e], scale, base));
							more = more + x[f][j][e];
						}
					most[f][r] = largest;
					sum[f][r] = fused(sum[f][r], factor, more);
#pragma unroll
					for (u32 j = 0; j < Size / 8; j++)
#pragma unroll
						for (u32 e = 2 * r; e < 2 * r + 2; e++)
							o[f][j][e] = o[f][j][e] * factor;
				}
				P::add(o[f], x[f], room[now][1]);
			}
		}
#pragma unroll
		for (u32 f = 0; f < F; f++)
#pragma unroll
			for (u32 r = 0; r < 2; r++) {
				f32 all = along_row(sum[f][r]);
				u32 row = P::row(f, 2 * r);
				if (thread_x() % 4 == 0 && row < there)
					lse[n * h.queries + first + row] = most[f][r] * f32(h.scale) + logarithm(all);
				sum[f][r] = all == 0 ? 0 : 1 / all;
			}
		barrier();
#pragma unroll
		for (u32 f = 0; f < F; f++)
			P::stage(room[0][0], o[f], sum[f], f);
		barrier();
		P::T::template write<P::rows>(y.at(h, n, first), y.row, room[0][0], there, h.size, in_vectors(y, h));
	}
}

template <u32 Threads, u32 Size, u32 N>
DEVICE void attention_gradient_q_tensor(Rows<bf16> dq, f32 *sums, Rows<const bf16> y, const f32 *lse, Rows<const bf16> q, Rows<const bf16> k, Rows<const bf16> v, Rows<const bf16> dy, const Heads &h) {
	typedef Fragments<Threads, Size, 1, N> P;
	SHARED b128 room[2][2][P::chunks];
	static_assert(P::rows <= 2 * N, "one half has room for the queries, too");
	bool vectors_q = in_vectors(q, h), vectors_k = in_vectors(k, h), vectors_v = in_vectors(v, h), vectors_dy = in_vectors(dy, h);
	f32 scale = f32(h.scale) * log2_e;
	for (Turn<P::rows> t(h.queries); t.more(h); t.next()) {
		u64 n = t.head, first = t.first;
		u64 there = least<u64>(P::rows, h.queries - first), keys = h.seen(first + there - 1);
		const bf16 *from_k = k.at(h, n, 0), *from_v = v.at(h, n, 0);
		auto copy = [&](u32 to, u64 key) {
			if (key < keys) {
				P::T::template copy<N>(room[to][0], from_k + key * k.row, k.row, h.keys - key, h.size, vectors_k);
				P::T::template copy<N>(room[to][1], from_v + key * v.row, v.row, h.keys - key, h.size, vectors_v);
			}
			end_of_group();
		};
		typename P::Own own[1], own_dy[1];
		barrier();
		P::copy(room[0][0], y, h, n, first, there, in_vectors(y, h));
		P::copy(room[1][0], dy, h, n, first, there, vectors_dy);
		wait_for_all_groups_but<0>();
		barrier();
		P::read(own, room[0][0]);
		P::read(own_dy, room[1][0]);
		barrier();
		P::copy(room[0][0], q, h, n, first, there, vectors_q);
		copy(1, 0);
		f32 log[2], sum[2], factor[2] = {f32(h.scale), f32(h.scale)};
#pragma unroll
		for (u32 r = 0; r < 2; r++) {
			f32 all = 0;
#pragma unroll
			for (u32 c = 0; c < Size / 16; c++)
#pragma unroll
				for (u32 i = r; i < 4; i += 2) {
					u32 a = own[0][c][i], b = own_dy[0][c][i];
					all = fused(bits_as<f32>(a << 16), bits_as<f32>(b << 16), all);
					all = fused(bits_as<f32>(a & 0xffff0000), bits_as<f32>(b & 0xffff0000), all);
				}
			u32 row = P::row(0, 2 * r);
			u64 at = n * h.queries + first + row;
			sum[r] = along_row(all);
			log[r] = row < there ? -lse[at] * log2_e : 0;
			if (thread_x() % 4 == 0 && row < there)
				sums[at] = sum[r];
		}
		wait_for_all_groups_but<1>();
		barrier();
		P::read(own, room[0][0]);
		typename P::Sums o[1] = {};
		u64 some = h.seen(first + P::first(0)), seen = h.seen(first + P::first(0) + 16 - 1); // keys, by the first of the rows, and by the last
		u32 now = 1;
		for (u64 key = 0; key < keys; key += N, now ^= 1) {
			wait_for_all_groups_but<0>();
			barrier();
			copy(now ^ 1, key + N);
			if (key >= seen)
				continue;
			typename P::Scores x, d;
			P::scores(x, own[0], room[now][0]);
			P::scores(d, own_dy[0], room[now][1]);
#pragma unroll
			for (u32 j = 0; j < N / 8; j++)
#pragma unroll
				for (u32 e = 0; e < 4; e++)
					x[j][e] = power_of_two(fused(x[j][e], scale, log[e / 2]));
			if (some < key + N)
#pragma unroll
				for (u32 r = 0; r < 2; r++) {
					u32 seen = P::within(h.seen(first + P::row(0, 2 * r)), key);
#pragma unroll
					for (u32 j = 0; j < N / 8; j++)
#pragma unroll
						for (u32 e = 2 * r; e < 2 * r + 2; e++)
							if (P::column(j, e) >= seen)
								x[j][e] = 0;
				}
#pragma unroll
			for (u32 j = 0; j < N / 8; j++)
#pragma unroll
				for (u32 e = 0; e < 4; e++)
					x[j][e] = x[j][e] * (d[j][e] - sum[e / 2]);
			P::add(o[0], x, room[now][0]);
		}
		barrier();
		P::stage(room[0][0], o[0], factor, 0);
		barrier();
		P::T::template write<P::rows>(dq.at(h, n, first), dq.row, room[0][0], there, h.size, in_vectors(dq, h));
	}
}

template <u32 Threads, u32 Size, u32 N>
DEVICE void attention_gradient_kv_tensor(Rows<bf16> dk, Rows<bf16> dv, const f32 *lse, const f32 *sums, Rows<const bf16> q, Rows<const bf16> k, Rows<const bf16> v, Rows<const bf16> dy, const Heads &h) {
	typedef Fragments<Threads, Size, 1, N> P;
	SHARED b128 room[2][2][P::chunks];
	SHARED f32 of_query[2][2][N]; // lse and sums
	static_assert(P::rows <= 2 * N, "one half has room for the keys, too");
	bool vectors_q = in_vectors(q, h), vectors_k = in_vectors(k, h), vectors_v = in_vectors(v, h), vectors_dy = in_vectors(dy, h);
	f32 scale = f32(h.scale) * log2_e;
	for (Turn<P::rows> t(h.keys); t.more(h); t.next()) {
		u64 n = t.head, first = t.first;
		u64 there = least<u64>(P::rows, h.keys - first);
		const bf16 *from_q = q.at(h, n, 0), *from_dy = dy.at(h, n, 0);
		auto copy = [&](u32 to, u64 query) {
			if (query < h.queries) {
				u64 left = h.queries - query;
				P::T::template copy<N>(room[to][0], from_q + query * q.row, q.row, left, h.size, vectors_q);
				P::T::template copy<N>(room[to][1], from_dy + query * dy.row, dy.row, left, h.size, vectors_dy);
				if (u32 i = thread_x(); i < N) {
					u64 at = n * h.queries + query + (i < left ? i : 0);
					copy_async_if(i < left, &of_query[to][0][i], lse + at);
					copy_async_if(i < left, &of_query[to][1][i], sums + at);
				}
			}
			end_of_group();
		};
		typename P::Own own_k[1], own_v[1];
		barrier();
		P::copy(room[0][0], k, h, n, first, there, vectors_k);
		P::copy(room[1][0], v, h, n, first, there, vectors_v);
		wait_for_all_groups_but<0>();
		barrier();
		P::read(own_k, room[0][0]);
		P::read(own_v, room[1][0]);
		barrier();
		typename P::Sums of_k[1] = {}, of_v[1] = {};
		u64 some = h.first_query(first + P::first(0)), all = h.first_query(first + P::first(0) + 16 - 1); // see some of the keys, and all
		u64 query = h.first_query(first) / N * N;
		u32 now = 0;
		for (copy(now, query); query < h.queries; query += N, now ^= 1) {
			wait_for_all_groups_but<0>();
			barrier();
			copy(now ^ 1, query + N);
			if (query + N <= some)
				continue;
			typename P::Scores x, d;
			P::scores(x, own_k[0], room[now][0]);
			P::scores(d, own_v[0], room[now][1]);
#pragma unroll
			for (u32 j = 0; j < N / 8; j++)
#pragma unroll
				for (u32 c = 0; c < 2; c++) {
					f32 log = -of_query[now][0][P::column(j, c)] * log2_e;
#pragma unroll
					for (u32 e = c; e < 4; e += 2)
						x[j][e] = power_of_two(fused(x[j][e], scale, log));
				}
			if (query < all)
#pragma unroll
				for (u32 r = 0; r < 2; r++) {
					u32 hidden = P::within(h.first_query(first + P::row(0, 2 * r)), query);
#pragma unroll
					for (u32 j = 0; j < N / 8; j++)
#pragma unroll
						for (u32 e = 2 * r; e < 2 * r + 2; e++)
							if (P::column(j, e) < hidden)
								x[j][e] = 0;
				}
			P::add(of_v[0], x, room[now][1]);
#pragma unroll
			for (u32 j = 0; j < N / 8; j++)
#pragma unroll
				for (u32 c = 0; c < 2; c++) {
					f32 sum = of_query[now][1][P::column(j, c)];
#pragma unroll
					for (u32 e = c; e < 4; e += 2)
						d[j][e] = x[j][e] * (d[j][e] - sum);
				}
			P::add(of_k[0], d, room[now][0]);
		}
		f32 factor[2] = {f32(h.scale), f32(h.scale)}, one[2] = {1, 1};
		barrier();
		P::stage(room[0][0], of_k[0], factor, 0);
		P::stage(room[1][0], of_v[0], one, 0);
		barrier();
		P::T::template write<P::rows>(dk.at(h, n, first), dk.row, room[0][0], there, h.size, in_vectors(dk, h));
		P::T::template write<P::rows>(dv.at(h, n, first), dv.row, room[1][0], there, h.size, in_vectors(dv, h));
	}
}

#endif

#define OPERAND(S, x) S *x, u64 x##_batch, u64 x##_head, u64 x##_row
#define OF(S, x) Rows<S> { x, x##_batch, x##_head, x##_row }
#define HEADS u64 batch, u64 heads, u64 queries, u64 keys, u64 size, u64 causal, f64 scale
#define THESE_HEADS Heads { batch * heads, heads, queries, keys, size, causal != 0, scale }

#define ATTENTION(Size, S, T, Threads, GradientThreads, forward, backward_q, backward_kv)                            \
	LEAN_KERNEL(attention_##Size##_##S, Threads, OPERAND(S, y), T *lse, OPERAND(const S, q), OPERAND(const S, k), \
		OPERAND(const S, v), HEADS) {                                                                        \
		forward(OF(S, y), lse, OF(const S, q), OF(const S, k), OF(const S, v), THESE_HEADS);                 \
	}                                                                                                            \
	LEAN_KERNEL(attentiongradq_##Size##_##S, GradientThreads, OPERAND(S, dq), T *sums, OPERAND(const S, y),      \
		const T *lse, OPERAND(const S, q), OPERAND(const S, k), OPERAND(const S, v), OPERAND(const S, dy), HEADS) { \
		backward_q(OF(S, dq), sums, OF(const S, y), lse, OF(const S, q), OF(const S, k), OF(const S, v),     \
			OF(const S, dy), THESE_HEADS);                                                               \
	}                                                                                                            \
	LEAN_KERNEL(attentiongradkv_##Size##_##S, GradientThreads, OPERAND(S, dk), OPERAND(S, dv), const T *lse,     \
		const T *sums, OPERAND(const S, q), OPERAND(const S, k), OPERAND(const S, v), OPERAND(const S, dy), HEADS) { \
		backward_kv(OF(S, dk), OF(S, dv), lse, sums, OF(const S, q), OF(const S, k), OF(const S, v),         \
			OF(const S, dy), THESE_HEADS);                                                               \
	}

#define AT_LEAST_64(Size) (Size < 64 ? 64 : Size)
#define PLAIN_ATTENTION(Size, S, T, Each, Gradient)                                                              \
	ATTENTION(Size, S, T, 128, Gradient, (attention_plain<128, T, AT_LEAST_64(Size), Each>),                 \
		(attention_gradient_q<Gradient, T, AT_LEAST_64(Size), Each>), (attention_gradient_kv<Gradient, T, AT_LEAST_64(Size), Each>))
PLAIN_ATTENTION(64, f64, f64, 2, 128)
PLAIN_ATTENTION(256, f64, f64, 2, 128)
PLAIN_ATTENTION(64, f32, f32, 4, 128)
PLAIN_ATTENTION(128, f32, f32, 4, 128)
PLAIN_ATTENTION(256, f32, f32, 4, 128)
#if TENSOR_CORES
#define BF16_ATTENTION(Size, F, N, Gradient)                                                                     \
	ATTENTION(Size, bf16, f32, 128, Gradient, (attention_tensor<128, Size, F, N>),                           \
		(attention_gradient_q_tensor<Gradient, Size, N>), (attention_gradient_kv_tensor<Gradient, Size, N>))
#else
#define BF16_ATTENTION(Size, F, N, Gradient) PLAIN_ATTENTION(Size, bf16, f32, 4, Gradient)
#endif
BF16_ATTENTION(32, 2, 64, 256)
BF16_ATTENTION(64, 2, 64, 256)
BF16_ATTENTION(128, 1, 32, 128)
PLAIN_ATTENTION(256, bf16, f32, 4, 128)

// ---- launch ----
//
// 128 threads. The x axis of the grid has a block for some of the queries, or of the keys, the y axis
// one for each head.
