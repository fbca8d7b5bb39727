// The common part of kernels that exchange data among two to eight devices with access to
// each other's memory: rounds, waits, sums in rank order, LL packets, staging.
//
// # Rounds
//
// A call consists of rounds. The device numbers them, so that calls from the host and from
// a replayed graph share one sequence. In every round each rank receives from every other
// rank. So a rank that begins round t+2 has received round t+1 from all others: they had
// begun round t+1 and were done with round t. Inboxes and staging alternate between two
// halves, by the round, and need no other protection. If a call has several rounds, this
// holds for each block, or each group of threads with a line, separately: it must be the
// same one in all rounds of a call.
#pragma once

#include "number.cuh"
#include "system.cuh"

namespace peers {

constexpr u32 most_ranks = 8, most_blocks = 128, most_windows = 64;

// State is a rank's progress. There is a copy for each block. Block b of a grid of G updates
// copies b, b+G, b+2G...: so all copies stay equal, whatever the grids, and no block reads
// a copy that another one writes.
struct State {
	u64 round;      // the last one
	u64 cleaned[2]; // the last round at whose end each half of the inboxes was cleaned
	u32 dead;       // a wait has failed: later kernels do nothing
};

// Place is the number of a window times 2^48, plus an offset in it in bytes. Window 0 is
// staging.
struct Place { u64 source, target; };

// Pad is the memory that a group needs on each rank. The inboxes follow it: for each half
// and each sender `packets` of 16 bytes; then for each half `lines` of 128.
struct Pad {
	State state[most_blocks];
	u64 windows[most_windows][most_ranks]; // where this rank reaches those of each rank
	// Written by the others:
	Place places[2][most_blocks][most_ranks];
	u64 entered[most_blocks][most_ranks]; // the last round that they have entered
	u64 left[most_blocks][most_ranks];    // the last round that they are done with
	u64 hosts[most_ranks];                // used by the hosts only
	u64 unused[8];                        // lines begin at multiples of their size
};

// Status is in the host's memory.
struct Status {
	u32 stop;   // set by the host: end all waits
	u32 reason; // 1 + the rank that did not come within the limit
};

struct Group {
	u32 rank, size;
	Pad *pads[most_ranks];
	Status *status;
	u64 limit;   // of a wait, in nanoseconds
	u64 packets; // in an inbox
	u64 lines;   // in each half, of all senders together
	u64 staging; // bytes of each half
	u64 divisor; // of the sum: size for an average, else 1
};

// Tree is a Group whose sums are in a tree: neighbours first, then neighbouring sums; the last one
// of an odd number joins the next level as it is.
struct Tree : Group {};

// Block is shared by the threads of a block.
struct Block {
	State state;
	u32 failed;
	// in this round: where to read from each rank, and write to
	u64 source[most_ranks], target[most_ranks];
	u32 direct[most_ranks];                     // whether a rank shows its own memory
};

// The flag of a packet is the lower half of the round's number. 0 is skipped, since clean
// memory holds it; halves still alternate.
DEVICE u64 next(u64 round) { return (u32)(round + 1) == 0 ? round + 3 : round + 1; }

DEVICE Pad *own(const Group &g) { return g.pads[g.rank]; }

// begin reports whether the group still works.
DEVICE bool begin(const Group &g, Block &k) {
	if (thread_x() == 0) {
		k.state = own(g)->state[block_x()];
		k.failed = 0;
	}
	barrier();
	return !k.state.dead;
}

// How often a wait polls its flag before it checks the clock and the host's memory, which is
// far: about half a millisecond.
constexpr u32 polls_per_check = 1024;

// A thread waits alone, or with its warp.
struct Alone { static DEVICE u32 agree(u32 x) { return x; } };
struct Warp { static DEVICE u32 agree(u32 x) { return ::agree(x); } };

// await polls until missing() returns 0; until then that is 1 + the number of a missing rank.
// It returns false after the limit, or if the host sets stop; every later kernel then ends
// at once.
template <class Who = Alone, class Missing> DEVICE bool await(const Group &g, Missing missing) {
	u64 began = 0;
	for (u32 looks = 1;; looks++) {
		u32 rank = Who::agree(missing());
		if (rank == 0)
			return true;
		relax();
		if (looks % polls_per_check != 0)
			continue;
		u64 now = nanoseconds();
		if (began == 0)
			began = now;
		bool late = Who::agree(now - began > g.limit);
		if (!late && !Who::agree(get_word(&g.status->stop)))
			continue;
		if (late)
			put_word(&g.status->reason, rank);
#pragma unroll 1
		for (u32 b = 0; b < most_blocks; b++)
			put_word(&own(g)->state[b].dead, 1);
		return false;
	}
}

// Conversions by instructions. Those of Number also keep the payload of a NaN, which matters
// little here, as the sum of several NaNs has the payload of any of them. Without the
// instruction for bf16 its NaN is imitated, so that all devices give the same bits.
DEVICE f32 wide(f32 x) { return x; }
DEVICE f32 wide(bf16 x) { return widen(x); }
DEVICE void narrow(f32 &y, f32 x) { y = x; }
#if defined(__CUDA__) || defined(__NVCC__)
DEVICE f32 wide(f16 x) {
	f32 y;
	asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
	return y;
}
DEVICE void narrow(f16 &y, f32 x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
#else
DEVICE f32 wide(f16 x) { return widen(x); }
DEVICE void narrow(f16 &y, f32 x) { y = narrow_f16(x); }
#endif
#if AMPERE
DEVICE void narrow(bf16 &y, f32 x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
#else
DEVICE void narrow(bf16 &y, f32 x) { y = x == x ? nearest_bf16(x) : bf16{0x7fff}; }
#endif

// add_up combines the elements of ranks 0 to size, in this order. R is a bound of
// size that the compiler knows.
template <class T, u32 R, int N> DEVICE void add_up(T (&y)[N], const T (&x)[R][N], const Group &g) {
	f32 sum[N];
#pragma unroll
	for (int i = 0; i < N; i++) {
		sum[i] = wide(x[0][i]);
#pragma unroll
		for (u32 p = 1; p < R; p++)
			if (p < g.size)
				sum[i] = plus(sum[i], wide(x[p][i]));
	}
	if (g.divisor != 1)
#pragma unroll
		for (int i = 0; i < N; i++)
			sum[i] = over(sum[i], (f32)g.divisor);
#pragma unroll
	for (int i = 0; i < N; i++)
		narrow(y[i], sum[i]);
}

template <class T, u32 R, int N> DEVICE void add_up(T (&y)[N], const T (&x)[R][N], const Tree &g) {
#pragma unroll
	for (int i = 0; i < N; i++) {
		f32 sums[R];
#pragma unroll
		for (u32 p = 0; p < R; p++)
			sums[p] = p < g.size ? wide(x[p][i]) : 0;
#pragma unroll
		for (u32 step = 1; step < R; step *= 2)
#pragma unroll
			for (u32 p = 0; p + step < R; p += 2 * step)
				if (p + step < g.size)
					sums[p] = plus(sums[p], sums[p + step]);
		narrow(y[i], g.divisor != 1 ? over(sums[0], (f32)g.divisor) : sums[0]);
	}
}

// by_size runs body with the least bound there is code for.
template <class Body> DEVICE void by_size(u32 size, Body body) {
	if (size <= 2)
		body(Count<2>{});
	else if (size <= 4)
		body(Count<4>{});
	else
		body(Count<8>{});
}

// fetch reads unit i of n elements, with zeros behind them; deliver writes one, and
// nothing behind them.
template <int N, class T> DEVICE void fetch(T (&x)[N], const T *src, u64 i, u64 n, bool vectors) {
	if (vectors && (i + 1) * N <= n) {
		load(x, src + i * N);
		return;
	}
#pragma unroll
	for (int j = 0; j < N; j++)
		x[j] = i * N + j < n ? src[i * N + j] : T{};
}

template <int N, class T> DEVICE void deliver(T *dst, const T (&x)[N], u64 i, u64 n, bool vectors) {
	if (vectors && (i + 1) * N <= n) {
		store(dst + i * N, x);
		return;
	}
#pragma unroll
	for (int j = 0; j < N; j++)
		if (i * N + j < n)
			dst[i * N + j] = x[j];
}

// ---- LL ----

// slot is where packet i of a sender lies in the inboxes of a rank.
DEVICE u64 *slot(const Group &g, u32 at, u32 half, u32 from, u64 i) {
	return reinterpret_cast<u64 *>(g.pads[at] + 1) + 2 * ((half * g.size + from) * g.packets + i);
}

// A packet is {value, flag, value, flag}, of 32 bits each.
DEVICE void send(u64 *to, u64 value, u32 flag) {
	put_packet(to, (u64)flag << 32 | (value & 0xffffffff), (u64)flag << 32 | value >> 32);
}

// receive reports whether both halves have arrived.
DEVICE bool receive(u64 &value, const u64 *from, u32 flag) {
	u64 a, b;
	get_packet(a, b, from);
	value = (a & 0xffffffff) | b << 32;
	return a >> 32 == flag && b >> 32 == flag;
}

// ---- the end of a kernel ----

// Flags repeat after 2^32 rounds, and a packet of a very old round would then be taken for a new
// one. So every 2^30 rounds the half of the inboxes that the last round used is cleared, by the
// threads that read it: no rank writes to it before this kernel has ended.
constexpr u64 cleaning = 1 << 30;

DEVICE void clean(const Group &g, State &s) {
	u32 half = s.round & 1;
	if (s.round - (half ? s.cleaned[1] : s.cleaned[0]) < cleaning)
		return;
	(half ? s.cleaned[1] : s.cleaned[0]) = s.round;
	for (u32 p = 0; p < g.size; p++)
		for (u64 i = thread_index(); i < g.packets; i += thread_count())
			send(slot(g, g.rank, half, p, i), 0, 0);
}

// end is called by a block after its last round.
DEVICE void end(const Group &g, State s) {
	clean(g, s);
	for (u32 b = block_x() + thread_x() * blocks_x(); b < most_blocks;
		b += threads_x() * blocks_x()) {
		State *copy = &own(g)->state[b];
		copy->round = s.round;
		copy->cleaned[0] = s.cleaned[0];
		copy->cleaned[1] = s.cleaned[1];
	}
}

// ---- staging ----

// staged returns the staging of a rank in a round, as this rank reaches it.
template <class T> DEVICE T *staged(const Group &g, u32 at, u64 round) {
	return reinterpret_cast<T *>(own(g)->windows[0][at] + (round & 1) * g.staging);
}

// units of a run of n elements, and those of a piece of it.
template <class T> DEVICE u64 units_of(u64 n) { return (n * sizeof(T) + 15) / 16; }
DEVICE u64 piece_of(u64 units, u64 lo, u64 piece) {
	return lo < units ? least(units - lo, piece) : 0;
}

// opaque keeps the compiler from computing what depends on x ahead of a loop, and keeping it in
// registers that the loop needs.
#if defined(__CUDA__) || defined(__NVCC__)
DEVICE u64 opaque(u64 x) { asm volatile("" : "+l"(x)); return x; }
#else
DEVICE u64 opaque(u64 x) { return x; }
#endif

// first_from is the first unit from `first` on that is this thread's: each deals with each
// `thread_count`-th. It is `end` if there are none, as where everything is whole units: small
// calls would wait for the division.
DEVICE u64 first_from(u64 first, u64 end) {
	u64 i = thread_index(), every = thread_count();
	if (first >= end)
		return end;
	return i < first ? i + (first - i + every - 1) / every * every : i;
}

// copy_units copies whole units between multiples of 16. A thread has four loads under way; in
// small calls it has one unit, and skips the questions whether there are more.
template <class T> DEVICE void copy_units(T *to, const T *from, u64 count) {
	constexpr u32 N = 16 / sizeof(T), K = 4;
	u64 first = thread_index(), every = opaque(thread_count());
	if (count <= every) {
		if (first < count) {
			T x[N];
			load(x, from + first * N);
			store(to + first * N, x);
		}
		return;
	}
#pragma unroll 1
	for (u64 i = first; i < count; i += K * every) {
		T x[K][N];
#pragma unroll
		for (u32 j = 0; j < K; j++)
			if (i + j * every < count)
				load(x[j], from + (i + j * every) * N);
#pragma unroll
		for (u32 j = 0; j < K; j++)
			if (i + j * every < count)
				store(to + (i + j * every) * N, x[j]);
	}
}

// copy_in copies `count` units of src, of n elements in all, from its unit lo on, with zeros
// behind the last one.
template <class T> DEVICE void copy_in(T *to, const T *src, u64 lo, u64 count, u64 n) {
	constexpr u32 N = 16 / sizeof(T);
	u64 whole = aligned(ADDRESS(src), 16) ? piece_of(n / N, lo, count) : 0;
	copy_units(to, src + lo * N, whole);
#pragma unroll 1
	for (u64 i = first_from(whole, count); i < count; i += thread_count())
#pragma unroll 1
		for (u32 j = 0; j < N; j++)
			to[i * N + j] = (lo + i) * N + j < n ? src[(lo + i) * N + j] : T{};
}

} // namespace peers
