// Runs the kernels of allreduce.cu, ll128.cu and mesh.cu on several devices at a time,
// for tests: each block of each device is a thread of the host.
//
//	devices exchange VERB SIZE CALLS ROUND   calls of random lengths, types,
//	        alignments, places and grids, back to back, with random delays, that
//	        begin after a round; VERB may be "mixed", which is all but mesh
//	devices missing VERB SIZE                a rank does not come
//	devices stop VERB SIZE                   a rank does not come, and the host says stop
//	devices layout - -                       prints what the host must know of Pad and Status
//
// It prints "ok" or what is wrong.

#include "../allreduce.cu"
#include "../ll128.cu"
#include "../mesh.cu"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include <unistd.h>

using namespace peers;

// ---- devices ----

static const u32 most_grid = 3;                 // blocks
static const u64 staging = 1 << 10;             // bytes of each half: calls have several rounds
static const u64 packets = 300;                 // in an inbox
// in a half, of all senders: calls have several rounds
static const u64 lines = 96;
static const u64 window = 1 << 16, guard = 64;  // bytes
static const u8 untouched = 0xa5;

static u8 *memory(u64 nbytes) {
	u8 *p = static_cast<u8 *>(aligned_alloc(256, (nbytes + 255) / 256 * 256));
	memset(p, 0, nbytes);
	return p;
}

struct Device {
	Pad *pad;
	u8 *stage;
	u8 *windows[2]; // of operands and of results: peers reach them
	u8 *plain[2];   // the same, but nobody else does
	Status status;
	std::mutex lock;
	std::condition_variable changed;
	u32 arrived = 0, turn = 0;

	// The end of a kernel: all its blocks have ended.
	void meet(u32 blocks) {
		std::unique_lock<std::mutex> held(lock);
		if (++arrived == blocks) {
			arrived = 0, turn++;
			changed.notify_all();
			return;
		}
		changed.wait(held, [this, now = turn] { return turn != now; });
	}
};

static std::vector<std::unique_ptr<Device>> devices;

// Ranks 0 to 3 and 4 to 7 of a mesh are cliques, and r's relay is r ^ 4.
static u32 partner(u32 rank, u32 i) { return i < 3 ? rank ^ (i + 1) : rank ^ 4; }
static bool neighbours(u32 r, u32 p) { return r / 4 == p / 4 || p == partner(r, 3); }

static void make(u32 size, u64 round, bool mesh) {
	for (u32 r = 0; r < size; r++) {
		auto d = std::make_unique<Device>();
		d->pad = reinterpret_cast<Pad *>(
			memory(sizeof(Pad) + 2 * size * packets * 16 + 2 * lines * 128));
		d->stage = memory(2 * staging);
		for (int i = 0; i < 2; i++)
			d->windows[i] = memory(window), d->plain[i] = memory(window);
		for (State &s : d->pad->state)
			s.round = round;
		d->status = {0, 0};
		devices.push_back(std::move(d));
	}
	for (u32 r = 0; r < size; r++)
		for (u32 p = 0; p < size; p++) {
			auto &d = devices[r];
			if (mesh && !neighbours(r, p))
				continue;
			d->pad->windows[0][p] = ADDRESS(devices[p]->stage);
			d->pad->windows[1][p] = ADDRESS(devices[p]->windows[0]);
			d->pad->windows[2][p] = ADDRESS(devices[p]->windows[1]);
		}
}

// Ranks of a mesh do not reach all pads.
static Group group(u32 rank, u64 divisor, u64 limit, bool mesh) {
	Group g = {};
	g.rank = rank, g.size = devices.size();
	for (u32 p = 0; p < g.size; p++)
		g.pads[p] = mesh && !neighbours(rank, p) ? nullptr : devices[p]->pad;
	g.status = &devices[rank]->status;
	g.limit = limit, g.packets = packets, g.lines = lines, g.staging = staging, g.divisor = divisor;
	return g;
}

// ---- calls ----

enum Type { type_f32, type_f16, type_bf16, type_u8 };
static const char *type_names[] = {"f32", "f16", "bf16", "b8"};
static const u64 sizes[] = {4, 2, 2, 1};

