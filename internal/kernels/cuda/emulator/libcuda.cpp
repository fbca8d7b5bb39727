// A libcuda.so.1 whose devices (EMULATED_DEVICES, 2 if not set) are the host: programs built with
// GPU support run on it, with the kernels of this directory, so that their way to the driver is
// tested without a GPU. Functions that are not here are reported missing.
//
// Streams are threads, so that what is not ordered may happen in any order; and
// calls are refused that need another context than the thread's current one.

#include "../functions.cuh"
#include "ptx.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#define DRIVER extern "C" int

enum {
	success = 0,
	invalid_value = 1,
	out_of_memory = 2,
	invalid_device = 101,
	invalid_context = 201,
	no_binary_for_gpu = 209,
	invalid_ptx = 218,
	not_found = 500,
	not_ready = 600,
	peer_enabled = 704,
	not_supported = 801,
	capture_unsupported = 900,
	capture_unmatched = 903,
	capture_unjoined = 904,
	capture_isolation = 905,
	captured_event = 907
};

// ---- devices and contexts ----

static const size_t capacity = size_t(4) << 30; // bytes of a device

struct Context {
	int device;
	size_t used;
	bool peer;
};
static Context contexts[8];
static thread_local Context *current;

static int devices() {
	const char *text = getenv("EMULATED_DEVICES");
	return text ? std::min(atoi(text), 8) : 2;
}

struct Block {
	Context *context; // null for pinned host memory
	size_t n;
};
static std::map<u64, Block> blocks;
static std::mutex memory_lock;

DRIVER cuInit(unsigned) { return success; }
DRIVER cuDriverGetVersion(int *version) { return *version = 12030, success; }
DRIVER cuDeviceGetCount(int *count) { return *count = devices(), success; }
DRIVER cuDeviceGet(int *device, int ordinal) {
	return *device = ordinal, ordinal < 0 || ordinal >= devices() ? invalid_device : success;
}
DRIVER cuDeviceGetName(char *name, int n, int) { return snprintf(name, n, "the host"), success; }
// Devices have the compute capability EMULATED_CAPABILITY, 70 for 7.0; else they are of two
// generations, 9.0 and 8.0.
static int capability(int device) {
	const char *text = getenv("EMULATED_CAPABILITY");
	return text ? atoi(text) : device % 2 == 0 ? 90 : 80;
}
DRIVER cuDeviceGetAttribute(int *value, int attribute, int device) {
	switch (attribute) {
	case 16: // the multiprocessors
		return *value = 132, success;
	case 75: // the compute capability, major and minor
		return *value = capability(device) / 10, success;
	case 76:
		return *value = capability(device) % 10, success;
	default:
		return *value = 8, success;
	}
}
DRIVER cuDeviceGetPCIBusId(char *id, int n, int device) {
	return snprintf(id, n, "0000:%02x:00.0", device + 1), success;
}
DRIVER cuDeviceCanAccessPeer(int *can, int, int) { return *can = 1, success; }
DRIVER cuDevicePrimaryCtxRetain(Context **c, int device) {
	contexts[device].device = device;
	return *c = &contexts[device], success;
}
DRIVER cuDevicePrimaryCtxRelease_v2(int) { return success; }
DRIVER cuCtxCreate_v2(Context **c, unsigned, int device) {
	return *c = current = &contexts[device], success;
}
DRIVER cuCtxDestroy_v2(void *) { return success; }
DRIVER cuCtxGetCurrent(Context **c) { return *c = current, success; }
DRIVER cuCtxGetDevice(int *device) {
	return current ? (*device = current->device, success) : int(invalid_context);
}
DRIVER cuCtxSetCurrent(Context *c) { return current = c, success; }
DRIVER cuCtxEnablePeerAccess(Context *, unsigned) {
	if (!current)
		return invalid_context;
	bool before = current->peer;
	current->peer = true;
	return before ? peer_enabled : success;
}

DRIVER cuGetErrorString(int code, const char **text) {
	*text = code == success		  ? "no error"
		: code == invalid_value	  ? "invalid argument"
		: code == invalid_context ? "invalid context"
								  : "an error";
	return success;
}

// ---- streams and events ----

struct Capture;

struct Event {
	std::shared_ptr<Capture> capture; // it was recorded in, if it was recorded in one last
	std::vector<int> after;           // the nodes there that it comes after
	std::mutex lock;
	std::condition_variable changed;
	int recorded = 0, happened = 0;
	std::chrono::steady_clock::time_point when;
};

