// Sums and averages among two to eight devices that reach each other's memory:
// ll_DTYPE, ll128_DTYPE, oneshot_DTYPE, twoshot_DTYPE; ll128scatter_DTYPE and scatter_DTYPE, which
// are reduce-scatters; treeoneshot_f32, treetwoshot_f32, treescatter_f32; ll128alltoall_b8 and
// alltoall_b8, which are all-gathers, too. LL128 two-shot is in ll128.cu, the cube mesh in mesh.cu.
// LL and LL128 are NCCL's protocols of these names.
//
// Every rank launches the same kernel with the same grid, and block b of one rank
// deals with block b of the others only. Values are added in rank order, in 32
// bits, and rounded once, so that all ranks, kernels and sizes give the same bits; those named tree
// add neighbours first. How they meet: see peers.cuh.
//
// # What travels
//
// LL and LL128 push data to the inboxes of the other ranks, with flags that say which
// round it belongs to. LL sends packets of 16 bytes, of which half are flags; LL128 sends
// lines of 128 bytes, of which a sixteenth is. LL128 needs links where 128 bytes that a
// warp writes at once arrive at once, as over NVLink.
//
// Two-shot, its half that scatters, and the all-to-all push as well, without flags in the data, as
// NCCL's protocol Simple does: operands to the staging of the rank that adds them up, and its sums,
// or pieces, to where every rank wants them.
// NVLink carries writes better than reads: 256 MiB each way between two H200 took 736 us written
// and 802 us read (2026-11-23-h200x2-push.txt). One-shot reads operands where they are.
//
// Flags of the blocks guard both. Whole units of 16 bytes at multiples of 16 travel
// then. Memory that all ranks reach (a window) and that is of that form is used where it is;
// everything else goes through staging, which is a window, too. Each rank decides that for
// itself: it tells the others, as it enters a round, where its operand and its result are.

#include "ll128.cuh"

