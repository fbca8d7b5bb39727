/* libcuda.a: the CUDA driver, opened when it is first called.
 *
 * A program linked against the driver itself does not start on a machine that
 * has none. Here every function of the driver API is a trampoline
 * (trampolines_*.S) through an entry that holds the real function once it has
 * been looked up. Without a driver the calls return CUDA_ERROR_NO_DEVICE. */

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { success = 0, no_device = 100, not_found = 500 }; /* values of CUresult */

#define internal __attribute__((visibility("hidden")))

/* The trampolines know this layout. */
struct entry {
	void *function;
	const char *name;
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static void *library;
static const char *reason; /* why there is no library */

/* The driver gives a device 8 hardware queues, and streams that share one wait for
 * each other: a hierarchical communicator has more streams than that, and calls in
 * flight that cannot pass each other. 32 take 7 MiB of the device's memory (H200).
 * They cost 0.4 s for each device of a process, too (H100). The driver looks at this in cuInit,
 * and never again. */
static void ask_for_queues(void)
{
	setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

static void open_library(void)
{
	int (*init)(unsigned int);

	library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) {
		reason = strdup(dlerror()); /* the thread's next dlopen frees the original */
		return;
	}
	init = dlsym(library, "cuInit");
	if (init)
		init(0); /* what it says, euryale_cuda_status asks for */
}

static int return_no_device(void) { return no_device; }
static int return_not_found(void) { return not_found; }

/* Two threads may look one entry up at once: both store the same address. */
internal void *euryale_cuda_resolve(struct entry *e)
{
	void *function;

	pthread_once(&once, open_library);
	function = library ? dlsym(library, e->name) : (void *)return_no_device;
	if (!function)
		function = (void *)return_not_found; /* a driver older than the header */
	__atomic_store_n(&e->function, function, __ATOMIC_RELAXED);
	return function;
}

static int initialise(void)
{
	static struct entry init = {NULL, "cuInit"};
	int (*real)(unsigned int) = euryale_cuda_resolve(&init);

	return real(0);
}

/* gorgonia.org/cu calls this before main, and ends the process when it fails. What
 * euryale_cuda_status says is the truth. The driver starts at the first call that needs it: a
 * program without one saves a quarter of a second, and others may ask for other queues before. */
internal int cuInit(unsigned int flags)
{
	(void)flags; /* the only ones are 0 */
	ask_for_queues();
	return success;
}

/* The result of the real cuInit, and where it failed, in words. */
internal int euryale_cuda_status(const char **why)
{
	static struct entry describe = {NULL, "cuGetErrorString"};
	int (*error_string)(int, const char **);
	int status = initialise();

	*why = NULL;
	if (!library) {
		*why = reason;
	} else if (status != success) {
		error_string = euryale_cuda_resolve(&describe);
		error_string(status, why);
	}
	return status;
}
