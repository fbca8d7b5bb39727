// A libnccl.so.2 for the driver of internal/kernels/cuda/emulator: ranks are threads of one
// process or of several, also on several machines, whose devices are the host. What it starts runs
// on the streams of that driver and waits there for the other ranks, as NCCL's kernels do; sums are
// in rank order. With it everything down to NCCL's calls is tested without a GPU.
//
// It keeps what is awkward about NCCL: connecting goes on in the background, ending
// a communicator waits for all ranks or, in an abort, for nobody but graphs that hold
// calls of it, and the last rank
// of a process that ends frees memory of all of them, for which the driver waits
// for every stream of their devices. Processes reach each other at the address of one
// interface each, which NCCL_SOCKET_IFNAME names, if they have the same key: nothing is encrypted.
// Where one ends or aborts, the others have an error in the background.
//
// With OLD defined it is a version that has no more than is needed: it cannot split.

#include <arpa/inet.h>
#include <dlfcn.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#define NCCL extern "C" int

enum { success = 0, invalid_argument = 4, invalid_usage = 5, remote_error = 6, in_progress = 7 };

// ---- the driver ----

struct Driver {
	int (*launch)(void *stream, void (*f)(void *), void *data);
	int (*context)(void **c);
	int (*device)(int *ordinal);
	int (*bind)(void *c);
	int (*synchronize)();
	int (*capture)(void *stream, int *status, uint64_t *id, void **graph, void *, void *);
	int (*object)(void **object, void *data, void (*destroy)(void *), unsigned, unsigned);
	int (*retain)(void *graph, void *object, unsigned, unsigned);
	int (*depend)(void *stream, void *nodes, size_t n, unsigned);
};

static const Driver &driver() {
	static const Driver d = [] {
		void *lib = dlopen("libcuda.so.1", RTLD_NOW);
		auto look = [=](const char *name) { return dlsym(lib, name); };
		return Driver{
			reinterpret_cast<decltype(Driver::launch)>(look("cuLaunchHostFunc")),
			reinterpret_cast<decltype(Driver::context)>(look("cuCtxGetCurrent")),
			reinterpret_cast<decltype(Driver::device)>(look("cuCtxGetDevice")),
			reinterpret_cast<decltype(Driver::bind)>(look("cuCtxSetCurrent")),
			reinterpret_cast<decltype(Driver::synchronize)>(look("cuCtxSynchronize")),
			reinterpret_cast<decltype(Driver::capture)>(look("cuStreamGetCaptureInfo_v2")),
			reinterpret_cast<decltype(Driver::object)>(look("cuUserObjectCreate")),
			reinterpret_cast<decltype(Driver::retain)>(look("cuGraphRetainUserObject")),
			reinterpret_cast<decltype(Driver::depend)>(look("cuStreamUpdateCaptureDependencies")),
		};
	}();
	return d;
}

// ---- communicators ----

using Bytes = std::vector<char>;

struct Part { // what a rank says when it splits
	int rank, color, key;
	bool here; // it is of this process
};

// Event is what a process tells the others of a rank of its own.
struct Event {
	enum Kind : int { joined, split, mail, closed, aborted };
	std::string ring;
	Kind kind;
	int rank, to; // mail goes to a rank, a split has its number there
	int color, key;
	Bytes data;
};

struct Ring {
	std::string name;
	std::shared_ptr<Ring> top; // that it was split from, null for one that was joined
	int size = 0, joined = 0, closed = 0, ended = 0;
	std::set<int> here;           // the ranks of this process
	std::vector<void *> contexts; // of the ranks that have ended
	std::map<std::pair<int, int>, std::deque<Bytes>> mail; // by source and destination
	std::map<int, std::vector<Part>> splits;               // by number

	// Of a ring that was joined:
	std::string hub;              // the process that made its id, which passes on what each tells
	std::set<std::string> others; // the other processes of the ring, for the hub
	std::vector<Event> history;   // for those that come later

	bool lost = false; // another process has ended, or a rank there has aborted