namespace peers {

// ---- kernels ----

// ---- LL ----

// for i < n { dst[i] = sum over p of src of rank p [i] / divisor }, where n elements fill no
// more than g.packets packets.
template <class T> DEVICE void ll(const Group &g, T *dst, const T *src, u64 n) {
	constexpr int N = 8 / sizeof(T);
	SHARED Block k;
	await_predecessors();
	release_successors();
	u64 packets = (n + N - 1) / N;
	bool vectors = aligned(ADDRESS(dst) | ADDRESS(src), 8);
	// What most threads need is on its way while the round is looked up.
	T first[N] = {};
	if (thread_index() < packets)
		fetch(first, src, thread_index(), n, vectors);
	if (!begin(g, k))
		return;
	State s = k.state;
	s.round = next(s.round);
	u32 half = s.round & 1, flag = (u32)s.round;
	for (u64 i = thread_index(); i < packets; i += thread_count()) {
		u64 value;
		__builtin_memcpy(&value, first, sizeof value);
		// Each rank starts with another one, so that links are used evenly.
#pragma unroll 1
		for (u32 step = 1, p = g.rank; step < g.size; step++) {
			p = p + 1 < g.size ? p + 1 : 0;
			send(slot(g, p, half, g.rank, i), value, flag);
		}
		if (i + thread_count() < packets)
			fetch(first, src, i + thread_count(), n, vectors);
	}
	bool ok = true;
	by_size(g.size, [&](auto bound) INLINE {
		constexpr u32 R = decltype(bound)::value;
		for (u64 i = thread_index(); i < packets && ok; i += thread_count()) {
			u64 values[R];
			ok = await(g, [&]() INLINE {
				u32 missing = 0; // without branches: see collect
#pragma unroll
				for (u32 p = 0; p < R; p++) {
					bool other = p < g.size && p != g.rank;
					bool there =
						receive(values[p], slot(g, g.rank, half, other ? p : g.rank, i), flag);
					missing = other && !there ? 1 + p : missing;
				}
				return missing;
			});
			if (!ok)
				break;
			T mine[N], x[R][N], y[N];
			fetch(mine, src, i, n, vectors);
#pragma unroll
			for (u32 p = 0; p < R; p++) {
				__builtin_memcpy(x[p], &values[p], sizeof x[p]);
				if (p == g.rank)
					for (int j = 0; j < N; j++)
						x[p][j] = mine[j];
			}
			add_up(y, x, g);
			deliver(dst, y, i, n, vectors);
		}
	});
	if (ok)
		end(g, s);
}

// ---- LL128 ----

// all-reduce (chunks false): for i < n { dst[i] = sum over p of src of rank p [i] / divisor },
// where n elements fill no more than g.lines / g.size lines. The same as ll, with fewer bytes.
// reduce-scatter (chunks true): the same of src + n * rank
template <class T, bool chunks> DEVICE void ll128(const Group &g, T *dst, const T *src, u64 n) {
	SHARED Block k;
	await_predecessors();
	u64 count = (n + Part<T>::line - 1) / Part<T>::line, room = room_in(g, g.size);
	u64 stride = chunks ? n : 0;
	Turns turns;
	if (count <= turns.every)
		release_successors();
	bool words = aligned(ADDRESS(dst) | ADDRESS(src) | stride * sizeof(T), 8), ok = true;
	u32 next_rank = g.rank + 1 < g.size ? g.rank + 1 : 0;
	Part<T> first; // it is on its way while the round is looked up
	first.read(src + next_rank * stride, turns.first, n, words);
	if (!begin(g, k))
		return;
	State s = k.state;
	s.round = next(s.round);
	u32 half = s.round & 1;
	for (u64 i = turns.first; turns.more(i, count); i += turns.every) {
		auto part = [&](u32 p) INLINE {
			Part<T> other = first;
			if (chunks && p != next_rank)
				other.read(src + p * stride, i, n, words);
			return other;
		};
		push(
			g, part, [&](u32) INLINE { return i < count; }, half, g.rank, room, i, s.round);
		first.read(src + next_rank * stride, i + turns.every, n, words);
	}
	by_size(g.size, [&](auto bound) INLINE {
		constexpr u32 R = decltype(bound)::value;
		for (u64 i = turns.first; turns.more(i, count) && ok; i += turns.every) {
			Part<T> parts[R] = {}, own;
			own.read(src + g.rank * stride, i, n, words);
			ok = collect(
				g, parts, [&](u32) INLINE { return i < count; }, half, 0, room, i, s.round);
			if (ok)
				sum(g, parts, own).write(dst, i, n, words);
		}
	});
	if (ok)
		end(g, s);
}

// ---- rounds with barriers ----

// Offer says where this rank's operand and result are in a round: what rank p reads
// is p strides further, and where it writes.
struct Offer { u64 source, source_stride, target, target_stride; };

DEVICE u64 address_of(const Group &g, u32 p, u64 place) {
	return own(g)->windows[place >> 48][p] + (place & ((1ull << 48) - 1));
}

// offer tells the same block of every rank that this one has entered a round, and what it
// offers. What the block has written before can be read by them then.
DEVICE void offer(const Group &g, u64 round, Offer mine) {
	u32 p = thread_x(), b = block_x();
	barrier();
	if (p < g.size && p != g.rank) {
		g.pads[p]->places[round & 1][b][g.rank] = {mine.source + p * mine.source_stride,
			mine.target + p * mine.target_stride};
		put_flag(&g.pads[p]->entered[b][g.rank], round);
	}
}

// meet waits until all have entered a round, and looks up what they offer.
DEVICE bool meet(const Group &g, Block &k, u64 round, Offer mine) {
	u32 p = thread_x(), b = block_x();
	if (p < g.size) {
		Place place = {mine.source + p * mine.source_stride, mine.target + p * mine.target_stride};
		if (p != g.rank) {
			if (await(g,
					[&]() INLINE { return get_flag(&own(g)->entered[b][p]) < round ? 1 + p : 0; }))
				place = own(g)->places[round & 1][b][p];
			else
				k.failed = 1;
		}
		if (!k.failed) { // else there may be no place
			k.source[p] = address_of(g, p, place.source);
			k.target[p] = address_of(g, p, place.target);
			k.direct[p] = place.source >> 48 != 0;
		}
	}
	barrier();
	return !k.failed;
}

DEVICE bool enter(const Group &g, Block &k, u64 round, Offer mine) {
	offer(g, round, mine);
	return meet(g, k, round, mine);
}

// finish tells every rank that the block is done with its memory, and that what the block
// has written there is complete.
DEVICE void finish(const Group &g, u64 round) {
	u32 p = thread_x();
	barrier();
	if (p < g.size && p != g.rank)
		put_flag(&g.pads[p]->left[block_x()][g.rank], round);
}

// finished waits until all have said so.
DEVICE bool finished(const Group &g, Block &k, u64 round) {
	u32 p = thread_x(), b = block_x();
	if (p < g.size && p != g.rank &&
		!await(g, [&]() INLINE { return get_flag(&own(g)->left[b][p]) < round ? 1 + p : 0; }))
		k.failed = 1;
	barrier();
	return !k.failed;
}

// leave tells the ranks that wait for it that the block has read their memory. If this rank
// shows its own memory, which it may change at once, leave waits for the others in turn.
DEVICE bool leave(const Group &g, Block &k, u64 round) {
	u32 p = thread_x(), b = block_x();
	barrier();
	if (p < g.size && p != g.rank) {
		if (k.direct[p])
			put_flag(&g.pads[p]->left[b][g.rank], round);
		if (k.direct[g.rank] &&
		    !await(g, [&]() INLINE { return get_flag(&own(g)->left[b][p]) < round ? 1 + p : 0; }))
			k.failed = 1;
	}
	barrier();
	return !k.failed;
}

// copy_out copies `count` units to dst, of n elements in all, from its unit lo on.
template <class T> DEVICE void copy_out(T *dst, const T *from, u64 lo, u64 count, u64 n) {
	constexpr u32 N = 16 / sizeof(T);
	u64 whole = aligned(ADDRESS(dst), 16) ? piece_of(n / N, lo, count) : 0;
	copy_units(dst + lo * N, from, whole);
#pragma unroll 1
	for (u64 i = first_from(whole, count); i < count; i += thread_count())
#pragma unroll 1
		for (u32 j = 0; j < N && (lo + i) * N + j < n; j++)
			dst[(lo + i) * N + j] = from[i * N + j];
}

// combine adds up `count` units of every rank, from where `from` says, and hands them to put.
// A thread has eight loads under way.
template <class T, u32 R, class G, class From, class Put>
DEVICE void combine_few(const G &g, From from, u64 count, Put put) {
	constexpr u32 N = 16 / sizeof(T), K = 8 / R;
	const T *at[R];
#pragma unroll
	for (u32 p = 0; p < R; p++)
		at[p] = from(p < g.size ? p : 0);
	u64 every = opaque(thread_count());
#pragma unroll 1
	for (u64 i = thread_index(); i < count; i += K * every) {
		T x[K][R][N];
#pragma unroll
		for (u32 j = 0; j < K; j++)
#pragma unroll
			for (u32 p = 0; p < R; p++)
				if (i + j * every < count && p < g.size)
					load(x[j][p], at[p] + (i + j * every) * N);
#pragma unroll
		for (u32 j = 0; j < K; j++)
			if (i + j * every < count) {
				T y[N];
				add_up(y, x[j], g);
				put(i + j * every, y);
			}
	}
}

template <class T, class G, class From, class Put>
DEVICE void combine(const G &g, From from, u64 count, Put put) {
	by_size(g.size,
		[&](auto bound) INLINE { combine_few<T, decltype(bound)::value>(g, from, count, put); });
}

// combine_slowly adds up units first to end, and puts those of their elements that
// there are, n, into dst: one by one, since dst may have any alignment.
template <class T, class G>
DEVICE void combine_slowly(const G &g, const Block &k, T *dst, u64 first, u64 end, u64 n) {
	constexpr u32 N = 16 / sizeof(T);
#pragma unroll 1
	for (u64 i = first_from(first, end); i < end; i += thread_count())
#pragma unroll 1
		for (u64 e = i * N; e < i * N + N && e < n; e++) {
			T x[most_ranks][1], y[1];
#pragma unroll
			for (u32 p = 0; p < most_ranks; p++)
				if (p < g.size)
					x[p][0] = reinterpret_cast<const T *>(k.source[p])[e];
			add_up(y, x, g);
			dst[e] = y[0];
		}
}

// for i < n { dst[i] = sum over p of src of rank p [i] / divisor }
//
// A round does `piece` units. source is the place of src, 0 if it is to be staged: it must be where
// the call is in place, since others read it while this rank writes.
template <class T, class G>
DEVICE void oneshot(const G &g, T *dst, const T *src, u64 n, u64 piece, u64 source) {
	constexpr int N = 16 / sizeof(T);
	SHARED Block k;
	await_predecessors();
	if (!begin(g, k))
		return;
	State s = k.state;
	u64 units = units_of<T>(n);
	bool vectors = aligned(ADDRESS(dst), 16);
	for (u64 lo = 0; lo < units; lo += piece) {
		s.round = next(s.round);
		u64 count = piece_of(units, lo, piece);
		Offer mine = {source + lo * 16, 0, 0, 0};
		if (source == 0) {
			mine.source = (s.round & 1) * g.staging;
			copy_in(staged<T>(g, g.rank, s.round), src, lo, count, n);
		}
		if (!enter(g, k, s.round, mine))
			return;
		u64 full = vectors ? piece_of(n / N, lo, piece) : 0;
		combine<T>(
			g, [&](u32 p) INLINE { return reinterpret_cast<const T *>(k.source[p]); }, full,
			[&](u64 i, const T(&y)[N]) INLINE { store(dst + (lo + i) * N, y); });
		combine_slowly(g, k, dst + lo * N, full, count, n - lo * N);
		if (!leave(g, k, s.round))
			return;
	}
	end(g, s);
}

// all-reduce (scatter false): for i < n { dst[i] = sum over p of src of rank p [i] / divisor }
// reduce-scatter (scatter true): the same of src + n * rank
//
// The operand of an all-reduce is cut into a segment for each rank, of whole units; that of a
// reduce-scatter has a chunk for each. A round does `piece` units of each: every rank pushes those
// of the others to them, adds up its own, and, in an all-reduce, pushes the sums to where every
// rank wants them. target is the place of dst, 0 if it is to be staged. It also works in place: a
// unit of dst is written after it was read in src.
//
// The operands of the next round are pushed before the sums of this one are awaited, so that the
// links stay busy. Two halves of staging are enough for that: see ll128.cu. A reduce-scatter has no
// sums to push: it pushes the next operands before it adds up, which takes four quarters, and the
// last ones after it: see alltoall.
template <bool scatter, class T, class G>
DEVICE void twoshot(const G &g, T *dst, const T *src, u64 n, u64 piece, u64 target) {
	constexpr int N = 16 / sizeof(T);
	SHARED Block k;
	await_predecessors();
	if (!begin(g, k))
		return;
	State s = k.state;
	u64 units = units_of<T>(n), segment = scatter ? units : (units + g.size - 1) / g.size;
	// the chunk of a rank, and the unit of it from which on the rank adds up
	auto chunk = [&](u32 p) INLINE { return scatter ? src + p * n : src; };
	auto first = [&](u32 p) INLINE { return scatter ? 0 : p * segment; };
	// else this rank's own segment is staged, too
	bool whole = aligned(ADDRESS(dst) | ADDRESS(chunk(g.rank)), 16) && n % N == 0;
	auto units_in = [&](u32 r) INLINE { return piece_of(units, first(r), segment); };
	auto next_rank = [&](u32 p) INLINE { return p + 1 < g.size ? p + 1 : 0; };
	// A half of staging, or a quarter, has room for an operand from each rank, then for a result of
	// each, or this rank's.
	auto staging = [&](u32 at, u32 slot, u64 lo, u64 round) INLINE {
		u64 quarter = scatter ? lo / piece / 2 % 2 * (g.staging / 2) : 0;
		return staged<T>(g, at, round) + quarter / sizeof(T) + slot * piece * N;
	};
	u32 results_of_own = g.size + (scatter ? 0 : g.rank);
	auto results = [&](u64 lo, u64 round) INLINE {
		return target ? Offer{0, 0, target + lo * 16, segment * 16}
					  : Offer{0, 0, (round & 1) * g.staging + g.size * piece * 16, piece * 16};
	};
	auto spread = [&](u64 lo, u64 round) INLINE {
#pragma unroll 1
		for (u32 step = 0, p = g.rank; step < g.size; step++, p = next_rank(p))
			if (p != g.rank || !whole)
				copy_in(staging(p, g.rank, lo, round), chunk(p), first(p) + lo,
					piece_of(units_in(p), lo, piece), n);
		offer(g, round, results(lo, round));
	};
	u64 coming = next(s.round);
	spread(0, coming);
#pragma unroll 1
	for (u64 lo = 0; lo < segment; lo += piece) {
		s.round = coming, coming = next(coming);
		if (!meet(g, k, s.round, results(lo, s.round)))
			return;
		bool more = lo + piece < segment, early = scatter && lo + 2 * piece < segment;
		if (early)
			spread(lo + piece, coming);
		u64 mine = (first(g.rank) + lo) * N;
		auto from = [&](u32 p) INLINE {
			return p == g.rank && whole ? chunk(p) + mine : staging(g.rank, p, lo, s.round);
		};
		T *sums = whole ? dst + mine : staging(g.rank, results_of_own, lo, s.round);
		combine<T>(g, from, piece_of(units_in(g.rank), lo, piece),
			[&](u64 i, const T(&y)[N]) INLINE {
				store(sums + i * N, y);
#pragma unroll 1
				for (u32 p = next_rank(g.rank); p != g.rank && !scatter; p = next_rank(p))
					store(reinterpret_cast<T *>(k.target[p]) + i * N, y);
			});
		if (!scatter)
			finish(g, s.round);
		if (more && !early)
			spread(lo + piece, coming);
		if (!scatter && !finished(g, k, s.round))
			return;
#pragma unroll 1
		for (u32 p = 0; p < g.size; p++)
			if (p == g.rank ? !whole : target == 0 && !scatter)
				copy_out(dst, staging(g.rank, p == g.rank ? results_of_own : g.size + p, lo,
					s.round), first(p) + lo, piece_of(units_in(p), lo, piece), n);
	}
	end(g, s);
}

// ---- all-to-all ----

// Rows is where the parts of a piece lie: `width` bytes each, one `pitch` after the other. A width
// of 0 says that the piece lies together.
struct Rows {
	u8 *at;
	u32 width;
	u64 pitch;