// What a library keeps as long as a graph has calls of it.
struct UserObject {
	void *data;
	void (*destroy)(void *);
	~UserObject() { destroy(data); }
};

// Work that was captured, in an order in which it is replayed.
struct Graph {
	std::vector<std::function<void()>> work;
	std::vector<std::shared_ptr<UserObject>> objects;
};

struct Node {
	std::function<void()> f;
	std::vector<int> after;
	bool own = false; // a library has set what depends on it: nobody looks whether it is joined
};

// A capture of one stream, or of several that were ordered behind it.
struct Capture {
	struct Stream *origin;
	bool strict;
	std::vector<struct Stream *> streams;
	std::vector<Node> nodes;
	std::vector<std::shared_ptr<UserObject>> objects;
};
static std::recursive_mutex capture_lock; // guards captures, and those of streams and events

// How many captures this thread has begun that are not relaxed: it may not ask for events or memory
// then.
static thread_local int strict;
static thread_local int capturing; // the same of all captures
enum { relaxed = 2 };

struct Stream {
	Context *context;
	std::shared_ptr<Capture> capture;
	std::vector<int> last; // the nodes of the capture that the next one comes after
	std::mutex lock;
	std::condition_variable changed;
	std::deque<std::function<void()>> work;
	bool busy = false, closed = false;
	std::thread thread;

	explicit Stream(Context *c) : context(c), thread([this] { run(); }) {}

	void run() {
		std::unique_lock<std::mutex> held(lock);
		for (;;) {
			changed.wait(held, [this] { return closed || !work.empty(); });
			if (work.empty())
				return;
			auto next = std::move(work.front());
			work.pop_front();
			busy = true;
			held.unlock();
			next();
			held.lock();
			busy = false;
			changed.notify_all();
		}
	}

	int start(std::function<void()> f) {
		if (current != context)
			return invalid_context;
		std::lock_guard<std::recursive_mutex> capturing(capture_lock);
		if (capture) {
			capture->nodes.push_back({std::move(f), last});
			last = {int(capture->nodes.size()) - 1};
			return success;
		}
		std::lock_guard<std::mutex> held(lock);
		work.push_back(std::move(f));
		changed.notify_all();
		return success;
	}

	void wait() {
		std::unique_lock<std::mutex> held(lock);
		changed.wait(held, [this] { return work.empty() && !busy; });
	}
};

static std::mutex streams_lock;
// never destroyed: the program may end with streams open
static auto &streams = *new std::map<Stream *, std::shared_ptr<Stream>>;

DRIVER cuCtxSynchronize() {
	if (!current)
		return invalid_context;
	std::unique_lock<std::mutex> held(streams_lock);
	auto now = streams; // others may make and destroy streams while this waits
	held.unlock();
	for (auto &s : now)
		if (s.second->context == current)
			s.second->wait();
	return success;
}
DRIVER cuStreamCreate(Stream **s, unsigned) {
	if (!current)
		return invalid_context;
	auto made = std::make_shared<Stream>(current);
	std::lock_guard<std::mutex> held(streams_lock);
	streams[made.get()] = made;
	return *s = made.get(), success;
}
DRIVER cuStreamCreateWithPriority(Stream **s, unsigned flags, int) {
	return cuStreamCreate(s, flags);
}
DRIVER cuCtxGetStreamPriorityRange(int *least, int *greatest) {
	return *least = 0, *greatest = -5, success;
}
DRIVER cuStreamSynchronize(Stream *s) { return s->wait(), success; }
DRIVER cuStreamDestroy_v2(Stream *s) {
	s->wait();
	{
		std::lock_guard<std::mutex> held(s->lock);
		s->closed = true;
		s->changed.notify_all();
	}
	s->thread.join();
	std::lock_guard<std::mutex> held(streams_lock);
	return streams.erase(s), success;
}

DRIVER cuStreamBeginCapture_v2(Stream *s, int mode) {
	std::lock_guard<std::recursive_mutex> held(capture_lock);
	if (s->capture)
		return invalid_value;
	s->capture = std::make_shared<Capture>();
	s->capture->origin = s;
	s->capture->strict = mode != relaxed;
	strict += s->capture->strict, capturing++;
	s->capture->streams = {s};
	s->last.clear();
	return success;
}

