package nn

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
)

// convCase is a convolution of small operands.
type convCase struct {
	x, w       []int
	transposed bool
	bias       bool
	o          ConvOptions
}

func (c convCase) build() builder {
	return func(n gorgonia.Nodes) (*gorgonia.Node, error) {
		var bias *gorgonia.Node
		if c.bias {
			bias = n[2]
		}
		switch {
		case c.transposed:
			return ConvTranspose2D(c.o, n[0], n[1], bias)
		case len(c.x) == 3:
			return Conv1D(c.o, n[0], n[1], bias)
		case len(c.x) == 4:
			return Conv2D(c.o, n[0], n[1], bias)
		}
		return Conv3D(c.o, n[0], n[1], bias)
	}
}

// operands are x, w and, if there is one, the bias.
func (c convCase) operands() []operand {
	all := []operand{normal(1, c.x...), normal(2, c.w...)}
	if c.bias {
		n := c.w[0]
		if c.transposed {
			n = c.w[1] * max(c.o.Groups, 1)
		}
		all = append(all, normal(3, n))
	}
	return all
}

func convCases() []convCase {
	list := func(n ...int) []int { return n }
	return []convCase{
		{x: list(2, 3, 5, 6), w: list(4, 3, 3, 2), bias: true},
		{x: list(2, 4, 6, 7), w: list(6, 2, 3, 3),
			o: ConvOptions{Groups: 2, Pad: list(1, 0, 2, 1), Stride: list(2, 1)}},
		{x: list(1, 4, 7, 6), w: list(4, 1, 3, 3), bias: true,
			o: ConvOptions{Groups: 4, Pad: list(1, 1)}},
		{x: list(2, 3, 7, 6), w: list(6, 1, 2, 3),
			o: ConvOptions{Groups: 3, Pad: list(1, 2), Stride: list(2, 3), Dilation: list(2, 1)}},
		{x: list(2, 2, 9, 8), w: list(3, 2, 2, 3),
			o: ConvOptions{Dilation: list(3, 2), Stride: list(2, 2), Pad: list(0, 1, 3, 0)}},
		{x: list(2, 4, 9), w: list(6, 2, 3), bias: true,
			o: ConvOptions{Groups: 2, Stride: list(2), Pad: list(2, 1), Dilation: list(2)}},
		{x: list(1, 2, 4, 5, 4), w: list(4, 1, 2, 3, 2), bias: true,
			o: ConvOptions{Groups: 2, Stride: list(2, 1, 2), Pad: list(1, 0, 1)}},
		{x: list(2, 2, 5, 4, 3), w: list(2, 2, 3, 2, 2),
			o: ConvOptions{Dilation: list(2, 1, 1), Pad: list(2, 1, 0, 1, 0, 1)}},
		{x: list(2, 3, 4, 3), w: list(3, 2, 3, 2), bias: true, transposed: true},
		{x: list(2, 4, 3, 4), w: list(4, 3, 3, 3), bias: true, transposed: true,
			o: ConvOptions{Groups: 2, Stride: list(2, 3), Pad: list(1, 0, 0, 1),
				OutputPad: list(1, 2)}},
		{x: list(1, 3, 3, 3), w: list(3, 1, 2, 2), transposed: true,
			o: ConvOptions{Groups: 3, Dilation: list(3, 2), OutputPad: list(2, 1)}},
	}
}

// TestConvolutionsDifferentiate: results and gradients of both machines, and gradients of
// gradients.
func TestConvolutionsDifferentiate(t *testing.T) {
	for _, c := range convCases() {
		checkGradient(t, c.operands(), c.build())
	}
}

// TestASequenceIsAVolumeOfOneLine: axes that a convolution does not have are of length 1, and are
// passed over in steps of 1.
func TestASequenceIsAVolumeOfOneLine(t *testing.T) {
	c := convCase{x: []int{1, 1, 5}, w: []int{1, 1, 3}, o: ConvOptions{Stride: []int{2}}}
	_, _, y := graph(t, tensor.Float32, c.operands(), c.build())
	s := y.Op().(*Op).spec.(convSpec)
	if want := (convSpec{Axes: 1, Image: [3]int{1, 1, 5}, Kernel: [3]int{1, 1, 3},
		Stride: [3]int{1, 1, 2}, Dilation: [3]int{1, 1, 1}, Groups: 1, Pass: s.Pass}); s != want {
		t.Errorf("%+v, want %+v", s, want)
	}
}

