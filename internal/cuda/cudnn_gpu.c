//go:build gpu

#include "cudnn_gpu.h"

#include <dlfcn.h>
#include <string.h>

/* Numbers of kernels.Pass, cudnnConvolutionMode_t and cudnnDataType_t. */
enum { FORWARD = 0, INPUT_GRADIENT = 1, FILTER_GRADIENT = 2 };
enum { CROSS_CORRELATION = 1, TYPE_F64 = 1 };

/*
 * Numbers of cudnnConvolutionFwdAlgo_t, cudnnConvolutionBwdDataAlgo_t and
 * cudnnConvolutionBwdFilterAlgo_t. These are deterministic, and sum up the products themselves:
 * transforms (FFT, Winograd) round more than f32's tolerance of 1e-5 allows.
 */
enum { IMPLICIT_GEMM = 0, IMPLICIT_PRECOMP_GEMM = 1, INPUT_ALGORITHM = 1, FILTER_ALGORITHM = 1 };

/* look finds one function, and remembers the first that is not there. */
static void *look(struct euryale_cudnn *l, const char *name)
{
	void *f = dlsym(l->library, name);

	if (f == NULL && l->missing == NULL)
		l->missing = name;
	return f;
}

const char *euryale_cudnn_open(struct euryale_cudnn *l, const char *path)
{
	memset(l, 0, sizeof *l);
	l->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (l->library == NULL) {
		const char *why = dlerror();
		return why != NULL ? why : "unknown error";
	}
	l->get_version = look(l, "cudnnGetVersion");
	l->get_error = look(l, "cudnnGetErrorString");
	l->create = look(l, "cudnnCreate");
	l->destroy = look(l, "cudnnDestroy");
	l->set_stream = look(l, "cudnnSetStream");
	l->create_tensor = look(l, "cudnnCreateTensorDescriptor");
	l->set_tensor = look(l, "cudnnSetTensor4dDescriptor");
	l->destroy_tensor = look(l, "cudnnDestroyTensorDescriptor");
	l->create_filter = look(l, "cudnnCreateFilterDescriptor");
	l->set_filter = look(l, "cudnnSetFilter4dDescriptor");
	l->destroy_filter = look(l, "cudnnDestroyFilterDescriptor");
	l->create_convolution = look(l, "cudnnCreateConvolutionDescriptor");
	l->set_convolution = look(l, "cudnnSetConvolution2dDescriptor");
	l->set_math = look(l, "cudnnSetConvolutionMathType");
	l->set_groups = look(l, "cudnnSetConvolutionGroupCount");
	l->destroy_convolution = look(l, "cudnnDestroyConvolutionDescriptor");
	l->forward_workspace = look(l, "cudnnGetConvolutionForwardWorkspaceSize");
	l->forward = look(l, "cudnnConvolutionForward");
	l->input_workspace = look(l, "cudnnGetConvolutionBackwardDataWorkspaceSize");
	l->input_gradient = look(l, "cudnnConvolutionBackwardData");
	l->filter_workspace = look(l, "cudnnGetConvolutionBackwardFilterWorkspaceSize");
	l->filter_gradient = look(l, "cudnnConvolutionBackwardFilter");
	return NULL;
}

void euryale_cudnn_close(struct euryale_cudnn *l)
{
	if (l->library != NULL)
		dlclose(l->library);
	l->library = NULL;
}

int euryale_cudnn_create(struct euryale_cudnn *l, euryale_dnn_handle *handle, uintptr_t stream)
{
	int code = l->create(handle);

	if (code == 0)
		code = l->set_stream(*handle, (void *)stream);
	return code;
}

int euryale_cudnn_destroy(struct euryale_cudnn *l, euryale_dnn_handle handle) {
	return l->destroy(handle);
}

size_t euryale_cudnn_version(struct euryale_cudnn *l) { return l->get_version(); }

const char *euryale_cudnn_error(struct euryale_cudnn *l, int status) {
	return l->get_error(status);
}

