// A libcuda.so.1 whose one device is the host: programs built with GPU support
// run on it, with the kernels of this directory, so that their way to the driver
// is tested without a GPU. Functions that are not here are reported missing.
//
// Everything is done before a call returns.

#include "kernels.h"

#include <mutex>

#define DRIVER extern "C" int

enum { success = 0, invalid_value = 1, out_of_memory = 2, not_found = 500 };

static std::mutex one_at_a_time;

DRIVER cuInit(unsigned) { return success; }
DRIVER cuDriverGetVersion(int *version) { return *version = 12000, success; }
DRIVER cuDeviceGetCount(int *count) { return *count = 1, success; }
DRIVER cuDeviceGet(int *device, int) { return *device = 0, success; }
DRIVER cuCtxCreate_v2(void **context, unsigned, int) { return *context = &one_at_a_time, success; }
DRIVER cuCtxDestroy_v2(void *) { return success; }
DRIVER cuCtxSynchronize() { return success; }
DRIVER cuStreamCreate(void **stream, unsigned) { return *stream = &one_at_a_time, success; }
DRIVER cuStreamDestroy_v2(void *) { return success; }
DRIVER cuStreamSynchronize(void *) { return success; }
DRIVER cuModuleLoadData(void **module, const void *) { return *module = &emulate::kernels, success; }
DRIVER cuModuleUnload(void *) { return success; }

DRIVER cuGetErrorString(int code, const char **text) {
	*text = code == success ? "no error" : code == invalid_value ? "invalid argument" : "an error";
	return success;
}

DRIVER cuModuleGetFunction(void **function, void *, const char *name) {
	auto found = emulate::kernels.find(name);
	if (found == emulate::kernels.end())
		return not_found;
	*function = &found->second;
	return success;
}

DRIVER cuMemAlloc_v2(u64 *address, size_t n) {
	void *memory = aligned_alloc(256, (n + 255) / 256 * 256);
	*address = ADDRESS(memory);
	return memory ? success : out_of_memory;
}
DRIVER cuMemFree_v2(u64 address) { return free(reinterpret_cast<void *>(address)), success; }
DRIVER cuMemcpyHtoD_v2(u64 dst, const void *src, size_t n) { return memcpy(reinterpret_cast<void *>(dst), src, n), success; }
DRIVER cuMemcpyDtoH_v2(void *dst, u64 src, size_t n) { return memcpy(dst, reinterpret_cast<void *>(src), n), success; }

// The parameters are bytes, in `extra`: {1, bytes, 2, size, 0}.
DRIVER cuLaunchKernel(emulate::Kernel *k, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32, void *, void **, void **extra) {
	if (!extra || ADDRESS(extra[0]) != 1 || ADDRESS(extra[2]) != 2 || extra[4] || *static_cast<size_t *>(extra[3]) != k->nbytes)
		return invalid_value;
	if (gx == 0 || gy == 0 || gy > 65535 || gz != 1 || bx == 0 || by == 0 || bz != 1 || u64(bx) * by > k->threads)
		return invalid_value;
	std::lock_guard<std::mutex> lock(one_at_a_time);
	emulate::grid = {gx, gy};
	emulate::block = {bx, by};
	emulate::launch(*k, static_cast<const char *>(extra[1]));
	return success;
}
