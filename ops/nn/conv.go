package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// ConvOptions are the options of convolutions. Lists have a number for each axis of the images
// behind batch and channels. The zero value is a convolution without padding, in steps of 1.
type ConvOptions struct {
	// Stride is the distance between windows, and Dilation between the pixels of a window: nil is
	// 1.
	Stride, Dilation []int
	// Pad is the number of zeros around the images: for each axis one number, before and behind,
	// or, as in ONNX, twice as many numbers, first those before all axes and then those behind. nil
	// is none. See [SamePad].
	Pad []int
	// OutputPad is the number of further pixels in the results of transposed convolutions, behind
	// the last one. It must be less than the stride or the dilation. nil is none.
	OutputPad []int
	// Groups divides channels and filters: the filters of a group see only its channels. 0 is 1.
	// With as many groups as channels the convolution is depthwise.
	Groups int
}

// Conv1D convolves sequences with filters: [Conv2D] with one axis.
//
//	in   x     [b, c, n]
//	     w     [f, c/groups, k]
//	     bias  [f], or nil
//	out  y     [b, f, n']
//
// Gradient, cost and errors: those of Conv2D.
func Conv1D(o ConvOptions, x, w, bias *gorgonia.Node) (*gorgonia.Node, error) {
	return conv("Conv1D", 1, kernels.Forward, o, x, w, bias)
}

// Conv2D convolves images with filters: it is the correlation, as in PyTorch and in ONNX.
//
//	in   x     [b, c, h, w]
//	     w     [f, c/groups, kh, kw]
//	     bias  [f], or nil
//	out  y     [b, f, h', w']
//	           y[b,f,i,j] = bias[f] + sum over c, k, l of w[f,c,k,l] *
//	           x[b,c, i*stride - pad + k*dilation, j*stride - pad + l*dilation]
//
// with h' = (h + padding before and behind - dilation*(kh-1) - 1)/stride + 1, rounded down, and w'
// likewise.
//
// Gradient: dx is the transposed convolution of dy with w, dw the correlation of x with dy, and
// dbias the sum of dy over all axes but the channels'.
// Cost: 2*b*f*h'*w'*c/groups*kh*kw operations; backward twice that. Patches are not written to
// memory. On GPUs cuDNN computes it, where it is installed.
// Errors: [ops.ErrShape] if operands do not fit; [backend.ErrArgument] if an option is out of
// range; [ops.ErrDType].
func Conv2D(o ConvOptions, x, w, bias *gorgonia.Node) (*gorgonia.Node, error) {
	return conv("Conv2D", 2, kernels.Forward, o, x, w, bias)
}

// Conv3D convolves volumes with filters: [Conv2D] with three axes.
//
//	in   x     [b, c, d, h, w]
//	     w     [f, c/groups, kd, kh, kw]
//	     bias  [f], or nil
//	out  y     [b, f, d', h', w']
//
// Gradient and errors: those of Conv2D.
// Cost: that of Conv2D, and a copy of x for each of kd.
func Conv3D(o ConvOptions, x, w, bias *gorgonia.Node) (*gorgonia.Node, error) {
	return conv("Conv3D", 3, kernels.Forward, o, x, w, bias)
}

// ConvTranspose2D is the transposed convolution: the gradient of [Conv2D] by its images.
//
//	in   x     [b, c, h, w]
//	     w     [c, f/groups, kh, kw]
//	     bias  [f], or nil
//	out  y     [b, f, h', w']
//
// with h' = (h-1)*stride + dilation*(kh-1) + 1 + outputPad - padding before and behind, and w'
// likewise.
//
// Gradient: dx is the convolution of dy with w, dw the correlation of dy with x, and dbias that of
// Conv2D.
// Cost: 2*b*c*h*w*f/groups*kh*kw operations; backward twice that.
// Errors: those of Conv2D.
func ConvTranspose2D(o ConvOptions, x, w, bias *gorgonia.Node) (*gorgonia.Node, error) {
	return conv("ConvTranspose2D", 2, kernels.InputGradient, o, x, w, bias)
}

