// Convolutions and their gradients: convolve_TILE_DTYPE for results and for gradients by the
// images, convolvefilters_TILE_DTYPE for gradients by the filters, and convolvesum_DTYPE for the
// sum of their parts.
//
// All are products of matrices C = A B, of which A are filters, or gradients of results, as they
// lie in memory, and B is patches of images that are never written: an element is looked up when a
// tile of B is read (implicit GEMM): see tiles.cuh. Where it is, is found once for all threads of a
// block. Where tiles are few, K is divided among blocks, which write parts to be added up
// afterwards. No sum depends on the order in which blocks run.
//
// Of convolutions with strides, gradients by the images are several products: pixels whose rows and
// columns leave the same rests are reached by the same taps.
//
// No tensor has more than 2^31 elements, so that indices are of 32 bits.

#include "tiles.cuh"

// ---- kernels ----

namespace convolution {

// A place of planes of ny x nx, which moves along them: the n-th is (n / nx / ny, n / nx % ny,
// n % nx).
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

// Elements from a place to the next plane, row and column, and in front of the first: modulo 2^32.
struct Way {
	u32 first, plane, y, x;
	DEVICE u32 at(const Place &p) const { return first + p.i * plane + p.y * y + p.x * x; }
};

// An axis of a product: planes of ny x nx places, where each is in the matrix beside the image, and
// in the image: a plane, and the pixel of the first place.
struct Axis {
	u32 ny, nx;
	Way way;
	u32 plane;
	i32 y, x, step_y, step_x;

	DEVICE Place place(u32 n) const { return Place(n, ny, nx); }
};

// The index of a place's pixel, its row and its column: those of a place along K and of a column
// are added.
struct Pixel {
	u32 at;
	i32 y, x;

	DEVICE Pixel(const Place &p, const Axis &axis, i32 width)
		: y(axis.y + (i32)p.y * axis.step_y), x(axis.x + (i32)p.x * axis.step_x) {
		at = p.i * axis.plane + (u32)(y * width + x);
	}
};

// The product: A(row, k) = a[row * a_row + k.way], B(k, column) is the pixel of both places, and
// C(row, column) = c[row * c_row + columns.way].
struct Problem {
	u32 m, n, k, a_row, c_row;
	Axis along_k, columns;
	i32 height, width; // of the image
};

// The sizes of a convolution: of images, results, filters, padding, strides, dilations and groups.
struct Sizes {
	i32 batch, channels, filters, h, w, out_h, out_w, kernel_h, kernel_w, pad_h, pad_w, stride_h,
		stride_w, dilation_h, dilation_w, groups;
};

enum { forward, input_gradient, filter_gradient };

// Gradients of the pixels of which each `stride`-th one is alike: the `rest`-th and those that
// follow. Of `taps` only some reach them: from `first` on every `step`-th, `count` of them, and a
// pixel's first one is the result `at`, the next `move` behind it.
struct Reach {
	u32 first, step, count, pixels;
	i32 at, move;

