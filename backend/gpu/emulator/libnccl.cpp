// A libnccl.so.2 for the driver of kernels/cuda/emulator: ranks are threads of one
// process, whose devices are the host. What it starts runs on the streams of that
// driver and waits there for the other ranks, as NCCL's kernels do; sums are in
// rank order. With it everything down to NCCL's calls is tested without a GPU.
//
// It keeps what is awkward about NCCL: connecting goes on in the background, ending
// a communicator waits for all ranks or, in an abort, for nobody but graphs that hold
// calls of it, and the last rank
// of a process that ends frees memory of all of them, for which the driver waits
// for every stream of their devices.
//
// With OLD defined it is a version that has no more than is needed: it cannot split.

#include <dlfcn.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#define NCCL extern "C" int

enum { success = 0, invalid_argument = 4, invalid_usage = 5, in_progress = 7 };

// ---- the driver ----

struct Driver {
	int (*launch)(void *stream, void (*f)(void *), void *data);
	int (*context)(void **c);
	int (*bind)(void *c);
	int (*synchronize)();
	int (*capture)(void *stream, int *status, uint64_t *id, void **graph, void *, void *);
	int (*object)(void **object, void *data, void (*destroy)(void *), unsigned, unsigned);
	int (*retain)(void *graph, void *object, unsigned, unsigned);
};

static const Driver &driver() {
	static const Driver d = [] {
		void *lib = dlopen("libcuda.so.1", RTLD_NOW);
		auto look = [=](const char *name) { return dlsym(lib, name); };
		return Driver{
			reinterpret_cast<decltype(Driver::launch)>(look("cuLaunchHostFunc")),
			reinterpret_cast<decltype(Driver::context)>(look("cuCtxGetCurrent")),
			reinterpret_cast<decltype(Driver::bind)>(look("cuCtxSetCurrent")),
			reinterpret_cast<decltype(Driver::synchronize)>(look("cuCtxSynchronize")),
			reinterpret_cast<decltype(Driver::capture)>(look("cuStreamGetCaptureInfo_v2")),
			reinterpret_cast<decltype(Driver::object)>(look("cuUserObjectCreate")),
			reinterpret_cast<decltype(Driver::retain)>(look("cuGraphRetainUserObject")),
		};
	}();
	return d;
}

// ---- communicators ----

using Bytes = std::vector<char>;

struct Part { // what a rank says when it splits
	int rank, color, key;
};

struct Ring {
	int size = 0, joined = 0, closed = 0, ended = 0;
	std::vector<void *> contexts; // of the ranks that have ended
	std::map<std::pair<int, int>, std::vector<Bytes>> mail; // by source and destination
	std::map<int, std::vector<Part>> splits;                // by number
	std::map<std::pair<int, int>, std::shared_ptr<Ring>> parts; // by number and color
};

struct Comm {
	std::shared_ptr<Ring> ring;   // null until the split that makes it is known
	std::shared_ptr<Ring> parent; // whose split makes it
	int rank, number, color, splits = 0, running = 0;
	int captured = 0; // calls in graphs
	bool aborted = false;
	void *context;
};

static std::mutex lock;
static std::condition_variable changed;
static std::map<std::string, std::shared_ptr<Ring>> rings;

// resolve finds the ring of a part once all ranks have split. The lock is held.
static bool resolve(Comm *c) {
	if (c->ring)
		return true;
	auto &all = c->parent->splits[c->number];
	if (int(all.size()) < c->parent->size)
		return false;
	std::vector<Part> mine;
	for (const Part &p : all)
		if (p.color == c->color)
			mine.push_back(p);
	std::sort(mine.begin(), mine.end(), [](const Part &a, const Part &b) { return std::tie(a.key, a.rank) < std::tie(b.key, b.rank); });
	int rank = 0;
	while (mine[rank].rank != c->rank)
		rank++;
	auto &ring = c->parent->parts[{c->number, c->color}];
	if (!ring)
		ring = std::make_shared<Ring>();
	ring->size = ring->joined = int(mine.size());
	c->ring = ring;
	c->rank = rank;
	changed.notify_all();
	return true;
}

// connected reports whether all ranks are there, and the last split is through.
static bool connected(Comm *c) {
	if (!resolve(c) || c->ring->joined < c->ring->size)
		return false;
	return c->splits == 0 || int(c->ring->splits[c->splits].size()) == c->ring->size;
}

