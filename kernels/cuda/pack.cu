// Many buffers to one and back, in one launch; and to one of 16-bit floats, rounded on
// the way: pack_FROM_TO.

#include "bytes.cuh"
#include "number.cuh"

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

// Each thread reads all of its part of a piece before it writes any: 64 bytes, as
// copy_units has under way.
//
// for p in table { for i < p.nbytes/sizeof(From) { To(flat+p.offset)[i] = To(From(p.address)[i]) } }
template <class To, class From> DEVICE void pack_rounded(u8 *flat, const Piece *table) {
	constexpr u32 K = 64 / (16 / sizeof(To) * sizeof(From)); // vectors
	Piece p = table[block_x()];
	each_between<OfBlock, K>(reinterpret_cast<To *>(flat + p.offset), reinterpret_cast<const From *>(p.address),
		p.nbytes / sizeof(From), [](To &y, From x) { convert(x, y); });
}

#define PACK(From, To) \
	KERNEL(pack_##From##_##To, threads, u8 *flat, const Piece *table) { pack_rounded<To, From>(flat, table); }
PACK(f32, f16)
PACK(f32, bf16)
PACK(f64, f16)
PACK(f64, bf16)

// ---- launch ----
//
// One block of 128 threads for each piece. Pieces of elements that are rounded are as
// large as others before they are.
