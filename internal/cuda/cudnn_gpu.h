/* cuDNN, opened at run time, with prototypes of our own: the functions that are used, as versions 8
 * and 9 have them. */

#ifndef EURYALE_CUDNN_H
#define EURYALE_CUDNN_H

#include <stddef.h>
#include <stdint.h>

typedef struct cudnnContext *euryale_dnn_handle;
typedef struct cudnnTensorStruct *euryale_dnn_tensor;
typedef struct cudnnFilterStruct *euryale_dnn_filter;
typedef struct cudnnConvolutionStruct *euryale_dnn_convolution;

struct euryale_cudnn {
	void *library;
	const char *missing; /* the first function that was not found */
	size_t (*get_version)(void);
	const char *(*get_error)(int status);
	int (*create)(euryale_dnn_handle *handle);
	int (*destroy)(euryale_dnn_handle handle);
	int (*set_stream)(euryale_dnn_handle handle, void *stream);
	int (*create_tensor)(euryale_dnn_tensor *t);
	int (*set_tensor)(euryale_dnn_tensor t, int format, int type, int n, int c, int h, int w);
	int (*destroy_tensor)(euryale_dnn_tensor t);
	int (*create_filter)(euryale_dnn_filter *f);
	int (*set_filter)(euryale_dnn_filter f, int type, int format, int k, int c, int h, int w);
	int (*destroy_filter)(euryale_dnn_filter f);
	int (*create_convolution)(euryale_dnn_convolution *c);
	int (*set_convolution)(euryale_dnn_convolution c, int pad_h, int pad_w, int stride_h,
		int stride_w, int dilation_h, int dilation_w, int mode, int type);
	int (*set_math)(euryale_dnn_convolution c, int math);
	int (*set_groups)(euryale_dnn_convolution c, int groups);
	int (*destroy_convolution)(euryale_dnn_convolution c);
	int (*forward_workspace)(euryale_dnn_handle handle, euryale_dnn_tensor x, euryale_dnn_filter w,
		euryale_dnn_convolution c, euryale_dnn_tensor y, int algorithm, size_t *nbytes);
	int (*forward)(euryale_dnn_handle handle, const void *alpha, euryale_dnn_tensor dx,
		const void *x, euryale_dnn_filter dw, const void *w, euryale_dnn_convolution c,
		int algorithm, void *workspace, size_t nbytes, const void *beta, euryale_dnn_tensor dy,
		void *y);
	int (*input_workspace)(euryale_dnn_handle handle, euryale_dnn_filter w, euryale_dnn_tensor dy,
		euryale_dnn_convolution c, euryale_dnn_tensor dx, int algorithm, size_t *nbytes);
	int (*input_gradient)(euryale_dnn_handle handle, const void *alpha, euryale_dnn_filter dw,
		const void *w, euryale_dnn_tensor ddy, const void *dy, euryale_dnn_convolution c,
		int algorithm, void *workspace, size_t nbytes, const void *beta, euryale_dnn_tensor ddx,
		void *dx);
	int (*filter_workspace)(euryale_dnn_handle handle, euryale_dnn_tensor x, euryale_dnn_tensor dy,
		euryale_dnn_convolution c, euryale_dnn_filter dw, int algorithm, size_t *nbytes);
	int (*filter_gradient)(euryale_dnn_handle handle, const void *alpha, euryale_dnn_tensor dx,
		const void *x, euryale_dnn_tensor ddy, const void *dy, euryale_dnn_convolution c,
		int algorithm, void *workspace, size_t nbytes, const void *beta, euryale_dnn_filter ddw,
		void *dw);
};

/* The sizes of a convolution, and what cuDNN knows of it. */
struct euryale_convolution {
	int pass, type, sums, math; /* kernels.Pass, cudnnDataType_t of both, cudnnMathType_t */
	int format; /* cudnnTensorFormat_t */
	int batch, channels, h, w, filters, out_h, out_w, kernel_h, kernel_w;
	int pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, groups;
	int algorithm;
	size_t workspace; /* bytes that the algorithm needs */
	euryale_dnn_tensor x, y;
	euryale_dnn_filter filter;
	euryale_dnn_convolution convolution;
};

/* euryale_cudnn_open returns NULL, or why path cannot be opened. */
const char *euryale_cudnn_open(struct euryale_cudnn *l, const char *path);
void euryale_cudnn_close(struct euryale_cudnn *l);

/* euryale_cudnn_create makes a handle that works on a stream. */
int euryale_cudnn_create(struct euryale_cudnn *l, euryale_dnn_handle *handle, uintptr_t stream);
int euryale_cudnn_destroy(struct euryale_cudnn *l, euryale_dnn_handle handle);
size_t euryale_cudnn_version(struct euryale_cudnn *l);
const char *euryale_cudnn_error(struct euryale_cudnn *l, int status);

/* euryale_cudnn_prepare makes the descriptors of c and chooses its algorithm; euryale_cudnn_forget,
 * which is called after an error, too, frees them. */
int euryale_cudnn_prepare(struct euryale_cudnn *l, euryale_dnn_handle handle,
	struct euryale_convolution *c);
void euryale_cudnn_forget(struct euryale_cudnn *l, struct euryale_convolution *c);

/* euryale_cudnn_convolve computes dst of the operands of the pass. */
int euryale_cudnn_convolve(struct euryale_cudnn *l, euryale_dnn_handle handle,
	const struct euryale_convolution *c, uintptr_t dst, uintptr_t a, uintptr_t b,
	uintptr_t workspace);

#endif
