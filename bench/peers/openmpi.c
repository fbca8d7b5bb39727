//go:build ignore

// Collectives of an MPI library, measured as `euryale bench` measures.
//
//	mpicc -O2 -o openmpi openmpi.c
//	mpirun -n 4 ./openmpi 1024 67108864 > openmpi-4.jsonl
//
// Arguments: the first and the largest size in bytes, how many times each is the one before (2),
// the seconds that the timed calls of a size should take (0.3), and the collective (allreduce).
// Sums of f32, source and destination apart. The method is the same as in the Go package bench: ten
// calls to choose how many to time, a fifth of that number to warm up further, then calls back to
// back; p50 and p99 over the calls of rank 0 by the nearest-rank rule, the mean of the slowest
// rank, bandwidth from the mean; the result of the last call is compared element by element.

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { probes = 5, min_iters = 20, max_iters = 20000, period = 997 };
static double budget = 0.3; // seconds for the timed calls of a size

static const char *const names[] = {"allreduce", "reducescatter", "allgather", "alltoall",
	"broadcast"};
enum { allreduce, reducescatter, allgather, alltoall, broadcast, kinds };
static int kind, rank, ranks;

static int compare(const void *a, const void *b) {
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

// quantile returns the value at p percent of sorted times.
static double quantile(const double *sorted, int n, int p) {
	int i = (n * p + 99) / 100 - 1;
	return sorted[i < 0 ? 0 : i];
}

static float value(int rank, int i) { return (float)((i % period + rank * 5) % 7); }

// call runs one collective. count is of the buffer that holds all chunks.
static void call(const float *src, float *dst, int count) {
	int chunk = count / ranks;
	switch (kind) {
	case allreduce:
		MPI_Allreduce(src, dst, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
		break;
	case reducescatter:
		MPI_Reduce_scatter_block(src, dst, chunk, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
		break;
	case allgather:
		MPI_Allgather(src, chunk, MPI_FLOAT, dst, chunk, MPI_FLOAT, MPI_COMM_WORLD);
		break;
	case alltoall:
		MPI_Alltoall(src, chunk, MPI_FLOAT, dst, chunk, MPI_FLOAT, MPI_COMM_WORLD);
		break;
	case broadcast: // in place on the root
		MPI_Bcast(rank == 0 ? (float *)src : dst, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
		break;
	}
}

// wanted is element i of this rank's result.
static float wanted(int i, int count) {
	int chunk = count / ranks;
	if (kind == broadcast)
		return value(0, i);
	if (kind == allgather)
		return value(i / chunk, i % chunk);
	if (kind == alltoall)
		return value(i / chunk, rank * chunk + i % chunk);
	float sum = 0;
	for (int s = 0; s < ranks; s++)
		sum += value(s, kind == reducescatter ? rank * chunk + i : i);
	return sum;
}

// repeat runs calls back to back and notes the seconds that each took.
static double repeat(const float *src, float *dst, int count, double *times, int iters) {
	double begin = MPI_Wtime(), before = begin;
	for (int i = 0; i < iters; i++) {
		call(src, dst, count);
		double now = MPI_Wtime();
		times[i] = now - before;
		before = now;
	}
	return before - begin;
}

// choose_iters lets rank 0 decide for all.
static int choose_iters(double call) {
	double fit = budget / (call > 1e-9 ? call : 1e-9);
	int iters = fit < min_iters ? min_iters : fit > max_iters ? max_iters : (int)fit;
	MPI_Bcast(&iters, 1, MPI_INT, 0, MPI_COMM_WORLD);
	return iters;
}

static long count_wrong(const float *dst, int count) {
	long mine = 0, all = 0;
	for (int i = 0; i < (kind == reducescatter ? count / ranks : count); i++)
		mine += dst[i] != wanted(i, count) && !(kind == broadcast && rank == 0);
	MPI_Allreduce(&mine, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
	return all;
}

// first_word copies the start of a version text, up to a comma or line end.
static void first_word(char *out, size_t size, const char *text) {
	size_t n = strcspn(text, ",\n");
	snprintf(out, size, "%.*s", (int)n, text);
}

static long measure(long bytes, const float *src, float *dst, double *times, const char *version) {
	int count = (int)(bytes / (long)sizeof(float)),
		per = kind == allreduce || kind == broadcast ? 1 : ranks;
	count = count < per ? per : count / per * per;
	double factor = kind == broadcast ? 1 : (kind == allreduce ? 2.0 : 1.0) * (ranks - 1) / ranks;
	repeat(src, dst, count, times, probes);
	repeat(src, dst, count, times, probes);
	qsort(times, probes, sizeof *times, compare);
	int iters = choose_iters(times[probes / 2]);
	repeat(src, dst, count, times, iters > 5 ? iters / 5 : 1);
	memset(dst, 0xa5, (size_t)count * sizeof *dst);
	double mean = repeat(src, dst, count, times, iters) / iters, slowest = 0;
	MPI_Allreduce(&mean, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
	long wrong = count_wrong(dst, count);
	qsort(times, (size_t)iters, sizeof *times, compare);
	if (rank == 0) {
		double algbw = (double)count * sizeof(float) / slowest / 1e9;
		printf(
			"{\"collective\":\"%s\",\"backend\":\"openmpi\",\"ranks\":%d,\"dtype\":\"f32\","
			"\"bytes\":%ld,"
			"\"p50_us\":%.4f,\"p99_us\":%.4f,\"algbw_gbps\":%.4f,\"busbw_gbps\":%.4f,\"wrong\":%ld,"
			"\"op\":\"sum\",\"mean_us\":%.4f,\"iters\":%d,\"algorithm\":\"auto\","
			"\"alloc\":false,\"inplace\":false,\"inproc\":false,\"version\":\"%s\"}\n",
			names[kind], ranks, (long)count * (long)sizeof(float), quantile(times, iters, 50) * 1e6,
			quantile(times, iters, 99) * 1e6, algbw, algbw * factor, wrong, slowest * 1e6, iters,
			version);
		fflush(stdout);
	}
	return wrong;
}

int main(int argc, char **argv) {
	int length;
	char library[MPI_MAX_LIBRARY_VERSION_STRING], version[128];
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	MPI_Get_library_version(library, &length);
	first_word(version, sizeof version, library);
	long min = argc > 1 ? atol(argv[1]) : 1024, max = argc > 2 ? atol(argv[2]) : 64 << 20,
		 wrong = 0;
	long factor = argc > 3 ? atol(argv[3]) : 2;
	budget = argc > 4 ? atof(argv[4]) : budget;
	for (kind = argc > 5 ? 0 : allreduce; argc > 5 && kind < kinds && strcmp(names[kind], argv[5]);
		kind++);
	if (min < (long)sizeof(float) || max < min || factor < 2 || budget <= 0 || kind == kinds) {
		if (rank == 0)
			fprintf(stderr,
				"usage: %s [MIN [MAX [FACTOR [SECONDS [COLLECTIVE]]]]]: sizes in bytes, 4 <= MIN "
				"<= MAX, FACTOR >= 2\n",
				argv[0]);
		MPI_Finalize();
		return 2;
	}
	max = max < ranks * (long)sizeof(float) ? ranks * (long)sizeof(float) : max;
	float *src = malloc((size_t)max), *dst = malloc((size_t)max);
	double *times = malloc(max_iters * sizeof *times);
	if (!src || !dst || !times) {
		fprintf(stderr, "rank %d: no memory for buffers of %ld bytes\n", rank, max);
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	for (long i = 0; i < max / (long)sizeof(float); i++)
		src[i] = value(rank, (int)i);
	for (long bytes = min; bytes <= max; bytes *= factor)
		wrong += measure(bytes, src, dst, times, version);
	free(src), free(dst), free(times);
	MPI_Finalize();
	return wrong > 0;
}
