// Tensor cores: products of 16-bit floats, with sums of f32, from fragments that the threads of a warp
// hold together. Also copies to shared memory in groups. A host does what the instructions do, one
// thread after the other.
#pragma once

#include "number.cuh"

#if defined(__NVCC__) || defined(__CUDA__)
#define TENSOR_CORES AMPERE
#else
#define TENSOR_CORES 1
#endif

constexpr u32 chunk = 8; // elements of 16 bits in 16 bytes

#if AMPERE

// Copies that a thread has begun since the last end_of_group are a group.
DEVICE void end_of_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups> DEVICE void wait_for_all_groups_but() { asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory"); }

DEVICE u32 in_shared(const void *p) {
#if defined(__NVCC__)
	return (u32)__cvta_generic_to_shared(p);
#else
	return (u32)(u64)(__attribute__((address_space(3))) const void *)p;
#endif
}

// Begin to copy 16 bytes, or a word, to shared memory: zeros where nothing is `there`.
DEVICE void copy_async_if(bool there, b128 *shared, const void *from) {
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(in_shared(shared)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEVICE void copy_async_if(bool there, f32 *shared, const f32 *from) {
	asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(in_shared(shared)), "l"(from), "r"(there ? 4 : 0) : "memory");
}

// Reads four matrices of 8 by 8, transposed if asked to: lane i of the warp gives row i % 8 of matrix
// i / 8, and gets elements 2 (i % 4) and the next of row i / 4 of each.
template <bool transposed> DEVICE void load_matrices(u32 (&x)[4], const b128 *row) {
	if (transposed)
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
			: "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(in_shared(row)) : "memory");
	else
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
			: "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(in_shared(row)) : "memory");
}

// sum += a b, for a of 16 by 16 and b of 16 by 8: PTX has the layout of the fragments.
#define MULTIPLY_FRAGMENTS(S, type)                                                                            \
	DEVICE void multiply_fragments(S, f32 (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {                  \
		asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
			: "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                               \
			: "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                       \
	}
MULTIPLY_FRAGMENTS(f16, "f16")
MULTIPLY_FRAGMENTS(bf16, "bf16")

// Two numbers, rounded to bf16: the first one in the lower half.
DEVICE u32 pair_of_bf16(f32 low, f32 high) {
	u32 both;
	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
	return both;
}

#elif TENSOR_CORES

DEVICE void end_of_group() {}
template <int groups> DEVICE void wait_for_all_groups_but() {}

DEVICE void copy_async_if(bool there, b128 *shared, const void *from) { *shared = there ? *static_cast<const b128 *>(from) : b128{}; }
DEVICE void copy_async_if(bool there, f32 *shared, const f32 *from) { *shared = there ? *from : 0; }

template <bool transposed> DEVICE void load_matrices(u32 (&x)[4], const b128 *row) {
	for (u32 m = 0; m < 4; m++)
		x[m] = emulate::together(row, [m](const b128 *const *rows, u32 lane) {
			auto element = [&](u32 r, u32 c) -> u32 { return reinterpret_cast<const u16 *>(rows[8 * m + r])[c]; };
			u32 i = lane / 4, j = lane % 4 * 2;
			return transposed ? element(j, i) | element(j + 1, i) << 16 : element(i, j) | element(i, j + 1) << 16;
		});
}

template <class S> DEVICE void multiply_fragments(S, f32 (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
	struct Both { u32 a[4], b[2]; };
	struct Sum { f32 x[4]; } sums = emulate::together(Both{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](const Both *all, u32 lane) {
		auto element = [](u32 pair, u32 i) { return (f64)widen(S{(u16)(pair >> 16 * (i % 2))}); };
		Sum y;
		for (u32 e = 0; e < 4; e++) {
			u32 row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
			f64 x = sum[e];
			for (u32 k = 0; k < 16; k++)
				x += element(all[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k) * element(all[column * 4 + k % 8 / 2].b[k / 8], k);
			y.x[e] = (f32)x;
		}
		return y;
	});
	for (u32 e = 0; e < 4; e++)
		sum[e] = sums.x[e];
}

DEVICE u32 pair_of_bf16(f32 low, f32 high) { return narrow_bf16(low).bits | (u32)narrow_bf16(high).bits << 16; }

#endif

// The x of the lane whose number differs in the bits of `mask`; all of a warp call this at once.
DEVICE u32 across(u32 x, u32 mask) {
#if defined(__NVCC__) || defined(__CUDA__)
	u32 y;
	asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(y) : "r"(x), "r"(mask));
	return y;
#else
	return emulate::together(x, [mask](const u32 *all, u32 lane) { return all[lane ^ mask]; });
#endif
}
// An x that is the same in all lanes, as the compiler then knows.
DEVICE u32 of_warp(u32 x) {
#if defined(__NVCC__) || defined(__CUDA__)
	u32 y;
	asm volatile("shfl.sync.idx.b32 %0, %1, 0, 31, 0xffffffff;" : "=r"(y) : "r"(x));
	return y;
#else
	return x;
#endif
}
DEVICE f32 across(f32 x, u32 mask) { return bits_as<f32>(across(bits_as<u32>(x), mask)); }
DEVICE f64 across(f64 x, u32 mask) {
	u64 b = bits_as<u64>(x);
	return bits_as<f64>((u64)across((u32)(b >> 32), mask) << 32 | across((u32)b, mask));
}