// Nodes are replayed in the order that is least like that in which they were captured.
static int order(const Capture &c, const std::vector<int> &ends, Graph *g) {
	std::vector<bool> joined(c.nodes.size()), done(c.nodes.size());
	std::function<void(const std::vector<int> &)> join = [&](const std::vector<int> &nodes) {
		for (int i : nodes)
			if (!joined[i])
				joined[i] = true, join(c.nodes[i].after);
	};
	join(ends);
	for (size_t i = 0; i < joined.size(); i++)
		if (!joined[i] && !c.nodes[i].own)
			return capture_unjoined;
	while (g->work.size() < c.nodes.size())
		for (int i = int(c.nodes.size()) - 1; i >= 0; i--)
			if (!done[i] &&
				std::all_of(c.nodes[i].after.begin(), c.nodes[i].after.end(),
					[&](int k) { return done[k]; })) {
				done[i] = true;
				g->work.push_back(c.nodes[i].f);
				break;
			}
	return success;
}
DRIVER cuStreamEndCapture(Stream *s, Graph **g) {
	std::lock_guard<std::recursive_mutex> held(capture_lock);
	*g = nullptr;
	auto c = s->capture;
	if (!c || c->origin != s)
		return capture_unmatched;
	strict -= c->strict, capturing--;
	auto made = std::make_unique<Graph>();
	made->objects = c->objects;
	int code = order(*c, s->last, made.get());
	for (Stream *one : c->streams)
		one->capture = nullptr, one->last.clear();
	c->objects.clear();
	if (code == success)
		*g = made.release();
	return code;
}
DRIVER cuStreamGetCaptureInfo_v2(Stream *s, int *status, u64 *id, Capture **graph, void *, void *) {
	std::lock_guard<std::recursive_mutex> held(capture_lock);
	*status = s->capture ? 1 : 0;
	if (id)
		*id = ADDRESS(s->capture.get());
	if (graph)
		*graph = s->capture.get();
	return success;
}
// Sets the dependencies of a stream to its last nodes: such nodes are not missed at the end of a
// capture.
DRIVER cuStreamUpdateCaptureDependencies(Stream *s, void *, size_t, unsigned) {
	std::lock_guard<std::recursive_mutex> held(capture_lock);
	for (int i : s->last)
		s->capture->nodes[i].own = true;
	return success;
}
DRIVER cuUserObjectCreate(UserObject **object, void *data, void (*destroy)(void *), unsigned,
	unsigned) {
	return *object = new UserObject{data, destroy}, success;
}
DRIVER cuGraphRetainUserObject(Capture *c, UserObject *object, unsigned, unsigned) {
	std::lock_guard<std::recursive_mutex> held(capture_lock);
	return c->objects.emplace_back(object), success; // which has the only reference
}

// An executable graph lives until it is destroyed and nothing of it runs any more.
typedef std::shared_ptr<Graph> Executable;
DRIVER cuGraphInstantiateWithFlags(Executable **exec, Graph *g, u64) {
	return *exec = new Executable(new Graph(*g)), success;
}
DRIVER cuGraphUpload(Executable *, Stream *) { return success; }
DRIVER cuGraphLaunch(Executable *g, Stream *s) {
	int code = success;
	for (auto &f : (*g)->work)
		code = code == success ? s->start([keep = *g, &f] { f(); }) : code;
	return code;
}
DRIVER cuGraphDestroy(Graph *g) { return delete g, success; }
DRIVER cuGraphExecDestroy(Executable *g) { return delete g, success; }

DRIVER cuLaunchHostFunc(Stream *s, void (*f)(void *), void *data) {
	return s->start([=] { f(data); });
}

