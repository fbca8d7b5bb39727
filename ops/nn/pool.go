package nn

import (
	"fmt"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/ops"
)

// PoolOptions are further options of pools, for height and width. The zero value is the pool of
// PyTorch without arguments.
type PoolOptions struct {
	// After is the padding behind the image, if it differs from the padding before it; nil is the
	// same.
	After *[2]int
	// Dilation is the distance between the pixels of a window; 0 is 1.
	Dilation [2]int
	// Ceil adds a last window that begins inside of the image or of the padding before it, and goes
	// beyond the padding behind it.
	Ceil bool
	// ExcludePad makes means divide by the number of pixels inside of the image: ONNX's
	// count_include_pad 0.
	ExcludePad bool
}

// MaxPool2D returns the largest pixels of windows of images. kernel, pad and stride are for height
// and width. Pixels of the padding are never the largest.
//
//	in   x  [b, c, h, w]
//	out  y  [b, c, h', w']   see [AvgPool2D]
//
// NaN is the largest, as in PyTorch, and a window of -Inf is -Inf.
//
// Gradient: dy is added to the largest pixel of its window: the first of several, or the last NaN.
// Cost: a pass over the windows, forward and backward.
// Errors: those of [AvgPool2D]. Gradients cannot be differentiated again.
func MaxPool2D(kernel, pad, stride [2]int, x *gorgonia.Node,
	options ...PoolOptions) (*gorgonia.Node, error) {
	s, err := poolOf("MaxPool2D", kernel, pad, stride, x, options)
	if err != nil {
		return nil, err
	}
	return build("MaxPool2D", "x", maxPool2DSpec{s.Window}, x)
}

// AvgPool2D returns the means of windows of images. kernel, pad and stride are for height and
// width. The padding counts as zeros, and every mean divides by the whole kernel, as in PyTorch.
// Options change this; of several the last counts.
//
//	in   x  [b, c, h, w]
//	out  y  [b, c, h', w']   h' = (h + padding - dilation*(kernel-1) - 1)/stride + 1, rounded
//	                         down, or up with Ceil, with the padding of both sides; w' likewise
//
// Gradient: dy, divided by the size of the kernel, is added to every pixel of its window, in the
// order of the windows.
// Cost: a pass over the windows, and memory for their pixels, forward and backward.
// Errors: [ops.ErrShape] if x is not of 4 axes or the kernel does not fit into the padded image;
// [backend.ErrArgument] if a kernel, stride or dilation is less than 1, or a padding is negative or
// as large as the window; [ops.ErrDType].
func AvgPool2D(kernel, pad, stride [2]int, x *gorgonia.Node,
	options ...PoolOptions) (*gorgonia.Node, error) {
	s, err := poolOf("AvgPool2D", kernel, pad, stride, x, options)
	if err != nil {
		return nil, err
	}
	return build("AvgPool2D", "x", s, x)
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
	kernel := [2]int{1, 1}
	if x != nil && len(x.Shape()) == 4 {
		kernel = [2]int(x.Shape()[2:])
	}
	s, err := poolOf("GlobalAvgPool2D", kernel, [2]int{}, [2]int{1, 1}, x, nil)
	if err != nil {
		return nil, err
	}
	return build("GlobalAvgPool2D", "x", s, x)
}

// poolOf returns the pool that options describe. That of no image is none: build says so.
func poolOf(name string, kernel, pad, stride [2]int, x *gorgonia.Node,
	options []PoolOptions) (s avgPool2DSpec, err error) {
	if x == nil {
		return s, nil
	}
	image := x.Shape()
	if len(image) != 4 {
		return s, fmt.Errorf("nn: %s: %w: x has shape %v, want (b, c, h, w)", name, ops.ErrShape,
			image)
	}
	var o PoolOptions
	for _, o = range options {
	}
	w := program.Window{Kernel: kernel, Pad: pad, After: pad, Stride: stride, Dilation: o.Dilation}
	if o.After != nil {
		w.After = *o.After
	}
	s.Exclude = o.ExcludePad
	s.Padded = w.After
	for i := range 2 {
		if w.Dilation[i] == 0 {
			w.Dilation[i] = 1
		}
		reach, n := w.Reach(i), image[2+i]
		if kernel[i] < 1 || stride[i] < 1 || w.Dilation[i] < 1 || min(pad[i], w.After[i]) < 0 ||
			max(pad[i], w.After[i]) >= reach {
			return s, fmt.Errorf("nn: %s: %w: kernel %v, pad %v and %v, stride %v, dilation %v",
				name, backend.ErrArgument, kernel, pad, w.After, stride, w.Dilation)
		}
		room := n + pad[i] + w.After[i] - reach
		if room < 0 {
			return s, fmt.Errorf("nn: %s: %w: kernel %v does not fit into %v with pad %v", name,
				ops.ErrShape, kernel, image, pad)
		}
		last := (room + stride[i] - 1) / stride[i] * stride[i]
		if o.Ceil && last < n+pad[i] {
			w.After[i] += last - room
		}
	}
	s.Window = w
	return s, nil
}

