// What the kernels need of CUDA, for three compilers: clang without a CUDA
// toolkit (what is committed), nvcc (to compare speed), and any C++ compiler
// (emulator/, to test without a GPU).
//
// Every parameter of a kernel is a multiple of eight bytes, so that a call is a
// list of 64-bit words. A KERNEL leaves registers for at least 1024 threads on a
// multiprocessor, and takes what that allows; a LEAN_KERNEL takes what it needs,
// so that more threads have room, a FAT_KERNEL leaves some for 768, a PAIRED_KERNEL for 512, and a
// SHARING_KERNEL for a number of blocks. Blocks of a TOGETHER_KERNEL, which is lean, wait for each
// other: it is one that calls look of recurrent.cu.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
typedef float f32;
typedef double f64;

// Whether the code is for devices that have the instructions of compute capability 8.0, and of
// 9.0. All others do without: those of 7.0, and hosts.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define AMPERE 1
#else
#define AMPERE 0
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HOPPER 1
#else
#define HOPPER 0
#endif

// 16-bit floats are their bits: arithmetic on them is done in 32 bits.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

#if defined(__NVCC__)

typedef uint4 b128;
#define DEVICE __device__ __forceinline__
#define KERNEL(name, threads, ...) \
	extern "C" __global__ void __launch_bounds__(threads, 1024 / threads) name(__VA_ARGS__)
#define LEAN_KERNEL(name, threads, ...) \
	extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__)
#define TOGETHER_KERNEL LEAN_KERNEL
#define FAT_KERNEL(name, threads, ...) \
	extern "C" __global__ void __launch_bounds__(threads, 768 / threads) name(__VA_ARGS__)
#define PAIRED_KERNEL(name, threads, ...) \
	extern "C" __global__ void __launch_bounds__(threads, 512 / threads) name(__VA_ARGS__)
#define SHARING_KERNEL(name, threads, blocks, ...) \
	extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
#define SHARED __shared__

DEVICE u32 thread_x() { return threadIdx.x; }
DEVICE u32 thread_y() { return threadIdx.y; }
DEVICE u32 threads_x() { return blockDim.x; }
DEVICE u32 threads_y() { return blockDim.y; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 blocks_x() { return gridDim.x; }
DEVICE u32 blocks_y() { return gridDim.y; }
DEVICE void barrier() { __syncthreads(); }

#elif defined(__CUDA__)

typedef u32 b128 __attribute__((ext_vector_type(4)));
#define DEVICE __attribute__((device, always_inline)) inline
#define KERNEL(name, threads, ...) \
	extern "C" __attribute__((global, launch_bounds(threads, 1024 / threads))) void name( \
		__VA_ARGS__)
#define LEAN_KERNEL(name, threads, ...) \
	extern "C" __attribute__((global, launch_bounds(threads))) void name(__VA_ARGS__)
#define TOGETHER_KERNEL LEAN_KERNEL
#define FAT_KERNEL(name, threads, ...) \
	extern "C" __attribute__((global, launch_bounds(threads, 768 / threads))) void name(__VA_ARGS__)
#define PAIRED_KERNEL(name, threads, ...) \
	extern "C" __attribute__((global, launch_bounds(threads, 512 / threads))) void name(__VA_ARGS__)
#define SHARING_KERNEL(name, threads, blocks, ...) \
	extern "C" __attribute__((global, launch_bounds(threads, blocks))) void name(__VA_ARGS__)
#define SHARED __attribute__((shared))

DEVICE u32 thread_x() { return __nvvm_read_ptx_sreg_tid_x(); }
DEVICE u32 thread_y() { return __nvvm_read_ptx_sreg_tid_y(); }
DEVICE u32 threads_x() { return __nvvm_read_ptx_sreg_ntid_x(); }
DEVICE u32 threads_y() { return __nvvm_read_ptx_sreg_ntid_y(); }
DEVICE u32 block_x() { return __nvvm_read_ptx_sreg_ctaid_x(); }
DEVICE u32 block_y() { return __nvvm_read_ptx_sreg_ctaid_y(); }
DEVICE u32 blocks_x() { return __nvvm_read_ptx_sreg_nctaid_x(); }
DEVICE u32 blocks_y() { return __nvvm_read_ptx_sreg_nctaid_y(); }
DEVICE void barrier() { __syncthreads(); }

#else

#include "emulator/emulate.h"

#endif

// The index of this thread and the number of threads, over a one-dimensional
// grid.
DEVICE u64 thread_index() { return (u64)block_x() * threads_x() + thread_x(); }
DEVICE u64 thread_count() { return (u64)blocks_x() * threads_x(); }

template <class T> DEVICE T least(T a, T b) { return a < b ? a : b; }

// The bits of one type as another of the same size.
template <class To, class From> DEVICE To bits_as(From x) {
	static_assert(sizeof(To) == sizeof(From), "sizes differ");
	To to;
	__builtin_memcpy(&to, &x, sizeof to);
	return to;
}

// Whether a pointer (or several, or-ed) is a multiple of n bytes, a power of two.
DEVICE bool aligned(u64 address, u32 n) { return (address & (n - 1)) == 0; }

// The unsigned integer of a size.
template <int size> struct Bits;
template <> struct Bits<1> { typedef u8 type; };
template <> struct Bits<2> { typedef u16 type; };
template <> struct Bits<4> { typedef u32 type; };
template <> struct Bits<8> { typedef u64 type; };
template <> struct Bits<16> { typedef b128 type; };

// load and store move N elements in accesses of up to 16 bytes; the address is
// a multiple of that.
template <int N, class T> DEVICE void load(T (&x)[N], const T *p) {
	constexpr int unit = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
	typedef typename Bits<unit>::type B;
	for (int i = 0; i < int(N * sizeof(T)) / unit; i++) {
		B b = reinterpret_cast<const B *>(p)[i];
		__builtin_memcpy(reinterpret_cast<char *>(x) + i * unit, &b, unit);
	}
}

template <int N, class T> DEVICE void store(T *p, const T (&x)[N]) {
	constexpr int unit = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
	typedef typename Bits<unit>::type B;
	for (int i = 0; i < int(N * sizeof(T)) / unit; i++) {
		B b;
		__builtin_memcpy(&b, reinterpret_cast<const char *>(x) + i * unit, unit);
		reinterpret_cast<B *>(p)[i] = b;
	}
}

// load_if returns what p points to if it is `there`, else 0, without a branch.
template <class T> DEVICE T load_if(bool there, const T *p) {
	typename Bits<sizeof(T)>::type bits = 0;
#if defined(__NVCC__) || defined(__CUDA__)
#if defined(__NVCC__)
	u64 from = __cvta_generic_to_global(p);
#else
	u64 from = (u64)(__attribute__((address_space(1))) const void *)p;
#endif
	if constexpr (sizeof(T) == 8)
		asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p ld.global.b64 %0, [%2];}"
			: "+l"(bits) : "r"((u32)there), "l"(from));
	else
		asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p ld.global.b32 %0, [%2];}"
			: "+r"(bits) : "r"((u32)there), "l"(from));
