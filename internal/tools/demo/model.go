package main

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/handwritten"
	"github.com/euryale-ml/euryale/vm"
)

const (
	side   = handwritten.Side
	pixels = handwritten.Pixels
	labels = handwritten.Labels
)

// network is a graph of a model for batches of one size.
type network struct {
	g      *gorgonia.ExprGraph
	x, y   *gorgonia.Node // pixels [batch, 1, 8, 8] or [batch, 64]; labels, one-hot [batch, 10]
	params gorgonia.Nodes
	logits *gorgonia.Node // [batch, 10]
	loss   *gorgonia.Node // mean cross-entropy of the batch
}

// hook wraps a parameter where the model uses it.
type hook func(w *gorgonia.Node) (*gorgonia.Node, error)

// unhooked is the hook of a graph that is not trained.
func unhooked(w *gorgonia.Node) (*gorgonia.Node, error) { return w, nil }

// architecture is a kind of model.
type architecture struct {
	shapes  [][]int // of the parameters, weights and biases by turns
	input   []int   // shape of one image
	forward func(n *network, use hook) (*gorgonia.Node, error)
}

// architectureOf returns the model of a name.
func architectureOf(name string) (architecture, error) {
	switch name {
	case "mlp":
		return architecture{[][]int{{pixels, 128}, {1, 128}, {128, labels}, {1, labels}},
			[]int{pixels}, mlp}, nil
	case "cnn":
		return architecture{[][]int{{8, 1, 3, 3}, {1, 8, 1, 1}, {16, 8, 3, 3}, {1, 16, 1, 1},
			{pixels, labels}, {1, labels}}, []int{1, side, side}, cnn}, nil
	}
	return architecture{}, fmt.Errorf("unknown model %q: use mlp or cnn", name)
}

// weights returns the initial values of the parameters: uniform by fan-in (He et
// al., 2015), biases zero.
func (a architecture) weights(seed uint64) []*tensor.Dense {
	rng := rand.New(rand.NewPCG(seed, 1))
	all := make([]*tensor.Dense, len(a.shapes))
	for i, s := range a.shapes {
		data := make([]float32, tensor.Shape(s).TotalSize())
		fanIn := s[0]
		if len(s) == 4 {
			fanIn = s[1] * s[2] * s[3]
		}
		bound := float32(math.Sqrt(6 / float64(fanIn)))
		for j := range data {
			if i%2 == 0 {
				data[j] = (2*rng.Float32() - 1) * bound
			}
		}
		all[i] = tensor.New(tensor.WithShape(s...), tensor.WithBacking(data))
	}
	return all
}

// newNetwork makes the inputs and the parameters of a graph. Graphs with the
// same values share them.
func newNetwork(a architecture, values []*tensor.Dense, batch int) *network {
	n := &network{g: gorgonia.NewGraph()}
	n.x = input(n.g, "x", append([]int{batch}, a.input...)...)
	n.y = input(n.g, "y", batch, labels)
	for i, v := range values {
		name := fmt.Sprintf("w%d", i/2+1)
		if i%2 == 1 {
			name = fmt.Sprintf("b%d", i/2+1)
		}
		n.params = append(n.params, gorgonia.NewTensor(n.g, tensor.Float32, v.Dims(),
			gorgonia.WithName(name), gorgonia.WithShape(v.Shape()...), gorgonia.WithValue(v)))
	}
	return n
}

func input(g *gorgonia.ExprGraph, name string, shape ...int) *gorgonia.Node {
	return gorgonia.NewTensor(g, tensor.Float32, len(shape), gorgonia.WithName(name),
		gorgonia.WithShape(shape...),
		gorgonia.WithValue(tensor.New(tensor.WithShape(shape...), tensor.Of(tensor.Float32))))
}

// build makes the rest of the graph.
func (n *network) build(a architecture, use hook) (err error) {
	if n.logits, err = a.forward(n, use); err != nil {
		return fmt.Errorf("build the model: %w", err)
	}
	if n.loss, err = crossEntropy(n.logits, n.y); err != nil {
		return fmt.Errorf("build the loss: %w", err)
	}
	return nil
}

