// Attention of few queries to many keys of bf16, as when text is generated token by token:
// attendfew_SIZE_bf16, for heads of up to SIZE elements.
//
// The queries of all heads that share keys, up to 16, are rows of one product, so keys and values
// are read once. Blocks share the keys: see flash-decoding (Dao et al. 2023). As in fewrows.cu, a
// thread reads those chunks of keys and values that it multiplies itself.
#include "attention_bf16.cuh"
#include "tickets.cuh"

#if TENSOR_CORES

constexpr u32 few_parts = 32; // that blocks share keys in, at most

// A warp's step is N keys, of which a thread has few_chunks chunks, and as many of values.
template <u32 Size> struct Few {
	static constexpr u32 threads = attention_threads, warps = threads / 32, chunks = 8;
	static constexpr u32 N = 16 * 128 / Size, rows = 16;
	static constexpr u32 record = rows * (Size + 2); // of a warp or block: sums, largest, weights

	static DEVICE u32 group() { return thread_x() % 32 / 4; }
	static DEVICE u32 quad() { return thread_x() % 4; }

	// Chunk c of a thread's keys: 8 elements of one of 8 keys.
	static DEVICE u32 key_row(u32 c) { return c % (N / 8) * 8 + group(); }
	static DEVICE u32 key_column(u32 c) { return c / (N / 8) * 32 + quad() * chunk; }
	// Chunk c of its values: of 4 keys of each 16, 8 of each 64 elements.
	static DEVICE u32 value_row(u32 c) {
		return c / 4 % (N / 16) * 16 + c % 4 / 2 * 8 + 2 * quad() + c % 2;
	}
	static DEVICE u32 value_column(u32 c) { return c / (N / 4) * 64 + group() * chunk; }
};

// What merges records of n warps or blocks, in their order: by how much each counts, for each row.
template <u32 Size> struct Merge {
	typedef Few<Size> F;
	f32 factor[few_parts][F::rows], weight[few_parts][F::rows], most[F::rows], all[F::rows];

	DEVICE void begin(const f32 *records, u32 n, u32 rows) {
		barrier();
		for (u32 i = thread_x(); i < n * rows; i += F::threads) {
			u32 at = i / rows, row = i % rows;
			const f32 *largest = records + F::rows * Size + row;
			f32 own = largest[at * F::record], now = own;
#pragma unroll 8
			for (u32 j = 0; j < n; j++) {
				f32 other = largest[j * F::record];
				now = now < other ? other : now;
			}
			f32 x = own == -infinity_f32() ? 0 : power_of_two(own - now);
			factor[at][row] = x, weight[at][row] = x * largest[at * F::record + F::rows];
			most[row] = now; // as all who have the row find
		}
		barrier();
		if (u32 row = thread_x(); row < rows) {
			f32 sum = 0;
			for (u32 i = 0; i < n; i++)
				sum = sum + weight[i][row];
			all[row] = sum;
		}
		barrier();
	}
	// Four elements of a row.
	DEVICE void sum(f32 (&y)[4], const f32 *records, u32 n, u32 row, u32 c) const {
		y[0] = y[1] = y[2] = y[3] = 0;
#pragma unroll 8
		for (u32 i = 0; i < n; i++) {
			f32 x[4];
			load(x, records + i * F::record + row * Size + c);
#pragma unroll
			for (u32 e = 0; e < 4; e++)
				y[e] = fused(factor[i][row], x[e], y[e]);
		}
	}
};