	DEVICE u8 *of(u32 i) const {
		if (width == 0)
			return at + i;
		u32 row = i / width;
		return at + row * pitch + (i - row * width);
	}
	DEVICE u64 bits() const { return ADDRESS(at) | (width ? width | pitch : 0); }
};

// either is `which ? a : b`, for which the compiler would put both in memory.
DEVICE Rows either(bool which, const Rows &a, const Rows &b) {
	return {which ? a.at : b.at, which ? a.width : b.width, which ? a.pitch : b.pitch};
}

// Pieces are those that a rank sends and receives: by rank, the bytes of a part, and how many parts
// there are in this rank's source and destination. No rows of the source say that all of it goes to
// every rank. `there` is what this rank knows of the others' destinations: the width of its part,
// where that begins in a row, and the row's length.
struct Pieces {
	u32 src_rows, dst_rows;
	u32 src[most_ranks], dst[most_ranks], there[most_ranks];
	u64 there_at[most_ranks], there_pitch[most_ranks];

	// sent and received are the bytes of pieces.
	DEVICE u32 sent(u32 p) const { return src[p] * (src_rows ? src_rows : 1); }
	DEVICE u32 received(u32 p) const { return dst[p] * dst_rows; }
	DEVICE Rows in_src(u8 *base, u32 p) const {
		return src_rows ? rows_of(base, src, src_rows, p) : Rows{base, 0, 0};
	}
	DEVICE Rows in_dst(u8 *base, u32 p) const { return rows_of(base, dst, dst_rows, p); }

