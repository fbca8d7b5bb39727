// Strided tensors to contiguous ones: gather and transpose. A permutation of
// axes, a broadcast (stride 0) and a slice are strides of the source. The suffix
// is the bits of an element, or of a run of elements that stay together.

#include "device.cuh"

// ---- kernels ----

// Divisor divides what is below 2^31: the multiplier is 2^shift / value, rounded
// up. A place takes several divisions: with the instructions for them, rows were
// permuted at half the speed of a copy.
struct Divisor {
	u32 value, multiplier;
	u64 shift;
};

DEVICE u32 divide(u32 a, const Divisor &by, u32 &rest) {
	u32 q = (u32)((u64)a * by.multiplier >> by.shift);
	rest = a - q * by.value;
	return q;
}

// The axes of a gather, slowest first; those not used have length 1. The first
// one is what the others leave, so that its length need not be known.
struct Axes {
	u64 first;
	Divisor lengths[5];
	u64 strides[5];
};

// for i < n { dst[i] = src[the sum of i's indices, each times its stride] }
//
// Each thread reads four elements before it writes one: see copy_units. Eight are
// 4 % faster where rows are not aligned, and 1 to 8 % slower where they are (H200,
// 2026-11-21).
template <class B> DEVICE void gather(B *dst, const B *src, u32 n, const Axes &axes) {
	constexpr u32 K = 4, threads = 128;
	u32 start = block_x() * K * threads + thread_x(), i[K];
	u64 at[K];
	B x[K];
#pragma unroll
	for (u32 k = 0; k < K; k++) {
		i[k] = start + k * threads;
		at[k] = 0;
	}
#pragma unroll
	for (int a = 4; a >= 0; a--) {
		if (axes.lengths[a].value == 1)
			continue;
#pragma unroll
		for (u32 k = 0; k < K; k++) {
			u32 index;
			i[k] = divide(i[k], axes.lengths[a], index);
			at[k] += index * axes.strides[a];
		}
	}
#pragma unroll
	for (u32 k = 0; k < K; k++)
		if (start + k * threads < n)
			x[k] = src[at[k] + i[k] * axes.first];
#pragma unroll
	for (u32 k = 0; k < K; k++)
		if (start + k * threads < n)
			dst[start + k * threads] = x[k];
}

