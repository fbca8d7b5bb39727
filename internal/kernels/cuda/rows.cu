// Rows of tables, by indices: takerows_INDEX_u32, its gradient addrows_INDEX_DTYPE, and
// putrows_INDEX_u32. takerows and putrows copy words, of which a float64 has two.
//
// There are no atomics. A row of the table is added up by one warp, in the order of the indices, so
// that the bits equal the host's.

#include "number.cuh"
#include "sparse.cuh"

// ---- kernels ----

// How many columns of a row a warp does: eight loads of a thread are under way at once.
constexpr u32 row_strip = 256, row_strips = row_strip / 32;

// How many indices a block looks at before it adds the rows of its part of the table that they
// name.
constexpr u32 listed = 2048;

// for b, k { dst[b,k,:] = src[b,indices[k],:], or the words of nan }
template <class I>
DEVICE void takerows(u32 *dst, const u32 *src, const I *indices, u64 n, u64 before, u64 count,
	u64 width, u64 nan) {
	for (u64 row = thread_index() / 32; row < before * n; row += thread_count() / 32) {
		u64 b = before == 1 ? 0 : row / n;
		i64 index = indices[row - b * n];
		bool there = index >= 0 && index < (i64)count;
		const u32 *from = src + (b * count + index) * width;
		for (u64 first = (u64)block_y() * row_strip; first < width;
			first += (u64)blocks_y() * row_strip)
			for (u32 i = 0; i < row_strips; i++) {
				u64 c = first + i * 32 + thread_x() % 32;
				if (c < width)
					dst[row * width + c] = there ? from[c] : (u32)(nan >> c % 2 * 32);
			}
	}
}

// Whether one of n indices is out of range, for a warp.
template <class I> DEVICE bool any_wrong(const I *indices, u64 n, u64 count) {
	u32 votes = 0;
	for (u64 first = 0; first < n && votes == 0; first += 32) {
		u64 k = first + thread_x() % 32;
		votes = votes_of(k < n && !(indices[k] >= 0 && (i64)indices[k] < (i64)count));
	}
	return votes != 0;
}

// for b, k { dst[b,indices[k],:] = src[b,k,:] }, of equal indices for the last one; the words of
// nan everywhere if an index is out of range, a part of the rows by each warp
template <class I>
DEVICE void putrows(u32 *dst, const u32 *src, const I *indices, u64 n, u64 before, u64 count,
	u64 width, u64 nan) {
	u32 lane = thread_x() % 32;
	bool wrong = any_wrong(indices, n, count);
	for (u64 row = thread_index() / 32; row < before * n; row += thread_count() / 32) {
		u64 b = before == 1 ? 0 : row / n, k = row - b * n;
		for (u64 r = k; wrong && r < count; r += n)
			for (u64 c = (u64)block_y() * 32 + lane; c < width; c += (u64)blocks_y() * 32)
				dst[(b * count + r) * width + c] = (u32)(nan >> c % 2 * 32);
		i64 index = indices[k];
		bool put = !wrong;
		for (u64 later = k + 1; later < n; later += 32)
			put = put && votes_of(later + lane < n && (i64)indices[later + lane] == index) == 0;
		if (!put)
			continue;
		u32 *to = dst + (b * count + index) * width;
		for (u64 first = (u64)block_y() * row_strip; first < width;
			first += (u64)blocks_y() * row_strip)
			for (u32 i = 0; i < row_strips; i++) {
				u64 c = first + i * 32 + lane;
				if (c < width)
					to[c] = src[row * width + c];
			}
	}
}

// An index, of those that a block looks at, whose row is in the block's part of the table.
struct Named {
	u32 row;   // of the part
	u32 index; // its place among them
};

struct Names {
	Named list[listed];
	u32 counts[8]; // by warp
};

// Lists the indices, of the next `listed`, that name rows lo to hi of a table of `count`, in order,
// and returns how many there are. It sets wrong if one of them is out of range.
template <class I>
DEVICE u32 list_named(Names &names, const I *indices, u64 n, i64 lo, i64 hi, i64 count,
	bool &wrong) {
	constexpr u32 each = listed / 256;
	constexpr u32 out = 1u << 31; // of a warp's count: an index is out of range
	u32 warp = thread_x() / 32, lane = thread_x() % 32, votes[each], rows[each], own = 0;
	for (u32 j = 0; j < each; j++) {
		u64 k = (warp * each + j) * 32 + lane;
		i64 index = k < n ? (i64)indices[k] : -1;
		if (votes_of(k < n && !(index >= 0 && index < count)))
			own |= out;
		votes[j] = votes_of(index >= lo && index < hi);
		rows[j] = (u32)(index - lo);
		own += bits_set(votes[j]);
	}
	if (lane == 0)
		names.counts[warp] = own;
	barrier();
	u32 at = 0, all = 0;
	for (u32 w = 0; w < 8; w++) {
		u32 found = names.counts[w];
		wrong = wrong || found >= out;
		at += w < warp ? found % out : 0;
		all += found % out;
	}
	for (u32 j = 0; j < each; j++) {
		if (votes[j] >> lane & 1)
			names.list[at + bits_set(votes[j] & ((1u << lane) - 1))] =
				Named{rows[j], (warp * each + j) * 32 + lane};
		at += bits_set(votes[j]);
	}
	barrier();
	return all;
}

