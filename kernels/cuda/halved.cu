// Sums and averages of f32 among two to eight devices that reach each other's memory,
// of which 16 bits travel: halved_HALF.
//
// Every operand is rounded to HALF, this rank's own, too; each rank adds up one segment
// in rank order, in 32 bits, divides by the number of ranks, and rounds the average once.
// That is what all ranks write, widened; a sum is the average times the number of ranks.
// So no sum overflows HALF that has operands which do not, and all ranks get the same
// bits.
//
// Lines travel, as in linedtwo: see allreduce.cu. They are cast on the way from the
// operand and on the way to the result, so that nothing is stored in 16 bits but in the
// inboxes, whose size does not depend on the operand's.

#include "lines.cuh"

namespace peers {

// ---- kernels ----

// Numbers are what this thread's part of a line stands for.
template <class T> struct Numbers {
	static constexpr u32 N = Part<T>::N / 2;
	f32 lo[N], hi[N];

	static DEVICE bool both() { return Part<T>::length() == 2 * N; } // the last part has no hi

	// whole reports whether line i of n numbers has all of the part, and vectors that
	// memory begins at a multiple of 16 bytes: read and write are for such parts.
	static DEVICE bool whole(u64 i, u64 n, bool vectors) { return vectors && Part<T>::index(i) + Part<T>::length() <= n; }

	DEVICE void read(const f32 *src, u64 i) {
		load(lo, src + Part<T>::index(i));
		if (both())
			load(hi, src + Part<T>::index(i) + N);
	}
	// Some of it, and zeros behind the end.
	DEVICE void read_some(const f32 *src, u64 i, u64 n) {
		u64 at = Part<T>::index(i);
#pragma unroll
		for (u32 j = 0; j < N; j++) {
			lo[j] = at + j < n ? src[at + j] : 0;
			hi[j] = both() && at + N + j < n ? src[at + N + j] : 0;
		}
	}
	DEVICE void write(f32 *dst, u64 i, u64 n, bool vectors) const {
		u64 at = Part<T>::index(i);
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

	DEVICE Part<T> narrowed() const {
		T x[2][N];
#pragma unroll
		for (u32 j = 0; j < N; j++)
			narrow(x[0][j], lo[j]), narrow(x[1][j], hi[j]);
		Part<T> part;
		__builtin_memcpy(&part.lo, x[0], 8);
		__builtin_memcpy(&part.hi, x[1], 8);
		return part;
	}
	DEVICE Numbers(const Part<T> &part, f32 factor) {
		T x[2][N];
		__builtin_memcpy(x[0], &part.lo, 8);
		__builtin_memcpy(x[1], &part.hi, 8);
#pragma unroll
		for (u32 j = 0; j < N; j++)
			lo[j] = times(wide(x[0][j]), factor), hi[j] = times(wide(x[1][j]), factor);
	}
	Numbers() = default;
};

// for i < n { dst[i] = T(sum over p of T(src of rank p [i]) / size) * factor }
//
// The operand is cut into a segment for each rank, and a round does `some` lines of
// each: it spreads those of the others to them, adds up its own and pushes the averages
// to all others, and collects theirs. In place is no difference: only the thread that
// writes a part of dst has read it in src.
//
// Operands of round r+1 are spread before the averages of round r are collected, so that
// links have work meanwhile. Two halves are enough for that, too. Into an inbox for
// operands a rank writes in round r+1, after it has added up in r: it has operands of r
// from everyone, who had added up in r-1 before. Into one for averages it writes as it
// adds up in round r, with operands of r from everyone, who had collected averages of
// r-2 before.
template <class T> DEVICE void halved(const Group &g, f32 *dst, const f32 *src, u64 n, u64 some, u64 rounds, f32 factor) {
	SHARED Block k;
	await_predecessors();
	release_successors();
	if (!begin(g, k))
		return;
	State s = k.state;
	Turns turns;
	u64 room = room_in(g, 2 * g.size);
	bool vectors = aligned(ADDRESS(dst) | ADDRESS(src), 16), ok = true;
	auto line = [&](u32 p, u64 r, u64 i) INLINE { return (p * rounds + r) * some + i; };
	by_size(g.size, [&](auto bound) INLINE {
		constexpr u32 R = decltype(bound)::value;
		// Round r of the call has number `round`. Each rank starts with another one, so
		// that links are used evenly.
		auto to = [&](u32 step) INLINE { return g.rank + step < g.size ? g.rank + step : g.rank + step - g.size; };
		auto spread = [&](u64 r, u64 round) INLINE {
			for (u64 i = turns.first; turns.more(i, some); i += turns.every) {
				bool mine = i < some, whole = Numbers<T>::whole(line(g.size - 1, r, i), n, vectors); // and so are those before it
#pragma unroll
				for (u32 first = 1; first < R; first += 3) {
					constexpr u32 K = R > 3 ? 3 : R - 1;
					Numbers<T> x[K]; // all are on their way before the first one is used
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
							x[k].narrowed().send(line_at(g, to(first + k), round & 1, g.rank, room, i), round);
				}
			}
		};
		auto add = [&](u64 r, u64 round) INLINE {
			for (u64 i = turns.first; turns.more(i, some) && ok; i += turns.every) {
				Part<T> parts[R] = {};
				Numbers<T> own;
				u64 at = line(g.rank, r, i);
				bool mine = i < some;
				if (mine && Numbers<T>::whole(at, n, vectors))
					own.read(src, at);
				else if (mine)
					own.read_some(src, at, n);
				ok = collect(g, parts, mine, round & 1, 0, room, i, round);
				if (!ok)
					break;
				Part<T> y = sum(g, parts, own.narrowed());
				push(g, y, mine, round & 1, g.size + g.rank, room, i, round);
				if (mine)
					Numbers<T>(y, factor).write(dst, at, n, vectors);
			}
		};
		auto gather = [&](u64 r, u64 round) INLINE {
			for (u64 i = turns.first; turns.more(i, some) && ok; i += turns.every) {
				Part<T> parts[R] = {};
				ok = collect(g, parts, i < some, round & 1, g.size, room, i, round);
#pragma unroll
				for (u32 p = 0; p < R; p++)
					if (ok && i < some && p < g.size && p != g.rank)
						Numbers<T>(parts[p], factor).write(dst, line(p, r, i), n, vectors);
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

#define HALVED(T)                                                                                                                 \
	LEAN_KERNEL(halved_##T, 512, Group g, f32 *dst, const f32 *src, u64 n, u64 some, u64 rounds, f64 factor) {                \
		halved<T>(g, dst, src, n, some, rounds, (f32)factor);                                                            \
	}

HALVED(f16)
HALVED(bf16)

// ---- launch ----
//
// As for linedtwo: the same grid on every rank, of blocks of whole warps; g.divisor is
// g.size.

} // namespace peers