DRIVER cuEventCreate(Event **e, unsigned) {
	return *e = new Event, current ? success : invalid_context;
}
DRIVER cuEventDestroy_v2(Event *) { return success; } // streams may wait for it yet, so it stays
DRIVER cuEventRecord(Event *e, Stream *s) {
	std::lock_guard<std::recursive_mutex> capturing(capture_lock);
	if (current != s->context)
		return invalid_context;
	e->capture = s->capture;
	if (e->capture)
		return e->after = s->last, success;
	std::lock_guard<std::mutex> held(e->lock);
	int number = ++e->recorded;
	return s->start([=] {
		std::lock_guard<std::mutex> held(e->lock);
		e->happened = number;
		e->when = std::chrono::steady_clock::now();
		e->changed.notify_all();
	});
}
// With a flag, the record of an event is a node of the capture, and each replay records it.
DRIVER cuEventRecordWithFlags(Event *e, Stream *s, unsigned external) {
	std::lock_guard<std::recursive_mutex> capturing(capture_lock);
	if (!s->capture || !external)
		return cuEventRecord(e, s);
	return s->start([=] {
		std::lock_guard<std::mutex> held(e->lock);
		e->happened = ++e->recorded;
		e->when = std::chrono::steady_clock::now();
		e->changed.notify_all();
	});
}
DRIVER cuEventQuery(Event *e) {
	std::lock_guard<std::recursive_mutex> capturing(capture_lock);
	if (e->capture)
		return captured_event;
	if (strict)
		return capture_unsupported;
	std::lock_guard<std::mutex> held(e->lock);
	return e->happened == e->recorded ? success : not_ready;
}
DRIVER cuEventElapsedTime(float *ms, Event *from, Event *to) {
	if (from == to) // which scoped_lock does not take
		return *ms = 0, cuEventQuery(from);
	std::scoped_lock held(from->lock, to->lock);
	if (from->happened != from->recorded || to->happened != to->recorded)
		return not_ready;
	return *ms = std::chrono::duration<float, std::milli>(to->when - from->when).count(), success;
}
DRIVER cuEventElapsedTime_v2(float *ms, Event *from, Event *to) {
	return cuEventElapsedTime(ms, from, to);
}
// A stream that waits for an event of a capture becomes part of that.
static int fork(Stream *s, Event *e) {
	if (e->capture->streams.empty() || (s->capture && s->capture != e->capture))
		return capture_isolation;
	if (!s->capture) {
		s->capture = e->capture;
		s->last.clear();
		e->capture->streams.push_back(s);
	}
	s->last.insert(s->last.end(), e->after.begin(), e->after.end());
	return success;
}
DRIVER cuStreamWaitEvent(Stream *s, Event *e, unsigned) {
	std::lock_guard<std::recursive_mutex> capturing(capture_lock);
	if (e->capture)
		return fork(s, e);
	if (s->capture)
		return capture_isolation;
	std::lock_guard<std::mutex> held(e->lock);
	int number = e->recorded;
	return s->start([=] {
		std::unique_lock<std::mutex> held(e->lock);
		e->changed.wait(held, [=] { return e->happened >= number; });
	});
}

// ---- memory ----

// New memory is full of this, so that whoever reads what nobody wrote gets it wrong.
static const int unwritten = 0xa5;

// A large allocation is a row of private mappings of one file, so that only the pages that a
// test touches are ever made: a communicator has 176 MB, and writes little of it.
static const size_t tile = size_t(4) << 20, page = 4096;

static int tile_file() {
	static const int file = [] {
		int made = memfd_create("unwritten", MFD_CLOEXEC);
		std::vector<char> bytes(tile, char(unwritten));
		return made >= 0 && write(made, bytes.data(), tile) == ssize_t(tile) ? made : -1;
	}();
	return file;
}

static size_t in_tiles(size_t n) { return (n + tile - 1) / tile * tile; }

