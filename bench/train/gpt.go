package main

import (
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/ops/nn"
)

// transformer is a GPT whose classifier shares the embedding's weights.
type transformer struct{ vocabulary, batch, context, width, heads, layers int }

// deviation is that of GPT-2's weights.
const deviation = 0.02

// loss predicts random tokens.
func (t transformer) loss(b *builder) *gorgonia.Node {
	rows := t.batch * t.context
	tokens, positions := b.learn(deviation, t.vocabulary, t.width), b.learn(deviation, t.context, t.width)
	indices := b.below(t.vocabulary, rows)
	x := b.apply(func() (*gorgonia.Node, error) { return nn.Embedding(tokens, indices) })
	x = b.reshape(x, t.batch, t.context, t.width)
	p := b.reshape(positions, 1, t.context, t.width)
	x = b.apply(func() (*gorgonia.Node, error) { return gorgonia.BroadcastAdd(x, p, nil, []byte{0}) })
	x = b.reshape(x, rows, t.width)
	for range t.layers {
		x = t.block(b, x)
	}
	x = t.norm(b, x)
	x = b.apply(func() (*gorgonia.Node, error) { return nn.BatchedMatMul(false, true, x, tokens) })
	return b.loss(x, rows, t.vocabulary)
}

// block is causal attention and an MLP, each behind a layer norm and beside a residual.
func (t transformer) block(b *builder, x *gorgonia.Node) *gorgonia.Node {
	a := b.linear(t.attention(b, b.linear(t.norm(b, x), t.width, 3*t.width)), t.width, t.width)
	x = b.add(x, a)
	h := b.linear(t.norm(b, x), t.width, 4*t.width)
	h = b.apply(func() (*gorgonia.Node, error) { return nn.GELUTanh(h) })
	return b.add(x, b.linear(h, 4*t.width, t.width))
}

func (t transformer) norm(b *builder, x *gorgonia.Node) *gorgonia.Node {
	gain, bias := b.learn(0, t.width), b.learn(0, t.width)
	fill(gain, 1)
	return b.apply(func() (*gorgonia.Node, error) { return nn.LayerNorm(1e-5, x, gain, bias) })
}

// attention is causal, of queries, keys and values side by side.
func (t transformer) attention(b *builder, qkv *gorgonia.Node) *gorgonia.Node {
	size := t.width / t.heads
	parts := b.reshape(qkv, t.batch, t.context, 3, t.heads, size)
	parts = b.transpose(parts, 2, 0, 3, 1, 4)
	of := func(k int) *gorgonia.Node {
		part := b.apply(func() (*gorgonia.Node, error) { return nn.Slice(0, k, k+1, 1, parts) })
		return b.reshape(part, t.batch, t.heads, t.context, size)
	}
	q, k, v := of(0), of(1), of(2)
	scores := b.apply(func() (*gorgonia.Node, error) { return nn.BatchedMatMul(false, true, q, k) })
	scale := gorgonia.NewConstant(float32(1 / math.Sqrt(float64(size))))
	scores = b.apply(func() (*gorgonia.Node, error) { return gorgonia.Mul(scores, scale) })
	scores = b.apply(func() (*gorgonia.Node, error) { return gorgonia.BroadcastAdd(scores, t.mask(b), nil, []byte{0, 1}) })
	weights := b.apply(func() (*gorgonia.Node, error) { return nn.SoftMax(3, scores) })
	y := b.apply(func() (*gorgonia.Node, error) { return nn.BatchedMatMul(false, false, weights, v) })
	return b.reshape(b.transpose(y, 0, 2, 1, 3), t.batch*t.context, t.width)
}

// hidden is added to scores of what comes later: its exponential is 0.
const hidden = -1e9

// mask is hidden above the diagonal.
func (t transformer) mask(b *builder) *gorgonia.Node {
	data := make([]float32, t.context*t.context)
	for i := range t.context {
		for j := i + 1; j < t.context; j++ {
			data[i*t.context+j] = hidden
		}
	}
	return b.variable(data, 1, 1, t.context, t.context)
}

func (b *builder) add(x, y *gorgonia.Node) *gorgonia.Node {
	return b.apply(func() (*gorgonia.Node, error) { return gorgonia.Add(x, y) })
}

func (b *builder) transpose(x *gorgonia.Node, axes ...int) *gorgonia.Node {
	return b.apply(func() (*gorgonia.Node, error) { return gorgonia.Transpose(x, axes...) })
}

// fill sets all elements of a variable.
func fill(n *gorgonia.Node, to float32) {
	data := n.Value().Data().([]float32)
	for i := range data {
		data[i] = to
	}
}