// Call is what all ranks know of a call; Mine is what a rank decides for itself.
struct Call {
	std::string verb;
	bool tree;        // in whose order it adds
	bool in_lines;    // what could go by rounds, too
	Type type;
	u64 n; // elements of a chunk
	bool average;
	u32 grid, threads;
	u64 piece;
	u64 some, rounds; // of ll128twoshot and halved
	Type half;        // what travels of halved
};

// Layout is how the operands of an all-to-all lie: rank s sends n[s][r] elements to rank r.
struct Layout {
	u64 n[most_ranks][most_ranks], src_rows[most_ranks], dst_rows[most_ranks];

	// at returns where element e of what rank s sends to rank r lies in one of the two operands.
	u64 at(u64 s, u64 r, u64 e, bool in_dst) const {
		u64 rows = in_dst ? dst_rows[r] : src_rows[s], before = 0, pitch = 0,
			width = n[s][r] / rows;
		for (u64 p = 0; p < devices.size(); p++) {
			u64 part = (in_dst ? n[p][r] : n[s][p]) / rows;
			before += p < (in_dst ? s : r) ? part : 0, pitch += part;
		}
		return e / width * pitch + before + e % width;
	}
	u64 length(u64 rank, bool in_dst) const {
		u64 sum = 0;
		for (u64 p = 0; p < devices.size(); p++)
			sum += in_dst ? n[p][rank] : n[rank][p];
		return sum;
	}
};

struct Mine {
	u8 *dst, *src;
	u64 source, target;
	bool in_place;
	u32 delay;
};

// Origin: MurmurHash3
static u64 mix(u64 x) {
	x = (x ^ x >> 33) * 0xff51afd7ed558ccd;
	x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53;
	return x ^ x >> 33;
}

// Draw is a sequence of random numbers that every rank can repeat.
struct Draw {
	u64 state;
	u64 operator()(u64 below) { return mix(state += 0x9e3779b97f4a7c15) % below; }
};

// A tensor [a, b, c, d, e] that is distributed along one of b and d is distributed along the other
// one.
static Layout draw_layout(u64 seed) {
	Draw draw = {seed};
	u64 size = devices.size(), cut[most_ranks], join[most_ranks];
	bool uneven = draw(2), scatters_first = draw(2);
	for (u64 p = 0; p < size; p++)
		cut[p] = p && !uneven ? cut[0] : draw(5), join[p] = p && !uneven ? join[0] : draw(4);
	u64 a = 1 + draw(3), c = 1 + draw(3), e = draw(2) ? 8 * (1 + draw(3)) : 1 + draw(9);
	Layout l = {};
	for (u64 s = 0; s < size; s++) {
		l.src_rows[s] = std::max<u64>(1, scatters_first ? a : a * join[s] * c);
		l.dst_rows[s] = std::max<u64>(1, scatters_first ? a * cut[s] * c : a);
		for (u64 r = 0; r < size; r++)
			l.n[s][r] = a * join[s] * c * cut[r] * e;
	}
	return l;
}

// Pieces that travel in lines have room for them.
static Layout draw_layout(const Call &c, u64 number) {
	for (Draw seed = {number * 31};;) {
		Layout l = draw_layout(seed.state);
		u64 longest = 0;
		for (auto &of : l.n)
			longest = std::max(longest, *std::max_element(of, of + most_ranks));
		if (!c.in_lines || longest * sizes[c.type] <= lines / devices.size() * line_bytes)
			return l;
		seed(1);
	}
}

static u64 chunks_in(const Call &c) { return c.verb == "reducescatter" ? devices.size() : 1; }
static u64 chunks_out(const Call &c) { return c.verb == "allgather" ? devices.size() : 1; }

static u64 length_in(const Call &c, u64 number, u32 rank) {
	return c.verb == "alltoall" ? draw_layout(c, number).length(rank, false) : chunks_in(c) * c.n;
}
static u64 length_out(const Call &c, u64 number, u32 rank) {
	return c.verb == "alltoall" ? draw_layout(c, number).length(rank, true) : chunks_out(c) * c.n;
}

