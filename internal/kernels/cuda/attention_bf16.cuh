// Attention of bf16, on tensor cores where the device has them: see attention.cuh.
#pragma once

#include "attention.cuh"

#if TENSOR_CORES

// Each warp of a block has 16 rows, and goes along N rows of the other operands at a time: while
// they are multiplied, the next ones are copied to shared memory. Where warpgroups compute
// products, nothing branches between the first of them and the wait for their sums, or ptxas
// (12.8 to 13.0) gives registers of left operands away: rows that are partly masked have code of
// their own.

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
template <class S> DEVICE bool in_vectors(const Rows<S> &x, u64 size) {
	return aligned(ADDRESS(x.p), 16) && (x.batch | x.head | x.row | size) % chunk == 0;
}

// Rows of Size elements in shared memory, in chunks of 16 bytes. Eight rows of eight chunks are a
// panel, and panels of the same rows follow each other. Chunks of a row change places so that the
// eight that ldmatrix reads at a time, one of each row, lie in different banks: as products of
// warpgroups ask for.
template <u32 Size> struct Staged {
	static constexpr u32 in_row = Size / chunk;
	static DEVICE u32 place(u32 row, u32 at) {
		return in_row < 8 ? row * in_row + (at ^ row / 2 % 4)
						  : row / 8 * 8 * in_row + at / 8 * 64 + row % 8 * 8 + (at ^ row) % 8;
	}

	// Begins to copy n rows, with zeros for those that are not there.
	template <u32 n>
	static DEVICE void copy(b128 *to, const bf16 *from, u64 step, u64 there, u64 size,
		bool vectors) {
		u32 rows = (u32)least<u64>(there, n), columns = (u32)size;
		if (!vectors) {
#pragma unroll 1
			for (u32 i = thread_x(); i < n * Size; i += attention_threads) {
				u32 row = i / Size, column = i % Size;
				bf16 *dst =
					reinterpret_cast<bf16 *>(to + place(row, column / chunk)) + column % chunk;
				*dst = row < rows && column < columns ? from[row * step + column] : bf16{};
			}
			return;
		}
		// rows, a multiple of those after which chunks are in their first places again
		constexpr u32 together = attention_threads / in_row;
		u32 row = thread_x() / in_row, column = thread_x() % in_row * chunk;
		i32 left = column < columns ? (i32)rows - (i32)row : 0;
		const bf16 *p = from + row * step + column;
		to += place(row, column / chunk);
#pragma unroll
		for (u32 i = 0; i < n; i += together)
			copy_async_if((i32)i < left, to + i * in_row, p + i * step);
	}

	// Writes rows, of which some are there.
	template <u32 n>
	static DEVICE void write(bf16 *to, u64 step, const b128 *from, u64 there, u64 size,
		bool vectors) {
		u32 rows = (u32)least<u64>(there, n), columns = (u32)size;
		if (!vectors) {
#pragma unroll 1
			for (u32 i = thread_x(); i < rows * Size; i += attention_threads) {
				u32 row = i / Size, column = i % Size;
				if (column < columns)
					to[row * step + column] = reinterpret_cast<const bf16 *>(
						from + place(row, column / chunk))[column % chunk];
			}
			return;
		}
		u32 column = thread_x() % in_row * chunk;
#pragma unroll
		for (u32 row = thread_x() / in_row; row < n; row += attention_threads / in_row)
			if (row < rows && column < columns)
				*reinterpret_cast<b128 *>(to + row * step + column) =
					from[place(row, column / chunk)];
	}

	static DEVICE u32 lane() { return thread_x() % 8; }
	static DEVICE u32 first() { return thread_x() / 8 % 2 * 8; }
	static DEVICE u32 second() { return thread_x() / 16 % 2 * 8; }

	// Fragments of 16 by 16: as the left operand, as the right one transposed, and as the right
	// one.
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

template <u32 Size, u32 N> struct Fragments {
	typedef Staged<Size> T;
	typedef u32 Own[Size / 16][4]; // rows of this warp
	typedef f32 Scores[N / 8][4];  // of them and N others
	typedef f32 Sums[Size / 8][4]; // weighted sums of N others
	static constexpr bool wide = WARPGROUPS && Size >= 64;
	static constexpr u32 rows = attention_threads / 2, chunks = N * T::in_row;
	// Those who do products together have this many rows, from their first one on.
	static constexpr u32 together = wide ? 64 : 16;
	static DEVICE u32 first() { return of_warp(thread_x() / (2 * together) * together); }

	// Element e of a fragment is in this row of the block, and fragment j's in this column.
	static DEVICE u32 row(u32 e) { return warp() + e / 2 * 8 + thread_x() % 32 / 4; }
	static DEVICE u32 warp() { return of_warp(thread_x() / 32 * 16); }
	static DEVICE u32 column(u32 j, u32 e) { return first_column() + j * 8 + e % 2; }
	static DEVICE u32 first_column() { return thread_x() % 4 * 2; }
	// Whether a column is one of the first n: the difference of n and the thread's first column is
	// found once.
	static DEVICE i32 within(u64 end, u64 from) {
		return (end <= from ? 0 : (i32)least<u64>(end - from, N)) - (i32)first_column();
	}
	static DEVICE bool is_within(u32 j, u32 e, i32 n) { return (i32)(j * 8 + e % 2) < n; }
	static DEVICE bool is_between(u32 j, u32 e, i32 from, i32 end) {
		return is_within(j, e, end) && !is_within(j, e, from);
	}

	// Begins to copy the rows of the block, and reads those of this warp once they are there.
	static DEVICE void copy(b128 *room, const bf16 *from, u64 step, u64 there, u64 size,
		bool vectors) {
		T::template copy<rows>(room, from, step, there, size, vectors);
		end_of_group();
	}
	static DEVICE void read(Own &x, const b128 *room) {
#pragma unroll
		for (u32 k = 0; k < Size / 16; k++)
			T::left(x[k], room, warp(), k * 16);
	}

	// Begins x = a tᵀ, a group of products.
	static DEVICE void scores(Scores &x, const Own &a, const b128 *t) {
		if constexpr (wide) {
			begin_products();
#pragma unroll
			for (u32 k = 0; k < Size / 16; k++)
				multiply_wide<false, Size / 64>(k > 0, x, a[k], t, k);
			end_of_products();
		} else {
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
	}

	// Begins o += w t, a group of products: sums of two columns of scores are what a left operand
	// has in a lane, rounded.
	static DEVICE void add(Sums &o, const Scores &w, const b128 *t) {
		u32 a[N / 16][4];
#pragma unroll
		for (u32 k = 0; k < N / 16; k++)
#pragma unroll
			for (u32 i = 0; i < 4; i++)
				a[k][i] =
					pair_of_bf16(w[2 * k + i / 2][i % 2 * 2], w[2 * k + i / 2][i % 2 * 2 + 1]);
		if constexpr (wide) {
			held(a), held(o);
			begin_products();
#pragma unroll
			for (u32 k = 0; k < N / 16; k++)
#pragma unroll
				for (u32 j = 0; j < Size / 64; j++)
					multiply_wide<true, Size / 64>(true, reinterpret_cast<f32(&)[8][4]>(o[8 * j]),
						a[k], t + 64 * j, k);
			end_of_products();
		} else {
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
	}

	// Waits for all groups of products but some, and gives what they are the sums of.
	template <int groups, u32 n, class E> static DEVICE void wait(E (&x)[n][4]) {
		if constexpr (wide) {
			wait_for_all_products_but<groups>();
			held(x);
		}
	}
	template <u32 n, class E> static DEVICE void held(E (&x)[n][4]) {
#pragma unroll
		for (u32 i = 0; i < n; i++)
#pragma unroll
			for (u32 e = 0; e < 4; e++)
				hold(x[i][e]);
	}

	// After this, everyone's copies are there, products see them, and nobody reads what came
	// before.
	static DEVICE void meet_copies() {
		wait_for_all_groups_but<0>();
		if constexpr (wide)
			show_to_products();
		barrier();
	}

	// Lays rows of o times a factor out in shared memory.
	static DEVICE void stage(b128 *room, const Sums &o, const f32 (&factor)[2]) {
#pragma unroll
		for (u32 j = 0; j < Size / 8; j++)
#pragma unroll
			for (u32 r = 0; r < 2; r++)
				reinterpret_cast<u32 *>(room + T::place(row(2 * r), j))[thread_x() % 4] =
					pair_of_bf16(o[j][2 * r] * factor[r], o[j][2 * r + 1] * factor[r]);
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

template <u32 Size, u32 N>
DEVICE void attention_tensor(Rows<bf16> y, f32 *lse, Rows<const bf16> q, Rows<const bf16> k,
	Rows<const bf16> v, const Heads<f32, false, true> &h) {
	typedef Fragments<Size, N> P;
	alignas(1024) SHARED b128 room[2][2][P::chunks]; // keys and values, for now and for next
	static_assert(P::rows <= 2 * N, "one half has room for the queries, too");
	bool vectors_q = in_vectors(q, h.size), vectors_k = in_vectors(k, h.size),
		 vectors_v = in_vectors(v, h.width);
	f32 scale = f32(h.scale) * log2_e;
	for (Turn<P::rows> t(h.queries); t.more(h.count); t.next()) {
		u64 n = t.head, first = t.first, length = h.length(n);
		u64 there = least<u64>(P::rows, h.queries - first);
		u64 keys = h.seen(first + there - 1, length);
		const i64 *starts = h.starts_of(n);
		u64 key = h.first_key(starts, first, length) / N * N;
		const bf16 *from_k = k.shared_at(h, n, 0), *from_v = v.shared_at(h, n, 0);
		auto copy = [&](u32 to, u64 key) {
			if (key < keys) {
				P::T::template copy<N>(room[to][0], from_k + key * k.row, k.row, h.keys - key,
					h.size, vectors_k);
				P::T::template copy<N>(room[to][1], from_v + key * v.row, v.row, h.keys - key,
					h.width, vectors_v);
			}
			end_of_group();
		};
		typename P::Own own;
		barrier(); // nobody reads what is copied over
		P::copy(room[0][0], q.at(h, n, first), q.row, there, h.size, vectors_q);
		copy(1, key);
		wait_for_all_groups_but<1>();
		barrier();
		P::read(own, room[0][0]);
		typename P::Sums o = {};
		f32 most[2] = {-infinity_f32(), -infinity_f32()}, sum[2] = {};
		// keys, by the first of the rows, and by the last, and the first key of the last
		u64 row = first + P::first(), some = h.seen(row, length),
			seen = h.seen(row + P::together - 1, length);
		u32 late = (u32)h.first_key(starts, least(row + P::together, h.queries) - 1, length);
		u32 from[2]; // of the keys that a row sees
#pragma unroll
		for (u32 r = 0; r < 2; r++)
			from[r] = (u32)h.first_key(starts, first + P::row(2 * r), length);
		u32 now = 1;
		auto tile = [&](auto masked) INLINE {
			typename P::Scores x;
			P::scores(x, own, room[now][0]);
			P::template wait<0>(x);
#pragma unroll
			for (u32 r = 0; r < 2; r++) {
				i32 seen = N, hidden = 0;
				if (masked.value) {
					seen = P::within(h.seen(first + P::row(2 * r), length), key);
					hidden = P::within(from[r], key);
				}
				f32 largest = most[r];
#pragma unroll
				for (u32 j = 0; j < N / 8; j++)
#pragma unroll
					for (u32 e = 2 * r; e < 2 * r + 2; e++) {
						if (masked.value)
							x[j][e] = P::is_between(j, e, hidden, seen) ? x[j][e] : -infinity_f32();
						largest = __builtin_fmaxf(largest, x[j][e]);
					}
				largest = largest_of_row(largest);
				f32 base = largest == -infinity_f32() ? 0 : -largest * scale;
				f32 factor = power_of_two(fused(most[r], scale, base)), more = 0;
#pragma unroll
				for (u32 j = 0; j < N / 8; j++)
#pragma unroll
					for (u32 e = 2 * r; e < 2 * r + 2; e++) {
						x[j][e] = power_of_two(fused(x[j][e], scale, base));
						more = more + x[j][e];
					}
				most[r] = largest;
				sum[r] = fused(sum[r], factor, more);
#pragma unroll
				for (u32 j = 0; j < Size / 8; j++)
#pragma unroll
					for (u32 e = 2 * r; e < 2 * r + 2; e++)
						o[j][e] = o[j][e] * factor;
			}
			P::add(o, x, room[now][1]);
			P::template wait<0>(o);
		};
		for (; key < keys; key += N, now ^= 1) {
			P::meet_copies();
			copy(now ^ 1, key + N);
			if (key >= late && key + N <= some)
				tile(Count<0>{});
			else if (key < seen)
				tile(Count<1>{});
		}
#pragma unroll
		for (u32 r = 0; r < 2; r++) {
			f32 all = along_row(sum[r]);
			u32 row = P::row(2 * r);
			if (thread_x() % 4 == 0 && row < there)
				lse[n * h.queries + first + row] = most[r] * f32(h.scale) + logarithm(all);
			sum[r] = all == 0 ? 0 : 1 / all;
		}
		barrier();
		P::stage(room[0][0], o, sum);
		barrier();
		P::T::template write<P::rows>(y.at(h, n, first), y.row, room[0][0], there, h.width,
			in_vectors(y, h.width));
	}
}

// The keys of a tile, N, are gone along in parts, so that sums of scores need fewer registers.
template <u32 Size, u32 N, u32 Part>
DEVICE void attention_gradient_q_tensor(Rows<bf16> dq, f32 *sums, Rows<const bf16> y,
	const f32 *lse, Rows<const bf16> q, Rows<const bf16> k, Rows<const bf16> v, Rows<const bf16> dy,
	const Heads<f32, false> &h) {
	typedef Fragments<Size, Part> P;
	alignas(1024) SHARED b128 room[2][2][N * P::T::in_row];
	static_assert(P::rows <= 2 * N, "one half has room for the queries, too");
	bool vectors_q = in_vectors(q, h.size), vectors_k = in_vectors(k, h.size),
		 vectors_v = in_vectors(v, h.width), vectors_dy = in_vectors(dy, h.width);
	f32 scale = f32(h.scale) * log2_e;
	for (Turn<P::rows> t(h.queries); t.more(h.count); t.next()) {
		u64 n = t.head, first = t.first, length = h.length(n);
		u64 there = least<u64>(P::rows, h.queries - first);
		u64 keys = h.seen(first + there - 1, length);
		const i64 *starts = h.starts_of(n);
		u64 key = h.first_key(starts, first, length) / N * N;
		const bf16 *from_k = k.shared_at(h, n, 0), *from_v = v.shared_at(h, n, 0);
		auto copy = [&](u32 to, u64 key) {
			if (key < keys) {
				P::T::template copy<N>(room[to][0], from_k + key * k.row, k.row, h.keys - key,
					h.size, vectors_k);
				P::T::template copy<N>(room[to][1], from_v + key * v.row, v.row, h.keys - key,
					h.width, vectors_v);
			}
			end_of_group();
		};
		typename P::Own own, own_dy;
		barrier();
		P::copy(room[0][0], y.at(h, n, first), y.row, there, h.width, in_vectors(y, h.width));
		P::copy(room[1][0], dy.at(h, n, first), dy.row, there, h.width, vectors_dy);
		wait_for_all_groups_but<0>();
		barrier();
		P::read(own, room[0][0]);
		P::read(own_dy, room[1][0]);
		barrier();
		P::copy(room[0][0], q.at(h, n, first), q.row, there, h.size, vectors_q);
		copy(1, key);
		f32 log[2], sum[2], factor[2] = {f32(h.scale), f32(h.scale)};
#pragma unroll
		for (u32 r = 0; r < 2; r++) {
			f32 all = 0;
#pragma unroll
			for (u32 c = 0; c < Size / 16; c++)
#pragma unroll
				for (u32 i = r; i < 4; i += 2) {
					u32 a = own[c][i], b = own_dy[c][i];
					all = fused(bits_as<f32>(a << 16), bits_as<f32>(b << 16), all);
					all = fused(bits_as<f32>(a & 0xffff0000), bits_as<f32>(b & 0xffff0000), all);
				}
			u32 row = P::row(2 * r);
			u64 at = n * h.queries + first + row;
			sum[r] = along_row(all);
			log[r] = row < there ? -lse[at] * log2_e : 0;
			if (thread_x() % 4 == 0 && row < there)
				sums[at] = sum[r];
		}
		wait_for_all_groups_but<1>();
		barrier();
		P::read(own, room[0][0]);
		typename P::Sums o = {};
		// keys, by the first of the rows, and by the last, and the first key of the last
		u64 row = first + P::first(), some = h.seen(row, length),
			seen = h.seen(row + P::together - 1, length);
		u32 late = (u32)h.first_key(starts, least(row + P::together, h.queries) - 1, length);
		u32 from[2]; // of the keys that a row sees
#pragma unroll
		for (u32 r = 0; r < 2; r++)
			from[r] = (u32)h.first_key(starts, first + P::row(2 * r), length);
		u32 now = 1;
		auto part = [&](u32 at, auto masked) INLINE {
			const b128 *tile_k = room[now][0] + at * P::T::in_row,
					   *tile_v = room[now][1] + at * P::T::in_row;
			typename P::Scores x, d;
			P::scores(x, own, tile_k);
			P::scores(d, own_dy, tile_v);
			P::template wait<1>(x);
#pragma unroll
			for (u32 r = 0; r < 2; r++) {
				i32 seen = Part, hidden = 0;
				if (masked.value) {
					seen = P::within(h.seen(first + P::row(2 * r), length), key + at);
					hidden = P::within(from[r], key + at);
				}
#pragma unroll
				for (u32 j = 0; j < Part / 8; j++)
#pragma unroll
					for (u32 e = 2 * r; e < 2 * r + 2; e++) {
						x[j][e] = power_of_two(fused(x[j][e], scale, log[r]));
						if (masked.value)
							x[j][e] = P::is_between(j, e, hidden, seen) ? x[j][e] : 0;
					}
			}
			P::template wait<0>(d);
#pragma unroll
			for (u32 j = 0; j < Part / 8; j++)
#pragma unroll
				for (u32 e = 0; e < 4; e++)
					x[j][e] = x[j][e] * (d[j][e] - sum[e / 2]);
			P::add(o, x, tile_k);
			P::template wait<0>(o);
		};
		for (; key < keys; key += N, now ^= 1) {
			P::meet_copies();
			copy(now ^ 1, key + N);
			if (key >= late && key + N <= some)
#pragma unroll
				for (u32 at = 0; at < N; at += Part)
					part(at, Count<0>{});
			else if (key < seen)
#pragma unroll
				for (u32 at = 0; at < N; at += Part)
					part(at, Count<1>{});
		}
		barrier();
		P::stage(room[0][0], o, factor);
		barrier();
		P::T::template write<P::rows>(dq.at(h, n, first), dq.row, room[0][0], there, h.size,
			in_vectors(dq, h.size));
	}
}

// The queries of a tile, N, are gone along in parts, so that sums of scores need fewer registers.
template <u32 Size, u32 N, u32 Part>
DEVICE void attention_gradient_kv_tensor(Rows<bf16> dk, Rows<bf16> dv, const f32 *lse,
	const f32 *sums, Rows<const bf16> q, Rows<const bf16> k, Rows<const bf16> v,
	Rows<const bf16> dy, const Heads<f32, false> &h) {
	typedef Fragments<Size, Part> P;
	alignas(1024) SHARED b128 room[2][2][N * P::T::in_row];
	SHARED f32 of_query[2][2][N]; // lse and sums
	static_assert(P::rows <= 2 * N, "one half has room for the keys, too");
	bool vectors_q = in_vectors(q, h.size), vectors_k = in_vectors(k, h.size),
		 vectors_v = in_vectors(v, h.width), vectors_dy = in_vectors(dy, h.width);
	f32 scale = f32(h.scale) * log2_e;
	for (Turn<P::rows> t(h.keys); t.more(h.count / h.group); t.next()) {
		u64 n = t.head * h.group, first = t.first, length = h.length(n);
		u64 there = least<u64>(P::rows, h.keys - first);
		const bf16 *from_q = q.at(h, n, 0), *from_dy = dy.at(h, n, 0);
		const f32 *from_queries = (thread_x() < N ? lse : sums) + n * h.queries + thread_x() % N;
		const i64 *starts = h.starts_of(n);
		u64 stop = least(h.end_query(starts, first + there - 1, length), h.queries);
		auto copy = [&](u32 to, u64 query) {
			if (query < stop) {
				u64 left = h.queries - query;
				P::T::template copy<N>(room[to][0], from_q + query * q.row, q.row, left, h.size,
					vectors_q);
				P::T::template copy<N>(room[to][1], from_dy + query * dy.row, dy.row, left,
					h.width, vectors_dy);
				if (2 * N == attention_threads || thread_x() < 2 * N)
					copy_async_if(thread_x() % N < left, of_query[to][0] + thread_x(),
						from_queries + query);
			}
			end_of_group();
		};
		typename P::Own own_k, own_v;
		// one half has room for both, and the other one for queries
		constexpr bool at_once = P::rows <= N;
		b128 *room_v = at_once ? room[0][1] : room[1][0];
		u64 start = h.first_query(first, length) / N * N;
		barrier();
		P::copy(room[0][0], k.shared_at(h, n, first), k.row, there, h.size, vectors_k);
		P::copy(room_v, v.shared_at(h, n, first), v.row, there, h.width, vectors_v);
		if (at_once)
			copy(1, start);
		wait_for_all_groups_but<at_once>();
		barrier();
		P::read(own_k, room[0][0]);
		P::read(own_v, room_v);
		if (!at_once) {
			barrier();
			copy(1, start);
		}
		typename P::Sums of_k = {}, of_v = {};
		// see some of the keys, and all, up to a last one
		u64 some = h.first_query(first + P::first(), length),
			all = h.first_query(first + P::first() + P::together - 1, length);
		u32 last = (u32)h.end_query(starts, first + P::first(), length);
		u32 end[2]; // of the queries that see a row
#pragma unroll
		for (u32 r = 0; r < 2; r++)
			end[r] = (u32)h.end_query(starts, first + P::row(2 * r), length);
		u32 now = 1, heads_left = (u32)h.group;
		u64 query = start;
		auto part = [&](u32 at, auto masked) INLINE {
			const b128 *tile_q = room[now][0] + at * P::T::in_row,
					   *tile_dy = room[now][1] + at * P::T::in_row;
			typename P::Scores x, d;
			P::scores(x, own_k, tile_q);
			P::scores(d, own_v, tile_dy);
			i32 hidden[2] = {}, shown[2] = {};
#pragma unroll
			for (u32 r = 0; masked.value && r < 2; r++) {
				hidden[r] = P::within(h.first_query(first + P::row(2 * r), length), query + at);
				shown[r] = P::within(end[r], query + at);
			}
			P::template wait<1>(x);
#pragma unroll
			for (u32 j = 0; j < Part / 8; j++)
#pragma unroll
				for (u32 c = 0; c < 2; c++) {
					f32 log = -of_query[now][0][at + P::column(j, c)] * log2_e;
#pragma unroll
					for (u32 e = c; e < 4; e += 2) {
						x[j][e] = power_of_two(fused(x[j][e], scale, log));
						if (masked.value && !P::is_between(j, c, hidden[e / 2], shown[e / 2]))
							x[j][e] = 0;
					}
				}
			P::add(of_v, x, tile_dy);
			P::template wait<1>(d);
#pragma unroll
			for (u32 j = 0; j < Part / 8; j++)
#pragma unroll
				for (u32 c = 0; c < 2; c++) {
					f32 sum = of_query[now][1][at + P::column(j, c)];
#pragma unroll
					for (u32 e = c; e < 4; e += 2)
						d[j][e] = x[j][e] * (d[j][e] - sum);
				}
			P::add(of_k, d, tile_q);
			P::template wait<0>(of_v);
			P::held(of_k);
		};
		for (;;) {
			for (; query < stop; query += N, now ^= 1) {
				P::meet_copies();
				copy(now ^ 1, query + N);
				if (query >= all && query + N <= last)
#pragma unroll
					for (u32 at = 0; at < N; at += Part)
						part(at, Count<0>{});
				else if (query + N > some)
#pragma unroll
					for (u32 at = 0; at < N; at += Part)
						part(at, Count<1>{});
			}
			if (--heads_left == 0)
				break;
			// the next head that shares the keys
			from_q += q.head, from_dy += dy.head, from_queries += h.queries;
			barrier();
			copy(now, query = start);
		}
		f32 factor[2] = {f32(h.scale), f32(h.scale)}, one[2] = {1, 1};
		barrier();
		P::stage(room[0][0], of_k, factor);
		P::stage(room[1][0], of_v, one);
		barrier();
		P::T::template write<P::rows>(dk.shared_at(h, n, first), dk.row, room[0][0], there, h.size,
			in_vectors(dk, h.size));
		P::T::template write<P::rows>(dv.shared_at(h, n, first), dv.row, room[1][0], there, h.width,
			in_vectors(dv, h.width));
	}
}

// The blocks that share a multiprocessor have the registers that the parts need: measured on an
// H200.
#define BF16_ATTENTION(Size, Blocks, GradientBlocks, N, PartQ, PartKV) \
	ATTENTION(Size, bf16, f32, false, Blocks, GradientBlocks, (attention_tensor<Size, N>), \
		(attention_gradient_q_tensor<Size, N, PartQ>), \
		(attention_gradient_kv_tensor<Size, N, PartKV>))
#else
#define BF16_ATTENTION(Size, Blocks, GradientBlocks, N, PartQ, PartKV) \
	PLAIN_ATTENTION(Size, bf16, f32, false, 1, 4)
#endif
