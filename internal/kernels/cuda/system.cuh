// Memory that several devices and the host use at a time, and the clock.
//
// What a flag guards is written before put_flag and read after a get_flag that
// saw it: release and acquire at the scope of the whole system. A block does so
// for all its threads when a barrier is in between. LL packets need no such order: each
// half of a packet, eight bytes, is written at once, and has a flag in it. Nor do LL128
// lines, where a warp writes and reads 128 bytes at once, as it does over NVLink: the
// last word of a line is its flag.
#pragma once

#include "device.cuh"

// A lambda that is not inlined would have what it captures in memory.
#define INLINE __attribute__((always_inline))

// Programmatic dependent launch: on Hopper, a kernel may start before the kernels before it on its
// stream have ended. await_predecessors waits until they have ended and their writes are visible;
// it comes before the kernel's first access to memory. A family with a text of its own for Hopper
// calls it; in all other texts pdl.go inserts it. release_successors lets the next kernel start,
// and wait in turn, as soon as all blocks have called it; without it that is when they end.
//
// Small grids back to back are faster with release_successors: 3.3 us instead of 3.8 for sums of
// 1 KiB. Where blocks meet more than once, or threads take more than one turn, waiting blocks are
// in the way: with it, LL128 two-shot took 0.4 us longer for 1 KiB, and LL128 0.3 us for 1 MiB (two
// H200, 2026-11-21-h200x2-lowlatency-launch.txt). Devices before Hopper have neither.
#if HOPPER
DEVICE void await_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void release_successors() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void await_predecessors() {}
DEVICE void release_successors() {}
#endif

#if defined(__CUDA__) || defined(__NVCC__)

DEVICE void put_flag(u64 *p, u64 x) {
	asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
DEVICE u64 get_flag(const u64 *p) {
	u64 x;
	asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
	return x;
}
DEVICE void put_packet(u64 *p, u64 a, u64 b) {
	asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b)
		: "memory");
}
DEVICE void get_packet(u64 &a, u64 &b, const u64 *p) {
	asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
		: "=l"(a), "=l"(b)
		: "l"(p)
		: "memory");
}
// Words that guard nothing.
DEVICE void put_word(u32 *p, u32 x) {
	asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
DEVICE u32 get_word(const u32 *p) {
	u32 x;
	asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
	return x;
}
DEVICE u64 nanoseconds() {
	u64 t;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	return t;
}
// Between two looks at a flag: a device has nothing better to do.
DEVICE void relax() {}

// Lines are the business of whole warps, whose threads do the same: converge waits
// for all of them, and agree returns an x of theirs that is not 0, if there is one: to all
// of them the same.
DEVICE void converge() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
#if AMPERE
DEVICE u32 agree(u32 x) {
	u32 most;
	asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(x) : "memory");
	return most;
}
#else
// The last thread's that has one. If none has, it is found nowhere, which is thread 31.
DEVICE u32 agree(u32 x) {
	u32 last;
	asm volatile("{ .reg .pred p; .reg .u32 all, at; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 "
				 "all, p, 0xffffffff; "
				 "bfind.u32 at, all; shfl.sync.idx.b32 %0, %1, at, 31, 0xffffffff; }"
		: "=r"(last)
		: "r"(x)
		: "memory");
	return last;
}
#endif

// get_part reads this thread's part of a line, its lane-th two words, and reports
// whether it was there: what the thread with the flag says goes for all eight, once
// they agree.
DEVICE bool get_part(u64 &a, u64 &b, const u64 *line, u32 lane, u64 flag) {
	get_packet(a, b, line + 2 * lane);
	return lane != 7 || b == flag;
}

#else

#include <chrono>

DEVICE void put_flag(u64 *p, u64 x) { __atomic_store_n(p, x, __ATOMIC_RELEASE); }
DEVICE u64 get_flag(const u64 *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE void put_packet(u64 *p, u64 a, u64 b) {
	__atomic_store_n(p, a, __ATOMIC_RELAXED);
	__atomic_store_n(p + 1, b, __ATOMIC_RELEASE);
}
DEVICE void get_packet(u64 &a, u64 &b, const u64 *p) {
	a = __atomic_load_n(p, __ATOMIC_RELAXED);
	b = __atomic_load_n(p + 1, __ATOMIC_RELAXED);
}
DEVICE void put_word(u32 *p, u32 x) { __atomic_store_n(p, x, __ATOMIC_RELAXED); }
DEVICE u32 get_word(const u32 *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DEVICE u64 nanoseconds() {
	return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
DEVICE void relax() { emulate::pause(); }

// Threads read one by one, so each looks at the flag before it reads, and need not
// agree.
DEVICE void converge() { emulate::wait_for_warp(); }
DEVICE u32 agree(u32 x) { return x; }
DEVICE bool get_part(u64 &a, u64 &b, const u64 *line, u32 lane, u64 flag) {
	bool there = get_flag(line + 15) == flag;
	get_packet(a, b, line + 2 * lane);
	return there;
}

#endif
