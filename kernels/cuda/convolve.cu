// Convolutions and their gradients: convolve_TILE_DTYPE for results and for gradients by the
// images, convolvefilters_TILE_DTYPE for gradients by the filters, and convolvesum_DTYPE for the
// sum of their parts.
//
// All are products of matrices C = A B, of which A are filters, or gradients of results, as they
// lie in memory, and B is patches of images that are never written: an element is looked up when a
// tile of B is read (implicit GEMM): see tiles.cuh. Gradients by filters have few sums, each of
// many products: K is divided among the blocks of a column of the grid, which write parts to be
// added up afterwards. No sum depends on the order in which blocks run.
//
// No tensor has more than 2^31 elements, so that indices are of 32 bits.

#include "tiles.cuh"

// ---- kernels ----

namespace convolution {

// Planes of ny x nx places: index n stands for the place (n / nx / ny, n / nx % ny, n % nx).
struct Box {
	u32 ny, nx;
	u32 plane;          // elements from a plane of the image to the next
	i32 y, x;           // the pixel of the first place
	i32 step_y, step_x; // from one place to the next
};

// A place, which moves along its box.
struct Place {
	u32 i, y, x;

	DEVICE Place(u32 n, u32 ny, u32 nx) : i(n / nx / ny), y(n / nx % ny), x(n % nx) {}

	// Moves on by a place whose plane, row and column are by's.
	DEVICE void move(const Place &by, u32 ny, u32 nx) {
		x += by.x;
		u32 carry = x >= nx;
		x -= carry ? nx : 0;
		y += by.y + carry;
		carry = y >= ny;
		y -= carry ? ny : 0;
		i += by.i + carry;
	}
};

// Where a place is in the image: its plane, and its pixel, to which that of another place is added.
struct Pixel {
	u32 plane;
	i32 y, x;

	DEVICE Pixel(const Place &p, const Box &box)
		: plane(p.i * box.plane), y(box.y + (i32)p.y * box.step_y),
		  x(box.x + (i32)p.x * box.step_x) {}
};

// The product: A(row, k) = a[row * a_row + k / a_inner * a_outer + k % a_inner], B(k, column) is
// the pixel of both places, and C(row, column) = c[column / c_inner * c_outer + row * c_row +
// column % c_inner].
struct Problem {
	u32 m, n, k;
	u32 a_row, a_outer, a_inner;
	Box along_k, columns;
	i32 height, width;      // of the image
	i32 stride_y, stride_x; // of which only every so manieth pixel is there
	u32 c_row, c_outer, c_inner;
};

// The sizes of a convolution: of images, results, filters, padding, strides, dilations and groups.
struct Sizes {
	i32 batch, channels, filters, h, w, out_h, out_w, kernel_h, kernel_w, pad_h, pad_w, stride_h,
		stride_w, dilation_h, dilation_w, groups;

