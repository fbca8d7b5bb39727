// Many buffers to one and back, in one launch.

#include "bytes.cuh"

// ---- kernels ----

// One buffer, which is not empty, in a table in device memory.
struct Segment {
	u64 address;
	u64 offset; // in the flat buffer, in bytes
	u64 nbytes;
	u64 first; // the number of its first chunk
};

// The bytes of a block, and its threads: each copies four units of 16 bytes. Blocks
// twice as large are as fast for 64 buffers, but not for 1000 in 16 MiB: 68 % of
// the driver's copy instead of 73 % (H200, 2026-11-21).
constexpr u32 chunk = 8 << 10, threads = 128;

// The segment that holds a chunk: the last one that starts at it or before. All
// threads of a block look for it, each in its share of the table, so that the
// latency of the memory is met once for 128 segments.
DEVICE Segment find(const Segment *table, u32 count, u32 c) {
	SHARED u32 found;
	u32 lo = 0;
	for (u32 n = count; n > 1;) {
		u32 step = (n + threads - 1) / threads, s = lo + thread_x() * step, end = lo + n;
		if (s < end && table[s].first <= c && (s + step >= end || c < table[s + step].first))
			found = s;
		barrier();
		lo = found;
		n = least(step, end - lo);
		barrier();
	}
	return table[lo];
}

// Copies a block's chunk, from its buffer to its place in flat or back.
template <class Copy> DEVICE void copy_chunk(u8 *flat, const Segment *table, u64 count, Copy copy) {
	Segment s = find(table, (u32)count, block_x());
	u64 lo = (block_x() - s.first) * chunk;
	copy(reinterpret_cast<u8 *>(s.address) + lo, flat + s.offset + lo, (u32)least((u64)chunk, s.nbytes - lo));
}

// for s in table { for i < s.nbytes { flat[s.offset+i] = s.address[i] } }
KERNEL(pack_b8, threads, u8 *flat, const Segment *table, u64 count) {
	copy_chunk(flat, table, count, [](u8 *buffer, u8 *place, u32 n) { copy_bytes(place, buffer, n, thread_x(), threads); });
}

// for s in table { for i < s.nbytes { s.address[i] = flat[s.offset+i] } }
KERNEL(unpack_b8, threads, u8 *flat, const Segment *table, u64 count) {
	copy_chunk(flat, table, count, [](u8 *buffer, u8 *place, u32 n) { copy_bytes(buffer, place, n, thread_x(), threads); });
}

// ---- launch ----
//
// One block of 128 threads for each chunk.
