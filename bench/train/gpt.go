package main

import (
	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/ops/nn"
)

// transformer is a GPT whose classifier shares the embedding's weights.
type transformer struct{ vocabulary, batch, context, width, heads, layers int }

// deviation is the standard deviation of GPT-2's weights.
const deviation = 0.02

// loss predicts random tokens.
func (t transformer) loss(b *builder) *gorgonia.Node {
	rows := t.batch * t.context
	tokens, positions := b.learn(deviation, t.vocabulary, t.width), b.learn(deviation, t.context,
		t.width)
	indices := b.below(t.vocabulary, rows)
	x := b.apply(func() (*gorgonia.Node, error) { return nn.Embedding(tokens, indices) })
	x = b.reshape(x, t.batch, t.context, t.width)
	p := b.reshape(positions, 1, t.context, t.width)
	x = b.apply(func() (*gorgonia.Node, error) {
		return gorgonia.BroadcastAdd(x, p, nil, []byte{0})
	})
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
	heads := func(k int) *gorgonia.Node {
		y := b.apply(func() (*gorgonia.Node, error) {
			return nn.Slice(1, k*t.width, (k+1)*t.width, 1, qkv)
		})
		return b.transpose(b.reshape(y, t.batch, t.context, t.heads, t.width/t.heads), 0, 2, 1, 3)
	}
	q, k, v := heads(0), heads(1), heads(2)
	y := b.apply(func() (*gorgonia.Node, error) {
		return nn.Attention(q, k, v, nn.AttentionOptions{Causal: true})
	})
	return b.reshape(b.transpose(y, 0, 2, 1, 3), t.batch*t.context, t.width)
}

func (b *builder) add(x, y *gorgonia.Node) *gorgonia.Node {
	return b.apply(func() (*gorgonia.Node, error) { return gorgonia.Add(x, y) })
}

func (b *builder) transpose(x *gorgonia.Node, axes ...int) *gorgonia.Node {
	return b.apply(func() (*gorgonia.Node, error) { return gorgonia.Transpose(x, axes...) })
}

// fill sets all elements of a variable.
func fill(n *gorgonia.Node, to float32) {
	if n.Value() == nil { // see empty
		return
	}
	data := n.Value().Data().([]float32)
	for i := range data {
		data[i] = to
	}
}
