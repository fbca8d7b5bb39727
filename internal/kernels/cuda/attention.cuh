// Attention and its gradient: attention_SIZE_DTYPE, attentiongradq_SIZE_DTYPE and
// attentiongradkv_SIZE_DTYPE, for heads of up to SIZE elements. On ordinary cores they are here,
// and on tensor cores in attention_bf16.cuh.
//
// This is FlashAttention-2 (Dao 2023): a block has some queries, goes along the keys, and keeps for
// each query the largest score so far, the sum of the exponentials and the weighted sum of the
// values, so that scores are never in memory. A gradient finds the weights again, from the
// logarithm of the sum. dq is computed by blocks of queries, and dk and dv by blocks of keys:
// scores are found twice, but there are no atomics, and the bits are the same in every run.
#pragma once

#include "functions.cuh"
#include "system.cuh"
#include "tensor.cuh"

// ---- kernels ----

constexpr u32 attention_threads = 128;

// x, as if nobody knew it before, so that what is made of it is not made ahead, and kept in
// registers where few tiles need it.
#if defined(__CUDA__) || defined(__NVCC__)
DEVICE u64 here(u64 x) {
	asm volatile("" : "+l"(x));
	return x;
}
DEVICE f32 here(f32 x) {
	asm volatile("" : "+f"(x));
	return x;
}
DEVICE f64 here(f64 x) {
	asm volatile("" : "+d"(x));
	return x;
}
#else
template <class T> DEVICE T here(T x) { return x; }
#endif

// What is added to a score, in steps of elements, if it is there.
template <class T> struct Mask {
	const T *p;
	u64 batch, head, row, key;
};

// `group` heads of queries share a head of keys and values, `size` are the elements of a query or a
// key, and `width` those of a value. Kernels that are not `Limited` have neither caps nor masks,
// and gradients among them are not `Appended`: that code would take their registers.
template <class T, bool Limited, bool Appended = Limited> struct Heads {
	u64 count, per_batch, queries, keys, size;
	u64 causal; // 0 is not, and 2 counts from the length of an entry
	f64 scale;
	u64 group, width;
	f64 cap;
	Mask<T> mask;
	u64 window; // the most keys that a causal query sees, 0 for no bound
	// For each entry of the batch, unless they are null: how many keys it has, and the first ones
	// that its queries see, which do not descend.
	const i64 *lengths, *starts;

	// Whether scores are changed before their exponentials are taken.
	DEVICE bool limits() const { return Limited && (mask.p || cap > 0); }

	// How many keys head n of queries has: those that follow are hidden.
	DEVICE u64 length(u64 n) const {
		if (!lengths)
			return keys;
		i64 own = lengths[n / per_batch];
		return own < 0 ? 0 : least((u64)own, keys);
	}

	// The last query sees the keys before this one.
	DEVICE u64 frontier(u64 length) const { return Appended && causal == 2 ? length : keys; }

	// Query i sees the keys up to i + frontier - queries.
	DEVICE bool visible(u64 query, u64 key, u64 length) const {
		return key < length && (!causal || key + queries <= query + frontier(length));
	}

	// How many keys, from the first one on, the queries up to the last one see.
	DEVICE u64 seen(u64 last, u64 length) const {
		u64 end = last + 1 + frontier(length);
		return !causal ? length : end < queries ? 0 : least(end - queries, length);
	}

	// The first query that sees a key.
	DEVICE u64 first_query(u64 key, u64 length) const {
		u64 before = frontier(length);
		return key >= length					   ? queries
			: causal && key + queries > before ? key + queries - before
											   : 0;
	}

	// Where the queries of head n have their first keys, if they are given.
	DEVICE const i64 *starts_of(u64 n) const {
		return starts ? starts + n / per_batch * queries : nullptr;
	}

	// The first key that a query may see, given its starts_of: 0 for what is no query.
	DEVICE u64 first_key(const i64 *from, u64 query, u64 length) const {
		u64 end = query + 1 + frontier(length), before = queries + window;
		u64 first = window == 0 || end < before ? 0 : end - before;
		if (!from || query >= queries)
			return first;
		i64 own = from[query];
		return own > (i64)first ? (u64)own : first;
	}

	// The queries from this one on see only later keys, `everyone` if there is none.
	DEVICE u64 end_query(const i64 *from, u64 key, u64 length) const {
		u64 end = key + queries + window, before = frontier(length);
		end = window == 0 ? queries : end < before ? 0 : least(end - before, queries);
		for (u64 low = 0; from && low < end;) {
			u64 at = (low + end) / 2;
			if (from[at] <= (i64)key)
				low = at + 1;
			else
				end = at;
		}
		return end == queries ? everyone : end;
	}
	static constexpr u64 everyone = 0xffffffff;

	// The mask of a query and a key of head n.
	DEVICE const T *masked(u64 n, u64 query, u64 key) const {
		return mask.p + n / per_batch * mask.batch + n % per_batch * mask.head + query * mask.row +
			key * mask.key;
	}
};