	// rows_of returns where piece p lies in rows of these widths.
	static DEVICE Rows rows_of(u8 *base, const u32 (&widths)[most_ranks], u32 rows, u32 p) {
		u64 before = 0, pitch = 0;
#pragma unroll
		for (u32 q = 0; q < most_ranks; q++) {
			before += q < p ? widths[q] : 0;
			pitch += widths[q];
		}
		return {base + before, rows > 1 ? widths[p] : 0, pitch};
	}
};

// Team is the threads of a block that copy something: so many from `first` on.
struct Team { u32 first, threads; };

// copy_rows copies bytes lo to hi of a piece, by a team, in accesses of B, and what is less than
// one at the end of a piece by bytes. A thread has four loads under way.
template <class B>
DEVICE void copy_rows(const Rows &to, const Rows &from, u32 lo, u32 hi, Team team) {
	constexpr u32 K = 4;
	u32 thread = thread_x() - team.first, every = team.threads * sizeof(B);
	u32 whole = hi / sizeof(B) * sizeof(B);
#pragma unroll 1
	for (u32 i = lo + thread * sizeof(B); i < whole; i += K * every) {
		B x[K];
#pragma unroll
		for (u32 k = 0; k < K; k++)
			if (i + k * every < whole)
				x[k] = *reinterpret_cast<const B *>(from.of(i + k * every));
#pragma unroll
		for (u32 k = 0; k < K; k++)
			if (i + k * every < whole)
				*reinterpret_cast<B *>(to.of(i + k * every)) = x[k];
	}
#pragma unroll 1
	for (u32 i = whole + thread; i < hi; i += team.threads)
		*to.of(i) = *from.of(i);
}

// Bytes of a run that a block copies by way of staging before it goes on behind those of the other
// blocks, so that all are near each other: whole turns of a block's threads, or of three quarters
// of them. Where all write in place, a block has one run (0.93 of the time).
constexpr u64 run_bytes = 96 << 10;

// copy_share copies bytes lo to end of a piece, as far as they are this block's share of the
// `piece` bytes from lo on, in accesses as wide as both sides allow. Shares are runs of whole
// units, so that the same block of another rank, which may use other accesses, has the same bytes;
// and the same in all rounds. A run has `most` bytes at most.
DEVICE void copy_share(const Rows &to, const Rows &from, u32 lo, u32 end, u64 piece, u64 most,
	Team team) {
	u64 share = (piece + blocks_x() - 1) / blocks_x(), runs = (share + most - 1) / most;
	u32 run = (u32)(((share + runs - 1) / runs + 15) / 16 * 16);
	u64 bits = to.bits() | from.bits();
#pragma unroll 1
	for (u64 i = 0, at = lo + block_x() * run; i < runs && at < end; i++, at += blocks_x() * run) {
		u32 first = (u32)at, last = least(at + run, (u64)end);
		if (aligned(bits, 16))
			copy_rows<b128>(to, from, first, last, team);
		else if (aligned(bits, 4))
			copy_rows<u32>(to, from, first, last, team);
		else if (aligned(bits, 2))
			copy_rows<u16>(to, from, first, last, team);
		else
			copy_rows<u8>(to, from, first, last, team);
	}
}

// Bytes that a rank sends to another in a round: at least so many, of which the flags take little,
// and else an eighth of the piece, since staging is read while the next round is under way.
constexpr u64 round_bytes = 8 << 20;

// Piece p of src goes to rank p, and piece g.rank of dst comes from it, permuted on the way: a part
// of a row in src is written where it belongs in dst, or in between lies in staging, in one run.
// `longest` is the bytes of the longest piece of any two ranks, rounded up to units; target is the
// place of dst, 0 if others do not reach it.
//
// Ranks that reach dst write there. The others push to its staging, and it reads that out. In
// one round each rank sends `piece` bytes to each other one; if everyone writes in place there is
// one round.
//
// A round is pushed before the one ahead of it is awaited, so that the links are busy while staging
// is read. A quarter of the threads copies the rank's own piece meanwhile. Four quarters of staging
// are enough: a rank pushes round t+1 once round t-1 of all has arrived, which they pushed after
// they had read round t-3. The last round is pushed after the one ahead was read: the next kernel
// may use that half of staging at once, see peers.cuh.
DEVICE void alltoall(const Group &g, u8 *dst, u8 *src, u64 longest, u64 target, const Pieces &x) {
	SHARED Block k;
	await_predecessors();
	if (!begin(g, k))
		return;
	State s = k.state;
	s.round = next(s.round);
	if (!enter(g, k, s.round, {target, 0, target, 0}))
		return;
	u64 piece = longest;
	for (u32 p = 0; p < g.size; p++)
		if (!k.direct[p])
			piece = least(least(g.staging / 2 / g.size / 16 * 16, longest),
				longest / 8 < round_bytes ? round_bytes : longest / 128 * 16);
	u64 coming = s.round; // the round to be pushed
	bool in_place = x.in_dst(dst, g.rank).at == x.in_src(src, g.rank).at;
	u32 others = in_place ? threads_x() : threads_x() - (threads_x() + 3) / 4;
#pragma unroll 1
	for (u64 pushed = 0, read = 0; read < longest;) {
		bool push = pushed == read || (pushed - read == piece && pushed + piece < longest);
		u64 lo = push ? pushed : read, round = push ? coming : s.round;
		if (!push && !finished(g, k, round))
			return;
		bool own = push && thread_x() >= others;
		Team team = own ? Team{others, threads_x() - others} : Team{0, push ? others : threads_x()};
#pragma unroll 1
		for (u32 step = 1, p = g.rank; step < g.size && (push || !k.direct[g.rank]); step++) {
			p = own ? p : p + 1 < g.size ? p + 1 : 0;
			Rows from = x.in_src(src, p), to = x.in_dst(dst, p);
			Rows between = {staged<u8>(g, push ? p : g.rank, round) +
					lo / piece / 2 % 2 * (g.staging / 2) + (push ? g.rank : p) * piece - lo,
				0, 0};
			if (push && k.direct[p])
				between = {reinterpret_cast<u8 *>(k.target[p]) + x.there_at[p], x.there[p],
					x.there_pitch[p]};
			copy_share(either(push && !own, between, to), either(push, from, between), lo,
				least(lo + piece, (u64)(push ? x.sent(p) : x.received(p))), piece,
				piece == longest ? longest : run_bytes, team);
			step += own ? g.size : 0; // there is but one
		}
		if (push)
			finish(g, round), pushed += piece, coming = next(coming);
		else
			read += piece, s.round = read < longest ? next(s.round) : s.round;
	}
	end(g, s);
}

// Words of eight bytes of a piece of n, from byte i on, as far as it reaches: whole ones where all
// its rows consist of them.
DEVICE u64 read_word(const Rows &from, u32 i, u32 n) {
	u64 word = 0;
	if (i + 8 <= n && aligned(from.bits(), 8))
		return *reinterpret_cast<const u64 *>(from.of(i));
#pragma unroll 1
	for (u32 j = 0; j < 8 && i + j < n; j++)
		word |= (u64)*from.of(i + j) << 8 * j;
	return word;
}
DEVICE void write_word(const Rows &to, u32 i, u32 n, u64 word) {
	if (i + 8 <= n && aligned(to.bits(), 8)) {
		*reinterpret_cast<u64 *>(to.of(i)) = word;
		return;
	}
#pragma unroll 1
	for (u32 j = 0; j < 8 && i + j < n; j++)
		*to.of(i + j) = (u8)(word >> 8 * j);
}
DEVICE Part<u8> read_part(const Rows &from, u64 i, u32 n) {
	Part<u8> part;
	u32 at = (u32)Part<u8>::index(i);
	part.lo = read_word(from, at, n);
	part.hi = Part<u8>::length() == 16 ? read_word(from, at + 8, n) : 0;
	return part;
}
DEVICE void write_part(const Rows &to, u64 i, u32 n, const Part<u8> &part) {
	u32 at = (u32)Part<u8>::index(i);
	write_word(to, at, n, part.lo);
	if (Part<u8>::length() == 16)
		write_word(to, at + 8, n, part.hi);
}

// The same as alltoall, of pieces that fill no more than g.lines / g.size lines, in one trip and
// without a barrier. Of an empty piece a line is sent, too: every rank hears from all others.
DEVICE void ll128_alltoall(const Group &g, u8 *dst, u8 *src, u64 longest, const Pieces &x) {
	SHARED Block k;
	await_predecessors();
	auto lines_of = [](u32 n) INLINE { return n ? (n + line_bytes - 1) / line_bytes : 1; };
	u64 count = lines_of(longest), room = room_in(g, g.size);
	Turns turns;
	if (count <= turns.every)
		release_successors();
	u32 next_rank = g.rank + 1 < g.size ? g.rank + 1 : 0;
	// it is on its way while the round is looked up
	Part<u8> first = read_part(x.in_src(src, next_rank), turns.first, x.sent(next_rank));
	if (!begin(g, k))
		return;
	State s = k.state;
	s.round = next(s.round);
	u32 half = s.round & 1;
	Rows own = x.in_src(src, g.rank);
	for (u64 i = turns.first; turns.more(i, count); i += turns.every) {
		auto part = [&](u32 p) INLINE {
			return p == next_rank ? first : read_part(x.in_src(src, p), i, x.sent(p));
		};
		push(
			g, part, [&](u32 p) INLINE { return i < lines_of(x.sent(p)); }, half, g.rank, room, i,
			s.round);
		first = read_part(x.in_src(src, next_rank), i + turns.every, x.sent(next_rank));
	}
	bool ok = true;
	by_size(g.size, [&](auto bound) INLINE {
		constexpr u32 R = decltype(bound)::value;
		for (u64 i = turns.first; turns.more(i, count) && ok; i += turns.every) {
			Part<u8> parts[R] = {}, mine = read_part(own, i, x.sent(g.rank));
			ok = collect(
				g, parts, [&](u32 p) INLINE { return i < lines_of(x.received(p)); }, half, 0, room,
				i, s.round);
#pragma unroll
			for (u32 p = 0; p < R; p++)
				if (ok && p < g.size)
					write_part(x.in_dst(dst, p), i, x.received(p), p == g.rank ? mine : parts[p]);
		}
	});
	if (ok)
		end(g, s);
}

#define PEERS(T) \
	LEAN_KERNEL(ll_##T, 256, Group g, T *dst, const T *src, u64 n) { ll(g, dst, src, n); } \
	LEAN_KERNEL(ll128_##T, 512, Group g, T *dst, const T *src, u64 n) { \
		ll128<T, false>(g, dst, src, n); \
	} \
	LEAN_KERNEL(ll128scatter_##T, 512, Group g, T *dst, const T *src, u64 n) { \
		ll128<T, true>(g, dst, src, n); \
	} \
	LEAN_KERNEL(oneshot_##T, 512, Group g, T *dst, const T *src, u64 n, u64 piece, u64 source) { \
		oneshot(g, dst, src, n, piece, source); \
	} \
	LEAN_KERNEL(twoshot_##T, 512, Group g, T *dst, const T *src, u64 n, u64 piece, u64 target) { \
		twoshot<false>(g, dst, src, n, piece, target); \
	} \
	LEAN_KERNEL(scatter_##T, 512, Group g, T *dst, const T *src, u64 n, u64 piece) { \
		twoshot<true>(g, dst, src, n, piece, 0); \
	}

PEERS(f32)
PEERS(f16)
PEERS(bf16)

LEAN_KERNEL(treeoneshot_f32, 512, Tree g, f32 *dst, const f32 *src, u64 n, u64 piece, u64 source) {
	oneshot(g, dst, src, n, piece, source);
}

LEAN_KERNEL(treetwoshot_f32, 512, Tree g, f32 *dst, const f32 *src, u64 n, u64 piece, u64 target) {
	twoshot<false>(g, dst, src, n, piece, target);
}

LEAN_KERNEL(treescatter_f32, 512, Tree g, f32 *dst, const f32 *src, u64 n, u64 piece) {
	twoshot<true>(g, dst, src, n, piece, 0);
}

LEAN_KERNEL(alltoall_b8, 512, Group g, u8 *dst, u8 *src, u64 longest, u64 target, Pieces pieces) {
	alltoall(g, dst, src, longest, target, pieces);
}

LEAN_KERNEL(ll128alltoall_b8, 512, Group g, u8 *dst, u8 *src, u64 longest, u64, Pieces pieces) {
	ll128_alltoall(g, dst, src, longest, pieces);
}

// ---- launch ----
//
// Blocks are few, one on a multiprocessor, and need many registers for their loads: 64
// are too few, and what does not fit is spilled.
//
// The grid is the same on every rank, at most most_blocks, and a block has at least
// as many threads as there are ranks. A kernel waits for those of the other ranks:
// where several ranks share a device, all blocks must have room on it together.

} // namespace peers
