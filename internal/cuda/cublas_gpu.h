/* cuBLAS, opened at run time, with prototypes of our own: the functions that are used, as every
 * version since 11.0 has them. */

#ifndef EURYALE_CUBLAS_H
#define EURYALE_CUBLAS_H

#include <stddef.h>
#include <stdint.h>

typedef struct cublasContext *euryale_blas_handle;

struct euryale_cublas {
	void *library;
	const char *missing; /* the first function that was not found */
	int (*create)(euryale_blas_handle *handle);
	int (*destroy)(euryale_blas_handle handle);
	int (*get_version)(euryale_blas_handle handle, int *version);
	int (*set_stream)(euryale_blas_handle handle, void *stream);
	int (*set_workspace)(euryale_blas_handle handle, void *memory, size_t nbytes);
	int (*gemm)(euryale_blas_handle handle, int op_a, int op_b, int m, int n, int k,
		const void *alpha, const void *a, int type_a, int lda, const void *b, int type_b, int ldb,
		const void *beta, void *c, int type_c, int ldc, int compute, int algorithm);
	int (*gemm_batched)(euryale_blas_handle handle, int op_a, int op_b, int m, int n, int k,
		const void *alpha, const void *a, int type_a, int lda, long long stride_a, const void *b,
		int type_b, int ldb, long long stride_b, const void *beta, void *c, int type_c, int ldc,
		long long stride_c, int batch, int compute, int algorithm);
};

/*
 * A product of matrices in rows. cuBLAS has columns, and computes the product of the transposes in
 * the other order.
 */
struct euryale_gemm {
	int m, n, k, batch;
	uintptr_t a, b, c;
	int lda, ldb, ldc;
	long long stride_a, stride_b, stride_c;
	int transposed_a, transposed_b;
	int in, out, compute; /* cudaDataType of the operands and of the result, cublasComputeType */
	double alpha, beta;
};

/* euryale_cublas_open returns NULL, or why path cannot be opened. */
const char *euryale_cublas_open(struct euryale_cublas *l, const char *path);
void euryale_cublas_close(struct euryale_cublas *l);

/* euryale_cublas_create makes a handle for a stream, with its memory for intermediate results. */
int euryale_cublas_create(struct euryale_cublas *l, euryale_blas_handle *handle, uintptr_t stream,
	uintptr_t workspace, size_t nbytes);
int euryale_cublas_destroy(struct euryale_cublas *l, euryale_blas_handle handle);
int euryale_cublas_version(struct euryale_cublas *l, euryale_blas_handle handle, int *version);
int euryale_cublas_multiply(struct euryale_cublas *l, euryale_blas_handle handle,
	const struct euryale_gemm *p);

#endif