template <u32 Size>
DEVICE void attend_few(Rows<bf16> y, f32 *lse, Rows<const bf16> q, Rows<const bf16> k,
	Rows<const bf16> v, const Heads<f32, false, true> &h, f32 *partial, u32 *tickets) {
	typedef Few<Size> F;
	constexpr u32 N = F::N;
	SHARED struct alignas(16) Room {
		f32 records[F::warps * F::record];
		Merge<Size> merge;
		u32 last;
	} room;
	u32 warp = of_warp(thread_x() / 32), shares = (u32)h.group, queries = (u32)h.queries,
		rows = shares * queries, size = (u32)h.size, width = (u32)h.width;
	u64 head = (u64)block_y() * h.group; // the first one of queries
	u32 length = (u32)h.length(head);
	// each block has a part of the keys from `begin` on, in whole steps of all warps
	constexpr u32 each = N * F::warps;
	const i64 *starts = h.starts_of(head);
	u32 begin = (u32)least<u64>(h.first_key(starts, 0, length), length), left_over = length - begin;
	u32 part = ((left_over + each - 1) / each + blocks_x() - 1) / blocks_x() * each;
	u32 parts = part == 0 ? 1 : (left_over + part - 1) / part;
	if (block_x() >= parts)
		return;
	u32 first = begin + block_x() * part, end = least(first + part, length);
	first = first + warp * N;
	// whether a query sees a key: those up to this one
	auto seen = [&](u32 query) INLINE {
		return (u32)least<u64>(end, h.seen(query, length));
	};

	const bf16 *keys = k.shared_at(h, head, 0), *values = v.shared_at(h, head, 0);
	u32 of_keys[F::chunks][4], of_values[F::chunks][4];
	auto read = [&](u32 (&to)[F::chunks][4], bool of_value, u32 key) INLINE {
#pragma unroll
		for (u32 c = 0; c < F::chunks; c++) {
			u32 row = key + (of_value ? F::value_row(c) : F::key_row(c));
			u32 column = of_value ? F::value_column(c) : F::key_column(c);
			to[c][0] = to[c][1] = to[c][2] = to[c][3] = 0;
			if (row < end && column < (of_value ? width : size))
				load(to[c], reinterpret_cast<const u32 *>(
					(of_value ? values + row * v.row : keys + row * k.row) + column));
		}
	};
	read(of_keys, false, first);

	// the queries that rows group() and group() + 8 are of
	u32 own[2] = {F::group(), F::group() + 8};
	u32 hidden[2], visible[2]; // each sees the keys from one up to the other
	u32 left[Size / 16][4];
#pragma unroll
	for (u32 r = 0; r < 2; r++) {
		u32 query = own[r] % queries;
		const bf16 *from = q.at(h, head + own[r] / queries, query);
		visible[r] = seen(query);
		hidden[r] = (u32)least<u64>(h.first_key(starts, query, length), length);
#pragma unroll
		for (u32 j = 0; j < Size / 32; j++) {
			u32 x[4] = {}, column = 32 * j + F::quad() * chunk;
			if (own[r] < rows && column < size)
				load(x, reinterpret_cast<const u32 *>(from + column));
			left[2 * j][r] = x[0], left[2 * j][2 + r] = x[1];
			left[2 * j + 1][r] = x[2], left[2 * j + 1][2 + r] = x[3];
		}
	}
	f32 scale = f32(h.scale) * log2_e, most[2] = {-infinity_f32(), -infinity_f32()};
	f32 weights[2] = {};
	f32 sums[Size / 8][4] = {};
#pragma unroll 1
	for (u32 key = first; key < end; key += each) {
		read(of_values, true, key);
		f32 scores[N / 8][4] = {};
#pragma unroll
		for (u32 i = 0; i < Size / 16; i++)
#pragma unroll
			for (u32 j = 0; j < N / 8; j++) {
				const u32(&c)[4] = of_keys[i / 2 * (N / 8) + j];
				multiply_fragments(bf16{}, scores[j], left[i], c[i % 2 * 2], c[i % 2 * 2 + 1]);
			}
		read(of_keys, false, key + each);
#pragma unroll
		for (u32 r = 0; r < 2; r++) {
			f32 now = most[r], more = 0;
#pragma unroll
			for (u32 j = 0; j < N / 8; j++)
#pragma unroll
				for (u32 e = 0; e < 2; e++) {
					f32 &s = scores[j][2 * r + e];
					u32 at = key + 8 * j + 2 * F::quad() + e;
					s = at >= hidden[r] && at < visible[r] ? s * scale : -infinity_f32();
					now = now < s ? s : now;
				}
#pragma unroll
			for (u32 mask = 1; mask < 4; mask *= 2) {
				f32 other = across(now, mask);
				now = now < other ? other : now;
			}
			f32 base = now == -infinity_f32() ? 0 : now, factor = power_of_two(most[r] - base);
#pragma unroll
			for (u32 j = 0; j < N / 8; j++)
#pragma unroll
				for (u32 e = 0; e < 2; e++) {
					f32 &s = scores[j][2 * r + e];
					s = power_of_two(s - base);
					more = more + s;
				}
			weights[r] = weights[r] * factor + more, most[r] = now;
#pragma unroll
			for (u32 j = 0; j < Size / 8; j++)
				sums[j][2 * r] = sums[j][2 * r] * factor,
				sums[j][2 * r + 1] = sums[j][2 * r + 1] * factor;
		}
		u32(&x)[F::chunks][4] = of_values;
#pragma unroll
		for (u32 u = 0; u < N / 16; u++) {
			u32 a[4];
#pragma unroll
			for (u32 i = 0; i < 4; i++)
				a[i] = pair_of_bf16(scores[2 * u + i / 2][i % 2 * 2],
					scores[2 * u + i / 2][i % 2 * 2 + 1]);
#pragma unroll
			for (u32 j = 0; j < Size / 8; j++) {
				u32 c = j / 8 * (N / 4) + u * 4, word = j % 8 / 2, which = j % 2 ? 0x7632 : 0x5410;
				multiply_fragments(bf16{}, sums[j], a, pick(x[c][word], x[c + 1][word], which),
					pick(x[c + 2][word], x[c + 3][word], which));
			}
		}
	}
	f32 *record = room.records + warp * F::record;
#pragma unroll
	for (u32 r = 0; r < 2; r++) {
		f32 all = weights[r];
#pragma unroll
		for (u32 mask = 1; mask < 4; mask *= 2)
			all = all + across(all, mask);
		if (F::quad() == 0)
			record[F::rows * Size + own[r]] = most[r], record[F::rows * (Size + 1) + own[r]] = all;
#pragma unroll
		for (u32 j = 0; j < Size / 8; j++)
#pragma unroll
			for (u32 e = 0; e < 2; e++)
				record[own[r] * Size + j / 8 * 64 + (2 * F::quad() + e) * 8 + j % 8] =
					sums[j][2 * r + e];
	}
	// Writes the rows that records give, or what another block then merges.
	Merge<Size> &m = room.merge;
	auto merge = [&](const f32 *records, u32 n, f32 *to) INLINE {
		m.begin(records, n, rows);
		for (u32 i = thread_x(); i < rows * Size / 4; i += F::threads) {
			u32 row = i / (Size / 4), c = i % (Size / 4) * 4;
			f32 x[4];
			m.sum(x, records, n, row, c);
			if (to) {
				store(to + row * Size + c, x);
				continue;
			}
			f32 share = m.all[row] == 0 ? 0 : 1 / m.all[row];
			bf16 *of = y.at(h, head + row / queries, row % queries) + c;
#pragma unroll
			for (u32 e = 0; e < 4; e++)
				if (c + e < width)
					of[e] = narrow_bf16(x[e] * share);
		}
		if (u32 row = thread_x(); row < rows && to)
			to[F::rows * Size + row] = m.most[row], to[F::rows * (Size + 1) + row] = m.all[row];
		else if (row < rows)
			lse[head * queries + row] = m.most[row] / log2_e + logarithm(m.all[row]);
	};
	if (parts == 1)
		return merge(room.records, F::warps, nullptr);
	f32 *all = partial + (u64)block_y() * blocks_x() * F::record;
	merge(room.records, F::warps, all + block_x() * F::record);
	if (is_last(&tickets[block_y()], parts, &room.last))
		merge(all, parts, nullptr);
}

#define ATTEND_FEW(Size) attend_few<Size>
#define WORKSPACE , partial, tickets
#else
#define ATTEND_FEW(Size) attention_plain<f32, Size, 4>
#define WORKSPACE
#endif

#define FEW_QUERIES(Size, Blocks) \
	SHARING_KERNEL(attendfew_##Size##_bf16, 128, Blocks, OPERAND(bf16, y), f32 *lse, \
		OPERAND(const bf16, q), OPERAND(const bf16, k), OPERAND(const bf16, v), HEADS(f32), \
		f32 *partial, u32 *tickets) { \
		(void)partial, (void)tickets; \
		ATTEND_FEW(Size)(OF(bf16, y), lse, OF(const bf16, q), OF(const bf16, k), \
			OF(const bf16, v), THESE_HEADS(f32, false, true) WORKSPACE); \
	}
FEW_QUERIES(64, 3)
FEW_QUERIES(128, 2)

// ---- launch ----
//
// 128 threads. The x axis of the grid has blocks that share the keys, the y axis one for each head
// of keys.
