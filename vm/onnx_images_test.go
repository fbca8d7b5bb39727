package vm_test

import (
	"slices"

	"github.com/euryale-ml/euryale/ops/nn"
)

// imageKinds are convolutions and pools.
var imageKinds = onnxKinds{
	"Conv": func(c *onnxCase) (nodes, error) {
		conv := map[int]func(o nn.ConvOptions, x, w, bias node) (node, error){
			1: nn.Conv1D, 2: nn.Conv2D, 3: nn.Conv3D}[c.nodes[0].Dims()-2]
		o := c.convolution()
		if _, same := c.Attrs["auto_pad"]; same {
			o.Pad = c.samePad(c.nodes[1].Shape()[2:])
		}
		return result(conv(o, c.nodes[0], c.nodes[1], c.bias()))
	},
	"ConvTranspose": func(c *onnxCase) (nodes, error) {
		o := c.convolution()
		o.OutputPad = c.list("output_padding")
		c.padTransposed(&o)
		return result(nn.ConvTranspose2D(o, c.nodes[0], c.nodes[1], c.bias()))
	},
	"MaxPool": onnxPool(nn.MaxPool2D), "AveragePool": onnxPool(nn.AvgPool2D),
}

func (c *onnxCase) bias() node {
	if len(c.nodes) == 3 {
		return c.nodes[2]
	}
	return nil
}

func (c *onnxCase) convolution() nn.ConvOptions {
	return nn.ConvOptions{Stride: c.list("strides"), Dilation: c.list("dilations"),
		Pad: c.list("pads"), Groups: c.int("group", 0)}
}

// samePad returns the padding of auto_pad.
func (c *onnxCase) samePad(kernel []int) []int {
	how, _ := c.Attrs["auto_pad"].(string)
	if how != "SAME_UPPER" && how != "SAME_LOWER" {
		return nil
	}
	pad, err := nn.SamePad(how == "SAME_LOWER", c.nodes[0].Shape()[2:], kernel,
		c.list("strides"), c.list("dilations"))
	if err != nil {
		c.t.Fatal(err)
	}
	return pad
}

// padTransposed finds the padding with which results have a shape, as ONNX says.
func (c *onnxCase) padTransposed(o *nn.ConvOptions) {
	how, _ := c.Attrs["auto_pad"].(string)
	shape := c.list("output_shape")
	if shape == nil && how != "SAME_UPPER" && how != "SAME_LOWER" {
		return
	}
	image, kernel := c.nodes[0].Shape()[2:], c.nodes[1].Shape()[2:]
	o.Pad, o.OutputPad = make([]int, 4), make([]int, 2)
	for i := range 2 {
		stride, dilation := 1, 1
		if o.Stride != nil {
			stride = o.Stride[i]
		}
		if o.Dilation != nil {
			dilation = o.Dilation[i]
		}
		n := image[i] * stride
		if shape != nil {
			n = shape[i]
		}
		all := (image[i]-1)*stride + (kernel[i]-1)*dilation + 1 - n
		o.OutputPad[i], all = max(-all, 0), max(all, 0)
		o.Pad[i], o.Pad[2+i] = all-all/2, all/2
		if how == "SAME_UPPER" {
			o.Pad[i], o.Pad[2+i] = o.Pad[2+i], o.Pad[i]
		}
	}
}

// onnxPool builds a pool of images.
func onnxPool(pool func(kernel, pad, stride [2]int, x node,
	options ...nn.PoolOptions) (node, error)) func(*onnxCase) (nodes, error) {
	return func(c *onnxCase) (nodes, error) {
		kernel, stride := [2]int(c.list("kernel_shape")), [2]int{1, 1}
		if s := c.list("strides"); s != nil {
			stride = [2]int(s)
		}
		pad := c.list("pads")
		if pad == nil {
			pad = slices.Concat(c.samePad(kernel[:]), []int{0, 0, 0, 0})[:4]
		}
		o := nn.PoolOptions{After: (*[2]int)(pad[2:]), Ceil: c.int("ceil_mode", 0) != 0,
			ExcludePad: c.Op == "AveragePool" && c.int("count_include_pad", 0) == 0}
		if d := c.list("dilations"); d != nil {
			o.Dilation = [2]int(d)
		}
		return result(pool(kernel, [2]int(pad[:2]), stride, c.nodes[0], o))
	}
}