// SamePad returns the [ConvOptions].Pad with which a convolution has a result for each stride of an
// axis, even for an incomplete last one: ONNX's SAME_UPPER, or SAME_LOWER, with the odd zero before
// the image, if lower is set. Lists have a number for each axis of the images; nil strides and
// dilations are 1.
//
// Errors: [backend.ErrArgument] if lists differ in length or a number is less than 1.
func SamePad(lower bool, image, kernel, stride, dilation []int) ([]int, error) {
	n := len(image)
	s, d := listed(stride, n, 1), listed(dilation, n, 1)
	pad := make([]int, 2*n)
	for _, list := range [][]int{image, kernel, s, d} {
		if len(list) != n || n > 0 && slices.Min(list) < 1 {
			return nil, fmt.Errorf("nn: SamePad: %w: image %v, kernel %v, stride %v, dilation %v",
				backend.ErrArgument, image, kernel, stride, dilation)
		}
	}
	for i := range n {
		all := max((image[i]-1)/s[i]*s[i]+(kernel[i]-1)*d[i]+1-image[i], 0)
		pad[i], pad[n+i] = all/2, all-all/2
		if lower {
			pad[i], pad[n+i] = pad[n+i], pad[i]
		}
	}
	return pad, nil
}

// listed returns a list, or n times what stands for nil.
func listed(list []int, n, otherwise int) []int {
	if list == nil {
		return slices.Repeat([]int{otherwise}, n)
	}
	return list
}

// conv builds a convolution of images with a number of axes.
func conv(name string, axes int, pass kernels.Pass, o ConvOptions,
	x, w, bias *gorgonia.Node) (*gorgonia.Node, error) {
	operands, all := "x w", []*gorgonia.Node{x, w}
	if bias != nil {
		operands, all = "x w bias", append(all, bias)
	}
	var s convSpec
	var err error
	if x != nil && w != nil {
		s, err = convOf(axes, pass, o, x.Shape(), w.Shape())
	}
	if err != nil {
		return nil, fmt.Errorf("nn: %s: %w", name, err)
	}
	return build(name, operands, s, all...)
}

// convOf returns the convolution, or transposed convolution, of shapes.
func convOf(axes int, pass kernels.Pass, o ConvOptions, x, w tensor.Shape) (convSpec, error) {
	s := convSpec{Axes: axes, Groups: max(o.Groups, 1), Pass: pass}
	if len(x) != 2+axes || len(w) != 2+axes {
		return s, fmt.Errorf("%w: x has shape %v and w %v, want %d axes each", ops.ErrShape, x, w,
			2+axes)
	}
	if x[1] != w[1]*s.Groups && pass == kernels.Forward || w[0]%s.Groups != 0 ||
		x[1] != w[0] && pass != kernels.Forward || o.Groups < 0 {
		return s, fmt.Errorf("%w: x has shape %v and w %v, which does not fit in %d groups",
			ops.ErrShape, x, w, o.Groups)
	}
	stride, dilation := listed(o.Stride, axes, 1), listed(o.Dilation, axes, 1)
	pad, more := listed(o.Pad, axes, 0), listed(o.OutputPad, axes, 0)
	if len(pad) == axes {
		pad = slices.Concat(pad, pad)
	}
	lengths := [4]int{len(stride), len(dilation), len(pad), len(more)}
	if lengths != [4]int{axes, axes, 2 * axes, axes} || slices.Min(slices.Concat(pad, more)) < 0 ||
		slices.Min(slices.Concat(stride, dilation)) < 1 ||
		pass == kernels.Forward && slices.Max(more) > 0 {
		return s, fmt.Errorf("%w: options %+v of %d axes", backend.ErrArgument, o, axes)
	}
	s.Image, s.Kernel, s.Stride, s.Dilation = [3]int{1, 1, 1}, [3]int{1, 1, 1}, [3]int{1, 1, 1},
		[3]int{1, 1, 1}
	for i := range axes {
		at, n := 3-axes+i, x[2+i]
		s.Kernel[at], s.Stride[at], s.Dilation[at] = w[2+i], stride[i], dilation[i]
		s.Pad[at], s.After[at] = pad[i], pad[axes+i]
		reach := (w[2+i]-1)*dilation[i] + 1
		if pass != kernels.Forward {
			if more[i] > 0 && more[i] >= max(stride[i], dilation[i]) {
				return s, fmt.Errorf("%w: output padding %v: it is less than stride or dilation",
					backend.ErrArgument, more)
			}
			n = (n-1)*stride[i] + reach + more[i] - pad[i] - pad[axes+i]
			s.After[at] -= more[i]
		}
		if s.Image[at] = n; n < 1 || n+s.Pad[at]+s.After[at] < reach {
			return s, fmt.Errorf("%w: x has shape %v and w %v: nothing is left with padding %v",
				ops.ErrShape, x, w, pad)
		}
	}
	return s, nil
}

// convSpec is a convolution or one of its gradients, of two operands in the order of the pass. A
// third operand of results or images is their bias. Sizes are of depth, height and width, which
// have length 1 where there are fewer Axes. After is negative where images have output padding.
type convSpec struct {
	Axes                                        int
	Image, Kernel, Stride, Dilation, Pad, After [3]int
	Groups                                      int
	Pass                                        kernels.Pass
}