// machines are what can run a network: its loss, its logits and, if it is trained, its
// gradients.
var machines = map[string]func(n *network, on backend.Device, options ...vm.Option) (gorgonia.VM,
	error){
	"plan": func(n *network, on backend.Device, options ...vm.Option) (gorgonia.VM, error) {
		return vm.New(n.g, on, append(options, vm.Keep(n.logits))...)
	},
	"tape": func(n *network, _ backend.Device, _ ...vm.Option) (gorgonia.VM, error) {
		return gorgonia.NewTapeMachine(n.g), nil
	},
}

// mlp has one hidden layer.
func mlp(n *network, use hook) (*gorgonia.Node, error) {
	h, err := dense(n.x, n.params[0], n.params[1], use)
	if err != nil {
		return nil, err
	}
	if h, err = gorgonia.Rectify(h); err != nil {
		return nil, err
	}
	return dense(h, n.params[2], n.params[3], use)
}

// cnn has two layers of convolution and pooling, 8x8 to 4x4 to 2x2.
func cnn(n *network, use hook) (*gorgonia.Node, error) {
	h, err := convolution(n.x, n.params[0], n.params[1], use)
	if err != nil {
		return nil, err
	}
	if h, err = convolution(h, n.params[2], n.params[3], use); err != nil {
		return nil, err
	}
	if h, err = gorgonia.Reshape(h, tensor.Shape{n.x.Shape()[0], pixels}); err != nil {
		return nil, err
	}
	return dense(h, n.params[4], n.params[5], use)
}

// dense is x w + b.
func dense(x, w, b *gorgonia.Node, use hook) (*gorgonia.Node, error) {
	w, err := use(w)
	if err != nil {
		return nil, err
	}
	y, err := gorgonia.Mul(x, w)
	if err != nil {
		return nil, err
	}
	if b, err = use(b); err != nil {
		return nil, err
	}
	return gorgonia.BroadcastAdd(y, b, nil, []byte{0})
}

// convolution is a 3x3 convolution with a bias, a rectifier, and 2x2 pooling.
func convolution(x, w, b *gorgonia.Node, use hook) (*gorgonia.Node, error) {
	w, err := use(w)
	if err != nil {
		return nil, err
	}
	one, two := []int{1, 1}, []int{2, 2}
	y, err := gorgonia.Conv2d(x, w, tensor.Shape{3, 3}, one, one, one)
	if err != nil {
		return nil, err
	}
	if b, err = use(b); err != nil {
		return nil, err
	}
	if y, err = gorgonia.BroadcastAdd(y, b, nil, []byte{0, 2, 3}); err != nil {
		return nil, err
	}
	if y, err = gorgonia.Rectify(y); err != nil {
		return nil, err
	}
	return gorgonia.MaxPool2D(y, tensor.Shape{2, 2}, []int{0, 0}, two)
}

// crossEntropy is the mean over the batch of -log softmax(logits)[label].
func crossEntropy(logits, y *gorgonia.Node) (*gorgonia.Node, error) {
	logp, err := gorgonia.LogSoftMax(logits, 1)
	if err != nil {
		return nil, err
	}
	hit, err := gorgonia.HadamardProd(logp, y)
	if err != nil {
		return nil, err
	}
	sum, err := gorgonia.Sum(hit, 1)
	if err != nil {
		return nil, err
	}
	mean, err := gorgonia.Mean(sum)
	if err != nil {
		return nil, err
	}
	return gorgonia.Neg(mean)
}

// feed puts samples into the inputs. Where there are fewer than the batch, the rest is
// zeros.
func (n *network) feed(from handwritten.Samples, which []int) error {
	return errors.Join(
		autograd.Rows(n.x.Value().(*tensor.Dense), from.Images, which),
		autograd.Rows(n.y.Value().(*tensor.Dense), from.Labels, which),
	)
}

// correct counts the images of the batch that the last run has classified right.
func (n *network) correct(from handwritten.Samples, which []int) int {
	logits := n.logits.Value().Data().([]float32)
	count := 0
	for i, j := range which {
		if argmax(logits[i*labels:(i+1)*labels]) == from.Classes[j] {
			count++
		}
	}
	return count
}

func argmax(xs []float32) int {
	best := 0
	for i, x := range xs {
		if x > xs[best] {
			best = i
		}
	}
	return best
}