static Call draw_call(const std::string &verb, u64 number) {
	static const char *verbs[] = {"ll", "ll128", "ll128twoshot", "oneshot", "twoshot",
		"reducescatter", "allgather", "halved", "treeoneshot", "treetwoshot", "treereducescatter",
		"alltoall", "ll128reducescatter", "ll128allgather", "ll128alltoall"};
	Draw draw = {number * 77};
	Call c;
	c.verb = verb == "mixed" ? verbs[draw(15)] : verb;
	c.tree = c.verb.substr(0, 4) == "tree";
	if (c.tree)
		c.verb = c.verb.substr(4);
	c.in_lines = c.verb.size() > 12 && c.verb.substr(0, 5) == "ll128" && c.verb != "ll128twoshot";
	if (c.in_lines)
		c.verb = c.verb.substr(5);
	c.type = c.verb == "allgather" ? type_u8 : Type(draw(3));
	c.half = Type(type_f16 + draw(2));
	if (c.verb == "halved" || c.tree)
		c.type = type_f32;
	if (c.verb == "alltoall")
		c.type = draw(3) ? Type(draw(2)) : type_u8; // of 32 bits, 16 or 8
	c.average = c.verb != "allgather" && c.verb != "alltoall" && draw(2);
	u64 size = devices.size();
	u64 most = c.verb == "ll"			? packets * 8
		: c.verb == "ll128" || c.in_lines ? lines / size * line_bytes
		: draw(8) && c.verb != "halved" ? 700
										: 4 * staging;
	c.n = 1 + draw(most / sizes[c.type]);
	c.grid = 1 + draw(most_grid);
	c.threads = c.verb.substr(0, 5) == "ll128" || c.in_lines || c.verb == "halved"
		? 32 * (1 + draw(2))
		: 8 + draw(9);
	// lines, then those of a segment
	u64 each = (c.n * sizes[c.verb == "halved" ? c.half : c.type] + line_bytes - 1) / line_bytes;
	each = (each + size - 1) / size;
	u64 room = 1 + draw(lines / (2 * size));
	c.rounds = (each + room - 1) / room, c.some = (each + c.rounds - 1) / c.rounds;
	u64 shares = c.verb == "twoshot" ? 2 * size
		: c.verb == "mesh"			 ? size
		: c.verb == "reducescatter"  ? 2 * (size + 1)
									 : 1;
	c.piece = std::max<u64>(1, staging / 16 / shares);
	return c;
}

static Mine draw_mine(const Call &c, u64 number, u32 rank) {
	Draw draw = {number * 1013 + rank};
	Mine m;
	Device &d = *devices[rank];
	bool permutes = c.verb == "alltoall", pushes = permutes || c.verb == "allgather";
	u64 bytes = permutes ? 0 : c.n * sizes[c.type];
	m.in_place = draw(2) && !permutes;
	bool shows = draw(2), wants = draw(2), aligned = draw(3);
	m.delay = draw(16) ? 0 : draw(200);
	u64 skew = aligned ? draw(4) * 16 : draw(40) * sizes[c.type];
	m.src = (shows ? d.windows[0] : d.plain[0]) + guard + skew;
	m.dst = (wants ? d.windows[1] : d.plain[1]) + guard +
		(aligned ? draw(4) * 16 : draw(40) * sizes[c.type]);
	if (m.in_place && chunks_in(c) > 1)
		m.dst = m.src + rank * bytes;
	else if (m.in_place && chunks_out(c) > 1)
		m.dst = m.src, m.src = m.dst + rank * bytes;
	else if (m.in_place)
		m.dst = m.src;
	auto place = [&](u8 *p, u64 other) -> u64 {
		for (u64 w = 0; w < 2; w++)
			if (p >= d.windows[w] && p < d.windows[w] + window &&
				(pushes || (ADDRESS(p) % 16 == 0 && bytes % 16 == 0)) && !other)
				return (w + 1) << 48 | u64(p - d.windows[w]);
		return 0;
	};
	m.source = place(m.src, m.in_place && c.verb == "oneshot");
	m.target = place(m.dst, 0);
	return m;
}

