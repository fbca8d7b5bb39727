// Tensor cores: products of 16-bit floats, with sums of f32, from fragments that the threads of a
// warp hold together. Also copies to shared memory in groups. A host does what the instructions do,
// one thread after the other.
#pragma once

#include "number.cuh"

#if defined(__NVCC__) || defined(__CUDA__)
#define TENSOR_CORES AMPERE
#else
#define TENSOR_CORES 1
#endif

constexpr u32 chunk = 8; // elements of 16 bits in 16 bytes

// An f32 that is rounded to 11 bits of mantissa, as its bits.
struct tf32 { u32 bits; };

#if AMPERE

// Copies that a thread has begun since the last end_of_group are a group.
DEVICE void end_of_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups> DEVICE void wait_for_all_groups_but() {
	asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

DEVICE u32 in_shared(const void *p) {
#if defined(__NVCC__)
	return (u32)__cvta_generic_to_shared(p);
#else
	return (u32)(u64)(__attribute__((address_space(3))) const void *)p;
#endif
}

// Begin to copy 16 bytes, or a word, to shared memory: zeros where nothing is `there`, which is not
// read.
#if HOPPER // or newer PTX than that for Ampere: one instruction less
#define COPY_ASYNC_IF(copy, bytes) \
	asm volatile("{.reg .pred p; setp.eq.u32 p, %2, 0; " copy \
				 " [%0], [%1], %3, p;}" ::"r"(in_shared(shared)), \
		"l"(from), "r"((u32)there), "n"(bytes) \
		: "memory")
#else
#define COPY_ASYNC_IF(copy, bytes) \
	asm volatile(copy " [%0], [%1], %3, %2;" ::"r"(in_shared(shared)), "l"(from), \
		"r"(there ? bytes : 0), "n"(bytes) \
		: "memory")
#endif
DEVICE void copy_async_if(bool there, b128 *shared, const void *from) {
	COPY_ASYNC_IF("cp.async.cg.shared.global", 16);
}
DEVICE void copy_async_if(bool there, f32 *shared, const f32 *from) {
	COPY_ASYNC_IF("cp.async.ca.shared.global", 4);
}

// Reads four matrices of 8 by 8, transposed if asked to: lane i of the warp gives row i % 8 of
// matrix i / 8, and gets elements 2 (i % 4) and the next of row i / 4 of each.
template <bool transposed> DEVICE void load_matrices(u32 (&x)[4], const b128 *row) {
	if (transposed)
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
			: "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(in_shared(row)) : "memory");
	else
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
			: "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(in_shared(row)) : "memory");
}

// sum += a b, for a of 16 by 16 and b of 16 by 8, or 16 by 8 and 8 by 8 of tf32: PTX has the layout
// of the fragments.
#define MULTIPLY_FRAGMENTS(S, shape, type) \
	DEVICE void multiply_fragments(S, f32(&sum)[4], const u32(&a)[4], u32 b0, u32 b1) { \
		asm("mma.sync.aligned." shape ".row.col.f32." type "." type \
			".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
			: "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) \
			: "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); \
	}
MULTIPLY_FRAGMENTS(f16, "m16n8k16", "f16")
MULTIPLY_FRAGMENTS(bf16, "m16n8k16", "bf16")
MULTIPLY_FRAGMENTS(tf32, "m16n8k8", "tf32")

DEVICE tf32 narrow_tf32(f32 x) {
	tf32 y;
	asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y.bits) : "f"(x));
	return y;
}

// Two numbers, rounded to bf16: the first one in the lower half.
DEVICE u32 pair_of_bf16(f32 low, f32 high) {
	u32 both;
	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
	return both;
}

#elif TENSOR_CORES

DEVICE void end_of_group() {}
template <int groups> DEVICE void wait_for_all_groups_but() {}

DEVICE void copy_async_if(bool there, b128 *shared, const void *from) {
	*shared = there ? *static_cast<const b128 *>(from) : b128{};
}
DEVICE void copy_async_if(bool there, f32 *shared, const f32 *from) { *shared = there ? *from : 0; }

template <bool transposed> DEVICE void load_matrices(u32 (&x)[4], const b128 *row) {
	for (u32 m = 0; m < 4; m++)
		x[m] = emulate::together(row, [m](const b128 *const *rows, u32 lane) {
			auto element = [&](u32 r, u32 c) -> u32 {
				return reinterpret_cast<const u16 *>(rows[8 * m + r])[c];
			};
			u32 i = lane / 4, j = lane % 4 * 2;
			return transposed ? element(j, i) | element(j + 1, i) << 16
							  : element(i, j) | element(i, j + 1) << 16;
		});
}