#else
	if (there)
		__builtin_memcpy(&bits, p, sizeof bits);
#endif
	return bits_as<T>(bits);
}

template <int N> struct Count { static constexpr int value = N; };

// each covers 0 to n: body(Count<N>, i) does elements i to i+N where the
// operands allow vectors, body(Count<1>, i) the others.
template <int N, class Body> DEVICE void each(u64 n, bool vectors, Body body) {
	u64 whole = vectors ? n / N : 0;
	for (u64 i = thread_index(); i < whole; i += thread_count())
		body(Count<N>{}, i * N);
	for (u64 i = whole * N + thread_index(); i < n; i += thread_count())
		body(Count<1>{}, i);
}

#define ADDRESS(p) reinterpret_cast<u64>(p)

// Four bytes of the eight of a and b: those that the digits of `which` number.
DEVICE u32 pick(u32 a, u32 b, u32 which) {
#if defined(__NVCC__)
	return __byte_perm(a, b, which);
#elif defined(__CUDA__)
	return __nvvm_prmt(a, b, which);
#else
	u32 x[2] = {a, b}, y = 0;
	for (int i = 0; i < 4; i++)
		reinterpret_cast<u8 *>(&y)[i] = reinterpret_cast<u8 *>(x)[which >> 4 * i & 7];
	return y;
#endif
}

// The word that begins `shift` bits, modulo 32, after a, where b follows a.
DEVICE u32 funnel(u32 a, u32 b, u32 shift) { return (u32)(((u64)b << 32 | a) >> (shift & 31)); }

// meet waits for the other threads of the warp.
DEVICE void meet() {
#if defined(__NVCC__) || defined(__CUDA__)
	asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
#else
	emulate::wait_for_warp();
#endif
}

// The x of the next thread of the warp, the first one's for the last; all of them call
// this at once.
DEVICE u32 from_next(u32 x) {
#if defined(__NVCC__) || defined(__CUDA__)
	u32 y;
	asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;"
		: "=r"(y)
		: "r"(x), "r"((thread_x() + 1) & 31));
	return y;
#else
	return emulate::together(x, [](const u32 *all, u32 lane) { return all[(lane + 1) & 31]; });
#endif
}