struct Config {
	size_t size;
	unsigned magic, version;
	int blocking;
};

struct Id {
	char bytes[128];
};

#ifdef OLD
#define NEWER [[maybe_unused]] static
enum { version_number = 21003 };
#else
#define NEWER extern "C"
enum { version_number = 22803 };
#endif

NCCL ncclGetVersion(int *version) { return *version = version_number, success; }
extern "C" const char *ncclGetErrorString(int code) { return code == success ? "no error" : code == in_progress ? "in progress" : "invalid argument"; }
NEWER const char *ncclGetLastError(Comm *) { return ""; }

NCCL ncclGetUniqueId(Id *id) {
	static int next;
	std::lock_guard<std::mutex> held(lock);
	snprintf(id->bytes, sizeof id->bytes, "ring %d", ++next);
	return success;
}

static Comm *made(int rank) {
	Comm *c = new Comm;
	c->rank = rank;
	driver().context(&c->context);
	return c;
}

static int wait_connected(Comm *c, std::unique_lock<std::mutex> &held, const Config *config) {
	if (!config->blocking)
		return in_progress;
	changed.wait(held, [=] { return connected(c) || c->aborted; });
	return success;
}

NEWER int ncclCommInitRankConfig(Comm **comm, int size, Id id, int rank, Config *config) {
	std::unique_lock<std::mutex> held(lock);
	auto &ring = rings[id.bytes];
	if (!ring)
		ring = std::make_shared<Ring>();
	Comm *c = *comm = made(rank);
	c->ring = ring;
	ring->size = size;
	ring->joined++;
	changed.notify_all();
	return wait_connected(c, held, config);
}

NCCL ncclCommInitRank(Comm **comm, int size, Id id, int rank) {
	Config config = {sizeof config, 0, 0, 1};
	return ncclCommInitRankConfig(comm, size, id, rank, &config);
}

NEWER int ncclCommSplit(Comm *parent, int color, int key, Comm **comm, Config *config) {
	std::unique_lock<std::mutex> held(lock);
	if (!connected(parent))
		return invalid_usage;
	parent->splits++;
	parent->ring->splits[parent->splits].push_back({parent->rank, color, key});
	*comm = nullptr;
	if (color >= 0) {
		Comm *c = *comm = made(parent->rank);
		c->parent = parent->ring;
		c->number = parent->splits;
		c->color = color;
	}
	changed.notify_all();
	if (!config->blocking)
		return in_progress;
	changed.wait(held, [=] { return connected(parent) || parent->aborted; });
	return *comm ? wait_connected(*comm, held, config) : success;
}

NCCL ncclCommGetAsyncError(Comm *c, int *state) {
	std::lock_guard<std::mutex> held(lock);
	return *state = connected(c) ? success : in_progress, success;
}

// end frees what the ranks had, by the last one. A communicator itself stays: what
// is queued on a stream may still look at it.
static int end(Comm *c, std::unique_lock<std::mutex> &held) {
	changed.wait(held, [=] { return c->running == 0 && c->captured == 0; });
	if (!c->ring)
		return success;
	c->ring->contexts.push_back(c->context);
	if (++c->ring->ended < c->ring->size)
		return success;
	auto contexts = c->ring->contexts;
	held.unlock();
	void *before;
	driver().context(&before);
	for (void *context : contexts) {
		driver().bind(context);
		driver().synchronize();
	}
	driver().bind(before);
	return success;
}

NCCL ncclCommAbort(Comm *c) {
	std::unique_lock<std::mutex> held(lock);
	c->aborted = true;
	changed.notify_all();
	return end(c, held);
}

NCCL ncclCommDestroy(Comm *c) {
	std::unique_lock<std::mutex> held(lock);
	c->ring->closed++;
	changed.notify_all();
	changed.wait(held, [=] { return c->ring->closed == c->ring->size; });
	return end(c, held);
}

// ---- arithmetic ----

static float from_bf16(uint16_t x) {
	uint32_t bits = uint32_t(x) << 16;
	float y;
	return memcpy(&y, &bits, 4), y;
}

