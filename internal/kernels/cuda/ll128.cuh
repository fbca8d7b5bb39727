// LL128: lines of 128 bytes that a warp writes at once, of which the last eight are a flag.
#pragma once

#include "peers.cuh"

namespace peers {

// Eight threads deal with a line: lane i with its words 2i and 2i+1. So they have a
// unit of values each, but the last one, whose second word is the flag.
constexpr u32 lanes = 8;
constexpr u64 line_words = 16, line_bytes = 120; // of values

DEVICE u32 lane() { return thread_x() % lanes; }

// Lines are dealt with by the same threads in every rank: each by each `every`-th
// from `first` on. Threads of a warp take the same number of turns.
struct Turns {
	u64 first, every;
	DEVICE Turns() : first(thread_index() / lanes), every(thread_count() / lanes) {}
	// more reports whether a thread of the warp has a line.
	DEVICE bool more(u64 line, u64 count) const { return line - line % (32 / lanes) < count; }
};

// line_at is where line i of a sender's area lies in the half of a rank. Areas have
// `room` lines each.
DEVICE u64 *line_at(const Group &g, u32 at, u32 half, u32 area, u64 room, u64 i) {
	u64 *inboxes = reinterpret_cast<u64 *>(g.pads[at] + 1) + 2 * 2 * g.size * g.packets;
	return inboxes + line_words * (half * g.lines + area * room + i);
}

// room_in is the room of each of a number of areas.
DEVICE u64 room_in(const Group &g, u32 areas) { return (u32)g.lines / areas; }

// Part is this thread's part of a line: values, and perhaps the flag.
template <class T> struct Part {
	static constexpr u32 N = 16 / sizeof(T), line = line_bytes / sizeof(T); // values
	u64 lo, hi;

	static DEVICE u64 index(u64 i) { return i * line + lane() * N; }
	static DEVICE u32 length() { return lane() < lanes - 1 ? N : N / 2; }

	// read and write are of line i of memory with n values; words says that it begins
	// at a multiple of eight bytes, and whole that such words can be written.
	DEVICE void read(const T *src, u64 i, u64 n, bool words) {
		u64 at = index(i);
		u32 some = length();
		lo = hi = 0;
		if (whole(i, n, words)) {
			read_words(src, i);
			return;
		}
#pragma unroll 1
		for (u32 j = 0; j < some && at + j < n; j++) {
			u64 bits = (u64)bits_as<typename Bits<sizeof(T)>::type>(src[at + j])
				<< j % (N / 2) * (8 * sizeof(T));
			lo |= j < N / 2 ? bits : 0;
			hi |= j < N / 2 ? 0 : bits;
		}
	}

	DEVICE void read_words(const T *src, u64 i) {
		lo = *reinterpret_cast<const u64 *>(src + index(i));
		if (length() == N)
			hi = *reinterpret_cast<const u64 *>(src + index(i) + N / 2);
	}

	static DEVICE bool whole(u64 i, u64 n, bool words) { return words && index(i) + length() <= n; }
	DEVICE void write_words(T *dst, u64 i) const {
		*reinterpret_cast<u64 *>(dst + index(i)) = lo;
		if (length() == N)
			*reinterpret_cast<u64 *>(dst + index(i) + N / 2) = hi;
	}
	DEVICE void write_values(T *dst, u64 i, u64 n) const {
		typedef typename Bits<sizeof(T)>::type B;
		u64 at = index(i);
#pragma unroll 1
		for (u32 j = 0; j < length() && at + j < n; j++)
			dst[at + j] = bits_as<T>((B)((j < N / 2 ? lo : hi) >> j % (N / 2) * (8 * sizeof(T))));
	}
	DEVICE void write(T *dst, u64 i, u64 n, bool words) const {
		if (whole(i, n, words))
			write_words(dst, i);
		else
			write_values(dst, i, n);
	}

	DEVICE void send(u64 *line, u64 flag) const {
		put_packet(line + 2 * lane(), lo, lane() < lanes - 1 ? hi : flag);
	}
	DEVICE bool receive(const u64 *line, u64 flag) { return get_part(lo, hi, line, lane(), flag); }
};

// push sends part(p) to every other rank p that gets line i, as mine(p) says. Each rank starts with
// another one, so that links are used evenly.
template <class Of, class Mine>
DEVICE void push(const Group &g, Of part, Mine mine, u32 half, u32 area, u64 room, u64 i,
	u64 flag) {
#pragma unroll 1
	for (u32 step = 1, p = g.rank; step < g.size; step++) {
		p = p + 1 < g.size ? p + 1 : 0;
		auto x = part(p);
		converge();
		if (mine(p))
			x.send(line_at(g, p, half, area, room, i), flag);
	}
}

// collect waits for line i in the areas of all other ranks p that send it, as mine(p) says, from
// `area` on.
template <u32 R, class T, class Mine>
DEVICE bool collect(const Group &g, Part<T> (&parts)[R], Mine mine, u32 half, u32 area, u64 room,
	u64 i, u64 flag) {
	converge();
	return await<Warp>(g, [&]() INLINE {
		// No branches, so that all loads are under way at a time: there is an area for
		// this rank's own lines, too, which has none.
		u32 missing = 0;
#pragma unroll
		for (u32 p = 0; p < R; p++) {
			bool other = p < g.size && p != g.rank && mine(p);
			u64 *line = line_at(g, g.rank, half, area + (other ? p : g.rank), room, other ? i : 0);
			bool there = parts[p].receive(line, flag);
			missing = other && !there ? 1 + p : missing;
		}
		return missing;
	});
}

// sum adds up the parts of all ranks, with this rank's own.
template <u32 R, class T>
DEVICE Part<T> sum(const Group &g, const Part<T> (&parts)[R], const Part<T> &own) {
	T x[R][Part<T>::N], values[Part<T>::N];
	Part<T> y;
#pragma unroll
	for (u32 p = 0; p < R; p++) {
		u64 words[2] = {p == g.rank ? own.lo : parts[p].lo, p == g.rank ? own.hi : parts[p].hi};
		__builtin_memcpy(x[p], words, sizeof words);
	}
	add_up(values, x, g);
	__builtin_memcpy(&y.lo, values, 8);
	__builtin_memcpy(&y.hi, values + Part<T>::N / 2, 8);
	return y;
}

} // namespace peers
