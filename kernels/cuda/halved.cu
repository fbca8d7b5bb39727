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

// narrowed is this thread's part of line i of n numbers, and of zeros behind them;
// vectors says that src begins at a multiple of 16 bytes.
template <class T> DEVICE Part<T> narrowed(const f32 *src, u64 i, u64 n, bool vectors) {
	constexpr u32 N = Part<T>::N;
	u64 at = Part<T>::index(i);
	f32 lo[N / 2] = {}, hi[N / 2] = {};
	if (vectors && at + Part<T>::length() <= n) {
		load(lo, src + at);
		if (Part<T>::length() == N)
			load(hi, src + at + N / 2);
	} else {
#pragma unroll
		for (u32 j = 0; j < N / 2; j++) {
			lo[j] = at + j < n ? src[at + j] : 0;
			hi[j] = Part<T>::length() == N && at + N / 2 + j < n ? src[at + N / 2 + j] : 0;
		}
	}
	T x[2][N / 2];
#pragma unroll
	for (u32 j = 0; j < N / 2; j++)
		narrow(x[0][j], lo[j]), narrow(x[1][j], hi[j]);
	Part<T> part;
	__builtin_memcpy(&part.lo, x[0], 8);
	__builtin_memcpy(&part.hi, x[1], 8);
	return part;
}

// write_wide writes a part of line i of n numbers, times factor.
template <class T> DEVICE void write_wide(f32 *dst, const Part<T> &part, u64 i, u64 n, bool vectors, f32 factor) {
	constexpr u32 N = Part<T>::N;
	u64 at = Part<T>::index(i);
	T x[2][N / 2];
	f32 lo[N / 2], hi[N / 2];
	__builtin_memcpy(x[0], &part.lo, 8);
	__builtin_memcpy(x[1], &part.hi, 8);
#pragma unroll
	for (u32 j = 0; j < N / 2; j++)
		lo[j] = times(wide(x[0][j]), factor), hi[j] = times(wide(x[1][j]), factor);
	if (vectors && at + Part<T>::length() <= n) {
		store(dst + at, lo);
		if (Part<T>::length() == N)
			store(dst + at + N / 2, hi);
		return;
	}
#pragma unroll
	for (u32 j = 0; j < N / 2; j++) {
		if (at + j < n)
			dst[at + j] = lo[j];
		if (Part<T>::length() == N && at + N / 2 + j < n)
			dst[at + N / 2 + j] = hi[j];
	}
}

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
	if (!begin(g, k))
		return;
	State s = k.state;
	Turns turns;
	u32 areas = 2 * g.size;
	bool vectors = aligned(ADDRESS(dst) | ADDRESS(src), 16), ok = true;
	auto line = [&](u32 p, u64 r, u64 i) INLINE { return (p * rounds + r) * some + i; };
	by_size(g.size, [&](auto bound) INLINE {
		constexpr u32 R = decltype(bound)::value;
		// Round r of the call has number `round`. Each rank starts with another one, so
		// that links are used evenly.
		auto spread = [&](u64 r, u64 round) INLINE {
			for (u64 i = turns.first; turns.more(i, some); i += turns.every) {
				Part<T> parts[R];
				auto to = [&](u32 step) INLINE { return g.rank + step < g.size ? g.rank + step : g.rank + step - g.size; };
#pragma unroll
				for (u32 step = 1; step < R; step++)
					if (i < some && step < g.size)
						parts[step] = narrowed<T>(src, line(to(step), r, i), n, vectors);
				converge();
#pragma unroll
				for (u32 step = 1; step < R; step++)
					if (i < some && step < g.size)
						parts[step].send(line_at(g, to(step), round & 1, g.rank, areas, i), round);
			}
		};
		auto add = [&](u64 r, u64 round) INLINE {
			for (u64 i = turns.first; turns.more(i, some) && ok; i += turns.every) {
				Part<T> parts[R] = {}, own = narrowed<T>(src, i < some ? line(g.rank, r, i) : 0, i < some ? n : 0, vectors);
				ok = collect(g, parts, i < some, round & 1, 0, areas, i, round);
				if (!ok)
					break;
				Part<T> y = sum(g, parts, own);
				push(g, y, i < some, round & 1, g.size + g.rank, areas, i, round);
				if (i < some)
					write_wide(dst, y, line(g.rank, r, i), n, vectors, factor);
			}
		};
		auto gather = [&](u64 r, u64 round) INLINE {
			for (u64 i = turns.first; turns.more(i, some) && ok; i += turns.every) {
				Part<T> parts[R] = {};
				ok = collect(g, parts, i < some, round & 1, g.size, areas, i, round);
#pragma unroll
				for (u32 p = 0; p < R; p++)
					if (ok && i < some && p < g.size && p != g.rank)
						write_wide(dst, parts[p], line(p, r, i), n, vectors, factor);
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
