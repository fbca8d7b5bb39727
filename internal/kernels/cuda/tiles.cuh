// Tiles of products of matrices in shared memory, and the sums that a thread has of one: for
// gemm.cu and convolve.cu.
//
// A block computes one tile of C. It goes along K in steps of `depth`: the next step of A and B is
// read to registers while the current one is multiplied from shared memory, where both lie with K
// as the slow index, so that a thread reads its rows and columns as vectors. A thread has EachRow x
// EachColumn sums in registers. This is the design of CUTLASS's SIMT kernels. Sums are fused
// multiply-adds in the order of K, so that they do not depend on the tiles, and are the same in
// every run.
#pragma once

#include "functions.cuh"

constexpr u32 tile_threads = 256, depth = 8;

// A step of an operand in shared memory. Rows are padded, so that the threads of a warp that write
// elements of several rows write to different banks.
template <class T, u32 Side> using OperandStep = T[depth][Side + 4];

// A thread's rows, or columns, of a tile: vectors of up to 4, a vector of every thread after the
// other.
template <u32 Side, u32 Each> struct Places {
	static constexpr u32 width = Each < 4 ? Each : 4, groups = Each / width, spread = Side / groups;
	static DEVICE u32 at(u32 i, u32 lane) { return i / width * spread + lane * width + i % width; }

	template <class T> static DEVICE void load_all(T (&x)[Each], const T *row, u32 lane) {
#pragma unroll
		for (u32 g = 0; g < groups; g++) {
			T part[width];
			load(part, row + g * spread + lane * width);
#pragma unroll
			for (u32 i = 0; i < width; i++)
				x[g * width + i] = part[i];
		}
	}
};

// A thread's sums of a tile of Rows x Columns.
template <class T, u32 Rows, u32 Columns, u32 EachRow, u32 EachColumn> struct Sums {
	typedef Places<Rows, EachRow> R;
	typedef Places<Columns, EachColumn> C;
	static constexpr u32 lanes = Columns / EachColumn;
	static_assert(Rows / EachRow * lanes == tile_threads, "a thread for each part of the tile");
	T x[EachRow][EachColumn];

	// A warp is 4 threads down by 8 across, pairs of rows first: eight threads that read shared
	// memory at a time read few different vectors.
	static constexpr u32 warps = lanes / 8;
	static DEVICE u32 down() {
		return thread_x() / 32 / warps * 4 + thread_x() / 16 % 2 * 2 + thread_x() % 2;
	}
	static DEVICE u32 across() { return thread_x() / 32 % warps * 8 + thread_x() / 2 % 8; }
	static DEVICE u32 row(u32 i) { return R::at(i, down()); }
	static DEVICE u32 column(u32 j) { return C::at(j, across()); }

	DEVICE void add(const OperandStep<T, Rows> &a, const OperandStep<T, Columns> &b) {
#pragma unroll 2
		for (u32 k = 0; k < depth; k++) {
			T left[EachRow], right[EachColumn];
			R::load_all(left, a[k], down());
			C::load_all(right, b[k], across());
#pragma unroll
			for (u32 i = 0; i < EachRow; i++)
#pragma unroll
				for (u32 j = 0; j < EachColumn; j++)
					x[i][j] = fused(left[i], right[j], x[i][j]);
		}
	}
};
