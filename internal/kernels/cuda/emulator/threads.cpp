// Runs blocks whose threads wait for each other, in turns at a barrier and in their warp. It prints
// "ok" or how often one went on too early.

#include "../device.cuh"

#include <cstdio>

KERNEL(turns, 96, u32 *early) {
	SHARED u32 count;
	for (u32 turn = 0; turn < 5; turn++) {
		count = 0;
		barrier();
		count++;
		u32 last = emulate::together(thread_x(), [](u32 *warp, u32) { return warp[31]; });
		barrier();
		*early += count != threads_x() || last != (thread_x() | 31);
		barrier();
	}
}

int main() {
	u32 early = 0, *params = &early;
	emulate::host.grid = {2, 1}, emulate::host.block = {96, 1};
	emulate::launch(emulate::kernels["turns"], reinterpret_cast<const char *>(&params));
	return early ? std::printf("%u\n", early) : std::printf("ok\n"), 0;
}