// kept returns x, which the compiler then keeps rather than finds again.
DEVICE u32 kept(u32 x) {
#if defined(__NVCC__) || defined(__CUDA__)
	asm volatile("" : "+r"(x));
#endif
	return x;
}

// copy_async begins to copy 16 bytes to shared memory, past the L1 cache; wait_for_copies waits
// for those that the thread has begun. Before Ampere, they are copied when copy_async returns.
DEVICE void copy_async(b128 *shared, const b128 *from) {
#if !AMPERE
	*shared = *from;
#elif defined(__NVCC__)
	u32 to = (u32)__cvta_generic_to_shared(shared);
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
	u32 to = (u32)(u64)(__attribute__((address_space(3))) void *)shared;
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
}
DEVICE void wait_for_copies() {
#if AMPERE
	asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// exchange transposes words by what they have elements of: element i of word j becomes
// element j of word i.
DEVICE void exchange(u32 (&x)[2]) {
	u32 low = pick(x[0], x[1], 0x5410);
	x[1] = pick(x[0], x[1], 0x7632);
	x[0] = low;
}
DEVICE void exchange(u32 (&x)[4]) {
	u32 a = pick(x[0], x[1], 0x5140), b = pick(x[2], x[3], 0x5140);
	u32 c = pick(x[0], x[1], 0x7362), d = pick(x[2], x[3], 0x7362);
	x[0] = pick(a, b, 0x5410), x[1] = pick(a, b, 0x7632);
	x[2] = pick(c, d, 0x5410), x[3] = pick(c, d, 0x7632);
}

// a if that is so, else b: both are read, so that an array they are of needs no memory.
DEVICE u32 choose(bool so, u32 a, u32 b) { return so ? a : b; }

// N words of four more: those from byte `shift` on, which is less than 16.
template <int N> DEVICE void cut(u32 (&y)[N], const u32 (&x)[N + 4], u32 shift) {
	u32 w[N + 4];
#pragma unroll
	for (int i = 0; i < N + 4; i++)
		w[i] = x[i];
#pragma unroll
	for (int by = 2; by > 0; by /= 2)
#pragma unroll
		for (int i = 0; i + by < N + 4; i++)
			w[i] = choose(shift & 4 * by, w[i + by], w[i]);
#pragma unroll
	for (int i = 0; i < N; i++)
		y[i] = pick(w[i], w[i + 1], 0x3210 + 0x1111 * (shift & 3));
}

// fetch reads N words, a multiple of 4, from p on, of which the bytes from lo up to hi are
// asked for, to be cut at p % 16: in aligned accesses that hold at least one of them. What
// is not asked for is anything.
template <int N> DEVICE u32 fetch(u32 (&x)[N + 4], const void *p, u32 lo, u32 hi) {
	u32 shift = (u32)ADDRESS(p) & 15;
	const u32 *from = reinterpret_cast<const u32 *>(static_cast<const u8 *>(p) - shift);
#pragma unroll
	for (u32 i = 0; i <= N; i += 4)
		if (lo < hi && lo + shift < 4 * i + 16 && hi + shift > 4 * i)
			load(reinterpret_cast<u32 (&)[4]>(x[i]), from + i);
	return shift;
}

// load_any moves N elements, which are a multiple of 16 bytes, from wherever they are: at a
// multiple of their size.
template <int N, class T> DEVICE void load_any(T (&x)[N], const T *p) {
	constexpr int words = N * sizeof(T) / 4;
	u32 from[words + 4], y[words], shift = fetch<words>(from, p, 0, 4 * words);
	cut(y, from, sizeof(T) % 4 == 0 ? shift & 12 : shift);
	__builtin_memcpy(x, y, sizeof y);
}

// each_between does to(dst[i], src[i]) for all of n elements, of two types. Vectors are
// 16 bytes of the smaller type, and aligned in dst, wherever they are in src.
template <class To, class From, class Convert>
DEVICE void each_between(To *dst, const From *src, u64 n, Convert to) {
	constexpr u32 N = 16 / (sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
	u64 head = least(n, (-ADDRESS(dst) & 15) / sizeof(To)), vectors = (n - head) / N;
	bool together = aligned(ADDRESS(src + head), 16);
	for (u64 i = thread_index(); i < vectors; i += thread_count()) {
		From x[N];
		To y[N];
		if (together)
			load(x, src + head + i * N);
		else
			load_any(x, src + head + i * N);
#pragma unroll
		for (u32 k = 0; k < N; k++)
			to(y[k], x[k]);
		store(dst + head + i * N, y);
	}
	for (u64 i = thread_index(); i < head; i += thread_count())
		to(dst[i], src[i]);
	for (u64 i = head + vectors * N + thread_index(); i < n; i += thread_count())
		to(dst[i], src[i]);
}
