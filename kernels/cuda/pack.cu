// Many buffers to one and back, in one launch.

#include "bytes.cuh"

// ---- kernels ----

// One buffer, in a table in device memory.
struct Segment {
	u64 address;
	u64 offset; // in the flat buffer, in bytes
	u64 nbytes;
	u64 first; // the number of its first chunk
};

constexpr u64 chunk = 16 << 10; // bytes a block copies at a time
constexpr u64 threads = 256;    // in a block: known, so that less has to be kept in registers

// The segment that holds a chunk: the last one that starts at it or before and
// is not empty, for an empty one starts where the next one does.
DEVICE const Segment &find(const Segment *table, u64 count, u64 c) {
	u64 lo = 0, hi = count;
	while (hi - lo > 1) {
		u64 middle = (lo + hi) / 2;
		if (table[middle].first <= c)
			lo = middle;
		else
			hi = middle;
	}
	return table[lo];
}

template <class Copy> DEVICE void each_chunk(const Segment *table, u64 count, u64 chunks, Copy copy) {
	for (u64 c = block_x(); c < chunks; c += blocks_x()) {
		const Segment &s = find(table, count, c);
		u64 lo = (c - s.first) * chunk;
		copy(reinterpret_cast<u8 *>(s.address) + lo, s.offset + lo, least(chunk, s.nbytes - lo));
	}
}

// for s in table { for i < s.nbytes { flat[s.offset+i] = s.address[i] } }
KERNEL(pack_b8, threads, u8 *flat, const Segment *table, u64 count, u64 chunks) {
	each_chunk(table, count, chunks, [=](u8 *buffer, u64 offset, u64 n) {
		copy_bytes(flat + offset, buffer, n, thread_x(), threads);
	});
}

// for s in table { for i < s.nbytes { s.address[i] = flat[s.offset+i] } }
KERNEL(unpack_b8, threads, const u8 *flat, const Segment *table, u64 count, u64 chunks) {
	each_chunk(table, count, chunks, [=](u8 *buffer, u64 offset, u64 n) {
		copy_bytes(buffer, flat + offset, n, thread_x(), threads);
	});
}

// ---- launch ----
//
// One block of 256 threads for each chunk, up to the largest grid.