static uint16_t to_bf16(float x) {
	uint32_t bits;
	memcpy(&bits, &x, 4);
	if (x != x)
		return uint16_t(bits >> 16 | 0x40);
	return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct bf16 {
	uint16_t bits;
};

template <class T> struct Number {
	typedef T Wide;
	static T wide(T x) { return x; }
	static T narrow(T x) { return x; }
};
template <> struct Number<_Float16> {
	typedef float Wide;
	static float wide(_Float16 x) { return float(x); }
	static _Float16 narrow(float x) { return _Float16(x); }
};
template <> struct Number<bf16> {
	typedef float Wide;
	static float wide(bf16 x) { return from_bf16(x.bits); }
	static bf16 narrow(float x) { return {to_bf16(x)}; }
};

enum { op_sum, op_prod, op_max, op_min, op_avg };

template <class T> static void reduce(char *dst, const std::vector<Bytes> &xs, size_t n, int op) {
	typedef Number<T> N;
	typedef typename N::Wide Wide;
	for (size_t i = 0; i < n; i++) {
		Wide sum = 0;
		for (size_t p = 0; p < xs.size(); p++) {
			T element;
			memcpy(&element, &xs[p][i * sizeof(T)], sizeof(T));
			Wide x = N::wide(element);
			if (op == op_avg)
				x = x / Wide(xs.size());
			sum = p == 0 ? x : op == op_prod ? Wide(sum * x) : op == op_max ? std::max(sum, x) : op == op_min ? std::min(sum, x) : Wide(sum + x);
		}
		T result = N::narrow(sum);
		memcpy(dst + i * sizeof(T), &result, sizeof(T));
	}
}

static size_t size_of(int type) {
	static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
	return sizes[type];
}

static void combine(char *dst, const std::vector<Bytes> &xs, size_t n, int type, int op) {
	switch (type) {
	case 1: return reduce<uint8_t>(dst, xs, n, op);
	case 2: return reduce<int32_t>(dst, xs, n, op);
	case 4: return reduce<int64_t>(dst, xs, n, op);
	case 6: return reduce<_Float16>(dst, xs, n, op);
	case 7: return reduce<float>(dst, xs, n, op);
	case 8: return reduce<double>(dst, xs, n, op);
	case 9: return reduce<bf16>(dst, xs, n, op);
	}
}

// ---- collectives ----

enum Kind { send, recv, all_reduce, reduce_scatter, all_gather, broadcast, reduce_to };

struct Call {
	Kind kind;
	const char *src;
	char *dst;
	size_t n;
	int type, op, peer;
};

struct Job {
	Comm *comm;
	void *stream;
	std::vector<Call> calls;

	size_t nbytes(const Call &c) const { return c.n * size_of(c.type); }

	void post(int p, const char *x, size_t n) {
		std::lock_guard<std::mutex> held(lock);
		comm->ring->mail[{comm->rank, p}].emplace_back(x, x + n);
		changed.notify_all();
	}

	// receive takes what a rank has posted, as long as n: ranks may disagree.
	bool receive(int p, size_t n, Bytes &x) {
		std::unique_lock<std::mutex> held(lock);
		auto &box = comm->ring->mail[{p, comm->rank}];
		changed.wait(held, [&] { return comm->aborted || !box.empty(); });
		if (comm->aborted)
			return false;
		x = std::move(box.front());
		box.erase(box.begin());
		x.resize(n);
		return true;
	}

	void give(const Call &c) {
		size_t n = nbytes(c);
		switch (c.kind) {
		case send:
		case reduce_to:
			return post(c.peer, c.src, n);
		case all_reduce:
		case all_gather:
		case reduce_scatter:
			for (int p = 0; p < comm->ring->size; p++)
				post(p, c.src + (c.kind == reduce_scatter ? p * n : 0), n);
			return;
		case broadcast:
			for (int p = 0; c.peer == comm->rank && p < comm->ring->size; p++)
				post(p, c.src, n);
			return;
		case recv:
			return;
		}
	}

	bool take(const Call &c) {
		size_t n = nbytes(c);
		Bytes x;
		switch (c.kind) {
		case send:
			return true;
		case recv:
		case broadcast:
			if (!receive(c.peer, n, x))
				return false;
			memcpy(c.dst, x.data(), n);
			return true;
		case all_gather:
			for (int p = 0; p < comm->ring->size; p++) {
				if (!receive(p, n, x))
					return false;
				memcpy(c.dst + p * n, x.data(), n);
			}
			return true;
		case reduce_to:
			if (c.peer != comm->rank)
				return true;
			[[fallthrough]];
		case all_reduce:
		case reduce_scatter:
			std::vector<Bytes> all(comm->ring->size);
			for (int p = 0; p < comm->ring->size; p++)
				if (!receive(p, n, all[p]))
					return false;
			combine(c.dst, all, c.n, c.type, c.op);
			return true;
		}
		return false;
	}

	void run() {
		{
			std::lock_guard<std::mutex> held(lock);
			if (comm->aborted)
				return;
			comm->running++;
		}
		for (const Call &c : calls)
			give(c);
		for (const Call &c : calls)
			if (!take(c))
				break;
		std::lock_guard<std::mutex> held(lock);
		comm->running--;
		changed.notify_all();
	}
};

static thread_local int depth;
static thread_local std::vector<std::unique_ptr<Job>> group;

// record puts a job into a graph, which has it as long as there is one.
static int record(std::unique_ptr<Job> job, void *graph) {
	Job *kept = job.release();
	{
		std::lock_guard<std::mutex> held(lock);
		kept->comm->captured++;
	}
	void *object;
	driver().object(&object, kept, [](void *p) {
		std::unique_ptr<Job> job(static_cast<Job *>(p));
		std::lock_guard<std::mutex> held(lock);
		job->comm->captured--;
		changed.notify_all();
	}, 1, 1);
	driver().retain(graph, object, 1, 1);
	return driver().launch(kept->stream, [](void *p) { static_cast<Job *>(p)->run(); }, kept) == 0 ? success : invalid_argument;
}

static int launch(std::unique_ptr<Job> job) {
	void *stream = job->stream;
	void *graph = nullptr;
	int capturing = 0;
	driver().capture(stream, &capturing, nullptr, &graph, nullptr, nullptr);
	if (capturing)
		return record(std::move(job), graph);
	return driver().launch(stream, [](void *p) { std::unique_ptr<Job>(static_cast<Job *>(p))->run(); }, job.release()) == 0 ? success : invalid_argument;
}

static int start(Comm *c, void *stream, Call call) {
	{
		std::lock_guard<std::mutex> held(lock);
		if (!connected(c))
			return invalid_usage;
	}
	if (depth == 0) {
		auto job = std::make_unique<Job>();
		*job = Job{c, stream, {call}};
		return launch(std::move(job));
	}
	for (auto &job : group)
		if (job->comm == c && job->stream == stream)
			return job->calls.push_back(call), success;
	group.push_back(std::make_unique<Job>());
	*group.back() = Job{c, stream, {call}};
	return success;
}

NCCL ncclGroupStart() { return depth++, success; }
NCCL ncclGroupEnd() {
	if (depth == 0)
		return invalid_usage;
	if (--depth > 0)
		return success;
	int result = success;
	for (auto &job : group)
		if (int code = launch(std::move(job)))
			result = code;
	group.clear();
	return result;
}

static const char *in(const void *p) { return static_cast<const char *>(p); }
static char *out(void *p) { return static_cast<char *>(p); }

NCCL ncclAllReduce(const void *src, void *dst, size_t n, int type, int op, Comm *c, void *s) { return start(c, s, {all_reduce, in(src), out(dst), n, type, op, 0}); }
NCCL ncclReduceScatter(const void *src, void *dst, size_t n, int type, int op, Comm *c, void *s) { return start(c, s, {reduce_scatter, in(src), out(dst), n, type, op, 0}); }
NCCL ncclAllGather(const void *src, void *dst, size_t n, int type, Comm *c, void *s) { return start(c, s, {all_gather, in(src), out(dst), n, type, 0, 0}); }
NCCL ncclBroadcast(const void *src, void *dst, size_t n, int type, int root, Comm *c, void *s) { return start(c, s, {broadcast, in(src), out(dst), n, type, 0, root}); }
NCCL ncclReduce(const void *src, void *dst, size_t n, int type, int op, int root, Comm *c, void *s) { return start(c, s, {reduce_to, in(src), out(dst), n, type, op, root}); }
NCCL ncclSend(const void *src, size_t n, int type, int peer, Comm *c, void *s) { return start(c, s, {send, in(src), nullptr, n, type, 0, peer}); }
NCCL ncclRecv(void *dst, size_t n, int type, int peer, Comm *c, void *s) { return start(c, s, {recv, nullptr, out(dst), n, type, 0, peer}); }
