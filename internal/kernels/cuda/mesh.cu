// Sums and averages on a hybrid cube mesh, mesh_DTYPE: eight devices in two cliques of
// four, each device with a link to one of the other clique, its relay. A device reads
// the memory of these four neighbours only.
//
// Such machines are rare, so this is simple rather than fast: operands always go through
// staging, and reads are guarded by barriers. Values are added as in all other kernels of a
// group, so the bits are the same. In each round (see peers.cuh) a rank hears from its
// neighbours only, which is enough, since no other rank uses its memory.

#include "peers.cuh"

namespace peers {

// ---- kernels ----

// Mesh has a byte for each neighbour of a rank: three of its clique, then its relay.
struct Mesh {
	u32 partners;
	DEVICE u32 partner(u32 i) const { return partners >> 8 * i & 255; }
	DEVICE u32 relay() const { return partner(3); }
	// near reports whether a rank is in the clique of rank me.
	DEVICE bool near(u32 me, u32 p) const {
		return p == me || p == partner(0) || p == partner(1) || p == partner(2);
	}
};

typedef u64 Flags[most_blocks][most_ranks];

// meet tells neighbours first to 3 that the block has come so far in a round, and
// waits until they say the same.
DEVICE bool meet(const Group &g, Block &k, Mesh mesh, u32 first, Flags Pad::*flags, u64 round) {
	u32 i = first + thread_x(), b = block_x();
	barrier();
	if (i < 4) {
		u32 p = mesh.partner(i);
		put_flag(&(g.pads[p]->*flags)[b][g.rank], round);
		if (!await(g,
				[&]() INLINE { return get_flag(&(own(g)->*flags)[b][p]) < round ? 1 + p : 0; }))
			k.failed = 1;
	}
	barrier();
	return !k.failed;
}

// kept returns where a rank keeps the operand of rank p in a round.
template <class T> DEVICE T *kept(const Group &g, u32 at, u32 p, u64 round, u64 piece) {
	return reinterpret_cast<T *>(own(g)->windows[0][at] + (round & 1) * g.staging + p * piece * 16);
}

// for i < n { dst[i] = sum over p of src of rank p [i] / divisor }
//
// A round does `piece` units. A rank shows its operand, keeps those of its clique, and
// adds them up with those that its relay keeps. A thread deals with the same units
// everywhere, so that barriers are between blocks of the same number.
template <class T>
DEVICE void meshed(const Group &g, T *dst, const T *src, u64 n, u64 piece, Mesh mesh) {
	constexpr u32 N = 16 / sizeof(T);
	SHARED Block k;
	if (!begin(g, k))
		return;
	State s = k.state;
	u64 units = units_of<T>(n);
	bool vectors = aligned(ADDRESS(dst), 16);
	for (u64 lo = 0; lo < units; lo += piece) {
		s.round = next(s.round);
		u64 count = piece_of(units, lo, piece);
		copy_in(kept<T>(g, g.rank, g.rank, s.round, piece), src, lo, count, n);
		if (!meet(g, k, mesh, 0, &Pad::entered, s.round))
			return;
#pragma unroll 1
		for (u32 c = 0; c < 3; c++) {
			u32 p = mesh.partner(c);
			copy_in(kept<T>(g, g.rank, p, s.round, piece), kept<T>(g, p, p, s.round, piece), 0,
				count, count * N);
		}
		if (!meet(g, k, mesh, 3, &Pad::left, s.round))
			return;
#pragma unroll 1
		for (u64 i = thread_index(); i < count; i += thread_count()) {
			T x[most_ranks][N], y[N];
#pragma unroll
			for (u32 p = 0; p < most_ranks; p++)
				load(x[p],
					kept<T>(g, mesh.near(g.rank, p) ? g.rank : mesh.relay(), p, s.round, piece) +
						i * N);
			add_up(y, x, g);
			deliver(dst, y, lo + i, n, vectors);
		}
	}
	end(g, s);
}

#define MESH(T) \
	LEAN_KERNEL(mesh_##T, 512, Group g, T *dst, const T *src, u64 n, u64 piece, u64 partners) { \
		meshed(g, dst, src, n, piece, Mesh{(u32)partners}); \
	}

MESH(f32)
MESH(f16)
MESH(bf16)

// ---- launch ----
//
// As of the kernels of allreduce.cu: the grid is the same on every rank, and all blocks
// must have room together.

} // namespace peers
