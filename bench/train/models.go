package main

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// model is what is trained: the loss of its graph, its solver, its precisions.
type model struct {
	build      func(b *builder) *gorgonia.Node
	solver     func() solver.Solver
	precisions []vm.Precision
	gpt        *transformer // that build is the loss of, nil for other models
}

// gpt is the model of a transformer.
func gpt(t transformer, p vm.Precision) model {
	return model{t.loss, adamw, []vm.Precision{p}, &t}
}

// resized returns a model with so many layers and samples, each 0 for its own, if it is a GPT.
func (m model) resized(layers, batch int) model {
	if m.gpt == nil {
		return m
	}
	t := *m.gpt
	t.layers, t.batch = cmp.Or(layers, t.layers), cmp.Or(batch, t.batch)
	m.build = t.loss
	return m
}

// models are the models of train_torch.py.
var models = map[string]model{
	"mlp": {perceptron(64, 64, 128, 10), sgd, []vm.Precision{vm.F32}, nil},
	"mlp-large": {perceptron(1024, 784, 4096, 4096, 4096, 4096, 10), sgd,
		[]vm.Precision{vm.F32, vm.TF32}, nil},
	"cnn":     {digits(64), sgd, []vm.Precision{vm.F32}, nil},
	"convnet": {convnet(256), sgd, []vm.Precision{vm.F32}, nil},
	"nanogpt": gpt(transformer{vocabulary: 65, batch: 12, context: 64, width: 128, heads: 4,
		layers: 4}, vm.F32),
	"gpt": gpt(transformer{vocabulary: 256, batch: 16, context: 512, width: 1024, heads: 16,
		layers: 8}, vm.BF16),
	"gpt2": gpt(transformer{vocabulary: 50304, batch: 16, context: 1024, width: 768, heads: 12,
		layers: 12}, vm.BF16),
	"gpt-1b3": gpt(transformer{vocabulary: 50304, batch: 2, context: 1024, width: 2048, heads: 16,
		layers: 24}, vm.BF16),
	"resnet18": {resnet{batch: 128, filters: 64, stages: []int{2, 2, 2, 2}}.loss, decayed,
		allPrecisions, nil},
	"lstm": {recurrent{vocabulary: 256, batch: 64, steps: 128, hidden: 512, layers: 2}.loss, adam,
		allPrecisions, nil},
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
	unset      bool // variables get no values
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

// empty returns a variable without a value.
func (b *builder) empty(dt tensor.Dtype, shape ...int) *gorgonia.Node {
	return gorgonia.NewTensor(b.graph, dt, len(shape), gorgonia.WithShape(shape...),
		gorgonia.WithName(fmt.Sprint("v", len(b.graph.AllNodes()))))
}

// distinct is how many elements of a variable are drawn: larger ones repeat them, since a second
// for each 100 M elements would be most of the time of a measurement.
const distinct = 1<<20 - 3

// normal returns a variable of normal numbers.
func (b *builder) normal(deviation float64, shape ...int) *gorgonia.Node {
	if b.unset {
		return b.empty(tensor.Float32, shape...)
	}
	data := make([]float32, tensor.Shape(shape).TotalSize())
	for i := range data[:min(len(data), distinct)] {
		data[i] = float32(b.random.NormFloat64() * deviation)
	}
	for i := distinct; i < len(data); i += distinct {
		copy(data[i:], data[:distinct])
	}
	return b.variable(data, shape...)
}

// below returns a variable of integers from 0 to n-1.
func (b *builder) below(n int, shape ...int) *gorgonia.Node {
	if b.unset {
		return b.empty(tensor.Int, shape...)
	}
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
