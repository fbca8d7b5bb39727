// Strided tensors to contiguous ones: gather and transpose. A permutation of
// axes, a broadcast (stride 0) and a slice are strides of the source. The suffix
// is the bits of an element, or of a run of elements that stay together.

#include "bytes.cuh"

// ---- kernels ----

// Divisor divides numbers below 2^31: the multiplier is 2^shift / value, rounded up. Each
// element takes several divisions; with division instructions, rows were permuted at half
// the speed of a copy.
struct Divisor {
	u32 value, multiplier;
	u64 shift;
};

DEVICE u32 divide(u32 a, const Divisor &by, u32 &rest) {
	u32 q = (u32)((u64)a * by.multiplier >> by.shift);
	rest = a - q * by.value;
	return q;
}

// The axes of a gather, slowest first; unused ones have length 1. The index of the first is the
// remainder of the others, so its length is not needed.
struct Axes {
	u64 first;
	Divisor lengths[5];
	u64 strides[5];
};

// The order of the blocks of a gather. Where the source's memory goes along the last axis but
// two before it goes along the last but one, rows, blocks that follow each other do a part of
// each index of that axis in turn: what of the source they share, or lies together, they then
// read at about the same time. `rows` is the blocks of an index; those from `end` on are left
// where they are.
//
// Heads of bytes are 6 % faster so for 256 MiB, and 4 to 7 % from 64 MiB on where rows are not
// aligned; larger elements are between 3 % slower and 4 % faster (H200, 2026-11-21).
struct Turns {
	Divisor all, count; // the blocks of all indices that take turns; the indices
	u64 rows, end;
};

DEVICE u32 turn(const Turns &turns) {
	u32 block = block_x(), rest, which;
	if (block >= turns.end)
		return block;
	u32 first = divide(block, turns.all, rest) * turns.all.value,
		row = divide(rest, turns.count, which);
	return first + which * (u32)turns.rows + row;
}

