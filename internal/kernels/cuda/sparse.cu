// Selects the large elements of a vector, with error feedback, and adds the selections of
// several ranks.
//
// select_DTYPE adds a vector to a residual and moves the elements above a cut from there to a
// message, in the order of their indices, in one pass over memory. Each block has a tile,
// counts the elements that it selects, and learns the counts of the tiles before it by
// decoupled look-back (Merrill and Garland, Single-pass parallel prefix scan with decoupled
// look-back, 2016). Blocks start in the order of their numbers, on which CUB's scans rely,
// too: so a block only waits for blocks that have started.
//
// A top-k finds its cut first. A sample of the vector gives a bound that, almost certainly, at
// least k elements exceed; these go to a list of candidates, in the only pass over the vector.
// The k-th of the candidates is found by histograms of their bits, and take_DTYPE takes the
// elements from the list. If the sample was wrong, the same is done with the whole vector:
// slower, with the same result. The device decides that; the host launches both and never
// waits.

#include "number.cuh"
#include "sparse.cuh"
#include "system.cuh"

namespace sparse {

// ---- kernels ----

constexpr u32 threads = 256, warps = threads / 32;
constexpr u32 rows = 4, across = 4; // elements of a thread: rows, each of a vector of 16 bytes
constexpr u32 each_has = rows * across, tile = threads * each_has;
constexpr u32 all_there = (1 << each_has) - 1;

// Above all numbers is infinity, and above that NaN.
DEVICE u32 magnitude(f32 x) { return bits_as<u32>(x) & 0x7fffffff; }

// What is done with a cut.
enum Mode : u32 { nothing, selects, takes };

// Cut says which magnitudes are picked: those above, and the first ties of those
// that are equal. Behind it is a word for each tile.
struct alignas(8) Cut {
	u32 above, mode, ties, none;
	DEVICE u64 *tiles() { return reinterpret_cast<u64 *>(this + 1); }
};

// Entries is a message: index[i] is the place of values[i], for i < head[2], of
// head[1] that were picked. There is room for `room`.
struct Entries {
	u64 *head;
	void *values;
	i32 *index;
	u64 room;
};

// Picks are what a thread has picked: a bit for each element that is above, and for each that is
// equal.
struct Picks { u32 above, ties; };

// Counts of the picks before a thread's, of both kinds: in a byte for each row,
// from the threads of its warp; the same of all of them; and those before the warp.
struct Counts { u32 before, row, start; };

DEVICE u32 byte(u32 x, u32 i) { return x >> 8 * i & 0xff; }

// in_warp counts the picks of one kind.
DEVICE Counts in_warp(u32 picks) {
	u32 own = 0;
#pragma unroll
	for (u32 j = 0; j < rows; j++)
		own |= bits_set(picks >> across * j & 15) << 8 * j;
	u32 with = running(own);
	return {with - own, last(with), 0};
}

DEVICE u32 sum_of(u32 row) { return byte(row, 0) + byte(row, 1) + byte(row, 2) + byte(row, 3); }

// The word of a tile: how much is known, and the counts of both kinds. A launch has
// at most 2^30 elements.
constexpr u64 own_known = 1ull << 62, all_known = 2ull << 62;
DEVICE u64 pair(u64 above, u64 ties) { return above << 31 | ties; }
DEVICE u32 above_of(u64 w) { return w >> 31 & 0x7fffffff; }
DEVICE u32 ties_of(u64 w) { return w & 0x7fffffff; }

constexpr u32 looking = 4; // warps, see before

// Room for the counts of the warps of a block, and of the tiles that each has looked at.
struct Shared {
	u32 above[warps], ties[warps];
	u64 before[looking];
	bool all[looking];
};

// look_back returns the counts of the 32 tiles before `end`, by a warp, or of all if one
// of them knows.
DEVICE u64 look_back(const u64 *tiles, u32 end, u32 lane, bool &all) {
	u64 w = 0;
	u32 known = 0;
	do { // tiles before the first are known to have nothing
		w = lane < end ? look(tiles + end - 1 - lane) : all_known;
		known = votes_of(w >= all_known);
	} while (votes_of(w >> 62 == 0) & ((known & -known) - 1));
	u32 stop = trailing_zeros(known);
	bool counts = lane <= stop;
	all = stop < 32;
	return pair(total(counts ? above_of(w) : 0), total(counts ? ties_of(w) : 0));
}

// before returns the counts of all tiles before t. Some warps look at 32 of them each: what
// one tile has learnt, those in sight of it learn next, a memory latency later. With one
// warp, that was all the time that a selection took; eight only get in the way of those that
// read and write. Of 2^25 elements of f32 at 1 %, an H200 takes 143 us (147 with eight warps),
// and 102 us if nobody looks back, which is the floor of this form. Fewer, larger tiles of
// 8192, whose picks are gathered in rounds, would be next.
DEVICE u64 before(Shared &s, const u64 *tiles, u32 t) {
	u64 sum = 0;
	u32 warp = thread_x() / 32, lane = thread_x() % 32;
	for (u32 end = t;; end -= looking * 32) {
		if (warp < looking) {
			bool all;
			u64 own = look_back(tiles, end > warp * 32 ? end - warp * 32 : 0, lane, all);
			if (lane == 0)
				s.before[warp] = own, s.all[warp] = all;
		}
		barrier();
		for (u32 w = 0; w < looking; w++) {
			sum += s.before[w];
			if (s.all[w])
				return sum;
		}
		barrier();
	}
}

// What travels, and what it is when it arrives. With feedback a number is not made
// infinite: what is left stays behind.
template <class T> DEVICE f32 seen(f32 v, bool saturate, T &sent);
template <> DEVICE f32 seen(f32 v, bool, f32 &sent) { return sent = v; }
template <> DEVICE f32 seen(f32 v, bool saturate, f16 &sent) {
	sent = narrow_f16(v);
	if (saturate && (sent.bits & 0x7fff) == 0x7c00 && v - v == 0)
		sent.bits--;
	return widen(sent);
}
template <> DEVICE f32 seen(f32 v, bool saturate, bf16 &sent) {
	sent = narrow_bf16(v);
	if (saturate && (sent.bits & 0x7fff) == 0x7f80 && v - v == 0)
		sent.bits--;
	return widen(sent);
}

// What stays of v when y has been sent: nothing of what is not a number.
DEVICE f32 remainder(f32 v, f32 y) { return y - y != 0 ? 0 : v - y; }

// The same when v has been sent as a T.
template <class T> DEVICE f32 stays(f32 v, bool saturate) {
	T sent;
	return remainder(v, seen(v, saturate, sent));
}
template <> DEVICE f32 stays<f32>(f32, bool) { return 0; }

// count_block counts the picks of the block, and tells the tiles behind.
DEVICE u64 count_block(Shared &s, Counts &above, Counts &ties, const Picks &p, u32 most_ties,
	u64 *tiles, u32 t) {
	u32 warp = thread_x() / 32;
	above = in_warp(p.above), ties = {};
	if (most_ties != 0)
		ties = in_warp(p.ties);
	if (thread_x() % 32 == 0)
		s.above[warp] = sum_of(above.row), s.ties[warp] = sum_of(ties.row);
	barrier();
	u32 a = 0, e = 0;
#pragma unroll
	for (u32 w = 0; w < warps; w++) {
		if (w == warp)
			above.start = a, ties.start = e;
		a += s.above[w], e += s.ties[w];
	}
	if (thread_x() == 0)
		publish(tiles + t, (t == 0 ? all_known : own_known) | pair(a, e));
	return pair(a, e);
}

// count_all returns what the tiles before have picked, and tells those behind. The last
// tile writes the head of the message.
DEVICE u64 count_all(Shared &s, u64 own, const Cut &c, u64 *words, u32 t, u32 tiles,
	const Entries &out, bool lists) {
	u64 sum = before(s, words, t);
	if (thread_x() > 0)
		return sum;
	u64 all = sum + own;
	if (t > 0)
		publish(words + t, all_known | all);
	if (t + 1 == tiles) {
		u64 picked = above_of(all) + least(ties_of(all), c.ties);
		out.head[1] = picked;
		out.head[2] = lists ? least(picked, out.room) : 0;
	}
	return sum;
}

// The place of a thread's first element in its tile.
DEVICE u32 first_of(u32 thread) { return thread / 32 * (32 * each_has) + thread % 32 * across; }

// Gathered are the values of a tile, and its picks in their order: the place of each in the
// tile, whether it is a tie, and how many ties were before it.
struct alignas(16) Gathered {
	f32 v[tile];
	u32 picked[tile];
};
constexpr u32 tie_bit = 0x8000;

// How many picks of a block are before the first of a thread's in each row, 16 bits each.
DEVICE u64 in_rows(const Counts &c) {
	u64 starts = 0;
	u32 start = c.start;
#pragma unroll
	for (u32 j = 0; j < rows; j++) {
		starts |= (u64)(start + byte(c.before, j)) << 16 * j;
		start += byte(c.row, j);
	}
	return starts;
}

// gather puts the values of a thread, and its picks, among those of its block. A thread
// has few picks: a loop over them is a quarter of the instructions of one over all rows.
DEVICE void gather(Gathered &to, const f32 (&v)[each_has], const Picks &p, const Counts &above,
	const Counts &ties) {
	u32 first = first_of(thread_x());
#pragma unroll
	for (u32 j = 0; j < rows; j++)
		store(to.v + first + j * 32 * across,
			reinterpret_cast<const f32(&)[across]>(v[j * across]));
	u64 starts = in_rows(above), tie_starts = in_rows(ties);
	for (u32 left = p.above | p.ties; left != 0; left &= left - 1) {
		u32 bit = left & -left, i = trailing_zeros(left), row = i / across;
		u32 before = bit - 1 & 15 << row * across; // the elements before, in its row
		u32 at = (u32)(starts >> 16 * row & 0xffff) + bits_set(p.above & before);
		u32 tie = (u32)(tie_starts >> 16 * row & 0xffff) + bits_set(p.ties & before);
		u32 place = first + row * 32 * across + i % across;
		to.picked[at + tie] = place | (p.ties & bit ? tie_bit : 0) | tie << 16;
	}
}

// each_pick calls put(value, place in the tile, position in the message, is a tie) for the
// picks of a block, one behind the other, that are above or among the first ties.
template <class Put>
DEVICE void each_pick(const Gathered &from, u64 own, u64 before, u32 most_ties, Put put) {
	u32 a = above_of(before), e = ties_of(before), count = above_of(own) + ties_of(own);
	for (u32 i = thread_x(); i < count; i += threads) {
		u32 what = from.picked[i], place = what % tie_bit, own_ties = what >> 16,
			tie = e + own_ties;
		bool is_tie = what & tie_bit;
		if (!is_tie || tie < most_ties)
			put(from.v[place], place, a + i - own_ties + least(tie, most_ties), is_tie);
	}
}

// pick finds the picks of a thread, among those of its elements that there are.
DEVICE Picks pick(const f32 (&v)[each_has], u32 there, const Cut &c) {
	Picks p = {};
#pragma unroll
	for (u32 i = 0; i < each_has; i++)
		p.above |= (u32)(magnitude(v[i]) > c.above) << i;
	p.above &= there;
	if (c.ties == 0)
		return p;
#pragma unroll
	for (u32 i = 0; i < each_has; i++)
		p.ties |= (u32)(magnitude(v[i]) == c.above) << i;
	p.ties &= there;
	return p;
}

// A thread's elements are vectors, 32 of them, one for each thread of its warp,
// apart. at is the first one's place; 32 bits are enough for 2^30 elements.
template <class T> DEVICE void read(T (&v)[each_has], const T *p, u32 at, u32 n, bool vectors) {
	p += at;
#pragma unroll
	for (u32 j = 0; j < rows; j++) {
		u32 i = j * 32 * across;
		if (vectors) {
			load(reinterpret_cast<T(&)[across]>(v[j * across]), p + i);
			continue;
		}
#pragma unroll
		for (u32 c = 0; c < across; c++)
			v[j * across + c] = at + i + c < n ? p[i + c] : T{};
	}
}

// write writes y(i, value) for each element, row by row: fewer registers are in use.
template <class T, class Y>
DEVICE void write(T *p, const T (&v)[each_has], u32 at, u32 n, bool vectors, Y y) {
	p += at;
#pragma unroll
	for (u32 j = 0; j < rows; j++) {
		u32 i = j * 32 * across;
		T row[across];
#pragma unroll
		for (u32 c = 0; c < across; c++)
			row[c] = y(j * across + c, v[j * across + c]);
		if (vectors) {
			store_once(p + i, row);
			continue;
		}
#pragma unroll
		for (u32 c = 0; c < across; c++)
			if (at + i + c < n)
				p[i + c] = row[c];
	}
}

// The elements of a thread that there are, one bit each.
DEVICE u32 there(u32 at, u32 n) {
	u32 bits = 0;
#pragma unroll
	for (u32 i = 0; i < each_has; i++)
		bits |= (u32)(at + i / across * 32 * across + i % across < n) << i;
	return bits;
}

// What select is to do besides.
constexpr u64 keeps = 1;     // the residual keeps all
constexpr u64 saturates = 2; // see seen
constexpr u64 perhaps = 4;   // there may be nothing to do: look before anything is read

// for i < n {
//         v := residual[i] + x[i]           // the one that there is, if there is one
//         picked := magnitude(v) > above || magnitude(v) == above && ties-- > 0
//         head[1] += picked
//         picked and there is room: add (seen(v), i) to the message, or set dense[i] to seen(v)
//         residual[i] = v, or what stays of it if it was sent
// }
//
// dense gets zeros besides, and has room for all. It may be x.
//
// All that a block can do before it knows how many were picked before its own is done
// before: it waits for that with its residual written, and its picks in order.
template <class T>
DEVICE void select(const Entries &out, f32 *dense, const f32 *x, f32 *residual, u32 n, u64 how,
	Cut *cut) {
	SHARED Shared shared;
	SHARED Gathered gathered;
	if ((how & perhaps) && cut->mode != selects)
		return;
	u32 t = block_x(), at = t * tile + first_of(thread_x());
	bool whole =
		(t + 1) * tile <= n && aligned(ADDRESS(x) | ADDRESS(residual) | ADDRESS(dense), 16);
	f32 v[each_has];
	read(v, residual ? residual : x, at, n, whole);
	if (residual && x) {
		f32 more[each_has];
		read(more, x, at, n, whole);
#pragma unroll
		for (u32 i = 0; i < each_has; i++)
			v[i] += more[i];
	}
	Cut c = *cut;
	if (c.mode != selects)
		return;
	Picks p = pick(v, whole ? all_there : there(at, n), c);
	Counts above, ties;
	u64 own = count_block(shared, above, ties, p, c.ties, cut->tiles(), t);
	gather(gathered, v, p, above, ties);

	// Before it is known for which picks there is room, and which ties count: for
	// nearly all of them this is right.
	bool saturate = how & saturates, keep = how & keeps;
	T sent;
	if (dense)
		write(dense, v, at, n, whole,
			[&](u32 i, f32 x) { return p.above >> i & 1 ? seen(x, saturate, sent) : 0; });
	if (residual)
		write(residual, v, at, n, whole,
			[&](u32 i, f32 x) { return !keep && p.above >> i & 1 ? stays<T>(x, saturate) : x; });

	u64 before = count_all(shared, own, c, cut->tiles(), t, blocks_x(), out, !dense);
	each_pick(gathered, own, before, c.ties, [&](f32 x, u32 place, u32 position, bool is_tie) {
		u32 i = t * tile + place;
		bool fits = dense || position < out.room;
		T value;
		f32 y = seen(x, saturate, value);
		if (!fits) {
			if (residual && !keep)
				residual[i] = x;
			return;
		}
		if (residual && !keep && is_tie)
			residual[i] = remainder(x, y);
		if (!dense) {
			static_cast<T *>(out.values)[position] = value;
			out.index[position] = (i32)i;
		} else if (is_tie) {
			dense[i] = y;
		}
	});
}

#define SELECT(T) \
	KERNEL(select_##T, 256, Entries out, f32 *dense, const f32 *x, f32 *residual, u64 n, u64 how, \
		Cut *cut) { \
		select<T>(out, dense, x, residual, (u32)n, how, cut); \
	}
SELECT(f32)
SELECT(f16)
SELECT(bf16)

// The same from a list of candidates, which the residual holds, too, if there is
// one:
//
// for i < list.head[1] { v := list.values[i]; if picked { as above, for list.index[i] } }
template <class T>
DEVICE void take(const Entries &out, const Entries &list, f32 *residual, u64 how, Cut *cut) {
	SHARED Shared shared;
	SHARED Gathered gathered;
	u32 n = (u32)list.head[1], t = block_x();
	Cut c = *cut;
	if (c.mode != takes || t * tile >= n)
		return;
	u32 at = t * tile + first_of(thread_x());
	f32 v[each_has];
	read(v, static_cast<const f32 *>(list.values), at, n, (t + 1) * tile <= n);
	Picks p = pick(v, there(at, n), c);
	Counts above, ties;
	u64 own = count_block(shared, above, ties, p, c.ties, cut->tiles(), t);
	gather(gathered, v, p, above, ties);
	u64 before = count_all(shared, own, c, cut->tiles(), t, (n + tile - 1) / tile, out, true);
	each_pick(gathered, own, before, c.ties, [&](f32 x, u32 place, u32 position, bool) {
		if (position >= out.room)
			return;
		i32 i = list.index[t * tile + place];
		T value;
		f32 y = seen(x, how & saturates, value);
		static_cast<T *>(out.values)[position] = value;
		out.index[position] = i;
		if (residual)
			residual[i] = remainder(x, y);
	});
}

#define TAKE(T) \
	KERNEL(take_##T, 256, Entries out, Entries list, f32 *residual, u64 how, Cut *cut) { \
		take<T>(out, list, residual, how, cut); \
	}
TAKE(f32)
TAKE(f16)
TAKE(bf16)

// begin clears what a selection counts in, words of scratch whose first are the
// cut, and the head of the message; nothing is selected if a note is not zero.
KERNEL(begin_b64, 256, u64 *head, u64 heads, u64 print, u64 *scratch, u64 words, const u64 *notes,
	u64 ranks, u64 above) {
	u64 i = thread_index();
	for (u64 j = i; j < words; j += thread_count())
		if (j > 0)
			scratch[j] = 0;
	for (u64 j = i; j < heads; j += thread_count())
		head[j] = j == 0 ? print : 0;
	if (i > 0)
		return;
	u64 mode = selects;
	for (u64 r = 0; r < ranks; r++)
		if (notes[r] != 0)
			mode = nothing;
	scratch[0] = mode << 32 | above;
}

// ---- the cut of a top-k ----

// Sums of counts from the top: find returns the bin in which the rank-th is, from 1
// on, and the rank of it there. Where the counts are is a multiple of 16 bytes.
struct Bin { u32 bin, rank; };

template <u32 bins> DEVICE Bin find(const u32 *counts, u32 rank) {
	SHARED u32 sums[warps];
	SHARED Bin found;
	// a thread's, from first on: the first thread has the last ones
	constexpr u32 N = bins / threads;
	u32 thread = thread_x(), warp = thread / 32, first = bins - (thread + 1) * N;
	u32 own[N];
	load(own, counts + first);
	u32 sum = 0;
#pragma unroll
	for (u32 i = 0; i < N; i++)
		sum += own[i];
	u32 end = running(sum);
	if (thread == 0)
		found = {0, 1};
	if (thread % 32 == 31)
		sums[warp] = end;
	barrier();
	for (u32 w = 0; w < warp; w++)
		end += sums[w];
	u32 begin = end - sum;
	if (begin < rank && rank <= end) {
		u32 left = rank - begin;
#pragma unroll
		for (u32 i = N; i-- > 0;) {
			if (left <= own[i]) {
				found = {first + i, left};
				break;
			}
			left -= own[i];
		}
	}
	barrier();
	Bin result = found;
	barrier();
	return result;
}

// A sample's magnitudes are counted by their upper 13 bits, in bins that are 3 % apart,
// and those of one bin by 11 bits more: where a residual is cut off every time, a bin
// of 3 % may hold several times what is picked.
constexpr u32 coarse_bits = 13, coarse_bins = 1 << coarse_bits, fine_bits = 11,
			  fine_bins = 1 << fine_bits;
constexpr u32 fine_shift = 31 - coarse_bits - fine_bits;

// One element of every n/samples, at a place that has no pattern: its magnitude.
KERNEL(sample_f32, 256, u32 *counts, u32 *sample, const f32 *x, const f32 *residual, u64 n,
	u64 samples, const Cut *cut) {
	if (cut->mode != selects)
		return;
	u64 stride = n / samples;
	for (u64 s = thread_index(); s < samples; s += thread_count()) {
		u32 hash = (u32)s * 0x9e3779b1u;
		u64 i = s * stride + (hash ^ hash >> 15) % (u32)stride;
		u32 m = magnitude(residual ? residual[i] + x[i] : x[i]);
		sample[s] = m;
		add_global(counts + (m >> (31 - coarse_bits)), 1);
	}
}

// bound sets a cut below the rank-th of a sample, and above zero.
KERNEL(bound_b32, 256, Cut *cut, const u32 *counts, const u32 *sample, u64 samples, u64 rank) {
	alignas(16) SHARED u32 own[fine_bins];
	if (cut->mode != selects)
		return;
	for (u32 i = thread_x(); i < fine_bins; i += threads)
		own[i] = 0;
	Bin coarse = find<coarse_bins>(counts, (u32)rank); // with a barrier
	// for a thread, since there is no more than this block to hide a read behind
	constexpr u32 at_once = 32;
	for (u64 first = thread_x(); first < samples; first += at_once * threads) {
		u32 m[at_once];
#pragma unroll
		for (u32 j = 0; j < at_once; j++)
			// which is below all others
			m[j] = first + j * threads < samples ? sample[first + j * threads] : 0;
#pragma unroll
		for (u32 j = 0; j < at_once; j++)
			if (m[j] >> (31 - coarse_bits) == coarse.bin)
				add_shared(own + (m[j] >> fine_shift & (fine_bins - 1)), 1);
	}
	barrier();
	Bin fine = find<fine_bins>(own, coarse.rank);
	u32 least = (coarse.bin << fine_bits | fine.bin) << fine_shift;
	if (thread_x() == 0)
		cut->above = least == 0 ? 0 : least - 1;
}

// The bits of a magnitude, from the top, in three steps, and their histograms.
constexpr u32 high_bins = 2048, middle_bins = 1024, low_bins = 1024;

// fits reports whether a list has the k-th.
DEVICE bool fits(const Entries &list, u64 k) {
	return list.head[1] >= k && list.head[1] <= list.room;
}

// narrow_down returns the bits of the k-th that steps before this one have found,
// and its rank among those that share them.
DEVICE Bin narrow_down(const u32 *counts, u32 step, u32 k) {
	Bin b = {0, k};
	if (step > 0) {
		b = find<high_bins>(counts, k);
	}
	if (step > 1) {
		Bin c = find<middle_bins>(counts + high_bins, b.rank);
		b = {b.bin << 10 | c.bin, c.rank};
	}
	if (step > 2) {
		Bin c = find<low_bins>(counts + high_bins + middle_bins, b.rank);
		b = {b.bin << 10 | c.bin, c.rank};
	}
	return b;
}

// histogram counts the next bits of those that share the bits found before.
KERNEL(histogram_b32, 256, u32 *counts, u64 step, Entries list, const f32 *v, u64 n, u64 k,
	const Cut *first) {
	SHARED u32 own[high_bins];
	if (first->mode != selects)
		return;
	u32 prefix = narrow_down(counts, (u32)step, (u32)k).bin;
	if (fits(list, k))
		v = static_cast<const f32 *>(list.values), n = list.head[1];
	u32 shift = step == 0 ? 20 : step == 1 ? 10 : 0, bins = step == 0 ? high_bins : 1024;
	u32 *to = counts + (step == 0 ? 0 : step == 1 ? high_bins : high_bins + middle_bins);
	for (u32 i = thread_x(); i < bins; i += threads)
		own[i] = 0;
	barrier();
	u32 above = step == 0 ? 31 : shift + 10; // bits from here on are found
	each<4>(n, aligned(ADDRESS(v), 16), [&](auto count, u64 i) {
		constexpr int N = decltype(count)::value;
		f32 x[N];
		load(x, v + i);
#pragma unroll
		for (int j = 0; j < N; j++) {
			u32 m = magnitude(x[j]);
			if (m >> above == prefix)
				add_shared(own + (m >> shift & (bins - 1)), 1);
		}
	});
	barrier();
	for (u32 i = thread_x(); i < bins; i += threads)
		if (own[i] != 0)
			add_global(to + i, own[i]);
}

// cut sets the cut of a top-k, for where it is taken from.
KERNEL(cut_b32, 256, Cut *cut, const u32 *counts, Entries list, u64 k, const Cut *first) {
	Bin b = narrow_down(counts, 3, (u32)k);
	if (thread_x() > 0)
		return;
	cut->above = b.bin;
	cut->ties = b.rank;
	cut->mode = first->mode != selects ? nothing : fits(list, k) ? takes : selects;
}

// ---- sums of messages ----

// Where the messages of all ranks are, one behind the other.
struct Messages {
	const u8 *first;
	u64 nbytes; // of one
	u64 ranks;
	u64 values, index; // where they begin in a message
	u64 room;
};

// place returns how many of the sorted index are less than x, by a warp.
DEVICE u32 place(const i32 *index, u32 n, u32 x, u32 lane) {
	u32 lo = 0;
	while (n > 0) {
		u32 step = (n + 31) / 32, begin = lane * step, end = least(begin + step, n);
		u32 parts = (n + step - 1) / step;
		u32 less = bits_set(votes_of(begin < n && (u32)index[lo + end - 1] < x));
		u32 skip = least(less * step, n);
		lo += skip;
		n = less == parts ? 0 : least(step, n - skip) - 1; // its last one is not less
	}
	return lo;
}

DEVICE f32 wide(f32 x) { return x; }
DEVICE f32 wide(f16 x) { return widen(x); }
DEVICE f32 wide(bf16 x) { return widen(x); }
DEVICE void give(f32 &y, f32 x) { y = x; }
DEVICE void give(f64 &y, f32 x) { y = widen(x); }

// for i < n { dst[i] = the sum over the ranks r, in order, of the value for i of r, 0 if
// there is none; divided by the divisor }
//
// A block sums in shared memory, so that the result is written once. Ranks take turns, but
// what a thread adds first is read for two ranks at once: a turn is shorter than a read. On
// an H200, 5 % of 2^25 elements from each of four ranks take 88 us so, 93.5 with four ranks
// at once, and 101 with each in its turn (2026-11-21-h200-sparse-kernels.txt).
template <class V, class T> DEVICE void combine(T *dst, u64 n, const Messages &m, f32 divisor) {
	constexpr u32 width = 8192, group = 32; // elements; ranks whose places are looked up at a time
	constexpr u32 ahead = 2, few = 2;       // ranks; entries of a thread: 6 % of all
	constexpr u32 none = ~0u;
	SHARED f32 sums[width];
	SHARED u32 bounds[2 * group];
	u64 lo = (u64)block_x() * width;
	u32 count = (u32)least(n - lo, (u64)width), warp = thread_x() / 32;
	for (u32 i = thread_x(); i < width; i += threads)
		sums[i] = 0;
	auto index = [&](u64 r) {
		return reinterpret_cast<const i32 *>(m.first + r * m.nbytes + m.index);
	};
	auto values = [&](u64 r) {
		return reinterpret_cast<const V *>(m.first + r * m.nbytes + m.values);
	};
	auto add = [&](u32 i, V v) {
		if (i < count)
			sums[i] = plus(sums[i], wide(v));
	};
	for (u64 r0 = 0; r0 < m.ranks; r0 += group) {
		u32 ranks = (u32)least(m.ranks - r0, (u64)group);
		for (u32 b = warp; b < 2 * ranks; b += warps) {
			u64 r = r0 + b / 2,
				sent = least(reinterpret_cast<const u64 *>(m.first + r * m.nbytes)[2], m.room);
			u32 at = place(index(r), (u32)sent, (u32)lo + (b & 1 ? count : 0), thread_x() % 32);
			if (thread_x() % 32 == 0)
				bounds[b] = at;
		}
		barrier();
		for (u32 r1 = 0; r1 < ranks; r1 += ahead) {
			u32 i[ahead][few];
			V v[ahead][few];
#pragma unroll
			for (u32 a = 0; a < ahead; a++) {
#pragma unroll
				for (u32 j = 0; j < few; j++) {
					i[a][j] = none, v[a][j] = V{};
					u32 e = r1 + a < ranks ? bounds[2 * (r1 + a)] + j * threads + thread_x() : none;
					if (e < none && e < bounds[2 * (r1 + a) + 1])
						i[a][j] = (u32)index(r0 + r1 + a)[e] - (u32)lo,
						v[a][j] = values(r0 + r1 + a)[e];
				}
			}
#pragma unroll
			for (u32 a = 0; a < ahead; a++) {
				if (r1 + a >= ranks)
					break;
#pragma unroll
				for (u32 j = 0; j < few; j++)
					add(i[a][j], v[a][j]);
				u32 r = r1 + a;
				for (u32 e = bounds[2 * r] + few * threads + thread_x(); e < bounds[2 * r + 1];
					e += threads)
					add((u32)index(r0 + r)[e] - (u32)lo, values(r0 + r)[e]);
				barrier();
			}
		}
	}
	if (divisor != 1)
		for (u32 i = thread_x(); i < count; i += threads)
			if (sums[i] != 0)
				sums[i] = over(sums[i], divisor);
	barrier();
	constexpr u32 N = 16 / sizeof(T);
	if (count == width && aligned(ADDRESS(dst), 16)) {
		for (u32 i = thread_x() * N; i < width; i += threads * N) {
			T y[N];
#pragma unroll
			for (u32 j = 0; j < N; j++)
				give(y[j], sums[i + j]);
			store(dst + lo + i, y);
		}
		return;
	}
	for (u32 i = thread_x(); i < count; i += threads)
		give(dst[lo + i], sums[i]);
}

#define COMBINE(V, T) \
	KERNEL(combine_##V##_##T, 256, T *dst, u64 n, Messages m, u64 divisor) { \
		combine<V>(dst, n, m, (f32)divisor); \
	}
COMBINE(f32, f32)
COMBINE(f16, f32)
COMBINE(bf16, f32)
COMBINE(f32, f64)
COMBINE(f16, f64)
COMBINE(bf16, f64)

// note is n less the index of the first NaN or infinity, 0 if there is none.
template <class T> DEVICE void notfinite(u64 *note, const T *x, u64 n) {
	u64 first = n;
	constexpr int N = 16 / sizeof(T);
	each<N>(n, aligned(ADDRESS(x), 16), [&](auto count, u64 i) {
		constexpr int M = decltype(count)::value;
		T v[M];
		load(v, x + i);
#pragma unroll
		for (int j = M - 1; j >= 0; j--)
			if (v[j] - v[j] != 0)
				first = least(first, i + j);
	});
	if (first < n)
		greatest_global(note, n - first);
}

KERNEL(notfinite_f32, 256, u64 *note, const f32 *x, u64 n) {
	notfinite(note, x, n);
}
KERNEL(notfinite_f64, 256, u64 *note, const f64 *x, u64 n) {
	notfinite(note, x, n);
}

} // namespace sparse

// ---- launch ----
//
// select: one block of 256 threads for each tile of 4096 elements, all of them, in
// order. take: the same for a list, of whose length the room is known. combine: one
// for each 8192 elements. bound and cut: one block. The others go round.