#define GATHER(bits, B) \
	KERNEL(gather_b##bits, 128, B *dst, const B *src, u64 n, Axes axes) { gather(dst, src, (u32)n, axes); }
GATHER(8, u8)
GATHER(16, u16)
GATHER(32, u32)
GATHER(64, u64)
GATHER(128, b128)

// The tiles of a transposition, and its axes that are neither of the two,
// slowest first.
struct Tiles {
	Divisor across, down;
	Divisor lengths[4];
	u64 dst[4], src[4];
};

// A tile: where the matrix that it is part of begins, and its first row and
// column there.
struct Tile {
	u64 dst, src;
	u32 i, j;
};

DEVICE Tile find(const Tiles &tiles, u32 t) {
	Tile tile{};
	u32 b = divide(divide(t, tiles.across, tile.j), tiles.down, tile.i);
#pragma unroll
	for (int a = 3; a >= 0; a--) {
		if (tiles.lengths[a].value == 1)
			continue;
		u32 index;
		b = divide(b, tiles.lengths[a], index);
		tile.dst += index * tiles.dst[a];
		tile.src += index * tiles.src[a];
	}
	return tile;
}

// for each matrix { for i < m { for j < n {
//         dst[i*dst_stride+j] = src[j*src_stride+i]
// } } }
//
// A block moves a tile through shared memory, so that both sides are accessed
// along their rows. Rows of the tile are an odd number of words apart: a column
// lies in different banks. Tiles with sides of 32 were a seventh to a third slower
// (H200, 2026-11-21).
template <class B>
DEVICE void transpose(B *dst, const B *src, u64 m, u64 n, u64 dst_stride, u64 src_stride, const Tiles &tiles) {
	constexpr u32 side = 64, step = 256 / side, K = side / step, pad = sizeof(B) < 4 ? 4 / sizeof(B) : 1;
	SHARED B shared[side][side + pad];
	Tile tile = find(tiles, block_x());
	u64 i0 = (u64)tile.i * side, j0 = (u64)tile.j * side;
	u32 rows = (u32)least(m - i0, (u64)side), columns = (u32)least(n - j0, (u64)side);
	u32 x = thread_x(), y = thread_y();
	src += tile.src + (j0 + y) * src_stride + i0 + x;
	dst += tile.dst + (i0 + y) * dst_stride + j0 + x;
	B moved[K];
	if (x < rows)
#pragma unroll
		for (u32 k = 0; k < K; k++)
			if (y + k * step < columns)
				moved[k] = src[k * step * src_stride];
#pragma unroll
	for (u32 k = 0; k < K; k++)
		shared[y + k * step][x] = moved[k];
	barrier();
#pragma unroll
	for (u32 k = 0; k < K; k++)
		moved[k] = shared[x][y + k * step];
	if (x < columns)
#pragma unroll
		for (u32 k = 0; k < K; k++)
			if (y + k * step < rows)
				dst[k * step * dst_stride] = moved[k];
}

#define TRANSPOSE(bits, B)                                                                                     \
	KERNEL(transpose_b##bits, 256, B *dst, const B *src, u64 m, u64 n, u64 dst_stride, u64 src_stride,     \
	       Tiles tiles) {                                                                                  \
		transpose(dst, src, m, n, dst_stride, src_stride, tiles);                                      \
	}
TRANSPOSE(8, u8)
TRANSPOSE(16, u16)
TRANSPOSE(32, u32)
TRANSPOSE(64, u64)

// The same where both sides may be accessed in vectors of 16 bytes. A thread
// reads J vectors of I elements, from rows that follow each other, and transposes
// them in registers, K times; the block then writes vectors of J elements, along
// rows. If each thread wrote what it has read, rows would be written, or read, 64
// bytes at a time: 7 to 25 % slower from 64 MiB on (H200, 2026-11-21).
//
// A row of the tile in shared memory is what is written to a row of dst. Its
// vectors change places with each other, so that those that threads put there at
// a time, a column, lie in different banks.
template <class B, u32 I, u32 J, u32 K>
DEVICE void transpose_wide(B *dst, const B *src, u64 m, u64 n, u64 dst_stride, u64 src_stride, const Tiles &tiles) {
	typedef typename Bits<J * sizeof(B)>::type Vector;
	constexpr u32 side = 16, rows = side * I, width = side * K; // threads; the tile, in vectors
	SHARED Vector shared[rows][width];
	Tile tile = find(tiles, block_x());
	u64 i0 = (u64)tile.i * rows, j0 = (u64)tile.j * width * J;
	u32 left = (u32)least(m - i0, (u64)rows), vectors = (u32)least(n - j0, (u64)width * J) / J;
	src += tile.src + j0 * src_stride + i0;
	dst += tile.dst + i0 * dst_stride + j0;
	u32 x = thread_x(), y = thread_y();
	B read[K][J][I];
#pragma unroll
	for (u32 k = 0; k < K; k++)
		if (x * I < left && y + k * side < vectors)
#pragma unroll
			for (u32 j = 0; j < J; j++)
				load(read[k][j], src + ((y + k * side) * J + j) * src_stride + x * I);
#pragma unroll
	for (u32 k = 0; k < K; k++)
#pragma unroll
		for (u32 i = 0; i < I; i++) {
			B column[J];
#pragma unroll
			for (u32 j = 0; j < J; j++)
				column[j] = read[k][j][i];
			store(reinterpret_cast<B *>(&shared[x * I + i][(y + k * side) ^ x]), column);
		}
	barrier();
	u32 t = y * side + x, v = t % width, first = t / width;
	if (v < vectors)
#pragma unroll
		for (u32 k = 0; k < I * K; k++) {
			u32 i = first + k * (side * side / width);
			if (i < left)
				*reinterpret_cast<Vector *>(dst + i * dst_stride + v * J) = shared[i][v ^ (i / I)];
		}
}

// Vectors of I elements are 16 bytes, and so are those of J but for bytes, where
// twice as many would not fit in registers.
#define TRANSPOSE_WIDE(bits, B, I, J, K)                                                                       \
	LEAN_KERNEL(transpose_wide_b##bits, 256, B *dst, const B *src, u64 m, u64 n, u64 dst_stride,           \
	            u64 src_stride, Tiles tiles) {                                                             \
		transpose_wide<B, I, J, K>(dst, src, m, n, dst_stride, src_stride, tiles);                     \
	}
TRANSPOSE_WIDE(8, u8, 16, 8, 1)
TRANSPOSE_WIDE(16, u16, 8, 8, 1)
TRANSPOSE_WIDE(32, u32, 4, 4, 1)
TRANSPOSE_WIDE(64, u64, 2, 2, 2)
TRANSPOSE_WIDE(128, b128, 1, 1, 4)

// ---- launch ----
//
// gather: one block of 128 threads for 512 elements. transpose: one block for
// each tile, of 64 x 4 threads for 64 x 64 elements. transpose_wide: the same, of
// 16 x 16 threads for 16*I x 16*J*K elements.
