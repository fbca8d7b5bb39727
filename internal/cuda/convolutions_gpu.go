//go:build gpu

package cuda

/*
#cgo LDFLAGS: -ldl
#cgo noescape euryale_cudnn_convolve
#cgo nocallback euryale_cudnn_convolve
#include <stdlib.h>
#include "cudnn_gpu.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"math"
	"os"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/kernels"
	gpukernels "github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// Convolutions convolves images on a queue: by cuDNN where it is installed, otherwise by kernels of
// package internal/kernels/cuda. It is not for several goroutines at once.
//
// cuDNN is opened for the first convolution. It is looked for on the library path, in CUDA_HOME,
// and where pip puts NVIDIA's wheels. EURYALE_CUDNN names its file or its folder; EURYALE_CUDNN=off
// does without. Its algorithms are fixed, so that the bits are the same in every run, and it is
// used for convolutions for which they are fast.
type Convolutions struct {
	queue   *Queue
	opened  bool
	dnn     *C.struct_euryale_cudnn // nil: kernels of ours
	handle  C.euryale_dnn_handle
	missing error
	known   map[kernels.Convolution]*C.struct_euryale_convolution // nil: for a kernel of ours
}

// NewConvolutions returns the convolutions of a queue. It cannot fail: cuDNN is opened later.
func (q *Queue) NewConvolutions() *Convolutions {
	return &Convolutions{queue: q, known: map[kernels.Convolution]*C.struct_euryale_convolution{}}
}

// open opens cuDNN. Without it, it succeeds, too.
func (c *Convolutions) open() error {
	if c.opened {
		return nil
	}
	c.opened = true
	if env.CUDNN.Off(os.Getenv) {
		c.missing = errors.New("EURYALE_CUDNN=off")
		return nil
	}
	if c.dnn, c.missing = openCUDNN(); c.missing != nil {
		return nil
	}
	return c.queue.device.on("open cuDNN", func() error {
		return c.failure("create", C.euryale_cudnn_create(c.dnn, &c.handle,
			C.uintptr_t(c.queue.Stream())))
	})
}

// openCUDNN opens the first cuDNN that can be opened, the newest first.
func openCUDNN() (*C.struct_euryale_cudnn, error) {
	l := (*C.struct_euryale_cudnn)(C.calloc(1, C.sizeof_struct_euryale_cudnn))
	var all []error
	for path := range cuDNN().Places() {
		text := C.CString(path)
		why := C.euryale_cudnn_open(l, text)
		C.free(unsafe.Pointer(text))
		switch {
		case why != nil:
			all = append(all, errors.New(C.GoString(why)))
		case l.missing != nil:
			all = append(all, fmt.Errorf("%s lacks %s: the oldest cuDNN that works is 8.0", path,
				C.GoString(l.missing)))
			C.euryale_cudnn_close(l)
		default:
			return l, nil
		}
	}
	C.free(unsafe.Pointer(l))
	return nil, fmt.Errorf("cuDNN was not found: install it (%s), or name libcudnn.so in "+
		"EURYALE_CUDNN: %w", cuDNN().Install, errors.Join(all...))
}

// ChannelsLast reports whether convolutions in TF32 and BF16 want tensors with their channels last,
// as the tensor cores of cuDNN read them: whether there is a cuDNN, which it opens. Kernels of ours
// would convolve copies.
func (d *Device) ChannelsLast() bool {
	if env.CUDNN.Off(os.Getenv) {
		return false
	}
	l, err := openCUDNN()
	if err == nil { // the library stays open: see Close
		C.free(unsafe.Pointer(l))
	}
	return err == nil
}

// failure is a result of cuDNN as an error.
func (c *Convolutions) failure(doing string, code C.int) error {
	if code == 0 {
		return nil
	}
	return fmt.Errorf("cuDNN: %s: %s (status %d)", doing,
		C.GoString(C.euryale_cudnn_error(c.dnn, code)), code)
}

// Library says what convolves: "cuDNN 9.10.2", or "kernels of Euryale" and why there is no cuDNN.
// It opens cuDNN.
func (c *Convolutions) Library() (string, error) {
	if err := c.open(); err != nil {
		return "", err
	}
	if c.dnn == nil {
		return fmt.Sprintf("kernels of Euryale: %v", c.missing), nil
	}
	v := C.euryale_cudnn_version(c.dnn)
	major, rest := v/10000, v%10000
	if v < 10000 { // before 9.0
		major, rest = v/1000, v%1000
	}
	return fmt.Sprintf("cuDNN %d.%d.%d", major, rest/100, rest%100), nil
}

// The numbers of cudnnDataType_t, of what sums have and of cudnnMathType_t.
var (
	dnnTypes = [...]C.int{backend.F32: 0, backend.F64: 1, backend.BF16: 9}
	dnnSums  = [...]C.int{backend.F32: 0, backend.F64: 1, backend.BF16: 0}
)

const (
	mathDefault = 0 // with TF32, for f32
	mathTensor  = 1
	mathFMA     = 3

	formatNHWC = 1 // of cudnnTensorFormat_t, in place of NCHW
)

// ConvolutionScratch returns how many bytes of scratch [Convolutions.Convolve] needs, and makes it
// ready to be captured. It opens cuDNN.
//
// Errors: those of [gpukernels.Kernels.ConvolutionScratch].
func (c *Convolutions) ConvolutionScratch(v kernels.Convolution) (int, error) {
	known, err := c.ready(v)
	if err != nil {
		return 0, err
	}
	if known != nil {
		return int(known.workspace), nil
	}
	if v.ChannelsLast {
		return c.turnedScratch(v)
	}
	if err := c.queue.device.Prepare(gpukernels.Convolutions); err != nil {
		return 0, err
	}
	return c.queue.arithmetic.ConvolutionScratch(v)
}

// ready opens cuDNN, and returns what it knows of a convolution, nil if it does not compute it.
func (c *Convolutions) ready(v kernels.Convolution) (*C.struct_euryale_convolution, error) {
	if err := errors.Join(c.queue.usable(), c.open()); err != nil {
		return nil, err
	}
	known, ok := c.known[v]
	if !ok {
		known = c.prepare(v)
		c.known[v] = known
	}
	return known, nil
}

// prepare returns what cuDNN knows of a convolution, nil if it does not compute it.
func (c *Convolutions) prepare(v kernels.Convolution) *C.struct_euryale_convolution {
	if c.dnn == nil || !fitsDNN(v) || preferOurs(v) {
		return nil
	}
	d := (*C.struct_euryale_convolution)(C.calloc(1, C.sizeof_struct_euryale_convolution))
	*d = C.struct_euryale_convolution{
		pass: C.int(v.Pass), _type: dnnTypes[v.DType], sums: dnnSums[v.DType], math: mathFMA,
		batch: C.int(v.Batch), channels: C.int(v.C), h: C.int(v.H), w: C.int(v.W),
		filters: C.int(v.Filters), out_h: C.int(v.OutH), out_w: C.int(v.OutW),
		kernel_h: C.int(v.KernelH), kernel_w: C.int(v.KernelW), pad_h: C.int(v.PadH), pad_w: C.int(
			v.PadW),
		stride_h: C.int(v.StrideH), stride_w: C.int(v.StrideW), dilation_h: C.int(v.DilationH),
		dilation_w: C.int(v.DilationW), groups: C.int(v.Parts()),
	}
	if v.ChannelsLast {
		d.format = formatNHWC
	}
	switch {
	case v.DType == backend.BF16:
		d.math = mathTensor
	case v.TF32 && v.DType == backend.F32:
		d.math = mathDefault
	}
	err := c.queue.device.on("prepare a convolution", func() error {
		return c.failure("prepare", C.euryale_cudnn_prepare(c.dnn, c.handle, d))
	})
	if err == nil && (v.ChannelsLast || v.DType == backend.BF16) {
		err = c.try(v, d)
	}
	if err != nil { // for instance f64 with dilations
		c.forgetDescriptor(d)
		return nil
	}
	return d
}

// try runs a convolution once: of tensors with channels last and of bf16, cuDNN refuses some only
// then. Where there is no memory for that, it succeeds.
func (c *Convolutions) try(v kernels.Convolution, d *C.struct_euryale_convolution) (err error) {
	var memory [4]backend.Buffer // operands and scratch
	defer func() {
		for _, b := range memory {
			if b.Len() > 0 {
				err = errors.Join(err, c.queue.Free(b))
			}
		}
	}()
	for i := range memory {
		n := int(d.workspace)
		if i < 3 {
			n = alignedBytes(v.Operands()[i], v.DType)
		}
		if n == 0 {
			continue
		}
		if memory[i], err = c.queue.Alloc(n); err != nil {
			return nil
		}
	}
	return c.launch(v, d, memory[0], memory[1], memory[2], memory[3])
}

// launch has cuDNN compute a convolution.
func (c *Convolutions) launch(v kernels.Convolution, d *C.struct_euryale_convolution, dst, a, b,
	scratch backend.Buffer) error {
	defer c.queue.launcher.Forget() // cuDNN may use programmatic dependent launch
	return c.queue.device.on("convolve", func() error {
		return c.failure(fmt.Sprintf("%v of %+v", v.Pass, v), C.euryale_cudnn_convolve(c.dnn,
			c.handle, d, C.uintptr_t(dst.Addr()), C.uintptr_t(a.Addr()), C.uintptr_t(b.Addr()),
			C.uintptr_t(scratch.Addr())))
	})
}

// fitsDNN reports whether all tensors have elements, less than 2^31 of them.
func fitsDNN(v kernels.Convolution) bool {
	for _, n := range []int{v.Batch * v.C * v.H * v.W, v.Filters * v.Columns(),
		v.Batch * v.Filters * v.OutH * v.OutW} {
		if n < 1 || n > math.MaxInt32 {
			return false
		}
	}
	return (v.H+2*v.PadH-v.DilationH*(v.KernelH-1)-1)/v.StrideH+1 == v.OutH &&
		(v.W+2*v.PadW-v.DilationW*(v.KernelW-1)-1)/v.StrideW+1 == v.OutW
}

// preferOurs reports whether a kernel of ours computes a convolution rather than cuDNN's
// deterministic algorithm: one in f32 without tensor cores. Ours took 0.2 to 1.07 of its time,
// except for products with few rows, which do not fill a tile: see
// 2026-11-23-h100-convolutions.txt and 2026-11-27-h100-convolutions.md.
func preferOurs(v kernels.Convolution) bool {
	if v.DType != backend.F32 || v.TF32 || v.Parts() > 1 {
		return false // tiles of ours are larger than groups
	}
	const few = 16
	switch v.Pass {
	case kernels.Forward:
		return v.Filters > few || v.Columns() <= 2*few
	case kernels.InputGradient:
		return v.C > few
	}
	return true
}

func (c *Convolutions) forgetDescriptor(d *C.struct_euryale_convolution) {
	C.euryale_cudnn_forget(c.dnn, d)
	C.free(unsafe.Pointer(d))
}

// Convolve computes a convolution, in the order of the queue: see [kernels.Host.Convolve]. scratch
// has the bytes that [Convolutions.ConvolutionScratch] says.
//
// Errors: those of [kernels.Check], ErrArgument if scratch is too small.
func (c *Convolutions) Convolve(v kernels.Convolution, dst, a, b, scratch backend.Buffer) error {
	known, err := c.ready(v)
	if err != nil {
		return err
	}
	if known == nil && v.ChannelsLast {
		return c.convolveTurned(v, dst, a, b, scratch)
	}
	if known == nil {
		return c.queue.arithmetic.Convolve(v, dst, a, b, scratch)
	}
	if err := (kernels.Check{Device: true}).Convolve(v, dst, a, b); err != nil {
		return err
	}
	if need := int(known.workspace); scratch.NBytes() < need {
		return fmt.Errorf("%w: %v: %d bytes of scratch, want %d", backend.ErrArgument, v.Pass,
			scratch.NBytes(), need)
	}
	return c.launch(v, known, dst, a, b, scratch)
}

// turnedScratch returns how many bytes of scratch it takes to convolve copies with channels as the
// second axis: what has no faster way.
func (c *Convolutions) turnedScratch(v kernels.Convolution) (int, error) {
	shapes := v.Operands()
	v.ChannelsLast = false
	need, err := c.ConvolutionScratch(v)
	for _, s := range shapes {
		need += alignedBytes(s, v.DType)
	}
	return need, err
}

// alignedBytes returns the bytes of a tensor, up to where another one may begin.
func alignedBytes(shape [4]int, d backend.DType) int {
	const alignment = 256
	n := shape[0] * shape[1] * shape[2] * shape[3] * d.Size()
	return (n + alignment - 1) / alignment * alignment
}

// convolveTurned convolves copies with channels as the second axis.
func (c *Convolutions) convolveTurned(v kernels.Convolution, dst, a, b,
	scratch backend.Buffer) error {
	if err := (kernels.Check{Device: true}).Convolve(v, dst, a, b); err != nil {
		return err
	}
	need, err := c.turnedScratch(v)
	if err != nil {
		return err
	}
	if scratch.NBytes() < need {
		return fmt.Errorf("%w: %v: %d bytes of scratch, want %d", backend.ErrArgument, v.Pass,
			scratch.NBytes(), need)
	}
	var turned [3]backend.Buffer
	shapes, rest := v.Operands(), scratch.As(backend.U8)
	for i, like := range []backend.Buffer{dst, a, b} {
		turned[i] = rest.Slice(0, like.NBytes()).As(v.DType)
		rest = rest.Slice(alignedBytes(shapes[i], v.DType), rest.Len())
		if i == 0 {
			continue
		}
		dims, strides := kernels.ChannelsSecond(shapes[i])
		if err := c.queue.arithmetic.CopyStrided(turned[i], like, dims, strides); err != nil {
			return err
		}
	}
	v.ChannelsLast = false
	if err := c.Convolve(v, turned[0], turned[1], turned[2], rest); err != nil {
		return err
	}
	dims, strides := kernels.ChannelsBehind(shapes[0])
	return c.queue.arithmetic.CopyStrided(dst, turned[0], dims, strides)
}

// Close waits for the queue and frees what cuDNN has.
func (c *Convolutions) Close() error {
	if c.dnn == nil {
		return nil
	}
	err := c.queue.device.on("close cuDNN", func() error {
		if c.handle == nil {
			return nil
		}
		err := c.queue.drain()
		for _, d := range c.known {
			if d != nil {
				c.forgetDescriptor(d)
			}
		}
		return errors.Join(err, c.failure("destroy", C.euryale_cudnn_destroy(c.dnn, c.handle)))
	})
	// the library itself stays: to close it is to unload code from every device
	C.free(unsafe.Pointer(c.dnn))
	c.dnn, c.known = nil, map[kernels.Convolution]*C.struct_euryale_convolution{}
	return err
}