template <class S>
DEVICE void multiply_fragments(S, f32 (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
	struct Both { u32 a[4], b[2]; };
	struct Sum {
		f32 x[4];
	} sums =
		emulate::together(Both{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](const Both *all, u32 lane) {
			constexpr u32 in_word = 4 / sizeof(S), half = 4 * in_word; // of K
			auto element = [](u32 word, u32 i) -> f64 {
				if constexpr (in_word == 1)
					return bits_as<f32>(word);
				else
					return widen(S{(u16)(word >> 16 * (i % 2))});
			};
			Sum y;
			for (u32 e = 0; e < 4; e++) {
				u32 row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
				f64 x = sum[e];
				for (u32 k = 0; k < 2 * half; k++) {
					u32 from = k % half / in_word, in = k / half;
					x += element(all[row % 8 * 4 + from].a[row / 8 + in * 2], k) *
						element(all[column * 4 + from].b[in], k);
				}
				y.x[e] = (f32)x;
			}
			return y;
		});
	for (u32 e = 0; e < 4; e++)
		sum[e] = sums.x[e];
}

DEVICE tf32 narrow_tf32(f32 x) { return tf32{(bits_as<u32>(x) + 0x1000) & ~0x1fffu}; }

DEVICE u32 pair_of_bf16(f32 low, f32 high) {
	return narrow_bf16(low).bits | (u32)narrow_bf16(high).bits << 16;
}

#endif

// Products of warpgroups, four warps together: `sum` of 64 rows, 16 of each warp, and 64 columns,
// in fragments like those above. They run beside what follows: a wait gives the sums of groups, and
// until then nobody touches what they read. Right operands lie in shared memory in panels of 8 rows
// of 128 bytes, of which chunk i of row r is at place i ^ r % 8. Rows are columns of the product,
// or what is summed over if `transposed`. Rows have some panels, one after the other: columns of a
// product are of one if `transposed`.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WARPGROUPS 1

DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_of_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int groups> DEVICE void wait_for_all_products_but() {
	asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// Before a barrier, lets products behind it see what this thread has written to shared memory.
DEVICE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Says that x is changed here, so that the compiler moves nothing that reads or writes it across.
DEVICE void hold(f32 &x) { asm volatile("" : "+f"(x)::"memory"); }
DEVICE void hold(u32 &x) { asm volatile("" : "+r"(x)::"memory"); }

// sum = a b, or += with `add`, for columns 16 k on of a and those rows of b: 16, 32 or 64 columns.
template <bool transposed, u32 panels, u32 n>
DEVICE void multiply_wide(bool add, f32 (&sum)[n][4], const u32 (&a)[4], const b128 *tile, u32 k) {
	constexpr u32 panel = 64; // chunks
	u64 b = (u64)1 << 62 | (u64)(panels * panel) << 32 |
		(in_shared(tile) / 16 + (transposed ? k * 2 * panels * panel : k / 4 * panel + k % 4 * 2));
	static_assert(n == 2 || n == 4 || n == 8, "there are instructions for others, too");
#define EIGHT(j) \
	"+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3]), "+f"(sum[j + 1][0]), \
		"+f"(sum[j + 1][1]), "+f"(sum[j + 1][2]), "+f"(sum[j + 1][3])
#define MULTIPLY_WIDE(columns, sums, a0, a1, a2, a3, b0, add0, transposed0, ...) \
	asm volatile("{.reg .pred p; setp.ne.b32 p, " add0 \
				 ", 0; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" sums \
				 "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b0 ", p, 1, 1, " transposed0 ";}" \
		: __VA_ARGS__ \
		: "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)add), "n"((u32)transposed) \
		: "memory")
#define SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS_16 SUMS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_32 \
	SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
	if constexpr (n == 2)
		MULTIPLY_WIDE("16", SUMS_8, "%8", "%9", "%10", "%11", "%12", "%13", "%14", EIGHT(0));
	else if constexpr (n == 4)
		MULTIPLY_WIDE("32", SUMS_16, "%16", "%17", "%18", "%19", "%20", "%21", "%22", EIGHT(0),
			EIGHT(2));
	else
		MULTIPLY_WIDE("64", SUMS_32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", EIGHT(0),
			EIGHT(2), EIGHT(4), EIGHT(6));
}

#else
#define WARPGROUPS (TENSOR_CORES && !AMPERE)

DEVICE void begin_products() {}
DEVICE void end_of_products() {}
template <int groups> DEVICE void wait_for_all_products_but() {}
DEVICE void show_to_products() {}
template <class T> DEVICE void hold(T &) {}

#if !WARPGROUPS
template <bool transposed, u32 panels, u32 n>
DEVICE void multiply_wide(bool add, f32 (&sum)[n][4], const u32 (&a)[4], const b128 *tile, u32 k);
#else
template <bool transposed, u32 panels, u32 n>
DEVICE void multiply_wide(bool add, f32 (&sum)[n][4], const u32 (&a)[4], const b128 *tile, u32 k) {
	struct Left { u32 x[4]; };
	struct Products {
		f32 x[n][4];
	} products = emulate::together(Left{{a[0], a[1], a[2], a[3]}}, [&](const Left *all, u32 lane) {
		auto element = [](u32 pair, u32 i) {
			return (f64)widen(bf16{(u16)(pair >> 16 * (i % 2))});
		};
		Products y;
		for (u32 j = 0; j < n; j++)
			for (u32 e = 0; e < 4; e++) {
				u32 row = lane / 4 + e / 2 * 8, column = 8 * j + lane % 4 * 2 + e % 2;
				f64 x = add ? sum[j][e] : 0;
				for (u32 i = 0; i < 16; i++) {
					u32 r = transposed ? 16 * k + i : column, c = transposed ? column : 16 * k + i;
					u16 b = reinterpret_cast<const u16 *>(tile + r / 8 * 64 * panels + c / 64 * 64 +
						r % 8 * 8 + (c / 8 ^ r) % 8)[c % 8];
					x += element(all[row % 8 * 4 + i % 8 / 2].x[row / 8 + i / 8 * 2], i) *
						(f64)widen(bf16{b});
				}
				y.x[j][e] = (f32)x;
			}
		return y;
	});
	for (u32 j = 0; j < n; j++)
		for (u32 e = 0; e < 4; e++)
			sum[j][e] = products.x[j][e];
}
#endif

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