	DEVICE Reach(i32 rest, i32 size, i32 taps, i32 pad, i32 stride, i32 dilation)
		: first(0), step(1), count(0), pixels((size - rest + stride - 1) / stride) {
		for (i32 tap = 0; tap < taps; tap++) {
			if ((rest + pad - tap * dilation) % stride != 0)
				continue;
			first = count == 0 ? tap : first;
			step = count == 1 ? tap - first : step;
			count++;
		}
		at = (rest + pad - (i32)first * dilation) / stride;
		move = -(i32)step * dilation / stride;
	}
};

// The product of a group, whose operands and result begin at its own planes. Gradients by images
// are one for each rest of a pixel's row and column.
DEVICE Problem problem(u64 pass, const Sizes &s, u32 rest) {
	u32 taps = s.kernel_h * s.kernel_w, pixels = s.h * s.w, places = s.out_h * s.out_w;
	u32 filters = s.filters / s.groups, channels = s.channels / s.groups, batch = s.batch;
	u32 results = s.filters * places, images = s.channels * pixels, kw = s.kernel_w;
	if (pass == input_gradient) {
		u32 y = rest / s.stride_w, x = rest % s.stride_w;
		Reach ys(y, s.h, s.kernel_h, s.pad_h, s.stride_h, s.dilation_h),
			xs(x, s.w, kw, s.pad_w, s.stride_w, s.dilation_w);
		return Problem{channels, batch * ys.pixels * xs.pixels, filters * ys.count * xs.count, taps,
			pixels,
			Axis{ys.count, xs.count,
				Way{ys.first * kw + xs.first, channels * taps, ys.step * kw, xs.step}, places, 0, 0,
				ys.move, xs.move},
			Axis{ys.pixels, xs.pixels,
				Way{y * s.w + x, images, (u32)(s.stride_h * s.w), (u32)s.stride_w}, results, ys.at,
				xs.at, 1, 1},
			s.out_h, s.out_w};
	}
	Axis of_taps{(u32)s.kernel_h, kw, Way{0, taps, kw, 1}, pixels, 0, 0, s.dilation_h,
		s.dilation_w};
	Axis of_places{(u32)s.out_h, (u32)s.out_w, Way{0, results, (u32)s.out_w, 1}, images, -s.pad_h,
		-s.pad_w, s.stride_h, s.stride_w};
	if (pass == forward)
		return Problem{filters, batch * places, channels * taps, channels * taps, places, of_taps,
			of_places, s.h, s.w};
	return Problem{filters, channels * taps, batch * places, places, channels * taps, of_places,
		of_taps, s.h, s.w};
}

// Elements in front of a group: of its filters, or dy, of its images, or dy, and of its result,
// of which there are `whole` in all groups.
struct Front {
	u32 a, b, c, whole;
	DEVICE Front(u64 pass, const Sizes &s, u32 group) {
		u32 filters = group * (s.filters / s.groups), channels = s.channels / s.groups;
		u32 each = channels * s.kernel_h * s.kernel_w;
		u32 weights = filters * each;
		u32 results = filters * s.out_h * s.out_w, images = group * channels * s.h * s.w;
		a = weights, b = images, c = results, whole = s.batch * s.filters * s.out_h * s.out_w;
		if (pass == input_gradient)
			b = results, c = images, whole = s.batch * s.channels * s.h * s.w;
		else if (pass == filter_gradient)
			a = results, c = weights, whole = s.filters * each;
	}
};

// A row outside of the image, whatever is added to it.
constexpr i32 outside = -(1 << 30);

// A place along K, in shared memory: its pixel, and where it is in A.
struct Tap {
	u32 at;
	i32 y, x;
	u32 a;
};

// Finds the places of each step along K, by one thread for each.
struct Taps {
	Place k, step;
	u32 next;

	DEVICE Taps(const Problem &p, u32 from)
		: k(p.along_k.place(from + thread_x() % depth)), step(p.along_k.place(depth)),
		  next(from + thread_x() % depth) {}

