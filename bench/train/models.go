package main

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// model is what is trained: the loss of its graph, its solver, its precisions.
type model struct {
	build      func(b *builder) *gorgonia.Node
	solver     func() autograd.Solver
	precisions []vm.Precision
}

// models are the models of train_torch.py.
var models = map[string]model{
	"mlp": {perceptron(64, 64, 128, 10), sgd, []vm.Precision{vm.F32}},
	"mlp-large": {perceptron(1024, 784, 4096, 4096, 4096, 4096, 10), sgd,
		[]vm.Precision{vm.F32, vm.TF32}},
	"cnn":     {digits(64), sgd, []vm.Precision{vm.F32}},
	"convnet": {convnet(256), sgd, []vm.Precision{vm.F32}},
	"nanogpt": {transformer{vocabulary: 65, batch: 12, context: 64, width: 128, heads: 4,
		layers: 4}.loss, adamw, []vm.Precision{vm.F32}},
	"gpt": {transformer{vocabulary: 256, batch: 16, context: 512, width: 1024, heads: 16,
		layers: 8}.loss, adamw, []vm.Precision{vm.BF16}},
	"gpt2": {transformer{vocabulary: 50304, batch: 16, context: 1024, width: 768, heads: 12,
		layers: 12}.loss, adamw, []vm.Precision{vm.BF16}},
	"resnet18": {resnet{batch: 128, filters: 64, stages: []int{2, 2, 2, 2}}.loss, decayed,
		allPrecisions},
	"lstm": {recurrent{vocabulary: 256, batch: 64, steps: 128, hidden: 512, layers: 2}.loss, adam,
		allPrecisions},
}

// allPrecisions are the precisions there are.
var allPrecisions = []vm.Precision{vm.F32, vm.TF32, vm.BF16}

// names lists the models.
func names() []string { return slices.Sorted(maps.Keys(models)) }

// builder makes a graph. Its methods do nothing after an error.
type builder struct {
	graph      *gorgonia.ExprGraph
	learnables gorgonia.Nodes
	random     *rand.Rand
	err        error
}

func newBuilder(seed uint64) *builder {
	return &builder{graph: gorgonia.NewGraph(), random: rand.New(rand.NewPCG(1, seed))}
}

// try returns what a constructor of a node gives, or any node after an error.
func (b *builder) try(n *gorgonia.Node, err error) *gorgonia.Node {
	if b.err == nil {
		b.err = err
	}
	return n
}

// apply is try(f(x)), without a call after an error.
func (b *builder) apply(f func() (*gorgonia.Node, error)) *gorgonia.Node {
	if b.err != nil {
		return nil
	}
	return b.try(f())
}

// variable returns a variable of the data.
func (b *builder) variable(data any, shape ...int) *gorgonia.Node {
	t := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
	return gorgonia.NewTensor(b.graph, t.Dtype(), len(shape), gorgonia.WithShape(shape...),
		gorgonia.WithName(fmt.Sprint("v", len(b.graph.AllNodes()))), gorgonia.WithValue(t))
}

// normal returns a variable of normal numbers.
func (b *builder) normal(deviation float64, shape ...int) *gorgonia.Node {
	data := make([]float32, tensor.Shape(shape).TotalSize())
	for i := range data {
		data[i] = float32(b.random.NormFloat64() * deviation)
	}
	return b.variable(data, shape...)
}

// below returns a variable of integers from 0 to n-1.
func (b *builder) below(n int, shape ...int) *gorgonia.Node {
	data := make([]int, tensor.Shape(shape).TotalSize())
	for i := range data {
		data[i] = b.random.IntN(n)
	}
	return b.variable(data, shape...)
}

// learn returns a learnable of normal numbers.
func (b *builder) learn(deviation float64, shape ...int) *gorgonia.Node {
	n := b.normal(deviation, shape...)
	b.learnables = append(b.learnables, n)
	return n
}