	std::set<Bytes> places; // of the ranks of one that was joined
	bool twice = false;     // two ranks have one place
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
static std::map<std::string, std::shared_ptr<Ring>> rings; // by name

static std::shared_ptr<Ring> top(const std::shared_ptr<Ring> &r) { return r->top ? r->top : r; }

// find returns a ring, which begins to exist. "ADDRESS/N" is joined, "ADDRESS/N/NUMBER.COLOR" is
// split from that. The lock is held.
static std::shared_ptr<Ring> find(const std::string &name) {
	auto &ring = rings[name];
	if (!ring) {
		ring = std::make_shared<Ring>();
		ring->name = name;
		size_t address = name.find('/'), id = name.find('/', address + 1);
		ring->hub = name.substr(0, address);
		if (id != std::string::npos)
			ring->top = find(name.substr(0, id));
	}
	return ring;
}

// ---- other processes ----

// Each process listens at one address, and sends to another one over a connection that it
// makes to it.

static std::string key; // that ncclSetEncryption was given
static std::string address; // of this process, "" before the first id or communicator

struct Pipe { // to another process
	std::deque<Bytes> out;
	std::condition_variable more;
};

static std::map<std::string, Pipe *> pipes; // by address

static bool write_all(int fd, const void *x, size_t n) {
	for (const char *p = static_cast<const char *>(x); n > 0;) {
		ssize_t done = send(fd, p, n, MSG_NOSIGNAL);
		if (done <= 0)
			return false;
		p += done, n -= size_t(done);
	}
	return true;
}

static bool read_all(int fd, void *x, size_t n) {
	for (char *p = static_cast<char *>(x); n > 0;) {
		ssize_t done = recv(fd, p, n, 0);
		if (done <= 0)
			return false;
		p += done, n -= size_t(done);
	}
	return true;
}

template <class T> static void put(Bytes &b, const T &x) {
	uint64_t n = x.size();
	b.insert(b.end(), reinterpret_cast<char *>(&n), reinterpret_cast<char *>(&n + 1));
	b.insert(b.end(), x.begin(), x.end());
}

template <class T> static bool get(int fd, T &x) {
	uint64_t n;
	if (!read_all(fd, &n, sizeof n))
		return false;
	x.resize(n);
	return read_all(fd, &x[0], n);
}

static Bytes pack(const Event &e) {
	Bytes b;
	put(b, e.ring);
	const int numbers[] = {e.kind, e.rank, e.to, e.color, e.key};
	b.insert(b.end(), reinterpret_cast<const char *>(numbers),
		reinterpret_cast<const char *>(numbers + 5));
	put(b, e.data);
	return b;
}

static bool unpack(int fd, Event &e) {
	int numbers[5];
	if (!get(fd, e.ring) || !read_all(fd, numbers, sizeof numbers) || !get(fd, e.data))
		return false;
	e.kind = Event::Kind(numbers[0]), e.rank = numbers[1], e.to = numbers[2], e.color = numbers[3],
	e.key = numbers[4];
	return true;
}

static void pass(const std::shared_ptr<Ring> &ring, const Event &e, const std::string &from);

// lose ends the rings that another process is in.
static void lose(const std::string &other) {
	std::lock_guard<std::mutex> held(lock);
	for (auto &named : rings) {
		auto &ring = named.second;
		auto all = top(ring);
		if (all->hub != other && !all->others.count(other))
			continue;
		ring->lost = true;
		pass(ring, {ring->name, Event::aborted, 0, 0, 0, 0, {}}, other);
	}
	changed.notify_all();
}

static sockaddr_in parsed(const std::string &at) {
	size_t colon = at.find(':');
	sockaddr_in a = {};
	a.sin_family = AF_INET;
	a.sin_port = htons(uint16_t(std::stoi(at.substr(colon + 1))));
	inet_pton(AF_INET, at.substr(0, colon).c_str(), &a.sin_addr);
	return a;
}

// pour sends what a pipe has, until the other process ends.
static void pour(Pipe *p, std::string to) {
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	sockaddr_in at = parsed(to);
	int one = 1;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	bool open = connect(fd, reinterpret_cast<sockaddr *>(&at), sizeof at) == 0;
	while (open) {
		std::unique_lock<std::mutex> held(lock);
		p->more.wait(held, [=] { return !p->out.empty(); });
		Bytes b = std::move(p->out.front());
		p->out.pop_front();
		held.unlock();
		open = write_all(fd, b.data(), b.size());
	}
	close(fd);
	lose(to);
}

// send_to queues something for another process. The lock is held.
static void send_to(const std::string &to, Bytes b) {
	Pipe *&p = pipes[to];
	if (!p) {
		p = new Pipe;
		Bytes hello;
		put(hello, address);
		put(hello, key);
		p->out.push_back(hello);
		std::thread(pour, p, to).detach();
	}
	p->out.push_back(std::move(b));
	p->more.notify_one();
}

// pass tells an event to the other processes of a ring, but for the one that it is from. The lock
// is held.
static void pass(const std::shared_ptr<Ring> &ring, const Event &e, const std::string &from) {
	auto all = top(ring);
	if (all->hub != address) {
		if (from.empty())
			send_to(all->hub, pack(e));
		return;
	}
	if (e.kind == Event::joined || e.kind == Event::split)
		all->history.push_back(e);
	for (const std::string &other : all->others)
		if (other != from)
			send_to(other, pack(e));
}

// tell tells an event of this process. The lock is held.
static void tell(const std::shared_ptr<Ring> &ring, Event::Kind kind, int rank, int to = 0,
	int color = 0, int key = 0, Bytes data = {}) {
	pass(ring, {ring->name, kind, rank, to, color, key, std::move(data)}, "");
	changed.notify_all();
}

// take_place notes where a rank is: its machine and its device, which takes one rank of a machine.
static void take_place(const std::shared_ptr<Ring> &ring, const Bytes &place) {
	if (!ring->places.insert(place).second)
		ring->twice = true;
}

// hear takes an event of another process.
static void hear(const Event &e, const std::string &from) {
	std::lock_guard<std::mutex> held(lock);
	auto ring = find(e.ring), all = top(ring);
	if (all->hub == address && all->others.insert(from).second)
		for (const Event &before : all->history)
			send_to(from, pack(before));
	switch (e.kind) {
	case Event::joined:
		ring->joined++;
		take_place(ring, e.data);
		break;
	case Event::split:
		ring->splits[e.to].push_back({e.rank, e.color, e.key, false});
		break;
	case Event::mail:
		if (ring->here.empty() || ring->here.count(e.to)) // empty: it is not known here yet
			ring->mail[{e.rank, e.to}].push_back(e.data);
		break;
	case Event::closed:
		ring->closed++;
		break;
	case Event::aborted:
		ring->lost = true;
		break;
	}
	pass(ring, e, from);
	changed.notify_all();
}

// trusted reports whether another process has this one's key.
static bool trusted(const std::string &theirs) {
	std::lock_guard<std::mutex> held(lock);
	return theirs == key;
}

// listens takes what another process sends.
static void listens(int fd) {
	std::string from, theirs;
	if (get(fd, from) && get(fd, theirs)) {
		for (Event e; trusted(theirs) && unpack(fd, e);)
			hear(e, from);
		lose(from);
	}
	close(fd);
}

// named reports whether an interface is one that NCCL_SOCKET_IFNAME names: "eth,ib" by how it
// begins, "=eth0" by the name.
static bool named(const char *interface, const char *names) {
	bool exact = *names == '=';
	std::string rest = names + exact, each;
	for (size_t from = 0; from <= rest.size(); from += each.size() + 1) {
		each = rest.substr(from, rest.find(',', from) - from);
		if (exact ? each == interface : std::string(interface).compare(0, each.size(), each) == 0)
			return true;
	}
	return false;
}

// own_address returns the address of the interface that is asked for, else of the first that is not
// loopback, else of that.
static in_addr own_address() {
	in_addr best = {htonl(INADDR_LOOPBACK)};
	ifaddrs *all = nullptr;
	getifaddrs(&all);
	const char *names = getenv("NCCL_SOCKET_IFNAME");
	for (ifaddrs *i = all; i; i = i->ifa_next) {
		if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || !(i->ifa_flags & IFF_UP))
			continue;
		if (names && *names ? named(i->ifa_name, names) : !(i->ifa_flags & IFF_LOOPBACK)) {
			best = reinterpret_cast<sockaddr_in *>(i->ifa_addr)->sin_addr;
			break;
		}
	}
	freeifaddrs(all);
	return best;
}