// TestConvolutionsThatDifferAreNotMerged: every option is part of the operation.
func TestConvolutionsThatDifferAreNotMerged(t *testing.T) {
	options := []ConvOptions{
		{}, {Stride: []int{2, 1}}, {Dilation: []int{1, 2}}, {Pad: []int{1, 1}},
		{Pad: []int{1, 1, 1, 0}}, {Pad: []int{1, 0, 1, 0}},
	}
	in := []operand{normal(1, 1, 2, 6, 6), normal(2, 2, 2, 3, 3)}
	var builds []builder
	for _, o := range options {
		builds = append(builds, convCase{x: in[0].shape, w: in[1].shape, o: o}.build(),
			convCase{x: in[0].shape, w: in[1].shape, o: o, transposed: true}.build())
	}
	checkDistinct(t, in, builds...)
}

func TestConvolutionErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	n := func(name string, shape ...int) *gorgonia.Node {
		return count(shape...).node(g, name, tensor.Float64)
	}
	x, w := n("x", 1, 4, 5, 5), n("w", 4, 2, 3, 3)
	for _, test := range []struct {
		o     ConvOptions
		wraps error
		says  string
	}{
		{ConvOptions{}, ops.ErrShape, "does not fit in 0 groups"},
		{ConvOptions{Groups: 3}, ops.ErrShape, "does not fit in 3 groups"},
		{ConvOptions{Groups: 2, Stride: []int{0, 1}}, backend.ErrArgument, "options {Stride:[0 1]"},
		{ConvOptions{Groups: 2, Pad: []int{1, 2, 3}}, backend.ErrArgument, "of 2 axes"},
		{ConvOptions{Groups: 2, OutputPad: []int{1, 1}}, backend.ErrArgument, "OutputPad:[1 1]"},
		{ConvOptions{Groups: 2, Dilation: []int{3, 1}}, ops.ErrShape, "nothing is left"},
	} {
		_, err := Conv2D(test.o, x, w, nil)
		checkRefused(t, err, test.wraps, test.says)
	}
	_, err := Conv2D(ConvOptions{Groups: 2}, x, w, n("bias", 3))
	checkRefused(t, err, ops.ErrShape, "bias has shape (3), want (4)")
	_, err = ConvTranspose2D(ConvOptions{OutputPad: []int{0, 1}}, x, w, nil)
	checkRefused(t, err, backend.ErrArgument, "it is less than stride or dilation")
	_, err = Conv1D(ConvOptions{}, x, w, nil)
	checkRefused(t, err, ops.ErrShape, "want 3 axes each")
	_, err = SamePad(false, []int{3}, []int{0}, nil, nil)
	checkRefused(t, err, backend.ErrArgument, "kernel [0]")
}

// poolCase is a pool of images of a size.
type poolCase struct {
	image, kernel, pad, stride [2]int
	o                          PoolOptions
}

func (c poolCase) build(largest bool) builder {
	return one(func(x *gorgonia.Node) (*gorgonia.Node, error) {
		if largest {
			return MaxPool2D(c.kernel, c.pad, c.stride, x, c.o)
		}
		return AvgPool2D(c.kernel, c.pad, c.stride, x, c.o)
	})
}

func poolCases() []poolCase {
	type two = [2]int
	return []poolCase{
		{two{5, 4}, two{2, 2}, two{}, two{2, 2}, PoolOptions{Ceil: true}},
		{two{6, 7}, two{3, 2}, two{1, 0}, two{2, 2}, PoolOptions{Ceil: true}},
		{two{5, 6}, two{3, 3}, two{0, 1}, two{1, 2}, PoolOptions{After: &two{2, 0}}},
		{two{7, 6}, two{2, 3}, two{1, 2}, two{2, 1}, PoolOptions{Dilation: two{3, 2}}},
		{two{5, 5}, two{3, 3}, two{1, 1}, two{2, 2}, PoolOptions{ExcludePad: true}},
		{two{6, 5}, two{3, 2}, two{2, 1}, two{3, 2},
			PoolOptions{ExcludePad: true, Ceil: true, After: &two{1, 1}}},
		{two{3, 3}, two{3, 3}, two{}, two{1, 1}, PoolOptions{}},
	}
}

// TestPoolsDifferentiate: results and gradients of both machines.
func TestPoolsDifferentiate(t *testing.T) {
	var builds, largest []builder
	for _, c := range poolCases() {
		checkGradient(t, []operand{normal(1, 1, 2, c.image[0], c.image[1])}, c.build(true))
		checkGradient(t, []operand{normal(1, 1, 2, c.image[0], c.image[1])}, c.build(false))
		builds, largest = append(builds, c.build(false)), append(largest, c.build(true))
	}
	checkDistinct(t, []operand{count(1, 1, 7, 7)}, builds...)
	checkDistinct(t, []operand{count(1, 1, 7, 7)}, largest[:3]...)
}