static void *map_tiles(size_t n) {
	void *start = mmap(nullptr, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (start == MAP_FAILED)
		return nullptr;
	for (size_t at = 0; at < n; at += tile)
		if (mmap(static_cast<char *>(start) + at, tile, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_FIXED, tile_file(), 0) == MAP_FAILED)
			return munmap(start, n), nullptr;
	return start;
}

static int allocate(void **p, size_t n, Context *c) {
	std::lock_guard<std::mutex> held(memory_lock);
	if (c && c->used + n > capacity)
		return out_of_memory;
	*p = n >= tile ? map_tiles(in_tiles(n)) : aligned_alloc(256, (n + 255) / 256 * 256);
	if (!*p)
		return out_of_memory;
	if (n < tile)
		memset(*p, unwritten, n);
	if (c)
		c->used += n;
	blocks[ADDRESS(*p)] = {c, n};
	return success;
}

static int release(u64 address) {
	std::lock_guard<std::mutex> held(memory_lock);
	auto found = blocks.find(address);
	if (found == blocks.end())
		return invalid_value;
	size_t n = found->second.n;
	if (found->second.context)
		found->second.context->used -= n;
	blocks.erase(found);
	void *start = reinterpret_cast<void *>(address);
	n >= tile ? (void)munmap(start, in_tiles(n)) : free(start);
	return success;
}

static bool is_large(u64 address) {
	std::lock_guard<std::mutex> held(memory_lock);
	auto after = blocks.upper_bound(address);
	return after != blocks.begin() && std::prev(after)->second.n >= tile;
}

DRIVER cuMemAlloc_v2(void **address, size_t n) {
	return strict ? int(capture_unsupported)
		: current ? allocate(address, n, current)
				  : invalid_context;
}
DRIVER cuMemHostAlloc(void **p, size_t n, unsigned) { return allocate(p, n, nullptr); }
// as seen on H200
DRIVER cuMemFree_v2(u64 address) { return cuCtxSynchronize() ? invalid_context : release(address); }
DRIVER cuMemFreeHost(void *p) { return cuCtxSynchronize() ? invalid_context : release(ADDRESS(p)); }
DRIVER cuMemGetInfo_v2(size_t *free, size_t *total) {
	if (!current)
		return invalid_context;
	std::lock_guard<std::mutex> held(memory_lock);
	return *free = capacity - current->used, *total = capacity, success;
}
DRIVER cuPointerGetAttribute(unsigned *value, int attribute, u64 address) {
	std::lock_guard<std::mutex> held(memory_lock);
	auto after = blocks.upper_bound(address);
	if (after == blocks.begin() || address >= std::prev(after)->first + std::prev(after)->second.n)
		return invalid_value;
	Context *owner = std::prev(after)->second.context;
	if (attribute == 9) // the ordinal
		return owner ? (*value = owner->device, success) : int(invalid_value);
	return *value = owner ? 2 : 1, success;
}

static int copy(Stream *s, u64 dst, u64 src, size_t n) {
	return s->start(
		[=] { memcpy(reinterpret_cast<void *>(dst), reinterpret_cast<void *>(src), n); });
}

DRIVER cuMemcpyHtoD_v2(u64 dst, const void *src, size_t n) {
	return memcpy(reinterpret_cast<void *>(dst), src, n), success;
}
DRIVER cuMemcpyDtoH_v2(void *dst, u64 src, size_t n) {
	return memcpy(dst, reinterpret_cast<void *>(src), n), success;
}
DRIVER cuMemcpyHtoDAsync_v2(u64 dst, const void *src, size_t n, Stream *s) {
	return copy(s, dst, ADDRESS(src), n);
}
DRIVER cuMemcpyDtoHAsync_v2(void *dst, u64 src, size_t n, Stream *s) {
	return copy(s, ADDRESS(dst), src, n);
}
DRIVER cuMemcpyDtoDAsync_v2(u64 dst, u64 src, size_t n, Stream *s) { return copy(s, dst, src, n); }
DRIVER cuMemcpyPeerAsync(u64 dst, Context *, u64 src, Context *, size_t n, Stream *s) {
	return copy(s, dst, src, n);
}

// Words of memory that a stream waits for and writes. EMULATED_MEM_OPS=refused is a device that has
// none of it.
union MemOp {
	struct {
		int operation;
		u64 address, value;
		u32 flags;
	};
	u64 room[6];
};
enum { wait_32 = 1, write_32 = 2, wait_equal = 1 };

static void wait_for(const u32 *word, u32 value) {
	while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value)
		usleep(20);
}
DRIVER cuStreamBatchMemOp_v2(Stream *s, unsigned n, const MemOp *ops, unsigned flags) {
	const char *text = getenv("EMULATED_MEM_OPS");
	if (text && !strcmp(text, "refused"))
		return not_supported;
	if (n == 0 || n > 255 || flags)
		return invalid_value;
	for (unsigned i = 0; i < n; i++)
		if (ops[i].address % 4 || ops[i].flags != (ops[i].operation == wait_32 ? wait_equal : 0) ||
			(ops[i].operation != wait_32 && ops[i].operation != write_32))
			return invalid_value; // the driver has more
	return s->start([all = std::vector<MemOp>(ops, ops + n)] {
		for (auto &op : all) {
			u32 *word = reinterpret_cast<u32 *>(op.address);
			if (op.operation == wait_32)
				wait_for(word, u32(op.value));
			else
				__atomic_store_n(word, u32(op.value), __ATOMIC_RELEASE);
		}
	});
}

