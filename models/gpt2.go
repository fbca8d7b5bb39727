package models

import (
	"fmt"

	"github.com/euryale-ml/euryale/layers"
)

const (
	gpt2 = "gpt2"
	// gpt2Prefix begins the names of GPT-2's tensors, except in older files.
	gpt2Prefix = "transformer."
)

// gpt2 builds GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
func (m *Model) gpt2(b *layers.Builder, tokens *layers.Tokens, c *caching) layers.Node {
	n := m.Width
	embedding := b.Learn(m.embedding(), drawn, 0, m.Vocabulary, n)
	x := b.To(b.Embedding(embedding, tokens), layers.Tensor, layers.Replicated)
	positions := b.Learn(gpt2Prefix+"wpe.weight", drawn, layers.Undivided, m.Positions, n)
	switch {
	case c.context > 0:
		x = c.addPositions(b, positions, x)
	case c.positions != nil:
		x = b.Add(x, b.Embedding(positions, c.positions))
	default:
		x = b.PositionsOf(positions, x)
	}
	x = m.dropped(b, m.Dropout.Embedding, x)
	for i := range m.Blocks {
		p := fmt.Sprintf(gpt2Prefix+"h.%d.", i)
		x = b.Add(x, m.dropped(b, m.Dropout.Residual,
			m.gpt2Attention(b, c, i, p+"attn.", b.LayerNorm(p+"ln_1", x))))
		h := b.To(b.LayerNorm(p+"ln_2", x), layers.Tensor, layers.Copied)
		h = b.GELU(m.columns(b, p+"mlp.c_fc", h, true, 0, m.Hidden))
		x = b.Add(x, m.dropped(b, m.Dropout.Residual, m.rows(b, p+"mlp.c_proj", h, 1, true)))
	}
	return m.head(b, b.LayerNorm(gpt2Prefix+"ln_f", c.last(b, x)), embedding)
}

func (m *Model) gpt2Attention(b *layers.Builder, c *caching, block int, name string,
	x layers.Node) layers.Node {
	qkv := m.columns(b, name+"c_attn", b.To(x, layers.Tensor, layers.Copied), true, 1, 3, m.Heads,
		m.HeadWidth)
	qkv = b.To(qkv, layers.Sequence, layers.Split(3))
	y := m.attend(b, c, block, b.Part(qkv, 0), b.Part(qkv, 1), b.Part(qkv, 2))
	return m.rows(b, name+"c_proj", b.To(y, layers.Sequence, layers.Split(1)), 2, true)
}

// drawn is the first value of learnables without values.
var drawn = layers.Constant(0)