// A value of an operand: of exponents far apart, so that the order shows.
static f32 value(u64 number, u32 rank, u64 i) {
	u64 x = mix(number << 40 ^ u64(rank) << 32 ^ i);
	return ((i32)(x & 0xffff) - 0x8000) * std::exp2((int)(x >> 60) - 12.0f);
}

static void put(u8 *at, Type t, f32 x) {
	f16 h;
	bf16 b;
	switch (t) {
	case type_f32: memcpy(at, &x, 4); break;
	case type_f16: narrow(h, x), memcpy(at, &h, 2); break;
	case type_bf16: narrow(b, x), memcpy(at, &b, 2); break;
	case type_u8: *at = (u8)(i32)x;
	}
}

static f32 get(const u8 *at, Type t) {
	f32 x;
	f16 h;
	bf16 b;
	switch (t) {
	case type_f32: return memcpy(&x, at, 4), x;
	case type_f16: return memcpy(&h, at, 2), wide(h);
	case type_bf16: return memcpy(&b, at, 2), wide(b);
	default: return *at;
	}
}

// rounded is a value as an operand of a type holds it.
static f32 rounded(Type t, f32 x) {
	u8 at[4];
	return put(at, t, x), get(at, t);
}

// halved_value is an element of what a call gives whose operands and average travel in
// 16 bits.
static f32 halved_value(const Call &c, u64 number, u64 i) {
	f32 sum = rounded(c.half, value(number, 0, i));
	for (u32 p = 1; p < devices.size(); p++)
		sum += rounded(c.half, value(number, p, i));
	f32 average = rounded(c.half, sum / devices.size());
	return c.average ? average : average * devices.size();
}

// tree_sum adds the operands of ranks lo to hi: the largest power of two of them, and the others.
static f32 tree_sum(Type t, u64 number, u32 lo, u32 hi, u64 i) {
	if (hi - lo == 1)
		return rounded(t, value(number, lo, i));
	u32 half = 1;
	while (2 * half < hi - lo)
		half *= 2;
	return tree_sum(t, number, lo, lo + half, i) + tree_sum(t, number, lo + half, hi, i);
}

static void prepare(const Call &c, const Mine &m, u64 number, u32 rank) {
	u64 size = sizes[c.type];
	u64 in = length_in(c, number, rank);
	memset(m.dst - guard, untouched, length_out(c, number, rank) * size + 2 * guard);
	if (!m.in_place)
		memset(m.src - guard, untouched, in * size + 2 * guard);
	for (u64 i = 0; i < in; i++)
		put(m.src + i * size, c.type, value(number, rank, i));
}

static void fail(const Call &c, u64 number, u32 rank, const std::string &what) {
	std::printf("call %llu, %s%s_%s of %llu elements, grid %u, on rank %u of %zu: %s\n", number,
		c.tree ? "tree" : c.in_lines ? "ll128" : "", c.verb.c_str(), type_names[c.type], c.n,
		c.grid, rank, devices.size(), what.c_str());
	std::fflush(stdout);
	_exit(1);
}