// linear is x w + c for a matrix x.
func (b *builder) linear(x *gorgonia.Node, in, out int) *gorgonia.Node {
	w, c := b.learn(1/math.Sqrt(3*float64(in)), in, out), b.learn(0, 1, out)
	return b.apply(func() (*gorgonia.Node, error) {
		y, err := gorgonia.Mul(x, w)
		if err != nil {
			return nil, err
		}
		return gorgonia.BroadcastAdd(y, c, nil, []byte{0})
	})
}

func (b *builder) relu(x *gorgonia.Node) *gorgonia.Node {
	return b.apply(func() (*gorgonia.Node, error) { return gorgonia.Rectify(x) })
}

// reshape changes the shape.
func (b *builder) reshape(x *gorgonia.Node, shape ...int) *gorgonia.Node {
	return b.apply(func() (*gorgonia.Node, error) { return gorgonia.Reshape(x, shape) })
}

// loss is the cross-entropy of random labels.
func (b *builder) loss(logits *gorgonia.Node, batch, classes int) *gorgonia.Node {
	labels := b.below(classes, batch)
	return b.apply(func() (*gorgonia.Node, error) {
		return nn.CrossEntropy(nn.NoLabel, logits, labels)
	})
}

// perceptron is linear layers with ReLU between them.
func perceptron(batch int, widths ...int) func(b *builder) *gorgonia.Node {
	return func(b *builder) *gorgonia.Node {
		last := len(widths) - 1
		x := b.normal(1, batch, widths[0])
		for i := range last {
			if x = b.linear(x, widths[i], widths[i+1]); i+1 < last {
				x = b.relu(x)
			}
		}
		return b.loss(x, batch, widths[last])
	}
}

// digits is a convolutional network for images of 8x8: two convolutions of 3x3 with pooling, a
// linear layer.
func digits(batch int) func(b *builder) *gorgonia.Node {
	const side, classes = 8, 10
	return func(b *builder) *gorgonia.Node {
		x := b.normal(1, batch, 1, side, side)
		channels, at := 1, side
		for _, out := range []int{8, 16} {
			x = b.convolution(x, channels, out)
			c := b.learn(0, 1, out, 1, 1)
			x = b.apply(func() (*gorgonia.Node, error) {
				return gorgonia.BroadcastAdd(x, c, nil, []byte{0, 2, 3})
			})
			x = b.pool(b.relu(x))
			channels, at = out, at/2
		}
		return b.loss(b.linear(b.reshape(x, batch, channels*at*at), channels*at*at, classes), batch,
			classes)
	}
}

// convolution is one of 3x3, without a bias.
func (b *builder) convolution(x *gorgonia.Node, in, out int) *gorgonia.Node {
	w := b.learn(1/math.Sqrt(27*float64(in)), out, in, 3, 3)
	return b.apply(func() (*gorgonia.Node, error) {
		return gorgonia.Conv2d(x, w, tensor.Shape{3, 3}, []int{1, 1}, []int{1, 1}, []int{1, 1})
	})
}

// pool takes the largest of each 2x2 pixels.
func (b *builder) pool(x *gorgonia.Node) *gorgonia.Node {
	return b.apply(func() (*gorgonia.Node, error) {
		return gorgonia.MaxPool2D(x, tensor.Shape{2, 2}, []int{0, 0}, []int{2, 2})
	})
}

// convnet is Gorgonia's example: three convolutions of 3x3 with pooling, two linear layers, dropout
// left out.
func convnet(batch int) func(b *builder) *gorgonia.Node {
	const side, hidden, classes = 28, 625, 10
	return func(b *builder) *gorgonia.Node {
		x := b.normal(1, batch, 1, side, side)
		channels, at := 1, side
		for _, out := range []int{32, 64, 128} {
			x = b.pool(b.relu(b.convolution(x, channels, out)))
			channels, at = out, at/2
		}
		x = b.reshape(x, batch, channels*at*at)
		x = b.relu(b.linear(x, channels*at*at, hidden))
		return b.loss(b.linear(x, hidden, classes), batch, classes)
	}
}
