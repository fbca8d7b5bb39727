// Strided tensors to contiguous ones: gather and transpose. A permutation of
// axes, a broadcast (stride 0) and a slice are strides of the source. The suffix
// is the bits of an element, or of a run of elements that stay together.

#include "bytes.cuh"

// ---- kernels ----

// The outer axes of a gather, slowest first; those not used have length 1.
struct Rows {
	u64 dims[5];
	u64 strides[5];
};

// The axes of a transposition that are neither of the two, slowest first.
struct Batch {
	u64 dims[4];
	u64 dst[4];
	u64 src[4];
};

// Division of 64 bits is slow, and rarely needed.
DEVICE u64 divide(u64 a, u64 b, u64 &rest) {
	u64 q = (a | b) >> 32 ? a / b : (u32)a / (u32)b;
	rest = a - q * b;
	return q;
}

// The place of a row in the source.
DEVICE u64 row_offset(const Rows &rows, u64 row) {
	u64 offset = 0;
#pragma unroll
	for (int a = 4; a >= 0; a--) {
		if (rows.dims[a] == 1)
			continue;
		u64 i;
		row = divide(row, rows.dims[a], i);
		offset += i * rows.strides[a];
	}
	return offset;
}

// for r < n { for j < width { dst[r*width+j] = src[offset(r) + j*stride] } }
template <class B> DEVICE void gather(B *dst, const B *src, u64 n, u64 width, u64 stride, const Rows &rows) {
	for (u64 r = (u64)block_y() * threads_y() + thread_y(); r < n; r += (u64)blocks_y() * threads_y()) {
		const B *from = src + row_offset(rows, r);
		B *to = dst + r * width;
		if (stride == 1)
			copy_units(to, from, width, thread_index(), thread_count());
		else
			for (u64 j = thread_index(); j < width; j += thread_count())
				to[j] = from[j * stride];
	}
}

#define GATHER(bits, B)                                                                                         \
	KERNEL(gather_b##bits, 256, B *dst, const B *src, u64 n, u64 width, u64 stride, Rows rows) {            \
		gather(dst, src, n, width, stride, rows);                                                       \
	}
GATHER(8, u8)
GATHER(16, u16)
GATHER(32, u32)
GATHER(64, u64)
GATHER(128, b128)

// for each batch { for i < m { for j < n {
//         dst[i*dst_stride+j] = src[j*src_stride+i]
// } } }
//
// A block moves tiles through shared memory, so that both sides are accessed
// along their rows. Rows of the tile are an odd number of words apart: a column
// lies in different banks.
template <class B>
DEVICE void transpose(B *dst, const B *src, u64 m, u64 n, u64 dst_stride, u64 src_stride, u64 batches, const Batch &batch) {
	constexpr u32 side = 32, pad = sizeof(B) < 4 ? 4 / sizeof(B) : 1;
	SHARED B tile[side][side + pad];
	u32 x = thread_x(), y = thread_y();
	u64 down = (m + side - 1) / side, across = (n + side - 1) / side;
	for (u64 t = block_x(); t < batches * down * across; t += blocks_x()) {
		u64 ti, tj;
		u64 b = divide(divide(t, across, tj), down, ti);
		u64 i0 = ti * side, j0 = tj * side, to = 0, from = 0;
#pragma unroll
		for (int a = 3; a >= 0; a--) {
			u64 i;
			b = divide(b, batch.dims[a], i);
			to += i * batch.dst[a];
			from += i * batch.src[a];
		}
#pragma unroll
		for (u32 k = y; k < side; k += 8)
			if (j0 + k < n && i0 + x < m)
				tile[k][x] = src[from + (j0 + k) * src_stride + i0 + x];
		barrier();
#pragma unroll
		for (u32 k = y; k < side; k += 8)
			if (i0 + k < m && j0 + x < n)
				dst[to + (i0 + k) * dst_stride + j0 + x] = tile[x][k];
		barrier();
	}
}

#define TRANSPOSE(bits, B)                                                                                        \
	KERNEL(transpose_b##bits, 256, B *dst, const B *src, u64 m, u64 n, u64 dst_stride, u64 src_stride,        \
	       u64 batches, Batch batch) {                                                                        \
		transpose(dst, src, m, n, dst_stride, src_stride, batches, batch);                                \
	}
TRANSPOSE(8, u8)
TRANSPOSE(16, u16)
TRANSPOSE(32, u32)
TRANSPOSE(64, u64)

// ---- launch ----
//
// gather: the x axis of grid and block covers a row, the y axis the rows.
// transpose: blocks of 32 x 8 threads, one tile of 32 x 32 elements at a time.