// avgPool2DSpec is [AvgPool2D]. Padded is the padding behind the image that counts in means, as
// that before it does, unless all padding is excluded.
type avgPool2DSpec struct {
	program.Window
	Padded  [2]int
	Exclude bool
}

// String returns "AvgPool2D{kernel [2 2], pad [1 1 1 1], stride [2 2], dilation [1 1], counted
// [1 1 1 1]}".
func (s avgPool2DSpec) String() string {
	return "AvgPool2D" + s.text()
}

func (s avgPool2DSpec) text() string {
	return fmt.Sprintf("%s, counted %v}", strings.TrimSuffix(windowText(s.Window), "}"), s.border())
}

func windowText(w program.Window) string {
	return fmt.Sprintf("{kernel %v, pad %v, stride %v, dilation %v}", w.Kernel,
		append(w.Pad[:], w.After[:]...), w.Stride, w.Dilation)
}

func (s avgPool2DSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return pooled(s.Window, in), nil
}

// pooled returns the shape of the results of images.
func pooled(w program.Window, in []tensor.Shape) tensor.Shape {
	rows, columns := w.Places(in[0][2], in[0][3])
	return tensor.Shape{in[0][0], in[0][1], rows, columns}
}

func (s avgPool2DSpec) gradients(in []tensor.Shape) []gradient {
	return []gradient{{avgPool2DGradSpec{s, [2]int(in[0][2:])}, []int{dy}}}
}

func (s avgPool2DSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return program.AveragePool(b, x[0], s.Window, s.border())
}

func (s avgPool2DSpec) border() program.Border {
	if s.Exclude {
		return program.Border{}
	}
	return program.Border{s.Pad[0], s.Pad[1], s.Padded[0], s.Padded[1]}
}

// avgPool2DGradSpec is the gradient of the pooling of images of a height and width, from dy.
type avgPool2DGradSpec struct {
	Pool  avgPool2DSpec
	Image [2]int
}

// String returns "AvgPool2DGrad{kernel [2 2], ...} of [28 28]".
func (s avgPool2DGradSpec) String() string {
	return fmt.Sprintf("AvgPool2DGrad%s of %v", s.Pool.text(), s.Image)
}

func (s avgPool2DGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return tensor.Shape{in[0][0], in[0][1], s.Image[0], s.Image[1]}, nil
}

func (s avgPool2DGradSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{s.Pool, []int{dy}}}
}

func (s avgPool2DGradSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return program.AveragePoolGrad(b, x[0], s.Pool.Window, s.Pool.border(), s.Image[0], s.Image[1])
}

// maxPool2DSpec is [MaxPool2D].
type maxPool2DSpec struct{ program.Window }

// String returns "MaxPool2D{kernel [2 2], pad [0 0 0 0], stride [2 2], dilation [1 1]}".
func (s maxPool2DSpec) String() string { return "MaxPool2D" + windowText(s.Window) }

func (s maxPool2DSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return pooled(s.Window, in), nil
}

func (s maxPool2DSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{maxPool2DGradSpec(s), []int{0, dy}}}
}

func (s maxPool2DSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return b.MaxPool(s.Window, x[0])
}

// maxPool2DGradSpec is the gradient of [maxPool2DSpec], from x and dy.
type maxPool2DGradSpec struct{ program.Window }

// String returns "MaxPool2DGrad{kernel [2 2], pad [0 0 0 0], stride [2 2], dilation [1 1]}".
func (s maxPool2DGradSpec) String() string { return "MaxPool2DGrad" + windowText(s.Window) }

func (s maxPool2DGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return in[0].Clone(), nil
}

func (s maxPool2DGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s maxPool2DGradSpec) program(b *program.Builder, x ...program.Value) program.Value {
	return b.MaxPoolGrad(s.Window, x[0], x[1])
}
