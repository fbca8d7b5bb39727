//go:build ignore

// All-reduce of Gloo over TCP without PyTorch, measured as `euryale bench`
// measures.
//
//	cmake -S gloo -B gloo/b -DCMAKE_BUILD_TYPE=Release -DBUILD_TEST=OFF -DBUILD_BENCHMARK=OFF
//	cmake --build gloo/b
//	g++ -std=c++17 -O2 -Igloo -Igloo/b -o gloo_allreduce gloo_allreduce.cc gloo/b/gloo/libgloo.a -pthread
//	d=$(mktemp -d); ./gloo_allreduce $d 1 2 & ./gloo_allreduce $d 0 2 > gloo-2.jsonl
//
// Arguments: a directory where the ranks meet, rank and ranks, and those of
// openmpi.c, whose method this is. The call is the one that PyTorch
// makes (gloo::allreduce with its default algorithm), with two buffers.

#include <gloo/allreduce.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

using Context = std::shared_ptr<gloo::rendezvous::Context>;
using Clock = std::chrono::steady_clock;

enum { probes = 5, min_iters = 20, max_iters = 20000, period = 997 };

static float value(int rank, int i) { return (float)((i % period + rank * 5) % 7); }

template <typename T>
static void sum(const Context& context, T* dst, T* src, size_t count) {
	gloo::AllreduceOptions options(context);
	options.setInput(src, count);
	options.setOutput(dst, count);
	options.setReduceFunction(static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::sum<T>));
	gloo::allreduce(options);
}

// repeat runs calls back to back and notes the seconds that each took.
static double repeat(const Context& context, float* dst, float* src, size_t count, std::vector<double>& times, int iters) {
	auto begin = Clock::now(), before = begin;
	for (int i = 0; i < iters; i++) {
		sum(context, dst, src, count);
		auto now = Clock::now();
		times[i] = std::chrono::duration<double>(now - before).count();
		before = now;
	}
	return std::chrono::duration<double>(before - begin).count();
}

// chosen lets rank 0 decide for all.
static int chosen(const Context& context, double budget, double call) {
	int64_t iters = (int64_t)std::clamp(budget / std::max(call, 1e-9), (double)min_iters, (double)max_iters);
	gloo::BroadcastOptions options(context);
	options.setOutput(&iters, 1);
	options.setRoot(0);
	gloo::broadcast(options);
	return (int)iters;
}

static long measure(const Context& context, size_t bytes, double budget, float* src, float* dst) {
	size_t count = bytes / sizeof(float);
	int ranks = context->size;
	std::vector<double> times(max_iters);
	repeat(context, dst, src, count, times, probes);
	repeat(context, dst, src, count, times, probes);
	std::sort(times.begin(), times.begin() + probes);
	int iters = chosen(context, budget, times[probes / 2]);
	repeat(context, dst, src, count, times, std::max(1, iters / 5));
	memset(dst, 0xa5, bytes);
	double mine = repeat(context, dst, src, count, times, iters) / iters, all = 0;
	sum(context, &all, &mine, 1);
	int64_t wrong = 0, bad = 0;
	for (size_t i = 0; i < count; i++) {
		float want = 0;
		for (int s = 0; s < ranks; s++)
			want += value(s, (int)i);
		bad += dst[i] != want;
	}
	sum(context, &wrong, &bad, 1);
	std::sort(times.begin(), times.begin() + iters);
	if (context->rank == 0) {
		double mean = all / ranks, algbw = bytes / mean / 1e9;
		printf("{\"collective\":\"allreduce\",\"backend\":\"gloo\",\"ranks\":%d,\"dtype\":\"f32\",\"bytes\":%zu,\"p50_us\":%.4f,\"p99_us\":%.4f,"
		       "\"algbw_gbps\":%.4f,\"busbw_gbps\":%.4f,\"wrong\":%ld,\"op\":\"sum\",\"mean_us\":%.4f,\"iters\":%d,\"algorithm\":\"auto\","
		       "\"alloc\":false,\"inplace\":false,\"inproc\":false,\"version\":\"gloo\"}\n",
		       ranks, bytes, times[(iters * 50 + 99) / 100 - 1] * 1e6, times[(iters * 99 + 99) / 100 - 1] * 1e6, algbw,
		       algbw * 2 * (ranks - 1) / ranks, (long)wrong, mean * 1e6, iters);
		fflush(stdout);
	}
	return (long)wrong;
}

int main(int argc, char** argv) {
	if (argc < 4) {
		fprintf(stderr, "usage: %s DIRECTORY RANK RANKS [MIN [MAX [FACTOR [SECONDS]]]]\n", argv[0]);
		return 2;
	}
	size_t min = argc > 4 ? strtoul(argv[4], nullptr, 10) : 1024, max = argc > 5 ? strtoul(argv[5], nullptr, 10) : 64 << 20;
	size_t factor = argc > 6 ? strtoul(argv[6], nullptr, 10) : 2;
	double budget = argc > 7 ? atof(argv[7]) : 0.3;
	if (min < sizeof(float) || max < min || factor < 2 || budget <= 0) {
		fprintf(stderr, "%s: want 4 <= MIN <= MAX, FACTOR >= 2, SECONDS > 0\n", argv[0]);
		return 2;
	}
	gloo::transport::tcp::attr where;
	where.hostname = "127.0.0.1";
	auto device = gloo::transport::tcp::CreateDevice(where);
	auto context = std::make_shared<gloo::rendezvous::Context>(atoi(argv[2]), atoi(argv[3]));
	auto store = std::make_shared<gloo::rendezvous::FileStore>(argv[1]);
	context->connectFullMesh(store, device);
	std::vector<float> src(max / sizeof(float)), dst(max / sizeof(float));
	for (size_t i = 0; i < src.size(); i++)
		src[i] = value(context->rank, (int)i);
	long wrong = 0;
	for (size_t bytes = min; bytes <= max; bytes *= factor)
		wrong += measure(context, bytes, budget, src.data(), dst.data());
	return wrong > 0;
}