// start_listening gives this process its address. The lock is held.
static void start_listening() {
	if (!address.empty())
		return;
	sockaddr_in at = {};
	at.sin_family = AF_INET;
	at.sin_addr = own_address();
	socklen_t size = sizeof at;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (bind(fd, reinterpret_cast<sockaddr *>(&at), sizeof at) || listen(fd, 64) ||
		getsockname(fd, reinterpret_cast<sockaddr *>(&at), &size)) {
		close(fd);
		return;
	}
	char text[INET_ADDRSTRLEN];
	inet_ntop(AF_INET, &at.sin_addr, text, sizeof text);
	address = std::string(text) + ":" + std::to_string(ntohs(at.sin_port));
	std::thread([=] {
		for (int conn; (conn = accept4(fd, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;)
			std::thread(listens, conn).detach();
	}).detach();
}

// ---- connecting ----

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
	std::sort(mine.begin(), mine.end(), [](const Part &a, const Part &b) {
		return std::tie(a.key, a.rank) < std::tie(b.key, b.rank);
	});
	auto ring =
		find(c->parent->name + "/" + std::to_string(c->number) + "." + std::to_string(c->color));
	ring->size = ring->joined = int(mine.size());
	int rank = 0;
	for (int r = 0; r < ring->size; r++) {
		if (mine[r].here)
			ring->here.insert(r);
		if (mine[r].rank == c->rank)
			rank = r;
	}
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

// own_place is where a rank of this process is, with its device.
static Bytes own_place() {
	const char *machine = getenv("NCCL_HOSTID");
	int ordinal = 0;
	driver().device(&ordinal);
	std::string place = (machine ? machine : "") + ("/" + std::to_string(ordinal));
	return Bytes(place.begin(), place.end());
}

static bool refused(Comm *c) { return c->ring && c->ring->twice; }

static bool lost(Comm *c) { return (c->ring ? c->ring : c->parent)->lost; }

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
extern "C" const char *ncclGetErrorString(int code) {
	return code == success	   ? "no error"
		: code == in_progress  ? "in progress"
		: code == remote_error ? "remote process exited"
							   : "invalid argument";
}
NEWER const char *ncclGetLastError(Comm *) { return ""; }

NCCL ncclGetUniqueId(Id *id) {
	static int next;
	std::lock_guard<std::mutex> held(lock);
	start_listening();
	snprintf(id->bytes, sizeof id->bytes, "%s/%d", address.c_str(), ++next);
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
	changed.wait(held, [=] { return connected(c) || c->aborted || lost(c); });
	return lost(c) ? remote_error : refused(c) ? invalid_usage : success;
}

struct Encryption {
	size_t size;
	unsigned magic, version;
	int mode;
	const char *key;
};

NEWER int ncclSetEncryption(const Encryption *e) {
	if (e->size < sizeof *e || e->magic != 0xcafebeef || e->mode != 1 || strlen(e->key) < 32)
		return invalid_argument;
	std::lock_guard<std::mutex> held(lock);
	key = e->key;
	return success;
}

NEWER int ncclCommInitRankConfig(Comm **comm, int size, Id id, int rank, Config *config) {
	std::unique_lock<std::mutex> held(lock);
	start_listening();
	auto ring = find(id.bytes);
	Comm *c = *comm = made(rank);
	c->ring = ring;
	ring->size = size;
	ring->joined++;
	ring->here.insert(rank);
	Bytes place = own_place();
	take_place(ring, place);
	tell(ring, Event::joined, rank, 0, 0, 0, place);
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
	parent->ring->splits[parent->splits].push_back({parent->rank, color, key, true});
	*comm = nullptr;
	if (color >= 0) {
		Comm *c = *comm = made(parent->rank);
		c->parent = parent->ring;
		c->number = parent->splits;
		c->color = color;
	}
	tell(parent->ring, Event::split, parent->rank, parent->splits, color, key);
	if (!config->blocking)
		return in_progress;
	changed.wait(held, [=] { return connected(parent) || parent->aborted || lost(parent); });
	return *comm ? wait_connected(*comm, held, config) : success;
}

NCCL ncclCommGetAsyncError(Comm *c, int *state) {
	std::lock_guard<std::mutex> held(lock);
	return *state = lost(c)	  ? remote_error
			   : refused(c)	  ? invalid_usage
			   : connected(c) ? success
							  : in_progress,
		   success;
}

// end frees what the ranks had, by the last one of this process. A communicator itself stays: what
// is queued on a stream may still look at it.
static int end(Comm *c, std::unique_lock<std::mutex> &held) {
	changed.wait(held, [=] { return c->running == 0 && c->captured == 0; });
	if (!c->ring)
		return success;
	c->ring->contexts.push_back(c->context);
	if (++c->ring->ended < int(c->ring->here.size()))
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
	if (c->ring)
		tell(c->ring, Event::aborted, c->rank);
	changed.notify_all();
	return end(c, held);
}

NCCL ncclCommDestroy(Comm *c) {
	std::unique_lock<std::mutex> held(lock);
	c->ring->closed++;
	tell(c->ring, Event::closed, c->rank);
	changed.wait(held, [=] { return c->ring->closed == c->ring->size || lost(c); });
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
			sum = p == 0		? x
				: op == op_prod ? Wide(sum * x)
				: op == op_max	? std::max(sum, x)
				: op == op_min	? std::min(sum, x)
								: Wide(sum + x);
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

enum Kind { to_peer, from_peer, all_reduce, reduce_scatter, all_gather, broadcast, reduce_to };

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
		if (!comm->ring->here.count(p))
			return tell(comm->ring, Event::mail, comm->rank, p, 0, 0, Bytes(x, x + n));
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
		box.pop_front();
		x.resize(n);
		return true;
	}

	void give(const Call &c) {
		size_t n = nbytes(c);
		switch (c.kind) {
		case to_peer:
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
		case from_peer:
			return;
		}
	}

	bool take(const Call &c) {
		size_t n = nbytes(c);
		Bytes x;
		switch (c.kind) {
		case to_peer:
			return true;
		case from_peer:
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
	if (driver().launch(kept->stream, [](void *p) { static_cast<Job *>(p)->run(); }, kept) != 0)
		return invalid_argument;
	// NCCL launches on a stream of its own, and sets what the caller's depends on.
	return driver().depend(kept->stream, nullptr, 0, 1) == 0 ? success : invalid_argument;
}

static int launch(std::unique_ptr<Job> job) {
	void *stream = job->stream;
	void *graph = nullptr;
	int capturing = 0;
	driver().capture(stream, &capturing, nullptr, &graph, nullptr, nullptr);
	if (capturing)
		return record(std::move(job), graph);
	return driver().launch(
			   stream, [](void *p) { std::unique_ptr<Job>(static_cast<Job *>(p))->run(); },
			   job.release()) == 0
		? success
		: invalid_argument;
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

NCCL ncclAllReduce(const void *src, void *dst, size_t n, int type, int op, Comm *c, void *s) {
	return start(c, s, {all_reduce, in(src), out(dst), n, type, op, 0});
}
NCCL ncclReduceScatter(const void *src, void *dst, size_t n, int type, int op, Comm *c, void *s) {
	return start(c, s, {reduce_scatter, in(src), out(dst), n, type, op, 0});
}
NCCL ncclAllGather(const void *src, void *dst, size_t n, int type, Comm *c, void *s) {
	return start(c, s, {all_gather, in(src), out(dst), n, type, 0, 0});
}
NCCL ncclBroadcast(const void *src, void *dst, size_t n, int type, int root, Comm *c, void *s) {
	return start(c, s, {broadcast, in(src), out(dst), n, type, 0, root});
}
NCCL ncclReduce(const void *src, void *dst, size_t n, int type, int op, int root, Comm *c,
	void *s) {
	return start(c, s, {reduce_to, in(src), out(dst), n, type, op, root});
}
NCCL ncclSend(const void *src, size_t n, int type, int peer, Comm *c, void *s) {
	return start(c, s, {to_peer, in(src), nullptr, n, type, 0, peer});
}
NCCL ncclRecv(void *dst, size_t n, int type, int peer, Comm *c, void *s) {
	return start(c, s, {from_peer, nullptr, out(dst), n, type, 0, peer});
}
