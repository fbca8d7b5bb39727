// CUDA for the kernels on a host: the threads of a block are coroutines that
// change places at a barrier; blocks run one after the other, or on threads of the host if
// they wait for each other. Several launches may run at a time, on threads of the host, and
// wait for each other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <sched.h>
#include <setjmp.h>
#include <time.h>
#include <ucontext.h>

typedef u32 b128 __attribute__((vector_size(16)));

#define DEVICE inline
#define SHARED static thread_local
#define KERNEL(name, threads, ...)                                     \
	extern "C" void name(__VA_ARGS__);                             \
	static emulate::Register register_##name(#name, threads, name); \
	extern "C" void name(__VA_ARGS__)
#define TOGETHER_KERNEL(name, threads, ...)                                  \
	extern "C" void name(__VA_ARGS__);                                   \
	static emulate::Register register_##name(#name, threads, name, true); \
	extern "C" void name(__VA_ARGS__)
#define LEAN_KERNEL KERNEL
#define FAT_KERNEL KERNEL
#define PAIRED_KERNEL KERNEL
#define SHARING_KERNEL(name, threads, blocks, ...) KERNEL(name, threads, __VA_ARGS__)

namespace emulate {

struct Size { u32 x = 1, y = 1; };

// A place to jump to. What compilers have for it saves two registers; a jump of the library is a
// tenth of the time of a kernel whose threads wait for each other.
#if defined(__x86_64__)
typedef void *Place[5];
#define MARK(place) __builtin_setjmp(place)
#define JUMP(place) __builtin_longjmp(place, 1)
#else
typedef jmp_buf Place;
#define MARK(place) _setjmp(place)
#define JUMP(place) _longjmp(place, 1)
#endif

// One coroutine for each thread of a block, which the next block takes over.
struct Thread {
	std::unique_ptr<char[]> stack; // null before the first
	Place place;
	bool waits; // at a barrier
	bool warp;  // for its warp
	bool done;
	bool odd; // it has called together an odd number of times
};

// What a thread of the host runs. It is one variable, and one that nothing constructs, since in a
// shared library each access to a variable of a thread is a call.
struct Host {
	Size grid, block, block_index;
	const std::function<void()> *body;
	Thread *threads; // of the block
	size_t count, current;
	bool alone;  // the threads of the block are no coroutines
	bool paused; // one of them has since the last rest
	u32 rests;   // of the block
	Place scheduler;
};

inline thread_local Host host{};

// jump goes to a place. It is a function because g++ expects only calls to come back to a mark: in
// a function that jumps by itself, it leaves out what follows the mark.
__attribute__((noinline)) inline void jump(Place &to) { JUMP(to); }

// Places are changed by jumps, since swapcontext is two system calls. To be compiled with
// -U_FORTIFY_SOURCE, which would end the program at a jump to another stack.
__attribute__((noinline)) inline void change_places() {
	Host &h = host;
	if (!MARK(h.threads[h.current].place))
		jump(h.scheduler);
}

inline void run_threads() {
	for (;; change_places()) {
		(*host.body)();
		host.threads[host.current].done = true;
	}
}

inline void wait_at_barrier() {
	host.threads[host.current].waits = true;
	change_places();
}

inline void wait_for_warp() {
	Thread &t = host.threads[host.current];
	t.warp = true;
	while (t.warp)
		change_places();
}

// together returns f of what each thread of the warp has given, and of the number of this one. What
// one call has been given is read until all threads are in the next one, which has another place;
// what pointers point to is read before any of them goes on.
template <class T, class F> auto together(const T &x, F f) {
	static thread_local T all[2][1024];
	const size_t current = host.current;
	Thread &t = host.threads[current];
	T *warp = &all[t.odd][current & ~size_t(31)];
	u32 lane = u32(current % 32);
	t.odd = !t.odd;
	warp[lane] = x;
	wait_for_warp();
	auto y = f(warp, lane);
	if (std::is_pointer<T>::value)
		wait_for_warp();
	return y;
}

// rest lets other threads of the host run if one of this block has paused. A block that waits for
// long sleeps between its looks, since there are more of them than cores.
inline void rest() {
	const timespec nap = {0, 10000};
	if (!host.paused)
		return;
	host.paused = false;
	if (host.rests++ < 8)
		sched_yield();
	else
		nanosleep(&nap, nullptr);
}

// pause lets others run, of this block and of other launches.
inline void pause() {
	host.paused = true;
	if (host.alone)
		rest();
	else
		change_places();
}

inline void start(Thread &t) { t.waits = t.warp = t.done = t.odd = false; }

// enter gives the current thread its stack, and runs it there. The stack is not cleared: most
// pages of it are never touched.
inline void enter(Thread &t) {
	const size_t nbytes = 64 << 10;
	t.stack.reset(new char[nbytes]);
	ucontext_t context;
	getcontext(&context);
	context.uc_stack.ss_sp = t.stack.get();
	context.uc_stack.ss_size = nbytes;
	makecontext(&context, run_threads, 0);
	setcontext(&context);
}

// resume runs the current thread until it waits or is done.
__attribute__((noinline)) inline void resume() {
	Host &h = host;
	if (MARK(h.scheduler))
		return;
	Thread &t = h.threads[h.current];
	if (!t.stack)
		enter(t);
	jump(t.place);
}

// begun runs the first thread of some until it waits or is done, and returns whether it is done.
inline bool begun(size_t first) {
	Host &h = host;
	h.current = first;
	start(h.threads[first]);
	h.alone = false;
	resume();
	return h.threads[first].done;
}

// finish runs the others of threads whose first one has ended without a wait: none of them has one,
// and they need not be coroutines.
inline void finish(size_t first, size_t end) {
	Host &h = host;
	h.alone = true;
	for (h.current = first + 1; h.current < end; h.current++)
		(*h.body)();
}

struct Counts { size_t waiting, left; };

// advance runs a warp as far as it gets alone, and counts its threads that wait at a barrier, and
// those that are not done. It lets threads go on that wait for the warp if all do, or are done.
inline Counts advance(size_t first, size_t end) {
	Host &h = host;
	for (;;) {
		for (h.current = first; h.current < end; h.current++)
			if (Thread &t = h.threads[h.current]; !t.done && !t.waits && !t.warp)
				resume();
		size_t waiting = 0, left = 0, in_warp = 0;
		for (size_t i = first; i < end; i++) {
			Thread &t = h.threads[i];
			waiting += t.waits, left += !t.done, in_warp += t.warp;
		}
		if (in_warp == 0 || in_warp < left)
			return {waiting, left};
		for (size_t i = first; i < end; i++)
			h.threads[i].warp = false;
	}
}

// run_warp runs a warp of a block without barriers.
inline void run_warp(size_t first, size_t end) {
	if (begun(first))
		return finish(first, end);
	for (size_t i = first + 1; i < end; i++)
		start(host.threads[i]);
	while (advance(first, end).left > 0)
		rest();
}

// A barrier is for every thread of a block: if the first one ends without, none has one. Its warp
// has no votes then, and another one may.
inline void run_block() {
	static thread_local std::vector<Thread> all;
	Host &h = host;
	all.resize(size_t(h.block.x) * h.block.y);
	h.threads = all.data(), h.count = all.size(), h.rests = 0;
	if (begun(0)) {
		finish(0, std::min<size_t>(32, h.count));
		for (size_t first = 32; first < h.count; first += 32)
			run_warp(first, std::min(first + 32, h.count));
		return;
	}
	for (size_t i = 1; i < h.count; i++)
		start(h.threads[i]);
	for (size_t waiting, left = 1; left > 0;) {
		waiting = left = 0;
		for (size_t first = 0; first < h.count; first += 32) {
			Counts of_warp = advance(first, std::min(first + 32, h.count));
			waiting += of_warp.waiting, left += of_warp.left;
		}
		if (waiting < left)
			rest();
		else
			for (Thread &t : all)
				t.waits = false;
	}
}

struct Kernel {
	u32 threads;   // the most in a block
	size_t nbytes; // of the parameters
	std::function<void(const char *)> call;
	bool together = false; // its blocks wait for each other
};

inline std::map<std::string, Kernel> kernels;

// Register makes a kernel callable with its parameters as bytes.
struct Register {
	template <class... P>
	Register(const char *name, u32 threads, void (*kernel)(P...), bool together = false) {
		kernels[name] = {threads, (sizeof(P) + ... + 0), [kernel](const char *bytes) {
			auto next = [&bytes](auto &p) {
				std::memcpy(&p, bytes, sizeof p);
				bytes += sizeof p;
			};
			std::tuple<P...> params;
			std::apply([&](auto &...p) { (next(p), ...); }, params);
			std::apply(kernel, params);
		}, together};
	}
};

// run_together runs each block on a thread of the host.
inline void run_together(const Host &h) {
	std::vector<std::thread> blocks;
	for (u32 y = 0; y < h.grid.y; y++)
		for (u32 x = 0; x < h.grid.x; x++)
			blocks.emplace_back([&h, x, y] {
				host.grid = h.grid, host.block = h.block, host.block_index = {x, y};
				host.body = h.body;
				run_block();
			});
	for (std::thread &b : blocks)
		b.join();
}

inline void launch(const Kernel &k, const char *params) {
	Host &h = host;
	const std::function<void()> body = [&k, params] { k.call(params); };
	h.body = &body;
	if (k.together)
		return run_together(h);
	for (h.block_index.y = 0; h.block_index.y < h.grid.y; h.block_index.y++)
		for (h.block_index.x = 0; h.block_index.x < h.grid.x; h.block_index.x++)
			run_block();
}

} // namespace emulate

// The thread that runs is the current one.
static inline u32 thread_x() { return u32(emulate::host.current % emulate::host.block.x); }
static inline u32 thread_y() { return u32(emulate::host.current / emulate::host.block.x); }
static inline u32 threads_x() { return emulate::host.block.x; }
static inline u32 threads_y() { return emulate::host.block.y; }
static inline u32 block_x() { return emulate::host.block_index.x; }
static inline u32 block_y() { return emulate::host.block_index.y; }
static inline u32 blocks_x() { return emulate::host.grid.x; }
static inline u32 blocks_y() { return emulate::host.grid.y; }
static inline void barrier() { emulate::wait_at_barrier(); }
