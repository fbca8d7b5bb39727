// Blocks that share sums: each leaves its own in memory, and the last one of them adds them up, in
// their order.
#pragma once

#include "device.cuh"

// Counts the blocks that have come here, and returns how many had before. Whoever comes last sees
// what all have written before their barriers.
DEVICE u32 take_ticket(u32 *ticket) {
#if defined(__CUDA__) || defined(__NVCC__)
	u32 before;
	asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
		: "=r"(before) : "l"(ticket) : "memory");
	return before;
#else
	return __atomic_fetch_add(ticket, 1, __ATOMIC_ACQ_REL);
#endif
}

// Whether this block is the last one of n, for all its threads. The next call counts from 0 again.
DEVICE bool is_last(u32 *ticket, u32 n, u32 *shared) {
	barrier();
	if (thread_x() == 0) {
		u32 last = take_ticket(ticket) + 1 == n;
		if (last)
			*ticket = 0;
		*shared = last;
	}
	barrier();
	return *shared;
}
