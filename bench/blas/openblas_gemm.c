//go:build ignore

// A matrix multiplication of OpenBLAS, measured as bench/blas measures ours.
//
//	cc -O2 -o openblas_gemm openblas_gemm.c -lopenblas
//	OPENBLAS_NUM_THREADS=2 ./openblas_gemm f32 nt 768 512 128 0.1
//
// Arguments: f32 or f64; n or t for each operand, whether it is transposed in memory; M, N and K of
// row-major matrices; and the seconds that the timed calls should take. Two calls come before, and
// at least three are timed. It prints the median of a call in microseconds.

#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { max_calls = 100000 };

static double seconds(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static int compare(const void *a, const void *b) {
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static void *matrix(int is_f64, size_t n) {
	void *m = malloc(n * (is_f64 ? 8 : 4));
	for (size_t i = 0; i < n; i++) {
		int value = (int)(i * 7 % 11) - 5;
		if (is_f64)
			((double *)m)[i] = value;
		else
			((float *)m)[i] = value;
	}
	return m;
}

int main(int argc, char **argv) {
	if (argc != 7) {
		fprintf(stderr, "usage: openblas_gemm f32|f64 nn|nt|tn|tt M N K SECONDS\n");
		return 2;
	}
	int is_f64 = !strcmp(argv[1], "f64");
	enum CBLAS_TRANSPOSE ta = argv[2][0] == 't' ? CblasTrans : CblasNoTrans,
						 tb = argv[2][1] == 't' ? CblasTrans : CblasNoTrans;
	int m = atoi(argv[3]), n = atoi(argv[4]), k = atoi(argv[5]);
	double budget = atof(argv[6]);
	int lda = ta == CblasTrans ? m : k, ldb = tb == CblasTrans ? k : n;
	void *a = matrix(is_f64, (size_t)m * k), *b = matrix(is_f64, (size_t)k * n),
		 *c = matrix(is_f64, (size_t)m * n);
	double *times = malloc(max_calls * sizeof *times), begin = 0;
	int calls = 0;
	for (int i = -2; i < 3 || (calls < max_calls && seconds() - begin < budget); i++) {
		double before = seconds();
		if (i == 0)
			begin = before;
		if (is_f64)
			cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, 1, a, lda, b, ldb, 0, c, n);
		else
			cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, 1, a, lda, b, ldb, 0, c, n);
		if (i >= 0)
			times[calls++] = seconds() - before;
	}
	qsort(times, calls, sizeof *times, compare);
	printf("%.3f\n", times[calls / 2] * 1e6);
	return 0;
}
