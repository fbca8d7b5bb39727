package nn

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/ops"
)

// AvgPool2D returns the means of windows of images. kernel, pad and stride are of height and width.
// The padding counts as zeros, and every mean divides by the whole kernel, as in PyTorch.
//
//	in   x  [b, c, h, w]
//	out  y  [b, c, h', w']   h' = (h + 2*pad[0] - kernel[0])/stride[0] + 1, rounded down;
//	                         w' likewise
//
// Gradient: dy, divided by the size of the kernel, is added to every pixel of its window, in the
// order of the windows.
// Cost: a pass over the windows, and memory for their pixels, forward and backward.
// Errors: [ops.ErrShape] if x is not of 4 axes or the kernel does not fit into the padded image;
// [backend.ErrArgument] if a kernel or stride is less than 1, or the padding negative or as large
// as the kernel; [ops.ErrDType].
func AvgPool2D(kernel, pad, stride [2]int, x *gorgonia.Node) (*gorgonia.Node, error) {
	return build("AvgPool2D", "x", avgPool2DSpec{kernel, pad, stride}, x)
}

// GlobalAvgPool2D returns the mean of every channel of images: [AvgPool2D] with a kernel as large
// as the image.
//
//	in   x  [b, c, h, w]
//	out  y  [b, c, 1, 1]
//
// Gradient: dy / (h*w) for every pixel.
// Cost: a pass over x; backward a pass over dx.
// Errors: [ops.ErrShape] if x is not of 4 axes; [ops.ErrDType].
func GlobalAvgPool2D(x *gorgonia.Node) (*gorgonia.Node, error) {
	var kernel [2]int
	if x != nil && len(x.Shape()) == 4 {
		kernel = [2]int(x.Shape()[2:])
	}
	return build("GlobalAvgPool2D", "x", avgPool2DSpec{Kernel: kernel, Stride: [2]int{1, 1}}, x)
}

// avgPool2DSpec is [AvgPool2D]. Pad is on both sides of an axis.
type avgPool2DSpec struct{ Kernel, Pad, Stride [2]int }

// String returns "AvgPool2D{kernel [2 2], pad [0 0], stride [2 2]}".
func (s avgPool2DSpec) String() string {
	return fmt.Sprintf("AvgPool2D{kernel %v, pad %v, stride %v}", s.Kernel, s.Pad, s.Stride)
}

func (s avgPool2DSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	if len(in[0]) != 4 {
		return nil, fmt.Errorf("%w: x has shape %v, want (b, c, h, w)", ops.ErrShape, in[0])
	}
	out := in[0].Clone()
	for i := range 2 {
		kernel, pad, stride := s.Kernel[i], s.Pad[i], s.Stride[i]
		if kernel < 1 || stride < 1 || pad < 0 || pad >= kernel {
			return nil, fmt.Errorf("%w: kernel %v, pad %v, stride %v", backend.ErrArgument,
				s.Kernel, s.Pad, s.Stride)
		}
		room := in[0][2+i] + 2*pad - kernel
		if room < 0 {
			return nil, fmt.Errorf("%w: kernel %v does not fit into %v with pad %v", ops.ErrShape,
				s.Kernel, in[0], s.Pad)
		}
		out[2+i] = room/stride + 1
	}
	return out, nil
}

func (s avgPool2DSpec) gradients(in []tensor.Shape) []gradient {
	return []gradient{{avgPool2DGradSpec{s, [2]int(in[0][2:])}, []int{dy}}}
}

func (s avgPool2DSpec) program(b program.Builder, x ...program.Value) program.Value {
	return program.AveragePool(b, x[0], program.Window(s))
}

// avgPool2DGradSpec is the gradient of the pooling of images of a height and width, from dy.
type avgPool2DGradSpec struct {
	Pool  avgPool2DSpec
	Image [2]int
}

// String returns "AvgPool2DGrad{kernel [2 2], pad [0 0], stride [2 2], image [28 28]}".
func (s avgPool2DGradSpec) String() string {
	return fmt.Sprintf("AvgPool2DGrad{kernel %v, pad %v, stride %v, image %v}", s.Pool.Kernel,
		s.Pool.Pad, s.Pool.Stride, s.Image)
}

func (s avgPool2DGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return tensor.Shape{in[0][0], in[0][1], s.Image[0], s.Image[1]}, nil
}

func (s avgPool2DGradSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{s.Pool, []int{dy}}}
}

func (s avgPool2DGradSpec) program(b program.Builder, x ...program.Value) program.Value {
	return program.AveragePoolGrad(b, x[0], program.Window(s.Pool), s.Image[0], s.Image[1])
}
