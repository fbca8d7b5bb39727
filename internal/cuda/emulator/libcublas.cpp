// A libcublas.so.13 for the driver of internal/kernels/cuda/emulator: what internal/cuda calls of
// cuBLAS, as loops on the host in the order of a stream. With it everything down to cuBLAS's
// calls is tested without a GPU.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

enum { success = 0, not_initialized = 1, invalid_value = 7, not_supported = 15 };
enum { type_f32 = 0, type_f64 = 1, type_f16 = 2, type_bf16 = 14 };
enum { compute_f32 = 68, compute_f64 = 70, compute_tf32 = 77 };

static float widen(uint16_t bits, int type) {
	uint32_t sign = uint32_t(bits & 0x8000) << 16, b = bits & 0x7fff;
	float x;
	if (type == type_bf16)
		b = uint32_t(bits) << 16, sign = 0;
	else if (b >= 0x7c00)
		b = b << 13 | 0x7f800000;
	else {
		b <<= 13;
		std::memcpy(&x, &b, 4);
		x *= 0x1p112f;
		std::memcpy(&b, &x, 4);
	}
	b |= sign;
	std::memcpy(&x, &b, 4);
	return x;
}

// For numbers that are normal and in range, which is what tests have.
static uint16_t narrow(float x, int type) {
	uint32_t b;
	if (type == type_f16)
		x *= 0x1p-112f;
	std::memcpy(&b, &x, 4);
	int drop = type == type_f16 ? 13 : 16;
	uint32_t sign = b >> 31 << 15, magnitude = b & 0x7fffffff;
	magnitude += (1u << (drop - 1)) - 1 + (magnitude >> drop & 1);
	return uint16_t(sign | magnitude >> drop);
}

static double get(const void *p, size_t i, int type) {
	switch (type) {
	case type_f64:
		return static_cast<const double *>(p)[i];
	case type_f32:
		return static_cast<const float *>(p)[i];
	}
	return widen(static_cast<const uint16_t *>(p)[i], type);
}

static void set(void *p, size_t i, int type, double x) {
	if (type == type_f64)
		static_cast<double *>(p)[i] = x;
	else if (type == type_f32)
		static_cast<float *>(p)[i] = float(x);
	else
		static_cast<uint16_t *>(p)[i] = narrow(float(x), type);
}

struct Gemm {
	int op_a, op_b, m, n, k;
	double alpha, beta;
	const void *a, *b;
	void *c;
	int type, lda, ldb, type_c, ldc, batch;
	long long stride_a, stride_b, stride_c;
};

// A handle keeps what it has started, which a graph may run again.
struct Handle {
	void *stream = nullptr;
	void *workspace = nullptr;
	std::vector<std::unique_ptr<Gemm>> started;
};

static void run(void *data) {
	const Gemm *g = static_cast<Gemm *>(data);
	for (size_t n = 0; n < size_t(g->batch); n++)
		for (int i = 0; i < g->m; i++)
			for (int j = 0; j < g->n; j++) {
				double sum = 0;
				for (int k = 0; k < g->k; k++) {
					size_t x = g->op_a ? size_t(i) * g->lda + k : size_t(k) * g->lda + i;
					size_t y = g->op_b ? size_t(k) * g->ldb + j : size_t(j) * g->ldb + k;
					sum += get(g->a, n * g->stride_a + x, g->type) *
						get(g->b, n * g->stride_b + y, g->type);
				}
				size_t at = n * g->stride_c + size_t(j) * g->ldc + i;
				set(g->c, at, g->type_c,
					g->alpha * sum + (g->beta == 0 ? 0 : g->beta * get(g->c, at, g->type_c)));
			}
}

static int start(Handle *h, Gemm g, int type_b, int compute, const void *alpha, const void *beta) {
	using Launch = int (*)(void *, void (*)(void *), void *);
	static const auto launch =
		reinterpret_cast<Launch>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuLaunchHostFunc"));
	if (!h->workspace)
		return not_initialized;
	int rows_a = g.op_a ? g.k : g.m, rows_b = g.op_b ? g.n : g.k;
	if (g.m < 0 || g.n < 0 || g.k < 0 || g.batch < 0 || g.lda < rows_a || g.ldb < rows_b ||
		g.ldc < g.m)
		return invalid_value;
	bool wide = g.type == type_f64;
	if (type_b != g.type || wide != (compute == compute_f64) ||
		(compute == compute_tf32 && g.type != type_f32))
		return not_supported;
	g.alpha = wide ? *static_cast<const double *>(alpha) : *static_cast<const float *>(alpha);
	g.beta = wide ? *static_cast<const double *>(beta) : *static_cast<const float *>(beta);
	h->started.push_back(std::make_unique<Gemm>(g));
	return launch(h->stream, run, h->started.back().get());
}

#define CUBLAS extern "C" int

CUBLAS cublasCreate_v2(Handle **h) { return *h = new Handle, success; }
CUBLAS cublasDestroy_v2(Handle *h) { return delete h, success; }
CUBLAS cublasGetVersion_v2(Handle *, int *version) { return *version = 130002, success; }
CUBLAS cublasSetStream_v2(Handle *h, void *stream) {
	return h->stream = stream, h->workspace = nullptr, success;
}
CUBLAS cublasSetWorkspace_v2(Handle *h, void *memory, size_t) {
	return h->workspace = memory, success;
}

CUBLAS cublasGemmStridedBatchedEx(Handle *h, int op_a, int op_b, int m, int n, int k,
	const void *alpha, const void *a, int type_a, int lda, long long stride_a, const void *b,
	int type_b, int ldb, long long stride_b, const void *beta, void *c, int type_c, int ldc,
	long long stride_c, int batch, int compute, int) {
	return start(h,
		Gemm{op_a, op_b, m, n, k, 0, 0, a, b, c, type_a, lda, ldb, type_c, ldc, batch, stride_a,
			stride_b, stride_c},
		type_b, compute, alpha, beta);
}

CUBLAS cublasGemmEx(Handle *h, int op_a, int op_b, int m, int n, int k, const void *alpha,
	const void *a, int type_a, int lda, const void *b, int type_b, int ldb, const void *beta,
	void *c, int type_c, int ldc, int compute, int) {
	return start(h,
		Gemm{op_a, op_b, m, n, k, 0, 0, a, b, c, type_a, lda, ldb, type_c, ldc, 1, 0, 0, 0}, type_b,
		compute, alpha, beta);
}
