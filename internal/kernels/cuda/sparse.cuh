// What the threads of a warp do together: all of them call these at once.
#pragma once

#include "device.cuh"

#if defined(__CUDA__) || defined(__NVCC__)

// The threads for which x holds, one bit each.
DEVICE u32 votes_of(bool x) {
	u32 all;
	asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
		: "=r"(all)
		: "r"((u32)x));
	return all;
}

// The sum of x up to and with this thread's.
template <int distance> DEVICE void add_lower(u32 &x) {
	asm volatile("{ .reg .u32 y; .reg .pred p; shfl.sync.up.b32 y|p, %0, %1, 0, 0xffffffff; @p "
				 "add.u32 %0, %0, y; }"
		: "+r"(x)
		: "n"(distance));
}
DEVICE u32 running(u32 x) {
	add_lower<1>(x);
	add_lower<2>(x);
	add_lower<4>(x);
	add_lower<8>(x);
	add_lower<16>(x);
	return x;
}

// The x of the last thread.
DEVICE u32 last(u32 x) {
	u32 y;
	asm volatile("shfl.sync.idx.b32 %0, %1, 31, 31, 0xffffffff;" : "=r"(y) : "r"(x));
	return y;
}

// The sum of all x. From 8.0 on there is redux.sync, but a separate PTX variant that uses it is no
// faster (2026-11-27-kernel-variants.md).
DEVICE u32 total(u32 x) { return last(running(x)); }

DEVICE u32 bits_set(u32 x) { return __builtin_popcount(x); }
DEVICE u32 trailing_zeros(u32 x) { // 32 if there is no bit
	u32 y;
	asm("{ .reg .u32 r; brev.b32 r, %1; bfind.shiftamt.u32 %0, r; }" : "=r"(y) : "r"(x));
	return least(y, 32u);
}

// Words that guard nothing but themselves, among the blocks of a grid.
DEVICE void publish(u64 *p, u64 x) {
	asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
DEVICE u64 look(const u64 *p) {
	u64 x;
	asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
	return x;
}

// store_once writes what nobody reads soon.
DEVICE void store_once(f32 *p, const f32 (&x)[4]) {
	asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x[0]), "f"(x[1]),
		"f"(x[2]), "f"(x[3])
		: "memory");
}

DEVICE void add_global(u32 *p, u32 x) {
	asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
DEVICE void greatest_global(u64 *p, u64 x) {
	asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
DEVICE void add_shared(u32 *p, u32 x) {
	asm volatile("{ .reg .u64 a; cvta.to.shared.u64 a, %0; red.relaxed.cta.shared.add.u32 [a], %1; "
				 "}" ::"l"(p),
		"r"(x)
		: "memory");
}

#else

DEVICE u32 votes_of(bool x) {
	return emulate::together((u32)x, [](const u32 *all, u32) {
		u32 bits = 0;
		for (u32 i = 0; i < 32; i++)
			bits |= all[i] << i;
		return bits;
	});
}
DEVICE u32 running(u32 x) {
	return emulate::together(x, [](const u32 *all, u32 lane) {
		u32 sum = 0;
		for (u32 i = 0; i <= lane; i++)
			sum += all[i];
		return sum;
	});
}
DEVICE u32 last(u32 x) {
	return emulate::together(x, [](const u32 *all, u32) { return all[31]; });
}
DEVICE u32 total(u32 x) { return last(running(x)); }

DEVICE u32 bits_set(u32 x) { return __builtin_popcount(x); }
DEVICE u32 trailing_zeros(u32 x) { return x == 0 ? 32 : __builtin_ctz(x); }

DEVICE void publish(u64 *p, u64 x) { __atomic_store_n(p, x, __ATOMIC_RELAXED); }
DEVICE u64 look(const u64 *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DEVICE void store_once(f32 *p, const f32 (&x)[4]) { store(p, x); }
DEVICE void add_global(u32 *p, u32 x) { *p += x; }
DEVICE void greatest_global(u64 *p, u64 x) { *p = *p < x ? x : *p; }
DEVICE void add_shared(u32 *p, u32 x) { *p += x; }

#endif
