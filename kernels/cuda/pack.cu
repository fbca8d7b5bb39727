// Many buffers to one and back, in one launch.

#include "bytes.cuh"

// ---- kernels ----

// A piece of a buffer, as large as a block copies, or less.
struct Piece {
	u64 address;
	u64 offset; // in the flat buffer, in bytes
	u64 nbytes;
};

// Threads of a block: for a whole piece, each copies four units of 16 bytes. Pieces
// twice as large are as fast for 64 buffers, but not for 1000 in 16 MiB (H200,
// 2026-11-21).
constexpr u32 threads = 128;

// for p in table { for i < p.nbytes { flat[p.offset+i] = p.address[i] } }
KERNEL(pack_b8, threads, u8 *flat, const Piece *table) {
	Piece p = table[block_x()];
	copy_bytes(flat + p.offset, reinterpret_cast<const u8 *>(p.address), (u32)p.nbytes, thread_x(), threads);
}

// for p in table { for i < p.nbytes { p.address[i] = flat[p.offset+i] } }
KERNEL(unpack_b8, threads, u8 *flat, const Piece *table) {
	Piece p = table[block_x()];
	copy_bytes(reinterpret_cast<u8 *>(p.address), flat + p.offset, (u32)p.nbytes, thread_x(), threads);
}

// ---- launch ----
//
// One block of 128 threads for each piece.