	DEVICE Box taps(u32 plane, i32 sign) const {
		return Box{(u32)kernel_h, (u32)kernel_w, plane, 0, 0, sign * dilation_h, sign * dilation_w};
	}
	DEVICE Box windows() const {
		return Box{(u32)out_h, (u32)out_w, (u32)(channels * h * w), -pad_h, -pad_w, stride_h,
			stride_w};
	}
};

enum { forward, input_gradient, filter_gradient };

// The product of a group, whose operands and result begin at its own planes.
DEVICE Problem problem(u64 pass, const Sizes &s) {
	u32 taps = s.kernel_h * s.kernel_w, pixels = s.h * s.w, places = s.out_h * s.out_w;
	u32 filters = s.filters / s.groups, channels = s.channels / s.groups, batch = s.batch;
	u32 results = s.filters * places, images = s.channels * pixels;
	if (pass == forward)
		return Problem{filters, batch * places, channels * taps, channels * taps, 0,
			channels * taps, s.taps(pixels, 1), s.windows(), s.h, s.w, 1, 1, places, results,
			places};
	if (pass == input_gradient)
		return Problem{channels, batch * pixels, filters * taps, taps, channels * taps, taps,
			s.taps(places, -1), Box{(u32)s.h, (u32)s.w, results, s.pad_h, s.pad_w, 1, 1},
			s.out_h, s.out_w, s.stride_h, s.stride_w, pixels, images, pixels};
	return Problem{filters, channels * taps, batch * places, places, results, places,
		s.windows(), s.taps(pixels, 1), s.h, s.w, 1, 1, channels * taps, 0, channels * taps};
}

// Elements in front of a group: of its filters, or dy, of its images, or dy, and of its result.
struct Front {
	u32 a, b, c;
	DEVICE Front(u64 pass, const Sizes &s, u32 group) {
		u32 filters = group * (s.filters / s.groups), channels = s.channels / s.groups;
		u32 weights = filters * channels * s.kernel_h * s.kernel_w;
		u32 results = filters * s.out_h * s.out_w, images = group * channels * s.h * s.w;
		a = weights, b = images, c = results;
		if (pass == input_gradient)
			b = results, c = images;
		else if (pass == filter_gradient)
			a = results, c = weights;
	}
};

// One pixel of the image, 0 outside of it.
template <class T> DEVICE T look(const T *b, const Problem &p, const Pixel &s, const Pixel &t) {
	i32 y = s.y + t.y, x = s.x + t.x;
	bool there = true;
	if (p.stride_y != 1 || p.stride_x != 1) {
		there = y >= 0 && x >= 0 && y % p.stride_y == 0 && x % p.stride_x == 0;
		y /= p.stride_y, x /= p.stride_x;
	}
	T pixel = 0;
	if (there && (u32)y < (u32)p.height && (u32)x < (u32)p.width)
		pixel = b[s.plane + t.plane + (u32)(y * p.width + x)];
	return pixel;
}

// Elements of A on the way to a tile: neighbours along K go to neighbours among the threads.
template <class T, u32 Rows> struct Left {
	static constexpr u32 count = Rows * depth / tile_threads, every = tile_threads / depth;
	T x[count];
	const T *a;
	u32 row, lane;
	Place k, step;

	DEVICE Left(const T *a, const Problem &p, u32 first_row, u32 from)
		: a(a), row(first_row + thread_x() / depth), lane(thread_x() % depth),
		  k(from + lane, 1, p.a_inner), step(depth, 1, p.a_inner) {}

	DEVICE void read(const Problem &p, u32 rest) {
		const T *from = a + k.i * p.a_outer + k.x + row * p.a_row;
#pragma unroll
		for (u32 e = 0; e < count; e++) {
			x[e] = 0;
			if (lane < rest && row + e * every < p.m)
				x[e] = from[e * every * p.a_row];
		}
		k.move(step, 1, p.a_inner);
	}
	DEVICE void put(OperandStep<T, Rows> &tile) const {
#pragma unroll
		for (u32 e = 0; e < count; e++)
			tile[lane][thread_x() / depth + e * every] = x[e];
	}
};

// Elements of B on the way to a tile. If AlongK, neighbours along K go to neighbours among the
// threads, and a thread has some columns; else neighbours are in columns, and a thread has some of
// K.
template <class T, u32 Columns, bool AlongK> struct Right;

template <class T, u32 Columns> struct Right<T, Columns, false> {
	static constexpr u32 count = Columns * depth / tile_threads;
	T x[count];
	const T *b;
	u32 first; // of the thread's along K
	bool there;
	Pixel column;
	Place k, one, step;

	DEVICE Right(const T *b, const Problem &p, u32 first_column, u32 from)
		: b(b), first(thread_x() / Columns * count),
		  there(first_column + thread_x() % Columns < p.n),
		  column(Place(first_column + thread_x() % Columns, p.columns.ny, p.columns.nx), p.columns),
		  k(from + first, p.along_k.ny, p.along_k.nx), one(1, p.along_k.ny, p.along_k.nx),
		  step(depth - count, p.along_k.ny, p.along_k.nx) {}

	DEVICE void read(const Problem &p, u32 rest) {
#pragma unroll
		for (u32 e = 0; e < count; e++) {
			x[e] = 0;
			if (there && first + e < rest)
				x[e] = look(b, p, column, Pixel(k, p.along_k));
			k.move(one, p.along_k.ny, p.along_k.nx);
		}
		k.move(step, p.along_k.ny, p.along_k.nx);
	}
	DEVICE void put(OperandStep<T, Columns> &tile) const {
#pragma unroll
		for (u32 e = 0; e < count; e++)
			tile[first + e][thread_x() % Columns] = x[e];
	}
};

template <class T, u32 Columns> struct Right<T, Columns, true> {
	static constexpr u32 count = Columns * depth / tile_threads, every = tile_threads / depth;
	T x[count];
	const T *b;
	u32 plane[count];
	i32 y[count], column[count];
	u32 there, lane;
	Place k, step;

	DEVICE Right(const T *b, const Problem &p, u32 first_column, u32 from)
		: b(b), there(0), lane(thread_x() % depth), k(from + lane, p.along_k.ny, p.along_k.nx),
		  step(depth, p.along_k.ny, p.along_k.nx) {
#pragma unroll
		for (u32 e = 0; e < count; e++) {
			u32 n = first_column + thread_x() / depth + e * every;
			Pixel at(Place(n, p.columns.ny, p.columns.nx), p.columns);
			plane[e] = at.plane, y[e] = at.y, column[e] = at.x;
			there += n < p.n;
		}
	}
	DEVICE void read(const Problem &p, u32 rest) {
		Pixel here(k, p.along_k);
#pragma unroll
		for (u32 e = 0; e < count; e++) {
			Pixel at = here;
			at.plane = plane[e], at.y = y[e], at.x = column[e];
			x[e] = 0;
			if (e < there && lane < rest)
				x[e] = look(b, p, here, at);
		}
		k.move(step, p.along_k.ny, p.along_k.nx);
	}
	DEVICE void put(OperandStep<T, Columns> &tile) const {
#pragma unroll
		for (u32 e = 0; e < count; e++)
			tile[lane][thread_x() / depth + e * every] = x[e];
	}
};

// Writes a thread's sums of the tile at a row and a column: several columns at once where they are
// aligned in each row, and registers are left.
template <class T, u32 Rows, u32 Columns, u32 EachRow, u32 EachColumn>
DEVICE void write(const Sums<T, Rows, Columns, EachRow, EachColumn> &sums, T *c, const Problem &p,
	u32 first_row, u32 first_column) {
	constexpr u32 width = Places<Columns, EachColumn>::width;
	constexpr bool spare = EachRow * EachColumn <= 32; // registers, for vectors
	bool vectors = spare && p.c_inner % width == 0 && p.n % width == 0 && aligned(ADDRESS(c), 16);
#pragma unroll
	for (u32 j = 0; j < EachColumn; j += width) {
		u32 column = first_column + sums.column(j);
#pragma unroll
		for (u32 v = 0; v < width; v++) {
			if (column + v >= p.n || (vectors && v > 0))
				continue;
			T *to = c + ((column + v) / p.c_inner * p.c_outer + (column + v) % p.c_inner);
#pragma unroll
			for (u32 i = 0; i < EachRow; i++) {
				u32 row = first_row + sums.row(i);
				if (row >= p.m)
					continue;
				if (vectors) {
					T part[width];
#pragma unroll
					for (u32 x = 0; x < width; x++)
						part[x] = sums.x[i][j + x];
					store(to + row * p.c_row, part);
				} else
					to[row * p.c_row] = sums.x[i][j + v];
			}
		}
	}
}

// A block of the x axis of the grid computes a tile of C, of the group and the part of K that the y
// axis says.
template <class T, u32 Rows, u32 Columns, u32 EachRow, u32 EachColumn, bool Filters>
DEVICE void convolve(T *c, const T *a, const T *b, u64 pass, u32 part, const Sizes &sizes) {
	SHARED OperandStep<T, Rows> left[2];
	SHARED OperandStep<T, Columns> right[2];
	pass = Filters ? (u64)filter_gradient : pass;
	Problem p = problem(pass, sizes);
	u32 group = block_y() % sizes.groups, at = block_y() / sizes.groups;
	Front front(pass, sizes, group);
	a += front.a, b += front.b, c += front.c;
	u32 down = (p.m + Rows - 1) / Rows, row = block_x() % down * Rows,
		column = block_x() / down * Columns;
	u32 from = at * part, end = p.k - from < part ? p.k : from + part;
	c += (u64)at * sizes.groups * p.m * p.n;
	Left<T, Rows> next_a(a, p, row, from);
	Right<T, Columns, Filters> next_b(b, p, column, from);
	Sums<T, Rows, Columns, EachRow, EachColumn> sums = {};
	u32 now = 0;
	next_a.read(p, end - from), next_b.read(p, end - from);
	next_a.put(left[0]), next_b.put(right[0]);
	barrier();
	for (u32 k = from; k < end; k += depth, now ^= 1) {
		bool more = end - k > depth;
		if (more)
			next_a.read(p, end - k - depth), next_b.read(p, end - k - depth);
		sums.add(left[now], right[now]);
		if (more)
			next_a.put(left[now ^ 1]), next_b.put(right[now ^ 1]);
		barrier();
	}
	write(sums, c, p, row, column);
}

// dst[i] = sum over the parts of parts[part * n + i]: a block adds up those of `width` elements,
// each warp some parts, and then the warps' sums.
template <class T> DEVICE void sum(T *dst, const T *parts, u64 n, u64 count) {
	constexpr u32 width = 32, groups = tile_threads / width;
	SHARED T sums[groups][width];
	u32 group = thread_x() / width, lane = thread_x() % width;
	for (u64 first = block_x() * (u64)width; first < n; first += blocks_x() * (u64)width) {
		T x = 0;
		if (first + lane < n)
#pragma unroll 4
			for (u64 part = group; part < count; part += groups)
				x = plus(x, parts[part * n + first + lane]);
		sums[group][lane] = x;
		barrier();
		if (group == 0 && first + lane < n) {
			for (u32 i = 1; i < groups; i++)
				x = plus(x, sums[i][lane]);
			dst[first + lane] = x;
		}
		barrier();
	}
}

} // namespace convolution