// String returns "convolution{kernel [3 3], stride [1 1], dilation [1 1], pad [1 1 1 1], groups
// 1}", or that of a gradient.
func (s convSpec) String() string {
	from := 3 - s.Axes
	return fmt.Sprintf("%v{kernel %v, stride %v, dilation %v, pad %v, groups %d}", s.Pass,
		s.Kernel[from:], s.Stride[from:], s.Dilation[from:],
		slices.Concat(s.Pad[from:], s.After[from:]), s.Groups)
}

func (s convSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	a, b := in[0], in[1]
	shape, sizes := tensor.Shape{a[0], b[1] * s.Groups}, s.Image
	switch s.Pass {
	case kernels.Forward:
		shape, sizes = tensor.Shape{a[0], b[0]}, [3]int{s.places(0), s.places(1), s.places(2)}
	case kernels.FilterGradient:
		shape, sizes = tensor.Shape{b[1], a[1] / s.Groups}, s.Kernel
	}
	shape = append(shape, sizes[3-s.Axes:]...)
	if len(in) == 3 && (len(in[2]) != 1 || in[2][0] != shape[1]) {
		return nil, fmt.Errorf("%w: bias has shape %v, want (%d)", ops.ErrShape, in[2], shape[1])
	}
	return shape, nil
}

// places returns how many windows there are along an axis.
func (s convSpec) places(i int) int {
	reach := (s.Kernel[i]-1)*s.Dilation[i] + 1
	return (s.Image[i]+s.Pad[i]+s.After[i]-reach)/s.Stride[i] + 1
}

// gradients: each pass is linear in both operands, and its gradients are the other two.
func (s convSpec) gradients(in []tensor.Shape) []gradient {
	to := func(pass kernels.Pass, of ...int) gradient {
		s := s
		s.Pass = pass
		return gradient{s, of}
	}
	const y, dx, dw = kernels.Forward, kernels.InputGradient, kernels.FilterGradient
	all := [...][]gradient{
		y:  {to(dx, dy, 1), to(dw, 0, dy)},
		dx: {to(y, dy, 1), to(dw, dy, 0)},
		dw: {to(dx, 1, dy), to(y, 0, dy)},
	}[s.Pass]
	if len(in) == 3 {
		all = append(all, gradient{channelSumSpec{}, []int{dy}})
	}
	return all
}

func (s convSpec) program(b *program.Builder, x ...program.Value) program.Value {
	y := s.convolve(b, x[0], x[1])
	if len(x) == 3 {
		shape := slices.Repeat([]int{1}, 2+s.Axes)
		shape[1] = b.Of(x[2]).Shape[0]
		y = b.Do(fuse.Add, y, b.Reshape(x[2], shape...))
	}
	return y
}

// channelSumSpec is the sum over all axes but the channels', the second one.
type channelSumSpec struct{}

// String returns "ChannelSum".
func (s channelSumSpec) String() string { return "ChannelSum" }

func (s channelSumSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return tensor.Shape{in[0][1]}, nil
}

func (s channelSumSpec) gradients(in []tensor.Shape) []gradient {
	spread := channelSpreadSpec{Axes: len(in[0])}
	copy(spread.Shape[:], in[0])
	return []gradient{{spread, []int{dy}}}
}

func (s channelSumSpec) program(b *program.Builder, x ...program.Value) program.Value {
	axes := append([]int{0}, program.Axes(b, x[0], 2)...)
	return b.Reshape(program.Sum(b, x[0], axes...), b.Of(x[0]).Shape[1])
}

// channelSpreadSpec repeats a number for each channel: the gradient of [channelSumSpec].
type channelSpreadSpec struct {
	Axes  int
	Shape [5]int
}

// String returns "ChannelSpread{[8 3 28 28]}".
func (s channelSpreadSpec) String() string {
	return fmt.Sprintf("ChannelSpread{%v}", s.Shape[:s.Axes])
}

func (s channelSpreadSpec) shape([]tensor.Shape) (tensor.Shape, error) {
	return tensor.Shape(s.Shape[:s.Axes]).Clone(), nil
}

func (s channelSpreadSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{channelSumSpec{}, []int{dy}}}
}

func (s channelSpreadSpec) program(b *program.Builder, x ...program.Value) program.Value {
	one := slices.Repeat([]int{1}, s.Axes)
	one[1] = s.Shape[1]
	return b.Broadcast(b.Reshape(x[0], one...), s.Shape[:s.Axes]...)
}