static void verify(const Call &c, const Mine &m, u64 number, u32 rank) {
	u64 size = sizes[c.type], length = length_out(c, number, rank), in = length_in(c, number, rank);
	u8 want[4];
	std::vector<std::pair<u32, u64>> from(length); // of an all-to-all
	Layout l = draw_layout(c, number);
	for (u32 p = 0; p < devices.size() && c.verb == "alltoall"; p++)
		for (u64 e = 0; e < l.n[p][rank]; e++)
			from[l.at(p, rank, e, true)] = {p, l.at(p, rank, e, false)};
	for (u64 i = 0; i < length; i++) {
		if (c.verb == "allgather") {
			put(want, c.type, value(number, i / c.n, i % c.n));
		} else if (c.verb == "alltoall") {
			put(want, c.type, value(number, from[i].first, from[i].second));
		} else if (c.verb == "halved") {
			put(want, c.type, halved_value(c, number, i));
		} else {
			u64 at = chunks_in(c) > 1 ? rank * c.n + i : i;
			f32 sum = c.tree ? tree_sum(c.type, number, 0, devices.size(), at)
							 : rounded(c.type, value(number, 0, at));
			for (u32 p = 1; p < devices.size() && !c.tree; p++)
				sum += rounded(c.type, value(number, p, at));
			put(want, c.type, c.average ? sum / devices.size() : sum);
		}
		if (memcmp(want, m.dst + i * size, size))
			fail(c, number, rank,
				"element " + std::to_string(i) + " is " +
					std::to_string(get(m.dst + i * size, c.type)) + ", want " +
					std::to_string(get(want, c.type)));
	}
	bool touched = false;
	if (!m.in_place || chunks_in(c) == 1)
		for (u64 i = 0; i < guard; i++)
			touched |= m.dst[i - guard] != untouched || m.dst[length * size + i] != untouched;
	if (!m.in_place)
		for (u64 i = 0; i < in; i++)
			touched |= get(m.src + i * size, c.type) != rounded(c.type, value(number, rank, i));
	if (touched)
		fail(c, number, rank, "memory around the result, or the operand, was written");
}

// pieces_of returns what the kernel must know of a layout.
static Pieces pieces_of(const Layout &l, u32 rank, u64 size, u64 &longest) {
	Pieces x = {};
	x.src_rows = l.src_rows[rank], x.dst_rows = l.dst_rows[rank];
	longest = 0;
	for (u32 p = 0; p < devices.size(); p++) {
		x.src[p] = l.n[rank][p] / x.src_rows * size;
		x.dst[p] = l.n[p][rank] / x.dst_rows * size;
		x.there[p] = l.n[rank][p] / l.dst_rows[p] * size;
		for (u32 s = 0; s < devices.size(); s++) {
			u64 part = l.n[s][p] / l.dst_rows[p] * size;
			x.there_at[p] += s < rank ? part : 0, x.there_pitch[p] += part;
			longest = std::max(longest, (l.n[s][p] * size + 15) / 16 * 16);
		}
	}
	return x;
}

// gathered is pieces_of an all-gather of n bytes a rank.
static Pieces gathered(u32 rank, u64 n, u64 &longest) {
	Pieces x = {};
	x.dst_rows = 1, longest = (n + 15) / 16 * 16;
	for (u32 p = 0; p < devices.size(); p++) {
		x.src[p] = x.dst[p] = x.there[p] = n;
		x.there_at[p] = rank * n, x.there_pitch[p] = devices.size() * n;
	}
	return x;
}

// launch runs one block.
static void launch(const Call &c, const Mine &m, u64 number, u32 rank, u32 block, u64 limit) {
	bool gathers = c.verb == "allgather", pieces = gathers || c.verb == "alltoall";
	std::string verb = pieces ? "alltoall"
		: c.verb == "reducescatter" ? "scatter"
									: c.verb;
	std::string type = pieces ? "b8" : type_names[verb == "halved" ? c.half : c.type];
	const emulate::Kernel &k = emulate::kernels[(c.tree ? "tree" : c.in_lines ? "ll128" : "") +
		verb + "_" + type];
	Group g =
		group(rank, c.average || verb == "halved" ? devices.size() : 1, limit, verb == "mesh");
	std::vector<u64> words(sizeof g / 8);
	memcpy(words.data(), &g, sizeof g);
	words.insert(words.end(), {ADDRESS(m.dst), ADDRESS(m.src), c.n});
	if (pieces) {
		Pieces x = gathers ? gathered(rank, c.n, words.back())
			: pieces_of(draw_layout(c, number), rank, sizes[c.type], words.back());
		words.push_back(m.target);
		words.insert(words.end(), reinterpret_cast<u64 *>(&x), reinterpret_cast<u64 *>(&x + 1));
	} else if (verb == "ll128twoshot" || verb == "halved")
		words.insert(words.end(), {c.some, c.rounds});
	else if (verb == "mesh")
		words.insert(words.end(),
			{c.piece,
				partner(rank, 0) | partner(rank, 1) << 8 | partner(rank, 2) << 16 |
					partner(rank, 3) << 24});
	else if (verb == "twoshot")
		words.insert(words.end(), {c.piece, m.target});
	else if (verb == "scatter" && !c.in_lines)
		words.push_back(c.piece);
	else if (verb == "oneshot")
		words.insert(words.end(), {c.piece, m.source});
	if (verb == "halved")
		words.push_back(bits_as<u64>(c.average ? 1.0 : f64(devices.size())));
	if (words.size() * 8 != k.nbytes)
		fail(c, 0, rank, "the kernel takes other parameters");
	const std::function<void()> body = [&] {
		k.call(reinterpret_cast<const char *>(words.data()));
	};
	emulate::Host &h = emulate::host;
	h.grid = {c.grid, 1}, h.block = {c.threads, 1}, h.block_index = {block, 0}, h.body = &body;
	emulate::run_block();
}

