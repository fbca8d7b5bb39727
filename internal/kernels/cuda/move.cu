// Kernels that move bytes and know no element types: fill, copy, move, copy2d.
// The suffix is the bits of a unit.

#include "bytes.cuh"

// ---- kernels ----

// for i < n { dst[i] = value }
template <class B> DEVICE void fill(B *dst, u64 n, u64 value) {
	constexpr int N = 16 / sizeof(B);
	each<N>(n, aligned(ADDRESS(dst), 16), [=](auto count, u64 i) {
		B x[decltype(count)::value];
		for (B &unit : x)
			unit = (B)value;
		store(dst + i, x);
	});
}

KERNEL(fill_b8, 256, u8 *dst, u64 n, u64 value) { fill(dst, n, value); }
KERNEL(fill_b16, 256, u16 *dst, u64 n, u64 value) { fill(dst, n, value); }
KERNEL(fill_b32, 256, u32 *dst, u64 n, u64 value) { fill(dst, n, value); }
KERNEL(fill_b64, 256, u64 *dst, u64 n, u64 value) { fill(dst, n, value); }

// for i < n { dst[i] = src[i] }; dst and src do not overlap
KERNEL(copy_b8, 256, u8 *dst, const u8 *src, u64 n) {
	copy_bytes(dst, src, n, thread_index(), thread_count());
}

// As copy, where dst and src overlap. One block goes over them, from the end
// where nothing is overwritten before it has been read: of each round, all is
// read before any is written.
KERNEL(move_b8, 1024, u8 *dst, const u8 *src, u64 n) {
	constexpr u32 K = 16; // units of a thread in one round
	u32 t = thread_x(), threads = threads_x(), round = K * threads;
	bool forward = ADDRESS(dst) < ADDRESS(src);
	u8 x[K];
	for (u64 done = 0; done < n; done += round) {
		for (u32 k = 0; k < K; k++) {
			u64 i = done + k * threads + t;
			if (i < n)
				x[k] = src[forward ? i : n - 1 - i];
		}
		barrier();
		for (u32 k = 0; k < K; k++) {
			u64 i = done + k * threads + t;
			if (i < n)
				dst[forward ? i : n - 1 - i] = x[k];
		}
		barrier();
	}
}

// for i < rows { for j < width { dst[i*dst_pitch+j] = src[i*src_pitch+j] } }
template <class B>
DEVICE void copy2d(B *dst, u64 dst_pitch, const B *src, u64 src_pitch, u64 width, u64 rows) {
	for (u64 i = (u64)block_y() * threads_y() + thread_y(); i < rows;
		i += (u64)blocks_y() * threads_y())
		copy_units(dst + i * dst_pitch, src + i * src_pitch, width, thread_index(), thread_count());
}

#define COPY2D(bits, B) \
	KERNEL(copy2d_b##bits, 256, B *dst, u64 dst_pitch, const B *src, u64 src_pitch, u64 width, \
		u64 rows) { \
		copy2d(dst, dst_pitch, src, src_pitch, width, rows); \
	}
COPY2D(8, u8)
COPY2D(16, u16)
COPY2D(32, u32)
COPY2D(64, u64)
COPY2D(128, b128)

// ---- launch ----
//
// fill, copy: any one-dimensional grid; 16 bytes for each thread fill the memory
// system. move: one block. copy2d: the x axis of grid and block covers the
// columns, the y axis the rows; a block is as wide as a row needs.