#define CONVOLVE_IN_TILES(SIZED_KERNEL, name, T, filters, ...) \
	SIZED_KERNEL(name##_##T, 256, T *c, const T *a, const T *b, u64 pass, u64 part, i64 batch, \
		i64 channels, i64 filter_count, i64 h, i64 w, i64 out_h, i64 out_w, i64 kernel_h, \
		i64 kernel_w, i64 pad_h, i64 pad_w, i64 stride_h, i64 stride_w, i64 dilation_h, \
		i64 dilation_w, i64 groups) { \
		convolution::convolve<T, __VA_ARGS__, filters>(c, a, b, pass, part, \
			convolution::Sizes{(i32)batch, (i32)channels, (i32)filter_count, (i32)h, (i32)w, \
				(i32)out_h, (i32)out_w, (i32)kernel_h, (i32)kernel_w, (i32)pad_h, (i32)pad_w, \
				(i32)stride_h, (i32)stride_w, (i32)dilation_h, (i32)dilation_w, (i32)groups}); \
	}
#define CONVOLVE(SIZED_KERNEL, tile, T, ...)                                       \
	CONVOLVE_IN_TILES(SIZED_KERNEL, convolve_##tile, T, false, __VA_ARGS__)    \
	CONVOLVE_IN_TILES(SIZED_KERNEL, convolvefilters_##tile, T, true, __VA_ARGS__)

// Rows and columns of a tile, and those of a thread. Multiprocessors hold three of the smaller
// tiles.
CONVOLVE(KERNEL, narrow, f32, 32, 32, 2, 2)
CONVOLVE(FAT_KERNEL, small, f32, 32, 128, 4, 4)
CONVOLVE(FAT_KERNEL, medium, f32, 64, 128, 4, 8)
CONVOLVE(PAIRED_KERNEL, large, f32, 128, 128, 8, 8)
CONVOLVE(PAIRED_KERNEL, small, f64, 32, 64, 2, 4)
CONVOLVE(PAIRED_KERNEL, medium, f64, 64, 64, 4, 4)

#define CONVOLVE_SUM(T) \
	KERNEL(convolvesum_##T, 256, T *dst, const T *parts, u64 n, u64 count) { \
		convolution::sum(dst, parts, n, count); \
	}
CONVOLVE_SUM(f32)
CONVOLVE_SUM(f64)

// ---- launch ----
//
// 256 threads. The x axis of the grid has a block for each tile of C, the y axis one for each group
// and each part of K of so many elements, a multiple of 8: only in gradients by filters. Parts lie
// behind each other. Of convolvesum, a block for every 32 elements.