static const u64 second = 1000000000;

// everywhere runs f on a thread for each block of each rank.
template <class F> static void everywhere(F f) {
	std::vector<std::thread> all;
	for (u32 rank = 0; rank < devices.size(); rank++)
		for (u32 block = 0; block < most_grid; block++)
			all.emplace_back(f, rank, block);
	for (auto &t : all)
		t.join();
}

static void exchange(const std::string &verb, u64 calls) {
	everywhere([&](u32 rank, u32 block) {
		Device &d = *devices[rank];
		for (u64 number = 1; number <= calls; number++) {
			Call c = draw_call(verb, number);
			Mine m = draw_mine(c, number, rank);
			if (block == 0) {
				prepare(c, m, number, rank);
				if (m.delay)
					usleep(m.delay);
			}
			d.meet(most_grid);
			if (block < c.grid)
				launch(c, m, number, rank, block, 60 * second);
			d.meet(most_grid);
			if (block == 0 && get_word(&d.status.reason))
				fail(c, number, rank,
					"rank " + std::to_string(d.status.reason - 1) + " did not come");
			if (block == 0)
				verify(c, m, number, rank);
		}
	});
}

// missing lets the last rank stay away: kernels end with a reason, or because the
// host says stop, and later ones end at once.
static void missing(const std::string &verb, bool stop) {
	Call c = draw_call(verb, 5);
	u32 absent = devices.size() - 1;
	for (u64 limit : {second / 2, 1000 * second}) {
		if (stop && limit < second)
			limit = 1000 * second;
		std::thread host([&] {
			usleep(50000);
			for (auto &d : devices)
				if (stop)
					put_word(&d->status.stop, 1);
		});
		everywhere([&](u32 rank, u32 block) {
			if (rank != absent && block < c.grid)
				launch(c, draw_mine(c, 5, rank), 5, rank, block, limit);
		});
		host.join();
		for (u32 rank = 0; rank < absent; rank++) {
			u32 reason = devices[rank]->status.reason;
			bool right = stop ? reason == 0 : reason == 1 + absent;
			// A rank that does not reach the one that stays away misses its neighbour.
			if (!stop && verb == "mesh" && !neighbours(rank, absent))
				right = reason == 1 + partner(rank, 3);
			if (!right)
				fail(c, 5, rank, "the reason is " + std::to_string(reason));
		}
	}
}

int main(int argc, char **argv) {
	std::string what = argc > 3 ? argv[1] : "";
	if (what.empty())
		return std::fprintf(stderr,
				   "usage: devices exchange|missing|stop VERB SIZE [CALLS ROUND]\n"),
			   2;
	if (what == "layout")
		return std::printf("%zu %zu %zu %zu %zu\n", sizeof(Pad), offsetof(Pad, windows),
				   sizeof(Pad::windows[0]), offsetof(Pad, hosts), sizeof(Status)),
			   0;
	make(atoi(argv[3]), argc > 5 ? strtoull(argv[5], nullptr, 0) : 0,
		argv[2] == std::string("mesh"));
	if (what == "exchange")
		exchange(argv[2], atoi(argv[4]));
	else
		missing(argv[2], what == "stop");
	std::printf("ok\n");
}
