// A libcudnn.so.9 for the driver of internal/kernels/cuda/emulator: what internal/cuda calls of
// cuDNN, as loops on the host in the order of a stream. With it everything down to cuDNN's
// calls is tested without a GPU.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

enum { success = 0, bad_param = 2000, not_supported = 3000 };
enum { type_f32 = 0, type_f64 = 1, type_bf16 = 9 };
enum { math_fma = 3 };
enum { forward, input_gradient, filter_gradient };

struct Four {
	int type, format, n, c, h, w;
	// where an element is, in NCHW or NHWC
	size_t at(size_t i, int j, int y, int x) const {
		return format == 0 ? ((i * c + j) * h + y) * w + x : ((i * h + y) * w + x) * c + j;
	}
};
struct Window {
	int pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, type, math, groups;
};

struct Convolution {
	int pass;
	Four x, w, y;
	Window by;
	const void *a, *b;
	void *dst;
	char *workspace;
	size_t nbytes;
};

// A handle keeps what it has started, which a graph may run again.
struct Handle {
	void *stream = nullptr;
	std::vector<std::unique_ptr<Convolution>> started;
};

// Bf16 are the upper half of a float, rounded to even. No test has NaN.
struct Bf16 {
	uint16_t bits;
	Bf16() = default;
	explicit Bf16(double x) {
		float f = float(x);
		uint32_t b;
		std::memcpy(&b, &f, sizeof b);
		bits = uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
	}
	operator double() const {
		uint32_t b = uint32_t(bits) << 16;
		float f;
		std::memcpy(&f, &b, sizeof f);
		return f;
	}
};

template <class T> static void convolve(const Convolution &v) {
	const T *a = static_cast<const T *>(v.a), *b = static_cast<const T *>(v.b);
	T *dst = static_cast<T *>(v.dst);
	const Four &to = v.pass == forward ? v.y : v.pass == input_gradient ? v.x : v.w;
	std::vector<double> sums(size_t(to.n) * to.c * to.h * to.w);
	for (int n = 0; n < v.y.n; n++)
		for (int f = 0; f < v.y.c; f++)
			for (int oh = 0; oh < v.y.h; oh++)
				for (int ow = 0; ow < v.y.w; ow++)
					for (int c = 0; c < v.w.c; c++)
						for (int kh = 0; kh < v.w.h; kh++)
							for (int kw = 0; kw < v.w.w; kw++) {
								int h = oh * v.by.stride_h - v.by.pad_h + kh * v.by.dilation_h;
								int w = ow * v.by.stride_w - v.by.pad_w + kw * v.by.dilation_w;
								if (h < 0 || h >= v.x.h || w < 0 || w >= v.x.w)
									continue;
								int plane = f / (v.y.c / v.by.groups) * v.w.c + c;
								size_t x = v.x.at(n, plane, h, w);
								size_t weight = v.w.at(f, c, kh, kw);
								size_t y = v.y.at(n, f, oh, ow);
								if (v.pass == forward)
									sums[y] += double(a[x]) * b[weight];
								else if (v.pass == input_gradient)
									sums[x] += double(a[y]) * b[weight];
								else
									sums[weight] += double(a[x]) * b[y];
							}
	for (size_t i = 0; i < sums.size(); i++)
		dst[i] = T(sums[i]);
	std::memset(v.workspace, 0xff, v.nbytes);
}

static void run(void *data) {
	const Convolution &v = *static_cast<Convolution *>(data);
	if (v.x.type == type_bf16)
		convolve<Bf16>(v);
	else
		v.x.type == type_f64 ? convolve<double>(v) : convolve<float>(v);
}

static bool fits(int size, int kernel, int pad, int stride, int dilation, int out) {
	return (size + 2 * pad - dilation * (kernel - 1) - 1) / stride + 1 == out;
}

static int check(const Four *x, const Four *w, const Four *y, const Window *by) {
	// BF16 sums up in f32, and only on tensor cores
	bool half = x->type == type_bf16;
	if (by->type != (half ? type_f32 : x->type) || (half && by->math == math_fma))
		return not_supported;
	// channels last are not in groups here, and have a multiple of 4 filters
	if (x->format == 1 && (by->groups > 1 || y->c % 4 != 0))
		return not_supported;
	if (x->type != w->type || x->type != y->type || x->format != w->format ||
		x->format != y->format ||
		x->c != w->c * by->groups || y->c != w->n || y->c % by->groups != 0 || x->n != y->n ||
		!fits(x->h, w->h, by->pad_h, by->stride_h, by->dilation_h, y->h) ||
		!fits(x->w, w->w, by->pad_w, by->stride_w, by->dilation_w, y->w))
		return bad_param;
	return success;
}

// Scratch of as many bytes as the results have rows, so that tests have some.
static int workspace(int code, const Four *y, int algorithm, size_t *nbytes) {
	*nbytes = 16 * size_t(y->h);
	return code != success || algorithm == 1 ? code : not_supported;
}

