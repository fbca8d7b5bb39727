// Copying bytes by several threads, in the widest accesses that the addresses
// allow.
#pragma once

#include "device.cuh"

// Four accesses are under way at a time in each thread: one hides too little of
// the memory's latency, and many more take the registers of other threads.
template <class B> DEVICE void copy_units(B *dst, const B *src, u64 n, u64 thread, u64 threads) {
	u64 i = thread;
#pragma unroll 1
	for (; i + 3 * threads < n; i += 4 * threads) {
		B a = src[i], b = src[i + threads], c = src[i + 2 * threads], d = src[i + 3 * threads];
		dst[i] = a;
		dst[i + threads] = b;
		dst[i + 2 * threads] = c;
		dst[i + 3 * threads] = d;
	}
#pragma unroll 1
	for (; i < n; i += threads)
		dst[i] = src[i];
}

// The bytes before the first multiple of the unit and after the last are copied
// one by one.
template <class B> DEVICE void copy_as(u8 *dst, const u8 *src, u64 n, u64 thread, u64 threads) {
	u64 head = least(n, (u64)(-ADDRESS(dst) & (sizeof(B) - 1)));
	u64 units = (n - head) / sizeof(B), done = head + units * sizeof(B);
	copy_units(reinterpret_cast<B *>(dst + head), reinterpret_cast<const B *>(src + head), units, thread, threads);
#pragma unroll 1
	for (u64 i = thread; i < head; i += threads)
		dst[i] = src[i];
#pragma unroll 1
	for (u64 i = done + thread; i < n; i += threads)
		dst[i] = src[i];
}

// copy_bytes: for i < n { dst[i] = src[i] }, by the threads 0 to threads.
DEVICE void copy_bytes(u8 *dst, const u8 *src, u64 n, u64 thread, u64 threads) {
	u64 apart = ADDRESS(dst) ^ ADDRESS(src); // how the two are aligned to each other
	if (aligned(apart, 16))
		copy_as<b128>(dst, src, n, thread, threads);
	else if (aligned(apart, 8))
		copy_as<u64>(dst, src, n, thread, threads);
	else if (aligned(apart, 4))
		copy_as<u32>(dst, src, n, thread, threads);
	else if (aligned(apart, 2))
		copy_as<u16>(dst, src, n, thread, threads);
	else
		copy_as<u8>(dst, src, n, thread, threads);
}
