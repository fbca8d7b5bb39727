// Copying bytes by several threads, in accesses of 16 bytes.
#pragma once

#include "device.cuh"

// Four accesses are under way at a time in each thread: one hides too little of
// the memory's latency, and many more take the registers of other threads.
template <class B, class I> DEVICE void copy_units(B *dst, const B *src, I n, I thread, I threads) {
#pragma unroll 1
	for (I start = thread; start < n; start += 4 * threads) {
		B x[4];
#pragma unroll
		for (I k = 0; k < 4; k++)
			if (start + k * threads < n)
				x[k] = src[start + k * threads];
#pragma unroll
		for (I k = 0; k < 4; k++)
			if (start + k * threads < n)
				dst[start + k * threads] = x[k];
	}
}

// As copy_units of 16 bytes, from `shift` bytes after src, which is more than 0:
// every unit that is read holds bytes that are asked for. This has 95 to 111 %
// of the speed of the driver's copy (H200, bench/results/2026-11/2026-11-22-h200-kernels.txt); four
// units at a time, and units as wide as both addresses allow, if that is 4 bytes, took up to a
// fifth longer.
template <class I>
DEVICE void copy_shifted(u32 *dst, const u32 *src, u32 shift, I n, I thread, I threads) {
	constexpr I K = 2;
#pragma unroll 1
	for (I start = thread; start < n; start += K * threads) {
		u32 x[K][8];
#pragma unroll
		for (I k = 0; k < K; k++)
			if (start + k * threads < n)
				load(x[k], src + 4 * (start + k * threads));
#pragma unroll
		for (I k = 0; k < K; k++) {
			u32 y[4];
			cut(y, x[k], shift);
			if (start + k * threads < n)
				store(dst + 4 * (start + k * threads), y);
		}
	}
}

// copy_bytes: for i < n { dst[i] = src[i] }, by the threads 0 to threads. I is the
// type to count in. The bytes of dst before the first multiple of 16 and after
// the last are copied one by one.
template <class I> DEVICE void copy_bytes(u8 *dst, const u8 *src, I n, I thread, I threads) {
	I head = least(n, (I)(-ADDRESS(dst) & 15));
	I units = (n - head) / 16, done = head + units * 16;
	u32 shift = (u32)ADDRESS(src + head) & 15;
	u8 *to = dst + head;
	const u8 *from = src + head - shift;
	if (shift == 0)
		copy_units(reinterpret_cast<b128 *>(to), reinterpret_cast<const b128 *>(from), units,
			thread, threads);
	else
		copy_shifted(reinterpret_cast<u32 *>(to), reinterpret_cast<const u32 *>(from), shift, units,
			thread, threads);
#pragma unroll 1
	for (I i = thread; i < head; i += threads)
		dst[i] = src[i];
#pragma unroll 1
	for (I i = done + thread; i < n; i += threads)
		dst[i] = src[i];
}