// Adds the rows of src that are named as a row to sum: columns up to end, from src on.
template <class T>
DEVICE void add_named(T (&sum)[row_strips], const Names &names, u32 all, u32 row, const T *src,
	u64 width, u64 end) {
	u32 lane = thread_x() % 32;
	for (u32 i = 0; i < all; i += 32)
		for (u32 votes = votes_of(i + lane < all && names.list[i + lane].row == row); votes != 0;) {
			// Several rows are read at once, and added one after the other.
			constexpr u32 ahead = 16 / sizeof(T);
			T x[ahead][row_strips];
			bool has[ahead];
#pragma unroll
			for (u32 a = 0; a < ahead; a++) {
				has[a] = votes != 0;
				const T *from =
					has[a] ? src + (u64)names.list[i + trailing_zeros(votes)].index * width : src;
				votes &= votes - (has[a] ? 1 : 0);
#pragma unroll
				for (u32 j = 0; j < row_strips; j++) {
					u64 c = j * 32 + lane;
					x[a][j] = has[a] && c < end ? from[c] : T(0);
				}
			}
#pragma unroll
			for (u32 a = 0; a < ahead; a++)
#pragma unroll
				for (u32 j = 0; j < row_strips; j++)
					sum[j] = has[a] ? plus(sum[j], x[a][j]) : sum[j];
		}
}

template <class T> DEVICE T not_a_number() {
	if constexpr (sizeof(T) == 4)
		return bits_as<f32>(0x7fc00000);
	else
		return bits_as<f64>(0x7ff8000000000000);
}

// Whether a row is named.
DEVICE bool is_named(const Names &names, u32 all, u32 row) {
	u32 lane = thread_x() % 32, votes = 0;
	for (u32 i = 0; i < all && votes == 0; i += 32)
		votes = votes_of(i + lane < all && names.list[i + lane].row == row);
	return votes != 0;
}

// dst = 0; for b, k { dst[b,indices[k],:] += src[b,k,:] }; NaN if an index is out of range
template <class T, class I>
DEVICE void addrows(T *dst, const T *src, const I *indices, u64 n, u64 before, u64 count, u64 width,
	u64 part) {
	SHARED Names names;
	u32 warp = thread_x() / 32, lane = thread_x() % 32;
	u64 across = (width + row_strip - 1) / row_strip, parts = (count + part - 1) / part;
	for (u64 y = block_y(); y < across * before; y += blocks_y())
		for (u64 x = block_x(); x < parts; x += blocks_x()) {
			u64 b = y / across, first = (y - b * across) * row_strip,
				end = least(width - first, (u64)row_strip);
			u64 lo = x * part, hi = least(lo + part, count);
			bool wrong = false;
			for (u64 done = 0; done == 0 || done < n; done += listed) {
				u32 all =
					list_named(names, indices + done, n - done, lo, hi, (i64)count, wrong);
				for (u64 row = lo + warp; row < hi; row += 8) {
					if (done > 0 && !wrong && !is_named(names, all, (u32)(row - lo)))
						continue;
					T *to = dst + (b * count + row) * width + first;
					T sum[row_strips];
					for (u32 j = 0; j < row_strips; j++) {
						u64 c = j * 32 + lane;
						sum[j] = done > 0 && c < end ? to[c] : T(0);
					}
					add_named(sum, names, all, (u32)(row - lo),
						src + (b * n + done) * width + first, width, end);
					for (u32 j = 0; j < row_strips; j++) {
						u64 c = j * 32 + lane;
						if (c < end)
							to[c] = wrong ? not_a_number<T>() : sum[j];
					}
				}
				barrier();
			}
		}
}

#define COPIES(I) \
	KERNEL(takerows_##I##_u32, 256, u32 *dst, const u32 *src, const I *indices, u64 n, \
		u64 before, u64 count, u64 width, u64 nan) { \
		takerows(dst, src, indices, n, before, count, width, nan); \
	} \
	KERNEL(putrows_##I##_u32, 256, u32 *dst, const u32 *src, const I *indices, u64 n, \
		u64 before, u64 count, u64 width, u64 nan) { \
		putrows(dst, src, indices, n, before, count, width, nan); \
	}
COPIES(i32)
COPIES(i64)

#define SUMS(T, I) \
	KERNEL(addrows_##I##_##T, 256, T *dst, const T *src, const I *indices, u64 n, u64 before, \
		u64 count, u64 width, u64 part) { \
		addrows(dst, src, indices, n, before, count, width, part); \
	}
SUMS(f32, i32)
SUMS(f32, i64)
SUMS(f64, i32)
SUMS(f64, i64)

// ---- launch ----
//
// 256 threads. takerows and putrows have a warp for each row, and the y axis of the grid for its
// columns. addrows has a block for `part` rows of the table, at least one for each warp, and the y
// axis for columns and tables.