// fill is memset, but zeroes in a large allocation are pages that nobody has touched yet.
static void fill(u64 dst, unsigned char x, size_t n) {
	if (x == 0 && n >= tile && is_large(dst)) {
		u64 start = (dst + page - 1) / page * page, end = (dst + n) / page * page;
		void *zeroes = mmap(reinterpret_cast<void *>(start), end - start, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		if (zeroes == MAP_FAILED)
			abort();
		memset(reinterpret_cast<void *>(dst), 0, start - dst);
		memset(reinterpret_cast<void *>(end), 0, dst + n - end);
		return;
	}
	memset(reinterpret_cast<void *>(dst), x, n);
}
DRIVER cuMemsetD8Async(u64 dst, unsigned char x, size_t n, Stream *s) {
	return s->start([=] { fill(dst, x, n); });
}

// ---- kernels ----

// Machine code runs on devices of its major number, from its minor number on, and is refused by
// drivers older than its compiler, as by this one if EMULATED_MACHINE_CODE=refused.
static bool runs(const char *elf) {
	const char *text = getenv("EMULATED_MACHINE_CODE");
	int of = static_cast<unsigned char>(elf[48]), own = capability(current->device); // of e_flags
	return !(text && !strcmp(text, "refused")) && of / 10 == own / 10 && of <= own;
}

// PTX for newer devices is refused, as by the driver; else what is run is made of the same sources,
// or, if a program has written it, what its text says. Loading waits for what runs on the device,
// as the driver's may, and is refused in a capture.
typedef std::map<std::string, emulate::Kernel> Module;
DRIVER cuModuleLoadData(Module **module, const char *text) {
	static const char mark[] = "\n.target sm_";
	bool code = strncmp(text, "\x7f" "ELF", 4) == 0;
	const char *target = code ? nullptr : strstr(text, mark);
	if (!current || (code ? !runs(text) : !target ||
			atoi(target + sizeof mark - 1) > capability(current->device)))
		return no_binary_for_gpu;
	if (capturing)
		return capture_unsupported;
	cuCtxSynchronize();
	*module = &emulate::kernels;
	if (code)
		return success;
	if (strstr(text, "\n.visible .entry loop(") || strstr(text, "\n.visible .entry fold(") ||
		strstr(text, "\n.visible .entry rows(") || strstr(text, "\n.visible .entry all0(")) {
		try {
			*module = new Module(ptx::kernels(text));
		} catch (const std::exception &wrong) {
			return fprintf(stderr, "libcuda: %s\n", wrong.what()), invalid_ptx;
		}
	}
	return success;
}
DRIVER cuModuleUnload(Module *m) {
	if (m != &emulate::kernels)
		delete m;
	return success;
}
DRIVER cuModuleGetFunction(emulate::Kernel **function, Module *m, const char *name) {
	auto found = m->find(name);
	if (found == m->end())
		return not_found;
	*function = &found->second;
	return success;
}
DRIVER cuFuncGetAttribute(int *value, int, void *) { return *value = 0, success; }

// The parameters are bytes, in `extra`: {1, bytes, 2, size, 0}.
DRIVER cuLaunchKernel(emulate::Kernel *k, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32,
	Stream *s, void **, void **extra) {
	if (!extra || ADDRESS(extra[0]) != 1 || ADDRESS(extra[2]) != 2 || extra[4] ||
		*static_cast<size_t *>(extra[3]) != k->nbytes)
		return invalid_value;
	if (gx == 0 || gy == 0 || gy > 65535 || gz != 1 || bx == 0 || by == 0 || bz != 1 ||
		u64(bx) * by > k->threads)
		return invalid_value;
	const char *bytes = static_cast<const char *>(extra[1]);
	auto params = std::make_shared<std::vector<u64>>(k->nbytes / 8);
	memcpy(params->data(), bytes, k->nbytes);
	return s->start([=] {
		emulate::host.grid = {gx, gy};
		emulate::host.block = {bx, by};
		emulate::launch(*k, reinterpret_cast<const char *>(params->data()));
	});
}

// Kernels may begin early here, and do not. Each of the params is one word.
struct Config {
	u32 gx, gy, gz, bx, by, bz, shared;
	Stream *stream;
	void *attributes;
	u32 count;
};
DRIVER cuLaunchKernelEx(const Config *c, emulate::Kernel *k, void **params, void **extra) {
	std::vector<u64> words;
	for (size_t i = 0; params && i < k->nbytes / 8; i++)
		words.push_back(*static_cast<u64 *>(params[i]));
	size_t nbytes = k->nbytes;
	void *buffer[] = {reinterpret_cast<void *>(1), words.data(), reinterpret_cast<void *>(2),
		&nbytes, nullptr};
	return cuLaunchKernel(k, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream,
		nullptr, params ? buffer : extra);
}
