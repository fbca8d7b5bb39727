package vm_test

import (
	"errors"
	"strings"
	"testing"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// incomplete is a graph for a batch of 4 that may have missing samples.
type incomplete struct {
	g                     *G.ExprGraph
	x, images, words      node // [4, 6], [4, 2, 5, 5], [4, 3]
	labels, weights, mean node // [4], [4], []
}

func newIncomplete() *incomplete {
	c := &incomplete{g: G.NewGraph()}
	variable := func(name string, dt tensor.Dtype, shape ...int) node {
		return G.NewTensor(c.g, dt, len(shape), G.WithShape(shape...), G.WithName(name),
			G.WithInit(G.Zeroes()))
	}
	c.x, c.images = variable("x", G.Float32, 4, 6), variable("images", G.Float32, 4, 2, 5, 5)
	c.words, c.labels = variable("words", G.Int, 4, 3), variable("labels", G.Int, 4)
	c.weights = variable("weights", G.Float32, 4)
	c.mean = G.NewScalar(c.g, G.Float32, G.WithName("weight"), G.WithValue(float32(0)))
	return c
}

func (c *incomplete) learn(name string, shape ...int) node {
	return G.NewTensor(c.g, G.Float32, len(shape), G.WithShape(shape...), G.WithName(name),
		G.WithInit(G.Zeroes()))
}

// weighted is the sum of the samples' errors times their weights, of y [4, ...].
func (c *incomplete) weighted(y node) node {
	errs := square(reshape(y, tensor.Shape{4, y.Shape().TotalSize() / 4}))
	return sum(times(sum(errs, 1), c.weights))
}

// labelled is a cross-entropy of y [4, n], of which missing samples have no label.
func (c *incomplete) labelled(y node) node {
	return mul(c.mean, must(nn.CrossEntropy(nn.NoLabel, y, c.labels)))
}

// TestSamplesThatAreMixedAreFound: a loss that missing samples would change is refused, by the name
// of the node; other losses are not.
func TestSamplesThatAreMixedAreFound(t *testing.T) {
	for name, c := range map[string]struct {
		loss    func(c *incomplete) node
		refused string
	}{
		"weights": {loss: func(c *incomplete) node { return c.weighted(c.x) }},
		"inner product": {loss: func(c *incomplete) node {
			return mul(sum(c.x, 1), c.weights)
		}},
		"labels": {loss: func(c *incomplete) node { return c.labelled(c.x) }},
		"smoothed labels": {loss: func(c *incomplete) node {
			o := nn.CrossEntropyOptions{Smoothing: 0.1, Reduction: nn.SumOfRows}
			return mul(c.mean, must(nn.CrossEntropyWith(o, c.x, c.labels)))
		}},
		"softmax, chosen by labels": {loss: func(c *incomplete) node {
			p := must(nn.LogSoftMax(1, mul(c.x, c.learn("w", 6, 3))))
			return c.weighted(must(nn.GatherElements(1, p, reshape(c.labels, tensor.Shape{4, 1}))))
		}},
		"norms of samples": {loss: func(c *incomplete) node {
			y := must(nn.LayerNorm(1e-5, c.x, c.learn("gain", 6), c.learn("bias", 6)))
			return c.labelled(must(nn.Dropout(0.5, nn.NewRandom(1), must(nn.GELU(y)))))
		}},
		"images": {loss: func(c *incomplete) node {
			y := must(G.Conv2d(c.images, c.learn("w", 3, 2, 3, 3), tensor.Shape{3, 3}, []int{1, 1},
				[]int{1, 1}, []int{1, 1}))
			y = must(G.MaxPool2D(relu(y), tensor.Shape{2, 2}, []int{0, 0}, []int{2, 2}))
			y = must(nn.Conv2D(nn.ConvOptions{}, y, c.learn("v", 5, 3, 2, 2), nil))
			return c.weighted(mul(reshape(y, tensor.Shape{4, 5}), c.learn("dense", 5, 2)))
		}},
		"a sequence": {loss: func(c *incomplete) node {
			x := must(nn.Embedding(c.learn("table", 9, 2), c.words))
			y, _, _, err := nn.LSTM(nn.RecurrentOptions{BatchFirst: true}, x,
				c.learn("h0", 1, 4, 5), c.learn("c0", 1, 4, 5), c.learn("ih", 20, 2),
				c.learn("hh", 20, 5), c.learn("bi", 20), c.learn("bh", 20))
			return c.weighted(must(y, err))
		}},
		"attention": {loss: func(c *incomplete) node {
			x := must(nn.Embedding(c.learn("table", 9, 2), c.words))
			x = reshape(mul(reshape(x, tensor.Shape{12, 2}),
				c.learn("w", 2, 2)), tensor.Shape{4, 1, 3, 2})
			return c.weighted(must(nn.Attention(x, x, x, nn.AttentionOptions{Causal: true})))
		}},
		"a mean by weights": {loss: func(c *incomplete) node {
			mean := mul(c.weights, c.x) // of the features
			mean = reshape(mean, tensor.Shape{1, 6})
			return c.weighted(must(G.BroadcastSub(c.x, mean, nil, []byte{0})))
		}},
		"decay": {loss: func(c *incomplete) node {
			w := c.learn("w", 6, 2)
			return add(c.weighted(mul(c.x, w)), sum(square(w)))
		}},

		"a batch norm": {func(c *incomplete) node {
			gain, bias := c.learn("gain", 1, 6), c.learn("bias", 1, 6)
			y, _, _, _, err := G.BatchNorm(c.x, gain, bias, .1, .5)
			return c.weighted(must(y, err))
		}, "mean and variance over all samples"},
		"a mean": {func(c *incomplete) node {
			return mul(c.mean, must(G.Mean(c.x)))
		}, "without their weights"},
		"a sum times that of the weights": {func(c *incomplete) node {
			return sum(mul(c.x, sum(c.weights)))
		}, "without their weights"},
		"an auxiliary mean": {func(c *incomplete) node {
			return add(c.weighted(c.x), must(G.Mean(square(c.x))))
		}, "reduce-sum"},
		"a centre": {func(c *incomplete) node {
			mean := reshape(must(G.Mean(c.x, 0)), tensor.Shape{1, 6})
			return c.weighted(must(G.BroadcastSub(c.x, mean, nil, []byte{0})))
		}, "reduce-sum"},
		"softmax over the batch": {func(c *incomplete) node {
			return c.weighted(must(nn.SoftMax(0, c.x)))
		}, "reduce-max"},
		"similarities": {func(c *incomplete) node {
			return c.labelled(must(nn.BatchedMatMul(false, true, c.x, c.x)))
		}, "matmul"},
		"the next sample": {func(c *incomplete) node {
			return sum(must(G.Slice(c.x, G.S(1, 4))))
		}, "slice"},
		"pairs": {func(c *incomplete) node {
			pairs := reshape(c.x, tensor.Shape{2, 2, 6})
			return sum(sum(pairs, 1))
		}, "reduce-sum"},
	} {
		in := newIncomplete()
		loss := c.loss(in)
		G.WithName("loss")(loss)
		m, err := vm.New(in.g, nil, vm.Keep(loss))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		err = m.CheckIncomplete(vm.Incomplete{Inputs: nodes{in.x, in.images, in.words, in.labels},
			Missing: []any{[]float32{0}, []float32{0}, []int{0, 0, 0}, []int{nn.NoLabel}},
			Weights: in.weights, Loss: loss, Comm: autograd.Solo()})
		if refused := c.refused != ""; refused != errors.Is(err, backend.ErrArgument) ||
			refused && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s: %v, want %q", name, err, c.refused)
		}
		require.Report(t, m.Close())
	}
}

// TestALabelThatCountsIsMixed: Pad must write the label that the loss ignores.
func TestALabelThatCountsIsMixed(t *testing.T) {
	in := newIncomplete()
	loss := in.labelled(in.x)
	m := machine(t, in.g, vm.Keep(loss))
	for label, ok := range map[int]bool{nn.NoLabel: true, 0: false, 2: false} {
		err := m.CheckIncomplete(vm.Incomplete{Inputs: nodes{in.x, in.labels},
			Missing: []any{[]float32{0}, []int{label}}, Loss: loss, Comm: autograd.Solo()})
		require.Check(t, (err == nil) == ok, "label %d: %v", label, err)
	}
}