/* choose sets algorithm and workspace. */
static int choose(struct euryale_cudnn *l, euryale_dnn_handle handle, struct euryale_convolution *c)
{
	int code;

	switch (c->pass) {
	case FORWARD:
		c->algorithm = IMPLICIT_PRECOMP_GEMM;
		code = l->forward_workspace(handle, c->x, c->filter, c->convolution, c->y, c->algorithm,
			&c->workspace);
		if (code == 0)
			return 0;
		c->algorithm = IMPLICIT_GEMM;
		return l->forward_workspace(handle, c->x, c->filter, c->convolution, c->y, c->algorithm,
			&c->workspace);
	case INPUT_GRADIENT:
		c->algorithm = INPUT_ALGORITHM;
		return l->input_workspace(handle, c->filter, c->y, c->convolution, c->x, c->algorithm,
			&c->workspace);
	default:
		c->algorithm = FILTER_ALGORITHM;
		return l->filter_workspace(handle, c->x, c->y, c->convolution, c->filter, c->algorithm,
			&c->workspace);
	}
}

int euryale_cudnn_prepare(struct euryale_cudnn *l, euryale_dnn_handle handle,
	struct euryale_convolution *c) {
	int code;

	if ((code = l->create_tensor(&c->x)) != 0 || (code = l->create_tensor(&c->y)) != 0 ||
		(code = l->create_filter(&c->filter)) != 0 ||
		(code = l->create_convolution(&c->convolution)) != 0)
		return code;
	if ((code = l->set_tensor(c->x, c->format, c->type, c->batch, c->channels, c->h, c->w)) != 0 ||
		(code = l->set_tensor(c->y, c->format, c->type, c->batch, c->filters, c->out_h,
			 c->out_w)) != 0 ||
		(code = l->set_filter(c->filter, c->type, c->format, c->filters,
			 c->channels / c->groups, c->kernel_h, c->kernel_w)) != 0 ||
		(code = l->set_convolution(c->convolution, c->pad_h, c->pad_w, c->stride_h, c->stride_w,
			 c->dilation_h, c->dilation_w, CROSS_CORRELATION, c->sums)) != 0 ||
		(code = l->set_math(c->convolution, c->math)) != 0 ||
		(code = l->set_groups(c->convolution, c->groups)) != 0)
		return code;
	return choose(l, handle, c);
}

void euryale_cudnn_forget(struct euryale_cudnn *l, struct euryale_convolution *c)
{
	if (c->convolution != NULL)
		l->destroy_convolution(c->convolution);
	if (c->filter != NULL)
		l->destroy_filter(c->filter);
	if (c->y != NULL)
		l->destroy_tensor(c->y);
	if (c->x != NULL)
		l->destroy_tensor(c->x);
}

int euryale_cudnn_convolve(struct euryale_cudnn *l, euryale_dnn_handle handle,
	const struct euryale_convolution *c, uintptr_t dst, uintptr_t a, uintptr_t b,
	uintptr_t workspace) {
	float one = 1, zero = 0;
	double wide_one = 1, wide_zero = 0;
	const void *alpha = c->type == TYPE_F64 ? (const void *)&wide_one : &one;
	const void *beta = c->type == TYPE_F64 ? (const void *)&wide_zero : &zero;
	void *scratch = (void *)workspace;

	switch (c->pass) {
	case FORWARD:
		return l->forward(handle, alpha, c->x, (const void *)a, c->filter, (const void *)b,
			c->convolution, c->algorithm, scratch, c->workspace, beta, c->y, (void *)dst);
	case INPUT_GRADIENT:
		return l->input_gradient(handle, alpha, c->filter, (const void *)b, c->y, (const void *)a,
			c->convolution, c->algorithm, scratch, c->workspace, beta, c->x, (void *)dst);
	default:
		return l->filter_gradient(handle, alpha, c->x, (const void *)a, c->y, (const void *)b,
			c->convolution, c->algorithm, scratch, c->workspace, beta, c->filter, (void *)dst);
	}
}