static int start(Handle *h, Convolution v, int code, const void *alpha, const void *beta) {
	using Launch = int (*)(void *, void (*)(void *), void *);
	static const auto launch =
		reinterpret_cast<Launch>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuLaunchHostFunc"));
	bool wide = v.x.type == type_f64;
	double one = wide ? *static_cast<const double *>(alpha) : *static_cast<const float *>(alpha);
	double zero = wide ? *static_cast<const double *>(beta) : *static_cast<const float *>(beta);
	if (code != success || one != 1 || zero != 0 || v.nbytes < 16 * size_t(v.y.h) || !v.workspace)
		return bad_param;
	if (v.x.format == 1 && v.x.type == type_bf16 && v.x.c % 2 != 0) // which is found out only here
		return not_supported;
	h->started.push_back(std::make_unique<Convolution>(v));
	return launch(h->stream, run, h->started.back().get());
}

#define CUDNN extern "C" int

extern "C" size_t cudnnGetVersion() { return 91002; }
extern "C" const char *cudnnGetErrorString(int status) {
	return status == not_supported ? "CUDNN_STATUS_NOT_SUPPORTED" : "CUDNN_STATUS_BAD_PARAM";
}
CUDNN cudnnCreate(Handle **h) { return *h = new Handle, success; }
CUDNN cudnnDestroy(Handle *h) { return delete h, success; }
CUDNN cudnnSetStream(Handle *h, void *stream) { return h->stream = stream, success; }
CUDNN cudnnCreateTensorDescriptor(Four **d) { return *d = new Four{}, success; }
CUDNN cudnnSetTensor4dDescriptor(Four *d, int format, int type, int n, int c, int h, int w) {
	return *d = {type, format, n, c, h, w}, format == 0 || format == 1 ? success : not_supported;
}
CUDNN cudnnDestroyTensorDescriptor(Four *d) { return delete d, success; }
CUDNN cudnnCreateFilterDescriptor(Four **d) { return *d = new Four{}, success; }
CUDNN cudnnSetFilter4dDescriptor(Four *d, int type, int format, int k, int c, int h, int w) {
	return *d = {type, format, k, c, h, w}, format == 0 || format == 1 ? success : not_supported;
}
CUDNN cudnnDestroyFilterDescriptor(Four *d) { return delete d, success; }
CUDNN cudnnCreateConvolutionDescriptor(Window **d) { return *d = new Window{}, success; }
CUDNN cudnnSetConvolution2dDescriptor(Window *d, int pad_h, int pad_w, int stride_h, int stride_w,
	int dilation_h, int dilation_w, int mode, int type) {
	return *d = {pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, type, 0, 1},
		   mode == 1 ? success : not_supported;
}
CUDNN cudnnSetConvolutionMathType(Window *d, int math) { return d->math = math, success; }
CUDNN cudnnSetConvolutionGroupCount(Window *d, int n) { return d->groups = n, success; }
CUDNN cudnnDestroyConvolutionDescriptor(Window *d) { return delete d, success; }

CUDNN cudnnGetConvolutionForwardWorkspaceSize(Handle *, const Four *x, const Four *w,
	const Window *by, const Four *y, int algorithm, size_t *nbytes) {
	return workspace(check(x, w, y, by), y, algorithm, nbytes);
}
CUDNN cudnnGetConvolutionBackwardDataWorkspaceSize(Handle *, const Four *w, const Four *y,
	const Window *by, const Four *x, int algorithm, size_t *nbytes) {
	return workspace(check(x, w, y, by), y, algorithm, nbytes);
}
CUDNN cudnnGetConvolutionBackwardFilterWorkspaceSize(Handle *, const Four *x, const Four *y,
	const Window *by, const Four *w, int algorithm, size_t *nbytes) {
	return workspace(check(x, w, y, by), y, algorithm, nbytes);
}
CUDNN cudnnConvolutionForward(Handle *h, const void *alpha, const Four *x, const void *a,
	const Four *w, const void *b, const Window *by, int, void *workspace, size_t nbytes,
	const void *beta, const Four *y, void *dst) {
	return start(h, {forward, *x, *w, *y, *by, a, b, dst, static_cast<char *>(workspace), nbytes},
		check(x, w, y, by), alpha, beta);
}
CUDNN cudnnConvolutionBackwardData(Handle *h, const void *alpha, const Four *w, const void *b,
	const Four *y, const void *a, const Window *by, int, void *workspace, size_t nbytes,
	const void *beta, const Four *x, void *dst) {
	return start(h,
		{input_gradient, *x, *w, *y, *by, a, b, dst, static_cast<char *>(workspace), nbytes},
		check(x, w, y, by), alpha, beta);
}
CUDNN cudnnConvolutionBackwardFilter(Handle *h, const void *alpha, const Four *x, const void *a,
	const Four *y, const void *b, const Window *by, int, void *workspace, size_t nbytes,
	const void *beta, const Four *w, void *dst) {
	return start(h,
		{filter_gradient, *x, *w, *y, *by, a, b, dst, static_cast<char *>(workspace), nbytes},
		check(x, w, y, by), alpha, beta);
}