// for i < n { dst[i] = src[the sum of i's indices, each times its stride] }
//
// Each thread reads four elements before it writes one: see copy_units. Eight are
// 4 % faster where rows are not aligned, and 1 to 8 % slower where they are (H200,
// 2026-11-21).
template <class B>
DEVICE void gather(B *dst, const B *src, u32 n, const Axes &axes, const Turns &turns) {
	constexpr u32 K = 4, threads = 128;
	u32 start = turn(turns) * K * threads + thread_x(), i[K];
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
	KERNEL(gather_b##bits, 128, B *dst, const B *src, u64 n, Axes axes, Turns turns) { \
		gather(dst, src, (u32)n, axes, turns); \
	}
GATHER(8, u8)
GATHER(16, u16)
GATHER(32, u32)
GATHER(64, u64)
GATHER(128, b128)

// Where a run of elements that stay together begins, and the one after it.
struct Run { u64 at, next; };

DEVICE u64 place(u32 i, const Axes &axes, u32 &last) {
	u64 at = 0;
	last = 0;
#pragma unroll
	for (int a = 3; a >= 0; a--) {
		if (axes.lengths[a].value == 1)
			continue;
		u32 index;
		i = divide(i, axes.lengths[a], index);
		at += index * axes.strides[a];
		if (a == 3)
			last = index;
	}
	return at + i * axes.first;
}

// The next one's place is found by dividing again only at the end of an axis.
DEVICE Run find_run(u32 i, const Axes &axes) {
	u32 index, ignored;
	u64 at = place(i, axes, index);
	return {at,
		index + 1 < axes.lengths[3].value ? at + axes.strides[3] : place(i + 1, axes, ignored)};
}

// gather of bytes, where those of the last axis, a run, stay together: 16 or more. A
// thread writes 16 bytes, which are aligned in dst, and come from one run or two,
// wherever those begin. Two or four times that were 12 and 20 % slower (H200,
// 2026-11-21). Reads that leave the L1 cache out were 9 % slower, and other kinds of writes,
// or reads of 128 bytes into the L2 cache, as fast (2026-11-22-h200-heads.txt).
KERNEL(gather_runs_b8, 128, u8 *dst, const u8 *src, u64 n, Axes axes, Turns turns) {
	const Divisor &length = axes.lengths[4];
	i64 begin = (i64)(turn(turns) * 128 + thread_x()) * 16 - (i64)(ADDRESS(dst) & 15),
		end = begin + 16;
	u32 skip;
	if (begin < 0 || end > (i64)n) {
#pragma unroll 1
		for (i64 i = begin < 0 ? 0 : begin; i < end && i < (i64)n; i++) {
			u32 run = divide((u32)i, length, skip);
			dst[i] = src[find_run(run, axes).at + skip];
		}
		return;
	}
	Run run = find_run(divide((u32)begin, length, skip), axes);
	u32 left = least(length.value - skip, 16u);
	u32 x[8], y[8], z[4];
	const u8 *from = src + run.at + skip, *next = src + run.next - left;
	u32 shift = fetch<4>(x, from, 0, left), next_shift = fetch<4>(y, next, left, 16);
	cut(z, x, shift);
	if (left < 16) {
		u32 w[4];
		cut(w, y, next_shift);
		u64 first = ((u64)1 << 4 * left) - 1; // a digit for each byte
#pragma unroll
		for (u32 i = 0; i < 4; i++) {
			u32 digits = (u32)(first >> 16 * i);
			z[i] = pick(z[i], w[i], (0x3210 & digits) | (0x7654 & ~digits));
		}
	}
	store(reinterpret_cast<u32 *>(dst + begin), z);
}

// The matrices of a transposition: how many tiles one has, and the axes that are neither
// of its two, slowest first.
struct Matrices {
	Divisor tiles;
	Divisor lengths[4];
	u64 dst[4], src[4];
};

// A tile: where the matrix that it is part of begins, and its first row and column
// there, in tiles.
struct Tile {
	u64 dst, src;
	u32 i, j;
};

// find returns where a matrix begins.
DEVICE Tile find(const Matrices &matrices, u32 matrix) {
	Tile tile{};
#pragma unroll
	for (int a = 3; a >= 0; a--) {
		if (matrices.lengths[a].value == 1)
			continue;
		u32 index;
		matrix = divide(matrix, matrices.lengths[a], index);
		tile.dst += index * matrices.dst[a];
		tile.src += index * matrices.src[a];
	}
	return tile;
}

// The order of the tiles. Blocks that follow each other do those of a band of matrix rows,
// column by column: tiles that share 32 bytes of memory on either side are then done at about
// the same time, and meet in the L2 cache. From `end` on come the tiles of one more row of each
// matrix, `down`, if there is one that is done last.
struct Tiles {
	Divisor band;       // the tiles of one
	u32 height, across; // of a band, in tiles; the last one may be less high
	u32 down, end;      // the rows of tiles in bands; their blocks
	Matrices matrices;  // of the tiles in bands
};

DEVICE Tile find(const Tiles &tiles, u32 t) {
	u32 matrix, i, j;
	if (t < tiles.end) {
		matrix = divide(t, tiles.matrices.tiles, t);
		u32 first = divide(t, tiles.band, t) * tiles.height,
			height = least(tiles.height, tiles.down - first);
		j = t / height;
		i = first + t % height;
	} else {
		matrix = (t - tiles.end) / tiles.across;
		i = tiles.down;
		j = (t - tiles.end) % tiles.across;
	}
	Tile tile = find(tiles.matrices, matrix);
	tile.i = i;
	tile.j = j;
	return tile;
}

// for each matrix { for i < m { for j < n {
//         dst[i*dst_stride+j] = src[j*src_stride+i]
// } } }
//
// A block moves a tile through shared memory, so that both sides are accessed along
// their rows. A row of the tile begins a little to the right of its place, where 32
// bytes of dst do: to write some of these costs more than to write all. So the tile has
// a few columns more than are written.
//
// Words in shared memory change places with each other, so that those that threads put
// there at a time, a column, lie in different banks.
//
// Where rows are not aligned, elements of 4 bytes have 93 to 97 % of the speed of the driver's
// copy for 16 MiB, 90 to 98 % for 64 MiB and 86 to 94 % for 256 MiB; those of 8 bytes 103 to
// 107 %, 97 to 101 % and 93 to 96 % (H200, 2026-11-22-h200-kernels.txt). In tiles of
// 64 x 64, those of 4 bytes were 3 to 5 % slower.
constexpr u32 sector = 32;

template <class B, u32 m_tile, u32 n_tile>
DEVICE void transpose(B *dst, const B *src, u64 m, u64 n, u64 dst_stride, u64 src_stride,
	const Tiles &tiles) {
	constexpr u32 lanes = 32, Y = 256 / m_tile, K = n_tile / Y, step = n_tile - sector / sizeof(B);
	SHARED B shared[m_tile][n_tile];
	Tile tile = find(tiles, block_x());
	u64 i0 = (u64)tile.i * m_tile, j0 = (u64)tile.j * step;
	u32 rows = (u32)least(m - i0, (u64)m_tile), columns = (u32)least(n - j0, (u64)n_tile);
	bool last = n - j0 <= n_tile;
	src += tile.src + j0 * src_stride + i0;
	dst += tile.dst + i0 * dst_stride + j0;
	u32 x = thread_x(), y = thread_y();
	const B *from = src + y * src_stride + x;
	B moved[K];
#pragma unroll
	for (u32 k = 0; k < K; k++, from += Y * src_stride)
		if (x < rows && y + k * Y < columns)
			moved[k] = *from;
#pragma unroll
	for (u32 k = 0; k < K; k++)
		shared[x][(y + k * Y) ^ (x % lanes)] = moved[k];
	barrier();

	u32 t = y * m_tile + x, lane = t % lanes;
#pragma unroll 2
	for (u32 i = t / lanes; i < rows; i += 256 / lanes) {
		B *row = dst + i * dst_stride;
		u32 skip = (-(u32)ADDRESS(row) & (sector - 1)) / sizeof(B);
		u32 end = last ? columns : skip + step;
#pragma unroll
		for (u32 k = 0; k < n_tile / lanes; k++) {
			u32 j = skip + lane + k * lanes;
			if (j < end)
				row[j] = shared[i][j ^ (i % lanes)];
		}
		if (j0 == 0 && lane < least(skip, columns))
			row[lane] = shared[i][lane ^ (i % lanes)];
	}
}

#define TRANSPOSE(KIND, bits, B, m_tile, n_tile) \
	KIND(transpose_b##bits, 256, B *dst, const B *src, u64 m, u64 n, u64 dst_stride, \
		u64 src_stride, Tiles tiles) { \
		transpose<B, m_tile, n_tile>(dst, src, m, n, dst_stride, src_stride, tiles); \
	}
TRANSPOSE(LEAN_KERNEL, 32, u32, 64, 128)
TRANSPOSE(KERNEL, 64, u64, 32, 64)

DEVICE u32 line_of(u32 x) { return x % 4 * 8 + x / 4; }

// The same for smaller elements, in words. A warp reads words of rows of src, the first of which
// holds the tile's first element, and moves them to where elements begin; so a row of 32 words
// has 31 of the tile. Threads transpose words of as many rows as a word has elements, in
// registers. Rows of dst are written in vectors of 16 bytes, each cut from five words; only at
// the two ends of a row are elements written one by one.
//
// A row of the tile in shared memory begins where its first vector is a multiple of 16 bytes
// there. Rows are apart as an odd number of vectors is, and every fourth one follows the
// other, see line_of: words that threads put there at a time, a column, lie in different
// banks where rows of dst are of an odd number of elements.
//
// Of the speed of the driver's copy, bytes have 89 to 98 % for 16 MiB, 89 to 90 % for 64 MiB and
// 86 to 91 % for 256 MiB; halves 89 to 99 %, 91 to 95 % and 88 to 90 % (H200,
// 2026-11-22-h200-kernels.txt). Vectors of 16 bytes on either side were slower by
// up to 14 % for 16 MiB. Tiles of twice as many rows of halves were 3 to 8 % slower for 16 MiB
// and up to 3 % faster for 256 MiB. Elements of 4 bytes were no faster than with `transpose`. To
// read 128 bytes into the L2 cache where any of them is read was no difference
// (2026-11-22-h200-tiles.txt).
template <class B>
DEVICE void transpose_words(B *dst, const B *src, u64 m, u64 n, u64 dst_stride, u64 src_stride,
	const Tiles &tiles) {
	// of a row, V elements each
	constexpr u32 lanes = 32, warps = 8, K = 9, V = 4 / sizeof(B), words = warps * K;
	constexpr u32 m_tile = (lanes - 1) * V, step = (words * 4 - sector) / sizeof(B),
				  pitch = words + 4;
	static_assert(pitch % 8 == 4, "rows would share banks");
	SHARED b128 shared[V * lanes * pitch / 4];
	u32 *lines = reinterpret_cast<u32 *>(shared);
	Tile tile = find(tiles, block_x());
	u64 i0 = (u64)tile.i * m_tile, j0 = (u64)tile.j * step;
	u32 height = (u32)least(m - i0, (u64)m_tile), width = (u32)least(n - j0, (u64)words * V);
	bool last = n - j0 <= words * V;
	src += tile.src + j0 * src_stride + i0;
	dst += tile.dst + i0 * dst_stride + j0;
	u32 lane = thread_x(), warp = thread_y();

	// A thread's rows are a multiple of four apart: they begin as far from multiples of 4 bytes.
	u64 stride = src_stride * sizeof(B);
	const u8 *from[V];
	u32 shift[V], got[K][V];
	bool inside[V];
	i32 below = (i32)(width - warp * V);
#pragma unroll
	for (u32 v = 0; v < V; v++) {
		from[v] = reinterpret_cast<const u8 *>(src) + (warp * V + v) * stride;
		u32 before = (u32)ADDRESS(from[v]) & 3;
		from[v] += (i32)(lane * 4 - before);
		shift[v] = before * 8;
		inside[v] = lane * 4 < height * (u32)sizeof(B) + before;
	}
#pragma unroll
	for (u32 k = 0; k < K; k++)
#pragma unroll
		for (u32 v = 0; v < V; v++) {
			if (inside[v] && below > (i32)(k * warps * V + v))
				got[k][v] = *reinterpret_cast<const u32 *>(from[v]);
			from[v] += warps * V * stride;
		}
	u32 address = (u32)ADDRESS(dst), stride_of_row = (u32)dst_stride * (u32)sizeof(B); // in bytes
	u32 *to[V];
#pragma unroll
	for (u32 v = 0; v < V; v++) {
		u32 skip = -(address + (lane * V + v) * stride_of_row) & (sector - 1);
		to[v] = lines + (v * lanes + line_of(lane)) * pitch + (-(skip / 4) & 3) + warp;
	}
	meet();
#pragma unroll
	for (u32 k = 0; k < K; k++) {
		u32 x[V];
#pragma unroll
		for (u32 v = 0; v < V; v++)
			x[v] = funnel(got[k][v], from_next(got[k][v]), shift[v]);
		exchange(x);
#pragma unroll
		for (u32 v = 0; v < V; v++)
			to[v][k * warps] = x[v];
	}
	barrier();

	constexpr u32 wide = 16, threads_of_row = step * sizeof(B) / wide,
				  at_once = lanes * warps / threads_of_row;
	static_assert(at_once % (4 * V) == 0, "a thread's rows would not follow each other");
	u8 *rows = reinterpret_cast<u8 *>(dst);
	u32 end = width * (u32)sizeof(B), t = warp * lanes + lane;
	u32 i = t / threads_of_row, column = t % threads_of_row * wide;
	const u32 *line = lines + (i % V * lanes + line_of(i / V)) * pitch + column / 4;
#pragma unroll 4
	for (; i < height; i += at_once, line += at_once / V / 4 * pitch) {
		u32 place = i * stride_of_row, skip = -(address + place) & (sector - 1);
		const u32 *moved = line + (skip + 12) / 16 * 4;
		u32 x[4], y[4];
		load(x, moved);
#pragma unroll
		for (u32 k = 0; k < 4; k++)
			y[k] = funnel(x[k], k < 3 ? x[k < 3 ? k + 1 : k] : moved[4], skip * 8);
		if (skip + column + wide <= end)
			store(reinterpret_cast<u32 *>(rows + (place + skip + column)), y);
	}
	if (j0 > 0 && !last)
		return;
#pragma unroll 4
	for (u32 i = warp; i < height; i += warps) {
		constexpr u32 N = wide / sizeof(B);
		B *row = dst + i * dst_stride;
		u32 skip = -(address + i * stride_of_row) & (sector - 1);
		const u32 *line = lines + (i % V * lanes + line_of(i / V)) * pitch + (-(skip / 4) & 3);
		const B *moved = reinterpret_cast<const B *>(line);
		skip = least(skip / (u32)sizeof(B), width);
		if (j0 == 0 && lane < skip)
			row[lane] = moved[lane];
		u32 rest = skip + least(width - skip, step) / N * N + lane; // no more than a sector of them
		if (last && rest < width)
			row[rest] = moved[rest];
	}
}

#define TRANSPOSE_WORDS(bits, B) \
	KERNEL(transpose_b##bits, 256, B *dst, const B *src, u64 m, u64 n, u64 dst_stride, \
		u64 src_stride, Tiles tiles) { \
		transpose_words(dst, src, m, n, dst_stride, src_stride, tiles); \
	}
TRANSPOSE_WORDS(8, u8)
TRANSPOSE_WORDS(16, u16)

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
DEVICE void transpose_wide(B *dst, const B *src, u64 m, u64 n, u64 dst_stride, u64 src_stride,
	const Tiles &tiles) {
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

// Vectors of I or J elements are 16 bytes. Of bytes, a vector of J is half as long: twice as many
// would not fit in registers.
#define TRANSPOSE_WIDE(bits, B, I, J, K) \
	LEAN_KERNEL(transpose_wide_b##bits, 256, B *dst, const B *src, u64 m, u64 n, u64 dst_stride, \
		u64 src_stride, Tiles tiles) { \
		transpose_wide<B, I, J, K>(dst, src, m, n, dst_stride, src_stride, tiles); \
	}
TRANSPOSE_WIDE(8, u8, 16, 8, 1)
TRANSPOSE_WIDE(16, u16, 8, 8, 1)
TRANSPOSE_WIDE(32, u32, 4, 4, 1)
TRANSPOSE_WIDE(64, u64, 2, 2, 2)
TRANSPOSE_WIDE(128, b128, 1, 1, 4)

// Transpositions of matrices with few rows or columns, planes, such as those of images:
// what holds an element of each plane in turn is split into them, or joined from them. A
// block does a piece of all planes, `step` elements of each, and some that it shares with the
// next one, as many as 32 bytes of dst hold: see transpose. What is read lies in shared memory
// as it does in memory, as far from multiples of 16 bytes. Planes are written in words of 8
// bytes, and what is joined from them in vectors of 16.
//
// Threads that follow each other do 1 << run words of a plane, then as many of the next
// plane: as many as lie in different banks of shared memory.
struct Planes {
	Divisor count; // of planes
	u64 step, run;
};

// of a block at most; twice as many were 3 to 20 % slower (H200, 2026-11-21)
constexpr u32 split_bytes = 16 << 10;

// The word that a thread does, of which plane.
DEVICE u32 find_word(const Planes &planes, u32 i, u32 &plane) {
	u32 run = (u32)planes.run, rest = i & ((1 << run) - 1);
	return (divide(i >> run, planes.count, plane) << run) + rest;
}

// for each matrix { for i < count { for j < n {
//         dst[i*stride+j] = src[j*count+i]
// } } }
//
// 3, 4 and 8 planes have 94 to 108 % of the speed of the driver's copy for 16 MiB, 95 to 102 %
// for 64 MiB and 92 to 100 % for 256 MiB (H200, 2026-11-22-h200-kernels.txt). With
// gather bytes took 2 to 3 times as long, larger elements up to twice. Words of 4 bytes in place
// of 8 were up to 11 % slower for halves and elements of 4 bytes.
template <class B>
DEVICE void split(B *dst, const B *src, u64 n, u64 stride, const Planes &planes,
	const Matrices &matrices) {
	constexpr u32 N = 8 / sizeof(B), threads = 256, lanes = 32;
	SHARED b128 shared[split_bytes / 16 + 1];
	u32 piece, matrix = divide(block_x(), matrices.tiles, piece);
	Tile tile = find(matrices, matrix);
	u32 count = planes.count.value, step = (u32)planes.step, width = step + sector / sizeof(B);
	u64 j0 = (u64)piece * step;
	u32 columns = (u32)least(n - j0, (u64)width);
	src += tile.src + j0 * count;
	dst += tile.dst + j0;
	u32 begin = (u32)ADDRESS(src) & 15, end = begin + columns * count * (u32)sizeof(B);
	const b128 *from = reinterpret_cast<const b128 *>(reinterpret_cast<const u8 *>(src) - begin);
	copy_units(shared, from, (end + 15) / 16, thread_x(), threads);
	barrier();

	const B *elements = reinterpret_cast<const B *>(reinterpret_cast<const u8 *>(shared) + begin);
	for (u32 i = thread_x(); i < count * width / N; i += threads) {
		u32 plane, at = find_word(planes, i, plane) * N;
		B *row = dst + plane * stride;
		u32 skip = (-(u32)ADDRESS(row) & (sector - 1)) / sizeof(B);
		if (at < step && skip + at + N <= columns) {
			B x[N];
#pragma unroll
			for (u32 k = 0; k < N; k++)
				x[k] = elements[(skip + at + k) * count + plane];
			store(row + skip + at, x);
		}
	}
	if (j0 > 0 && columns == width)
		return;
	u32 lane = thread_x() % lanes;
	for (u32 plane = thread_x() / lanes; plane < count; plane += threads / lanes) {
		B *row = dst + plane * stride;
		u32 skip = least((-(u32)ADDRESS(row) & (sector - 1)) / (u32)sizeof(B), columns);
		u32 words = skip + least((columns - skip) / N * N, step),
			rest = least(skip + step, columns);
		if (j0 == 0 && lane < skip)
			row[lane] = elements[lane * count + plane];
		if (words + lane < rest)
			row[words + lane] = elements[(words + lane) * count + plane];
	}
}

// How planes are joined: how many, and the units of 16 bytes that a block copies of each.
struct Joined { Divisor count, units; };

// 8 KiB of planes, and up to 47 bytes more of each of 15.
constexpr u32 join_room = 9 << 10;

// Four words of the elements that words hold, in the lowest bits.
DEVICE void pack(u32 (&y)[4], const u32 (&x)[16]) {
#pragma unroll
	for (u32 i = 0; i < 4; i++)
		y[i] = pick(pick(x[4 * i], x[4 * i + 1], 0x0040), pick(x[4 * i + 2], x[4 * i + 3], 0x0040),
			0x5410);
}
DEVICE void pack(u32 (&y)[4], const u32 (&x)[8]) {
#pragma unroll
	for (u32 i = 0; i < 4; i++)
		y[i] = pick(x[2 * i], x[2 * i + 1], 0x5410);
}
DEVICE void pack(u32 (&y)[4], const u32 (&x)[4]) {
#pragma unroll
	for (u32 i = 0; i < 4; i++)
		y[i] = x[i];
}

// for each matrix { for i < n { for j < count {
//         dst[i*count+j] = src[j*stride+i]
// } } }
//
// A thread collects vectors of dst from shared memory, one element after the other. Its next
// one is so much further on that it is of the same planes, so that where the elements are is
// found once.
//
// 3, 4 and 8 planes have 100 to 109 % of the speed of the driver's copy for 16 MiB, 96 to 103 %
// for 64 MiB and 92 to 100 % for 256 MiB (H200, 2026-11-22-h200-kernels.txt); 7
// planes that are not aligned about a tenth less. Elements that were written to shared memory
// where they are in dst took bytes and halves up to a fifth longer, and gather took elements of 4
// bytes a tenth. Pieces of 16 KiB were 2 % slower for bytes, and for halves 3 to 4 % slower for 16
// MiB and 2 to 4 % faster from 64 MiB on.
template <class B, u32 threads>
DEVICE void join(B *dst, const B *src, u64 n, u64 stride, const Joined &joined,
	const Matrices &matrices) {
	// elements of a vector, and those shared with the next block
	constexpr u32 size = sizeof(B), N = 16 / size;
	SHARED b128 shared[join_room / 16];
	u32 t = thread_x(), piece, matrix = divide(block_x(), matrices.tiles, piece);
	Tile tile = find(matrices, matrix);
	u32 count = joined.count.value, units = joined.units.value, step = (units - 2) * N,
		width = step + N;
	u64 i0 = (u64)piece * step, row = stride * size;
	u32 rows = (u32)least(n - i0, (u64)width);
	bool last = n - i0 <= width;
	const u8 *from = reinterpret_cast<const u8 *>(src + tile.src + i0);
	u8 *to = reinterpret_cast<u8 *>(dst + tile.dst + i0 * count);
	u32 first = (u32)ADDRESS(from) & 15, pitch = units * 16 + ((u32)row & 15);
	for (u32 i = t; i < count * units; i += threads) {
		u32 unit, plane = divide(i, joined.units, unit), at = first + plane * pitch,
				  before = at & 15;
		if (unit * 16 < before + rows * size)
			copy_async(shared + at / 16 + unit,
				reinterpret_cast<const b128 *>(from + plane * row - before) + unit);
	}

	u32 skip = -(u32)ADDRESS(to) & (sector - 1),
		end = count * size * (last ? rows : step) + (last ? 0 : skip);
	u32 plane, i = divide(skip / size + t * N, joined.count, plane), at[N];
#pragma unroll
	for (u32 k = 0; k < N; k++) {
		at[k] = kept(first + i * size + plane * pitch);
		if (++plane == count)
			plane = 0, i++;
	}
	u32 idle, vectors = divide(threads, joined.count, idle), together = (threads - idle) * 16;
	wait_for_copies();
	barrier();
	const u8 *bytes = reinterpret_cast<const u8 *>(shared), *elements = bytes;
#pragma unroll 2
	for (u32 begin = skip; begin < end; begin += together, elements += vectors * 16) {
		u32 place = begin + t * 16;
		if (t * 16 < together && place + 16 <= end) {
			u32 x[N], y[4];
#pragma unroll
			for (u32 k = 0; k < N; k++)
				x[k] = *reinterpret_cast<const B *>(elements + at[k]);
			pack(y, x);
			store(reinterpret_cast<u32 *>(to + place), y);
		}
	}
	u32 head = i0 == 0 ? skip / size : 0, tail = last ? (end - skip) % 16 / size : 0;
	if (t >= head + tail)
		return;
	u32 e = t < head ? t : end / size - tail + t - head;
	i = divide(e, joined.count, plane);
	reinterpret_cast<B *>(to)[e] =
		*reinterpret_cast<const B *>(bytes + first + i * size + plane * pitch);
}

// Three planes of bytes, pixels: what a warp's threads collect of them lies too often in the
// same banks. A thread reads a word of each plane, four pixels, four times; a warp writes its
// pixels as vectors of 16 bytes, whole sectors.
//
// This has 106 % of the speed of the driver's copy for 16 MiB, 98 % for 64 MiB and 96 % for 256 MiB
// (H200, 2026-11-22-h200-kernels.txt); join took 1.34 to 1.46 times as long, and half
// as many words 1.15 times.
DEVICE void join_pixels(u8 *dst, const u8 *src, u64 n, u64 stride, const Matrices &matrices) {
	constexpr u32 C = 3, K = 4, threads = 256, lanes = 32, third = 11; // of 1, modulo a sector
	SHARED b128 shared[threads * C * 4 / 16];
	u32 piece, matrix = divide(block_x(), matrices.tiles, piece), t = thread_x(), lane = t % lanes,
			   warp = t / lanes;
	Tile tile = find(matrices, matrix);
	src += tile.src;
	dst += tile.dst;
	u32 skip = -(u32)ADDRESS(dst) * third & (sector - 1),
		first = skip + (piece * K * threads + warp * lanes) * 4;
	if (piece == 0 && t < skip * C)
		dst[t] = src[t % C * stride + t / C];
	u32 x[K][C];
#pragma unroll
	for (u32 k = 0; k < K; k++) {
		u32 i = first + (k * threads + lane) * 4;
#pragma unroll
		for (u32 c = 0; c < C; c++) {
			const u8 *p = src + c * stride + i;
			u32 before = (u32)ADDRESS(p) & 3, low = 0, high = 0;
			if (i < n)
				low = *reinterpret_cast<const u32 *>(p - before);
			if (i < n && before > 0 && before + (n - i) > 4)
				high = *reinterpret_cast<const u32 *>(p - before + 4);
			x[k][c] = funnel(low, high, before * 8);
		}
	}
	b128 *mine = shared + warp * lanes * C * 4 / 16;
	u32 *words = reinterpret_cast<u32 *>(mine) + lane * C;
#pragma unroll
	for (u32 k = 0; k < K; k++) {
		u32 a = x[k][0], b = x[k][1], c = x[k][2], low = pick(a, b, 0x5140),
			high = pick(a, b, 0x7362);
		meet();
		words[0] = pick(low, c, 0x2410);
		words[1] = pick(pick(b, c, 0x0051), high, 0x5410);
		words[2] = pick(high, c, 0x7326);
		meet();
		u32 begin = first + k * threads * 4,
			bytes = begin < n ? (u32)least(n - begin, (u64)lanes * 4) * C : 0;
		u8 *to = dst + (u64)begin * C;
		if (lane * 16 + 16 <= bytes)
			reinterpret_cast<b128 *>(to)[lane] = mine[lane];
		else
			for (u32 i = lane * 16; i < bytes; i++)
				to[i] = reinterpret_cast<const u8 *>(mine)[i];
	}
}

#define SPLIT(bits, B) \
	KERNEL(transpose_split_b##bits, 256, B *dst, const B *src, u64 n, u64 stride, Planes planes, \
		Matrices matrices) { \
		split(dst, src, n, stride, planes, matrices); \
	}
SPLIT(8, u8)
SPLIT(16, u16)
SPLIT(32, u32)
SPLIT(64, u64)

#define JOIN(KIND, bits, B, threads) \
	KIND(transpose_join_b##bits, threads, B *dst, const B *src, u64 n, u64 stride, Joined joined, \
		Matrices matrices) { \
		join<B, threads>(dst, src, n, stride, joined, matrices); \
	}
JOIN(KERNEL, 8, u8, 128)
JOIN(LEAN_KERNEL, 16, u16, 256)
JOIN(LEAN_KERNEL, 32, u32, 256)

LEAN_KERNEL(transpose_pixels_b8, 256, u8 *dst, const u8 *src, u64 n, u64 stride,
	Matrices matrices) {
	join_pixels(dst, src, n, stride, matrices);
}

// ---- launch ----
//
// gather: one block of 128 threads for 512 elements; gather_runs: for 2048 bytes.
// transpose: one block of 256 threads for each tile, which are as wide as it has rows of dst
// (bytes and halves: 32). transpose_wide: the same, of 16 x 16 threads for 16*I x 16*J*K
// elements. transpose_split, transpose_join: one block of 256 threads for each piece of planes,
// of 128 to join bytes. transpose_pixels: one of 256 for 4096 pixels.