// An operand or a result: a row for each query or key of each head. The distances are in elements.
template <class S> struct Rows {
	S *p;
	u64 batch, head, row;
	template <class H> DEVICE S *at(const H &h, u64 n, u64 i) const {
		return p + n / h.per_batch * batch + n % h.per_batch * head + i * row;
	}
	// The rows that head n of queries shares.
	template <class H> DEVICE S *shared_at(const H &h, u64 n, u64 i) const {
		return p + n / h.per_batch * batch + n % h.per_batch / h.group * head + i * row;
	}
};

// The turns of a block: each has `rows` of n rows of a head, from `first` on. The last rows come
// first: they see the most keys.
template <u32 rows> struct Turn {
	u64 head, tile, tiles, first;
	DEVICE explicit Turn(u64 n) : head(block_y()), tile(block_x()), tiles((n + rows - 1) / rows) {
		place();
	}
	DEVICE void place() { first = (tiles - 1 - tile) * rows; }
	DEVICE bool more(u64 heads) const { return head < heads && tile < tiles; }
	DEVICE void next() {
		tile += blocks_x();
		if (tile >= tiles)
			tile = block_x(), head += blocks_y();
		place();
	}
};

// ---- on ordinary cores ----

// The threads of a block, 8 by 16, have Each x Each scores each.
template <class T, u32 Size, u32 Each> struct alignas(16) Plain {
	static constexpr u32 rows = 8 * Each, columns = 16 * Each, depth = 8, wide = Size / 16;
	typedef T Scores[Each][Each]; // of rows row() on and columns column() on
	typedef T Sums[Each][wide];   // of rows row() on and columns place()

	T left[depth][rows + 4], right[depth][columns + 4], weights[columns][rows + 4],
		part[depth][Size];

	static DEVICE u32 row() { return thread_x() / 16 * Each; }
	static DEVICE u32 column() { return thread_x() % 16 * Each; }
	// Sums of a thread are of four columns, of each 64.
	static DEVICE u32 place(u32 j) { return j / 4 * 64 + thread_x() % 16 * 4 + j % 4; }

	template <u32 n, u32 width, class S>
	static DEVICE void fill(T (&to)[depth][width], const S *x, u64 step, u64 there, u64 left) {
		for (u32 i = thread_x(); i < n * depth; i += attention_threads) {
			u32 r = i / depth, c = i % depth;
			to[c][r] = r < there && c < left ? Number<S>::widen(x[r * step + c]) : T(0);
		}
	}

	// x = a bᵀ, of `rows` rows of a and `columns` of b, of which some are there.
	template <class S>
	DEVICE void scores(Scores &x, const S *a, u64 a_step, u64 a_there, const S *b, u64 b_step,
		u64 b_there, u64 size) {
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

	// Caps the scores x of rows and columns that are there, and adds the mask, in steps of rows and
	// columns, to them: then they are scaled. d becomes what ds would be without weights, plus the
	// sum of its row or of its column, unless it is null.
	template <bool of_column, class H>
	DEVICE void limit(Scores &x, Scores *d, const T (&sum)[Each], const H &h, const T *mask,
		u64 by_row, u64 by_column, u64 rows_there, u64 columns_there) {
		T factor = here(T(h.scale)), inner = 1;
		if (h.cap > 0) {
			T cap = here(T(h.cap));
			inner = factor / cap, factor = cap;
		}
		T (*own)[rows + 4] = weights + column(); // which nobody else reads, or uses now
#pragma unroll
		for (u32 i = 0; i < Each; i++)
#pragma unroll
			for (u32 j = 0; j < Each; j++)
				own[j][row() + i] = x[i][j] * inner;
		if (h.cap > 0) {
#pragma unroll 1
			for (u32 e = 0; e < Each * Each; e++) {
				T &to = own[e / Each][row() + e % Each];
				to = hyperbolic_tangent(to);
			}
#pragma unroll
			for (u32 i = 0; i < Each; i++)
#pragma unroll
				for (u32 j = 0; j < Each; j++) {
					T t = own[j][row() + i], all = sum[of_column ? j : i];
					if (d)
						(*d)[i][j] = fused((*d)[i][j] - all, fused(-t, t, T(1)), all);
				}
		}
		u64 r = here((u64)row()), c = here((u64)column());
		mask += r * by_row + c * by_column;
		u32 left = c < columns_there ? (u32)least<u64>(columns_there - c, Each) : 0;
#pragma unroll 1
		for (u32 i = 0; i < Each; i++, r++, mask += by_row)
#pragma unroll
			for (u32 j = 0; j < Each; j++) {
				bool is = h.mask.p && r < rows_there && j < left;
				own[j][r] = own[j][r] * factor + (is ? mask[j * by_column] : T(0));
			}
#pragma unroll
		for (u32 i = 0; i < Each; i++)
#pragma unroll
			for (u32 j = 0; j < Each; j++)
				x[i][j] = own[j][row() + i];
	}

	// o += w z, of all weights w and `columns` rows of z, of which some are there.
	template <class S>
	DEVICE void add(Sums &o, const Scores &w, const S *z, u64 step, u64 there, u64 size) {
		barrier();
#pragma unroll
		for (u32 i = 0; i < Each; i++)
#pragma unroll
			for (u32 j = 0; j < Each; j++)
				weights[column() + j][row() + i] = w[i][j];
		for (u32 n = 0; n < columns && n < there; n += depth) {
			barrier();
#pragma unroll 2
			for (u32 i = thread_x(); i < depth * Size; i += attention_threads) {
				u32 r = i / Size, c = i % Size;
				part[r][c] =
					n + r < there && c < size ? Number<S>::widen(z[(n + r) * step + c]) : T(0);
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
	template <class S>
	static DEVICE void write(S *to, u64 step, const Sums &o, const T (&factor)[Each], u64 there,
		u64 size) {
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

// for i { y[i] = sum over j of exp(s[i,j] - lse[i]) v[j], lse[i] = log of the sum over j of
// exp(s[i,j]) } with s[i,j] = scale q[i] k[j]
template <class T, u32 Size, u32 Each, class S, bool Limited>
DEVICE void attention_plain(Rows<S> y, T *lse, Rows<const S> q, Rows<const S> k, Rows<const S> v,
	const Heads<T, Limited, true> &h) {
	typedef Plain<T, Size, Each> P;
	SHARED P p;
	for (Turn<P::rows> t(h.queries); t.more(h.count); t.next()) {
		u64 n = t.head, first = t.first, length = h.length(n);
		u64 there = least<u64>(P::rows, h.queries - first);
		u64 keys = h.seen(first + there - 1, length);
		const i64 *starts = h.starts_of(n);
		typename P::Sums o = {};
		T most[Each], sum[Each];
#pragma unroll
		for (u32 i = 0; i < Each; i++)
			most[i] = -infinite(T()), sum[i] = 0;
		for (u64 key = h.first_key(starts, first, length) / P::columns * P::columns; key < keys;
			key += P::columns) {
			typename P::Scores x;
			p.scores(x, q.at(h, n, first), q.row, there, k.shared_at(h, n, key), k.row,
				h.keys - key, h.size);
			T scale = T(h.scale);
			if (h.limits()) {
				p.template limit<false>(x, nullptr, sum, h, h.masked(here(n), first, key),
					h.mask.row, h.mask.key, there, h.keys - key);
				scale = 1;
			}
#pragma unroll
			for (u32 i = 0; i < Each; i++) {
				T now = -infinite(T()), more = 0;
				u64 query = first + P::row() + i, from = h.first_key(starts, query, length);
#pragma unroll
				for (u32 j = 0; j < Each; j++) {
					u64 at = key + P::column() + j;
					x[i][j] = at >= from && h.visible(query, at, length) ? x[i][j] * scale
																		 : -infinite(T());
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
			p.add(o, x, v.shared_at(h, n, key), v.row, h.keys - key, h.width);
		}
		T share[Each];
#pragma unroll
		for (u32 i = 0; i < Each; i++) {
			share[i] = sum[i] == 0 ? T(0) : T(1) / sum[i];
			if (thread_x() % 16 == 0 && P::row() + i < there)
				lse[n * h.queries + first + P::row() + i] = most[i] + logarithm(sum[i]);
		}
		P::write(y.at(h, n, first), y.row, o, share, there, h.width);
	}
}

// sums[i] = sum over c of dy[i,c] y[i,c], and dq[i] = scale * sum over j of w[i,j] (dy[i] v[j] -
// sums[i]) k[j] with w[i,j] = exp(s[i,j] - lse[i])
template <class T, u32 Size, u32 Each, class S, bool Limited>
DEVICE void attention_gradient_q(Rows<S> dq, T *sums, Rows<const S> y, const T *lse,
	Rows<const S> q, Rows<const S> k, Rows<const S> v, Rows<const S> dy,
	const Heads<T, Limited> &h) {
	typedef Plain<T, Size, Each> P;
	SHARED P p;
	for (Turn<P::rows> t(h.queries); t.more(h.count); t.next()) {
		u64 n = t.head, first = t.first, length = h.length(n);
		u64 there = least<u64>(P::rows, h.queries - first);
		u64 keys = h.seen(first + there - 1, length);
		const i64 *starts = h.starts_of(n);
		typename P::Sums o = {};
		T log[Each], sum[Each], scale[Each];
#pragma unroll
		for (u32 i = 0; i < Each; i++) {
			u64 at = n * h.queries + first + P::row() + i;
			bool is = P::row() + i < there;
			log[i] = is && lse[at] != -infinite(T()) ? lse[at] : T(0); // no weights without keys
			scale[i] = T(h.scale);
			T all = 0;
			for (u64 c = thread_x() % 16; is && c < h.width; c += 16)
				all = fused(Number<S>::widen(dy.at(h, n, first + P::row() + i)[c]),
					Number<S>::widen(y.at(h, n, first + P::row() + i)[c]), all);
			sum[i] = P::along_row(all);
			if (is && thread_x() % 16 == 0)
				sums[at] = sum[i];
		}
		for (u64 key = h.first_key(starts, first, length) / P::columns * P::columns; key < keys;
			key += P::columns) {
			typename P::Scores x, d;
			p.scores(x, q.at(h, n, first), q.row, there, k.shared_at(h, n, key), k.row,
				h.keys - key, h.size);
			p.scores(d, dy.at(h, n, first), dy.row, there, v.shared_at(h, n, key), v.row,
				h.keys - key, h.width);
			T factor = T(h.scale);
			if (h.limits()) {
				p.template limit<false>(x, &d, sum, h, h.masked(here(n), first, key), h.mask.row,
					h.mask.key, there, h.keys - key);
				factor = 1;
			}
#pragma unroll
			for (u32 i = 0; i < Each; i++) {
				u64 query = first + P::row() + i, from = h.first_key(starts, query, length);
#pragma unroll
				for (u32 j = 0; j < Each; j++) {
					u64 at = key + P::column() + j;
					bool is = P::row() + i < there && at >= from && h.visible(query, at, length);
					x[i][j] =
						is ? exponential(x[i][j] * factor - log[i]) * (d[i][j] - sum[i]) : T(0);
				}
			}
			p.add(o, x, k.shared_at(h, n, key), k.row, h.keys - key, h.size);
		}
		P::write(dq.at(h, n, first), dq.row, o, scale, there, h.size);
	}
}

// dv[j] = sum over i of w[i,j] dy[i], and dk[j] = scale * sum over i of w[i,j] (dy[i] v[j] -
// sums[i]) q[i]
template <class T, u32 Size, u32 Each, class S, bool Limited>
DEVICE void attention_gradient_kv(Rows<S> dk, Rows<S> dv, const T *lse, const T *sums,
	Rows<const S> q, Rows<const S> k, Rows<const S> v, Rows<const S> dy,
	const Heads<T, Limited> &h) {
	typedef Plain<T, Size, Each> P;
	SHARED P p;
	for (Turn<P::rows> t(h.keys); t.more(h.count / h.group); t.next()) {
		u64 first = t.first, shares = t.head * h.group, length = h.length(shares);
		u64 there = least<u64>(P::rows, h.keys - first);
		const i64 *starts = h.starts_of(shares);
		u64 stop = least(h.end_query(starts, first + there - 1, length), h.queries);
		typename P::Sums of_k = {}, of_v = {};
		const S *of_key = k.shared_at(h, shares, first), *value = v.shared_at(h, shares, first);
		for (u64 n = shares; n < shares + h.group; n++)
			for (u64 query = h.first_query(first, length) / P::columns * P::columns;
				query < stop; query += P::columns) {
				u64 left = h.queries - query;
				typename P::Scores x, d;
				p.scores(x, of_key, k.row, there, q.at(h, n, query), q.row, left, h.size);
				p.scores(d, value, v.row, there, dy.at(h, n, query), dy.row, left, h.width);
				T log[Each], sum[Each], factor = T(h.scale);
#pragma unroll
				for (u32 j = 0; j < Each; j++) {
					u64 at = n * h.queries + query + P::column() + j;
					bool is = P::column() + j < left;
					log[j] = is ? lse[at] : T(0), sum[j] = is ? sums[at] : T(0);
					log[j] = log[j] == -infinite(T()) ? T(0) : log[j]; // no weights without keys
				}
				if (h.limits()) {
					p.template limit<true>(x, &d, sum, h, h.masked(here(n), query, first),
						h.mask.key, h.mask.row, there, left);
					factor = 1;
				}
#pragma unroll
				for (u32 j = 0; j < Each; j++) {
					u64 at = query + P::column() + j, from = h.first_key(starts, at, length);
#pragma unroll
					for (u32 i = 0; i < Each; i++) {
						u64 key = first + P::row() + i;
						bool both =
							P::column() + j < left && key >= from && h.visible(at, key, length);
						x[i][j] = both ? exponential(x[i][j] * factor - log[j]) : T(0);
						d[i][j] = x[i][j] * (d[i][j] - sum[j]);
					}
				}
				p.add(of_v, x, dy.at(h, n, query), dy.row, left, h.width);
				p.add(of_k, d, q.at(h, n, query), q.row, left, h.size);
			}
		T scale[Each], one[Each];
#pragma unroll
		for (u32 i = 0; i < Each; i++)
			scale[i] = T(h.scale), one[i] = 1;
		P::write(dk.shared_at(h, shares, first), dk.row, of_k, scale, there, h.size);
		P::write(dv.shared_at(h, shares, first), dv.row, of_v, one, there, h.width);
	}
}

#define OPERAND(S, x) S *x, u64 x##_batch, u64 x##_head, u64 x##_row
#define OF(S, x) Rows<S> { x, x##_batch, x##_head, x##_row }
#define HEADS(T) u64 batch, u64 heads, u64 queries, u64 keys, u64 size, u64 causal, f64 scale, \
	u64 group, u64 width, f64 cap, const T *mask, u64 mask_batch, u64 mask_head, u64 mask_row, \
	u64 mask_key, u64 window, const i64 *lengths, const i64 *starts
#define THESE_HEADS(...) Heads<__VA_ARGS__> { batch * heads, heads, queries, keys, size, causal, \
	scale, group, width, cap, { mask, mask_batch, mask_head, mask_row, mask_key }, window, \
	lengths, starts }

#define ATTENTION(Size, S, T, Limited, Blocks, GradientBlocks, forward, backward_q, backward_kv) \
	SHARING_KERNEL(attention_##Size##_##S, 128, Blocks, OPERAND(S, y), T *lse, \
		OPERAND(const S, q), OPERAND(const S, k), OPERAND(const S, v), HEADS(T)) { \
		await_predecessors(); \
		forward(OF(S, y), lse, OF(const S, q), OF(const S, k), OF(const S, v), \
			THESE_HEADS(T, Limited, true)); \
	} \
	SHARING_KERNEL(attentiongradq_##Size##_##S, 128, GradientBlocks, OPERAND(S, dq), T *sums, \
		OPERAND(const S, y), const T *lse, OPERAND(const S, q), OPERAND(const S, k), \
		OPERAND(const S, v), OPERAND(const S, dy), HEADS(T)) { \
		await_predecessors(); \
		backward_q(OF(S, dq), sums, OF(const S, y), lse, OF(const S, q), OF(const S, k), \
			OF(const S, v), OF(const S, dy), THESE_HEADS(T, Limited)); \
	} \
	SHARING_KERNEL(attentiongradkv_##Size##_##S, 128, GradientBlocks, OPERAND(S, dk), \
		OPERAND(S, dv), const T *lse, const T *sums, OPERAND(const S, q), OPERAND(const S, k), \
		OPERAND(const S, v), OPERAND(const S, dy), HEADS(T)) { \
		await_predecessors(); \
		backward_kv(OF(S, dk), OF(S, dv), lse, sums, OF(const S, q), OF(const S, k), \
			OF(const S, v), OF(const S, dy), THESE_HEADS(T, Limited)); \
	}

#define AT_LEAST_64(Size) (Size < 64 ? 64 : Size)
#define PLAIN_ATTENTION(Size, S, T, Limited, Blocks, Each) \
	ATTENTION(Size, S, T, Limited, Blocks, 1, (attention_plain<T, AT_LEAST_64(Size), Each>), \
		(attention_gradient_q<T, AT_LEAST_64(Size), Each>), \
		(attention_gradient_kv<T, AT_LEAST_64(Size), Each>))

// ---- launch ----
//
// 128 threads. The x axis of the grid has a block for some of the queries, or of the keys, the y
// axis one for each head.
