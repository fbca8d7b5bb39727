//go:build gpu

#include "cublas_gpu.h"

#include <dlfcn.h>
#include <string.h>

/* Numbers of cublasOperation_t, cublasComputeType_t and cublasGemmAlgo_t. */
enum { NOT_TRANSPOSED = 0, TRANSPOSED = 1, COMPUTE_64F = 70, DEFAULT_ALGORITHM = -1 };

/* look finds one function, and remembers the first that is not there. */
static void *look(struct euryale_cublas *l, const char *name)
{
	void *f = dlsym(l->library, name);

	if (f == NULL && l->missing == NULL)
		l->missing = name;
	return f;
}

const char *euryale_cublas_open(struct euryale_cublas *l, const char *path)
{
	memset(l, 0, sizeof *l);
	l->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (l->library == NULL) {
		const char *why = dlerror();
		return why != NULL ? why : "unknown error";
	}
	l->create = look(l, "cublasCreate_v2");
	l->destroy = look(l, "cublasDestroy_v2");
	l->get_version = look(l, "cublasGetVersion_v2");
	l->set_stream = look(l, "cublasSetStream_v2");
	l->set_workspace = look(l, "cublasSetWorkspace_v2");
	l->gemm = look(l, "cublasGemmEx");
	l->gemm_batched = look(l, "cublasGemmStridedBatchedEx");
	return NULL;
}

void euryale_cublas_close(struct euryale_cublas *l)
{
	if (l->library != NULL)
		dlclose(l->library);
	l->library = NULL;
}

int euryale_cublas_create(struct euryale_cublas *l, euryale_blas_handle *handle, uintptr_t stream,
	uintptr_t workspace, size_t nbytes) {
	int code = l->create(handle);

	if (code == 0)
		code = l->set_stream(*handle, (void *)stream);
	if (code == 0)
		code = l->set_workspace(*handle, (void *)workspace, nbytes);
	return code;
}

int euryale_cublas_destroy(struct euryale_cublas *l, euryale_blas_handle handle) {
	return l->destroy(handle);
}

int euryale_cublas_version(struct euryale_cublas *l, euryale_blas_handle handle, int *version)
{
	return l->get_version(handle, version);
}

int euryale_cublas_multiply(struct euryale_cublas *l, euryale_blas_handle handle,
	const struct euryale_gemm *p) {
	float alpha = (float)p->alpha, beta = (float)p->beta;
	int wide = p->compute == COMPUTE_64F;
	const void *by = wide ? (const void *)&p->alpha : &alpha,
			   *keep = wide ? (const void *)&p->beta : &beta;
	int op_a = p->transposed_a ? TRANSPOSED : NOT_TRANSPOSED,
		op_b = p->transposed_b ? TRANSPOSED : NOT_TRANSPOSED;

	if (p->batch == 1)
		return l->gemm(handle, op_b, op_a, p->n, p->m, p->k, by, (const void *)p->b, p->in, p->ldb,
			(const void *)p->a, p->in, p->lda, keep, (void *)p->c, p->out, p->ldc, p->compute,
			DEFAULT_ALGORITHM);
	return l->gemm_batched(handle, op_b, op_a, p->n, p->m, p->k, by, (const void *)p->b, p->in,
		p->ldb, p->stride_b, (const void *)p->a, p->in, p->lda, p->stride_a, keep, (void *)p->c,
		p->out, p->ldc, p->stride_c, p->batch, p->compute, DEFAULT_ALGORITHM);
}
