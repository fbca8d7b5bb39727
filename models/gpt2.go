package models

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
)

const (
	gpt2 = "gpt2"
	// gpt2Prefix begins the names of GPT-2's tensors, except in older files.
	gpt2Prefix = "transformer."
)

// gpt2 builds GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
func (m *Model) gpt2(b *layers.Builder, tokens *layers.Tokens, c *caching) layers.Node {
	n := m.Width
	words := b.Learn(gpt2Prefix+"wte.weight", drawn, 0, m.Vocabulary, n)
	x := b.To(b.Embedding(words, tokens), layers.Tensor, layers.Replicated)
	positions := b.Learn(gpt2Prefix+"wpe.weight", drawn, layers.Undivided, m.Positions, n)
	if c.steps() {
		x = c.addPositions(b, positions, x)
	} else {
		x = b.PositionsOf(positions, x)
	}
	for i := range m.Blocks {
		p := fmt.Sprintf(gpt2Prefix+"h.%d.", i)
		x = b.Add(x, m.gpt2Attention(b, c, p+"attn.", b.LayerNorm(p+"ln_1", x)))
		h := b.To(b.LayerNorm(p+"ln_2", x), layers.Tensor, layers.Copied)
		h = b.GELU(m.columns(b, p+"mlp.c_fc", h, true, 0, m.Hidden))
		x = b.Add(x, m.rows(b, p+"mlp.c_proj", h, 1, true))
	}
	return b.Logits(b.LayerNorm(gpt2Prefix+"ln_f", c.last(b, x)), words)
}

func (m *Model) gpt2Attention(b *layers.Builder, c *caching, name string,
	x layers.Node) layers.Node {
	qkv := m.columns(b, name+"c_attn", b.To(x, layers.Tensor, layers.Copied), true, 1, 3, m.Heads,
		m.HeadWidth)
	qkv = b.To(qkv, layers.Sequence, layers.Split(3))
	var parts [3]layers.Node
	for i := range parts {
		parts[i] = part(b, qkv, i)
	}
	y := c.attend(b, parts[0], parts[1], parts[2])
	return m.rows(b, name+"c_proj", b.To(y, layers.Sequence, layers.Split(1)), 2, true)
}

// drawn is what learnables begin with that have no values.
var drawn = layers.Constant(0)

// part returns one of the parts along axis 2 of [., ., parts, heads, d]: [., ., heads, d].
func part(b *layers.Builder, x layers.Node, i int) layers.Node {
	return b.Apply("part", func() (layers.Node, error) {
		s := x.Shape()
		n, err := nn.Slice(2, i, i+1, 1, x.Node)
		if err == nil {
			n, err = gorgonia.Reshape(n, tensor.Shape{s[0], s[1], s[3], s[4]})
		}
		return layers.Place(n, x, 0, 1, 3, 4), err
	})
}
