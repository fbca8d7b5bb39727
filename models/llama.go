package models

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
)

const (
	llama, mistral, qwen2, qwen3 = "llama", "mistral", "qwen2", "qwen3"
	// llamaPrefix begins the names of the tensors, except in files of the model without a head.
	llamaPrefix = "model."
	headName    = "lm_head.weight"
)

// llamas builds a model of the Llama family: Touvron et al., "LLaMA: Open and Efficient Foundation
// Language Models", 2023; with shared heads of keys, Ainslie et al., "GQA", 2023.
func (m *Model) llamas(b *layers.Builder, tokens *layers.Tokens, c *caching) layers.Node {
	embedding := b.Learn(m.embedding(), drawn, 0, m.Vocabulary, m.Width)
	x := b.To(b.Embedding(embedding, tokens, m.padding...), layers.Tensor, layers.Replicated)
	for i := range m.Blocks {
		p := fmt.Sprintf("model.layers.%d.", i)
		x = b.Add(x, m.llamaAttention(b, c, i, p+"self_attn.",
			b.RMSNorm(p+"input_layernorm", m.Epsilon, x)))
		h := b.To(b.RMSNorm(p+"post_attention_layernorm", m.Epsilon, x), layers.Tensor,
			layers.Copied)
		h = gated(b, m.columns(b, p+"mlp.gate_proj", h, m.Biased.MLP, 0, m.Hidden),
			m.columns(b, p+"mlp.up_proj", h, m.Biased.MLP, 0, m.Hidden))
		x = b.Add(x, m.rows(b, p+"mlp.down_proj", h, 1, m.Biased.MLP))
	}
	return m.head(b, b.RMSNorm("model.norm", m.Epsilon, c.last(b, x)), embedding)
}

// embedding returns the name of the embedding.
func (m *Model) embedding() string {
	if m.Type == gpt2 {
		return gpt2Prefix + "wte.weight"
	}
	return llamaPrefix + "embed_tokens.weight"
}

// head scores the vocabulary, by the embedding unless there is another head.
func (m *Model) head(b *layers.Builder, x, embedding layers.Node) layers.Node {
	if !m.Tied || m.adapter.parts(m.embedding()) {
		embedding = b.Learn(headName, drawn, 0, m.Vocabulary, m.Width)
	}
	y := b.Logits(x, embedding)
	if _, ok := m.adapter.of("lm_head"); ok {
		y = m.adaptColumns(b, "lm_head", b.To(x, layers.Tensor, layers.Copied), y, 0, m.Vocabulary)
	}
	return y
}

func (m *Model) llamaAttention(b *layers.Builder, c *caching, block int, name string,
	x layers.Node) layers.Node {
	x = b.To(x, layers.Tensor, layers.Copied)
	project := func(of string, heads int) layers.Node {
		y := m.columns(b, name+of+"_proj", x, m.Biased.QKV, 0, heads, m.HeadWidth)
		return b.To(y, layers.Sequence, layers.Split(2))
	}
	q, k, v := project("q", m.Heads), project("k", m.KeyHeads), project("v", m.KeyHeads)
	if m.NormedHeads {
		q, k = b.RMSNorm(name+"q_norm", m.Epsilon, q), b.RMSNorm(name+"k_norm", m.Epsilon, k)
	}
	y := m.attend(b, c, block, m.turned(b, c, q), m.turned(b, c, k), v)
	return m.rows(b, name+"o_proj", b.To(y, layers.Sequence, layers.Split(1)), 2, m.Biased.Out)
}

// turned adds rotary positions to x, [batch, positions, heads, d], which has all positions, or with
// caches some.
func (m *Model) turned(b *layers.Builder, c *caching, x layers.Node) layers.Node {
	return b.Apply("rotary positions", func() (layers.Node, error) {
		if err := m.angles(b, c, x); err != nil {
			return x, err
		}
		y, err := nn.Rotary(nn.RotaryOptions{}, x.Node, c.cosines, c.sines)
		return layers.Place(y, x), err
	})
}

// gated is nn.SwiGLU of two layers.
func gated(b *layers.Builder, gate, x layers.Node) layers.Node {
	return b.Apply("SwiGLU", func() (layers.Node, error) {
		y, err := nn.SwiGLU(gate.Node, x.Node)
		return layers.Place(y, x), err
	})
}

// angles makes cosines and sines of the positions of x, once for a graph.
func (m *Model) angles(b *layers.Builder, c *caching, x layers.Node) (err error) {
	if c.sines != nil {
		return nil
	}
	positions, half := x.Shape()[1], m.HeadWidth/2
	if c.context > 0 {
		positions = c.context
	}
	cos, sin := make([]float64, positions*half), make([]float64, positions*half)
	angles := m.rotary.angles(m.HeadWidth, positions)
	for i := range cos {
		sin[i], cos[i] = math.Sincos(float64(float32(i/half) * angles[i%half]))
		sin[i], cos[i] = m.rotary.Scale*sin[i], m.rotary.Scale*cos[i]
	}
	shape := []int{positions, 1, half}
	c.cosines, c.sines = b.Constant(shape, cos), b.Constant(shape, sin)
	if c.context > 0 {
		if c.cosines, err = pick(c.cosines, c.places, x.Shape()[0]); err == nil {
			c.sines, err = pick(c.sines, c.places, x.Shape()[0])
		}
	}
	return err
}
