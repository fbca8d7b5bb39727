// LL128 two-shot: sums and averages among two to eight devices that reach each other's
// memory, in two steps. ll128twoshot_DTYPE sends operands as they are; halved_HALF sends
// f32 as 16 bits. For LL128 itself see allreduce.cu and ll128.cuh.
//
// halved rounds every operand to HALF, this rank's own, too; each rank adds up one segment
// in rank order, in 32 bits, divides by the number of ranks, and rounds the average once.
// That is what all ranks write, widened; a sum is the average times the number of ranks.
// So no sum overflows HALF that has operands which do not, and all ranks get the same
// bits. Casts are on the way from the operand and on the way to the result, so that
// nothing is stored in 16 bits but in the inboxes, whose size does not depend on the
// operand's.

#include "ll128.cuh"

namespace peers {

// ---- kernels ----

// Numbers are what this thread's part of a line of W is in memory: W or, cast, T.
template <class T, class W> struct Numbers {
	static constexpr bool cast = sizeof(T) != sizeof(W);
	static constexpr u32 N = Part<W>::N / 2, vector = N * sizeof(T); // bytes
	T lo[N], hi[N];

	static DEVICE bool both() { return Part<W>::length() == 2 * N; } // the last part has no hi

	// whole reports whether line i of n numbers has all of the part, and vectors that
	// memory begins at a multiple of vector: read and write are for such parts.
	static DEVICE bool whole(u64 i, u64 n, bool vectors) {
		return vectors && Part<W>::index(i) + Part<W>::length() <= n;
	}

	DEVICE void read(const T *src, u64 i) {
		load(lo, src + Part<W>::index(i));
		if (both())
			load(hi, src + Part<W>::index(i) + N);
	}
	// Some of it, and zeros behind the end.
	DEVICE void read_some(const T *src, u64 i, u64 n) {
		u64 at = Part<W>::index(i);
#pragma unroll
		for (u32 j = 0; j < N; j++) {
			lo[j] = at + j < n ? src[at + j] : T{};
			hi[j] = both() && at + N + j < n ? src[at + N + j] : T{};
		}
	}
	DEVICE void write(T *dst, u64 i, u64 n, bool vectors) const {
		u64 at = Part<W>::index(i);
		if (whole(i, n, vectors)) {
			store(dst + at, lo);
			if (both())
				store(dst + at + N, hi);
			return;
		}
#pragma unroll
		for (u32 j = 0; j < N; j++) {
			if (at + j < n)
				dst[at + j] = lo[j];
			if (both() && at + N + j < n)
				dst[at + N + j] = hi[j];
		}
	}

	// part is what travels of them.
	DEVICE Part<W> part() const {
		W x[2][N];
#pragma unroll
		for (u32 j = 0; j < N; j++)
			to(x[0][j], lo[j]), to(x[1][j], hi[j]);
		Part<W> part;
		__builtin_memcpy(&part.lo, x[0], 8);
		__builtin_memcpy(&part.hi, x[1], 8);
		return part;
	}
	DEVICE Numbers(const Part<W> &part, f32 factor) {
		W x[2][N];
		__builtin_memcpy(x[0], &part.lo, 8);
		__builtin_memcpy(x[1], &part.hi, 8);
#pragma unroll
		for (u32 j = 0; j < N; j++)
			from(lo[j], x[0][j], factor), from(hi[j], x[1][j], factor);
	}
	Numbers() = default;

	static DEVICE void to(W &y, T x) {
		if constexpr (cast)
			narrow(y, x);
		else
			y = x;
	}
	static DEVICE void from(T &y, W x, f32 factor) {
		if constexpr (cast)
			y = times(wide(x), factor);
		else
			y = x;
	}
};

// for i < n { dst[i] = W(sum over p of W(src of rank p [i]) / divisor) }, times factor if T is
// not W
//
// The operand is cut into a segment for each rank. A round handles `some` lines of each
// segment: a rank sends the lines of the others' segments to them, adds those of its own and
// pushes the results to all others, and collects their results. It also works in place: the
// thread that writes a part of dst is the one that has read it in src. All rounds of a call
// have the same number of lines, even if some are empty, so that a thread takes part in all
// rounds or in none, and receives from the same thread of every other rank in each.
//
// The operands of round r+1 are sent before the results of round r are collected, so that the
// links stay busy. Two halves of the inboxes are enough. A rank writes operands of round r+1
// after it has added those of round r, which all others sent after adding those of round r-1. It
// writes results of round r with operands of round r from all others, which they sent after
// collecting the results of round r-2.
template <class T, class W>
DEVICE void ll128_two_shot(const Group &g, T *dst, const T *src, u64 n, u64 some, u64 rounds,
	f32 factor) {
	typedef Numbers<T, W> Own;
	SHARED Block k;
	if (!begin(g, k))
		return;
	State s = k.state;
	Turns turns;
	u64 room = room_in(g, 2 * g.size);
	bool vectors = aligned(ADDRESS(dst) | ADDRESS(src), Own::vector), ok = true;
	auto line = [&](u32 p, u64 r, u64 i) INLINE { return (p * rounds + r) * some + i; };
	by_size(g.size, [&](auto bound) INLINE {
		constexpr u32 R = decltype(bound)::value;
		// Round r of the call has number `round`. Each rank starts with another one, so
		// that links are used evenly.
		auto to = [&](u32 step) INLINE {
			return g.rank + step < g.size ? g.rank + step : g.rank + step - g.size;
		};
		auto spread = [&](u64 r, u64 round) INLINE {
			for (u64 i = turns.first; turns.more(i, some); i += turns.every) {
				// and so are those before it
				bool mine = i < some, whole = Own::whole(line(g.size - 1, r, i), n, vectors);
				// more would be spilled
				constexpr u32 few = 112 / sizeof(Own), K = R - 1 < few ? R - 1 : few;
#pragma unroll
				for (u32 first = 1; first < R; first += K) {
					Own x[K]; // all are on their way before the first one is used
#pragma unroll
					for (u32 k = 0; k < K; k++)
						if (mine && whole && first + k < g.size)
							x[k].read(src, line(to(first + k), r, i));
#pragma unroll
					for (u32 k = 0; k < K; k++)
						if (mine && !whole && first + k < g.size)
							x[k].read_some(src, line(to(first + k), r, i), n);
					converge();
#pragma unroll
					for (u32 k = 0; k < K; k++)
						if (mine && first + k < g.size)
							x[k].part().send(line_at(g, to(first + k), round & 1, g.rank, room, i),
								round);
				}
			}
		};
		auto add = [&](u64 r, u64 round) INLINE {
			for (u64 i = turns.first; turns.more(i, some) && ok; i += turns.every) {
				Part<W> parts[R] = {};
				Own own;
				u64 at = line(g.rank, r, i);
				bool mine = i < some;
				if (mine && Own::whole(at, n, vectors))
					own.read(src, at);
				else if (mine)
					own.read_some(src, at, n);
				auto each = [&](u32) INLINE { return mine; };
				ok = collect(g, parts, each, round & 1, 0, room, i, round);
				if (!ok)
					break;
				Part<W> y = sum(g, parts, own.part());
				push(
					g, [&](u32) INLINE { return y; }, each, round & 1, g.size + g.rank, room, i,
					round);
				if (mine)
					Own(y, factor).write(dst, at, n, vectors);
			}
		};
		auto gather = [&](u64 r, u64 round) INLINE {
			for (u64 i = turns.first; turns.more(i, some) && ok; i += turns.every) {
				Part<W> parts[R] = {};
				ok = collect(
					g, parts, [&](u32) INLINE { return i < some; }, round & 1, g.size, room, i,
					round);
#pragma unroll
				for (u32 p = 0; p < R; p++)
					if (ok && i < some && p < g.size && p != g.rank)
						Own(parts[p], factor).write(dst, line(p, r, i), n, vectors);
			}
		};
		u64 coming = next(s.round);
		spread(0, coming);
		for (u64 r = 0; r < rounds && ok; r++) {
			s.round = coming, coming = next(coming);
			add(r, s.round);
			if (ok && r + 1 < rounds)
				spread(r + 1, coming);
			gather(r, s.round);
		}
	});
	if (ok)
		end(g, s);
}

#define PLAIN(T) \
	LEAN_KERNEL(ll128twoshot_##T, 512, Group g, T *dst, const T *src, u64 n, u64 some, \
		u64 rounds) { \
		ll128_two_shot<T, T>(g, dst, src, n, some, rounds, 1); \
	}
#define HALVED(W) \
	LEAN_KERNEL(halved_##W, 512, Group g, f32 *dst, const f32 *src, u64 n, u64 some, u64 rounds, \
		f64 factor) { \
		ll128_two_shot<f32, W>(g, dst, src, n, some, rounds, (f32)factor); \
	}

PLAIN(f32)
PLAIN(f16)
PLAIN(bf16)
HALVED(f16)
HALVED(bf16)

// ---- launch ----
//
// The same grid on every rank, of blocks of whole warps, and all of them have room on the
// device together: see allreduce.cu. For halved, g.divisor is g.size.

} // namespace peers