	DEVICE void put(Tap (&taps)[depth], const Problem &p, u32 end) {
		if (thread_x() >= depth)
			return;
		Pixel pixel(k, p.along_k, p.width);
		taps[thread_x()] =
			Tap{pixel.at, next < end ? pixel.y : outside, pixel.x, p.along_k.way.at(k)};
		next += depth;
		k.move(step, p.along_k.ny, p.along_k.nx);
	}
};

// One pixel of the image, 0 outside of it.
template <class T>
DEVICE T look(const T *b, const Problem &p, const Tap &k, u32 at, i32 y, i32 x) {
	bool there = ((u32)(y + k.y) < (u32)p.height) & ((u32)(x + k.x) < (u32)p.width);
	return load_if(there, b + (at + k.at));
}

// Elements of A on the way to a tile: neighbours along K go to neighbours among the threads.
template <class T, u32 Rows> struct Left {
	static constexpr u32 count = Rows * depth / tile_threads, every = tile_threads / depth;
	T x[count];
	const T *a;
	u32 there, lane;

	DEVICE Left(const T *a, const Problem &p, u32 first_row) : lane(thread_x() % depth) {
		u32 row = first_row + thread_x() / depth;
		this->a = a + (u64)row * p.a_row;
		there = row < p.m ? (p.m - row + every - 1) / every : 0;
	}

	DEVICE void read(const Problem &p, const Tap (&taps)[depth], u32 rest) {
		const T *from = a + taps[lane].a;
		u32 n = lane < rest ? there : 0;
#pragma unroll
		for (u32 e = 0; e < count; e++)
			x[e] = load_if(e < n, from + (u64)(e * every) * p.a_row);
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
	Pixel column;

	DEVICE Right(const T *b, const Problem &p, u32 first_column)
		: b(b), first(thread_x() / Columns * count),
		  column(p.columns.place(first_column + thread_x() % Columns), p.columns, p.width) {
		if (first_column + thread_x() % Columns >= p.n)
			column.y = outside;
	}

	DEVICE void read(const Problem &p, const Tap (&taps)[depth]) {
#pragma unroll
		for (u32 e = 0; e < count; e++)
			x[e] = look(b, p, taps[first + e], column.at, column.y, column.x);
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
	u32 at[count];
	i32 y[count], column[count];
	u32 lane;

	DEVICE Right(const T *b, const Problem &p, u32 first_column)
		: b(b), lane(thread_x() % depth) {
#pragma unroll
		for (u32 e = 0; e < count; e++) {
			u32 n = first_column + thread_x() / depth + e * every;
			Pixel pixel(p.columns.place(n), p.columns, p.width);
			at[e] = pixel.at, y[e] = n < p.n ? pixel.y : outside, column[e] = pixel.x;
		}
	}
	DEVICE void read(const Problem &p, const Tap (&taps)[depth]) {
		Tap here = taps[lane];
#pragma unroll
		for (u32 e = 0; e < count; e++)
			x[e] = look(b, p, here, at[e], y[e], column[e]);
	}
	DEVICE void put(OperandStep<T, Columns> &tile) const {
#pragma unroll
		for (u32 e = 0; e < count; e++)
			tile[lane][thread_x() / depth + e * every] = x[e];
	}
};

// Writes a tile of sums at a row and a column. Rows go through shared memory, so that neighbours
// among the threads write neighbours, and a thread writes one column.
template <class T, u32 Rows, u32 Columns, u32 EachRow, u32 EachColumn>
DEVICE void write(const Sums<T, Rows, Columns, EachRow, EachColumn> &sums,
	OperandStep<T, Columns> (&room)[2], T *c, const Problem &p, u32 first_row, u32 first_column) {
	typedef Sums<T, Rows, Columns, EachRow, EachColumn> S;
	constexpr u32 at_once = Rows / EachRow, every = tile_threads / Columns, width = S::C::width;
	static_assert(at_once <= 2 * depth, "rows that are written at a time have room");
	T(&line)[2 * depth][Columns + 4] = reinterpret_cast<T(&)[2 * depth][Columns + 4]>(room);
	u32 own = thread_x() % Columns, column = first_column + own;
	T *to = c + p.columns.way.at(p.columns.place(column));
#pragma unroll
	for (u32 i = 0; i < EachRow; i++) {
#pragma unroll
		for (u32 j = 0; j < EachColumn; j += width)
			store(&line[S::down()][S::column(j)],
				reinterpret_cast<const T(&)[width]>(sums.x[i][j]));
		barrier();
#pragma unroll 2
		for (u32 lane = thread_x() / Columns; lane < at_once; lane += every) {
			u32 row = first_row + S::R::at(i, lane);
			if (row < p.m && column < p.n)
				to[row * p.c_row] = line[lane][own];
		}
		barrier();
	}
}

// A block of the x axis of the grid computes a tile of C, of the group, the rest and the part of K
// that the y axis says.
template <class T, u32 Rows, u32 Columns, u32 EachRow, u32 EachColumn, bool Filters>
DEVICE void convolve(T *c, const T *a, const T *b, u64 pass, u32 part, const Sizes &sizes) {
	SHARED OperandStep<T, Rows> left[2];
	SHARED OperandStep<T, Columns> right[2];
	SHARED Tap taps[2][depth];
	pass = Filters ? (u64)filter_gradient : pass;
	u32 rests = pass == input_gradient ? sizes.stride_h * sizes.stride_w : 1;
	u32 group = block_y() % sizes.groups, at = block_y() / sizes.groups;
	Problem p = problem(pass, sizes, at % rests);
	at /= rests;
	Front front(pass, sizes, group);
	a += front.a, b += front.b, c += front.c;
	u32 down = (p.m + Rows - 1) / Rows, row = block_x() % down * Rows,
		column = block_x() / down * Columns;
	if (column >= p.n)
		return; // another rest has more
	u32 from = least(at * part, p.k), end = p.k - from < part ? p.k : from + part;
	c += (u64)at * front.whole;
	Sums<T, Rows, Columns, EachRow, EachColumn> sums = {};
	if (from < end) {
		Taps next(p, from);
		Left<T, Rows> next_a(a, p, row);
		Right<T, Columns, Filters> next_b(b, p, column);
		next.put(taps[0], p, end), next.put(taps[1], p, end);
		barrier();
		next_a.read(p, taps[0], end - from), next_b.read(p, taps[0]);
		next_a.put(left[0]), next_b.put(right[0]);
		barrier();
		u32 now = 0;
		for (u32 k = from; k < end; k += depth, now ^= 1) {
			bool more = end - k > depth;
			if (more) {
				next_a.read(p, taps[now ^ 1], end - k - depth);
				next_b.read(p, taps[now ^ 1]);
			}
			next.put(taps[now], p, end);
			sums.add(left[now], right[now]);
			if (more)
				next_a.put(left[now ^ 1]), next_b.put(right[now ^ 1]);
			barrier();
		}
	}
	write(sums, right, c, p, row, column);
}

// dst[i] = sum over the parts of parts[part * n + i]. Of many parts a block adds up those of
// `width` elements, each warp some, and then the warps' sums.
template <class T> DEVICE void sum(T *dst, const T *parts, u64 n, u64 count) {
	constexpr u32 width = 32, groups = tile_threads / width;
	if (count < 2 * groups) {
		for (u64 i = thread_index(); i < n; i += thread_count()) {
			T x = 0;
#pragma unroll 4
			for (u64 part = 0; part < count; part++)
				x = plus(x, parts[part * n + i]);
			dst[i] = x;
		}
		return;
	}
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
CONVOLVE_IN_TILES(PAIRED_KERNEL, convolve_wide, f32, false, 64, 256, 8, 8)
CONVOLVE(PAIRED_KERNEL, medium, f64, 64, 64, 4, 4)

#define CONVOLVE_SUM(T) \
	KERNEL(convolvesum_##T, 256, T *dst, const T *parts, u64 n, u64 count) { \
		convolution::sum(dst, parts, n, count); \
	}
CONVOLVE_SUM(f32)
CONVOLVE_SUM(f64)

// ---- launch ----
//
// 256 threads. The x axis of the grid has a block for each tile of C, of the rests that have most,
// and the y axis one for each group, each rest of rows and of columns by the strides (in gradients
// by the images alone), and each part of K of so many elements. Parts lie behind each other. Of
// convolvesum, a block for every 32 elements of 16 parts and more, and otherwise for every 256.
