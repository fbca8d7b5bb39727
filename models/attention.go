package models

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
)

// attend is causal attention of q, k and v, [batch, positions, heads, d], in a block. With caches
// it writes k and v there, and attends to all that they have.
func (m *Model) attend(b *layers.Builder, c *caching, block int, q, k, v layers.Node) layers.Node {
	o, p, window := layers.AttentionOptions{Causal: true}, m.dropout(m.Dropout.Attention),
		m.window(block)
	if c.context > 0 {
		k, v = c.cache(b, k), c.cache(b, v)
		o.KeyLengths, o.Appended = c.lengths, true
	}
	if b.Err() != nil {
		return layers.Node{}
	}
	keys := k.Shape()[1]
	if window >= keys {
		window = 0
	}
	var starts *gorgonia.Node
	if c.positions != nil {
		b.Apply("documents", func() (layers.Node, error) { return q, m.grows(keys) })
		starts = c.positions.Documents()
	}
	if p > 0 {
		return m.attendDropping(b, p, c.masked(b, keys, window, starts), q, k, v)
	}
	o.Window, o.KeyStarts = window, starts
	return b.Attend(q, k, v, [2]int{1, 1}, o)
}

// masked returns what is added to scores, [positions, positions]: -Inf hides later positions, and
// those before a window unless it is 0. With starts of documents it also hides those before these,
// and is [batch, 1, positions, positions]. There is one for a graph and window.
func (c *caching) masked(b *layers.Builder, positions, window int,
	starts *gorgonia.Node) *gorgonia.Node {
	if mask := c.masks[window]; mask != nil {
		return mask
	}
	scores := make([]float64, positions*positions)
	for i := range scores {
		query, key := i/positions, i%positions
		if key > query || window > 0 && key <= query-window {
			scores[i] = math.Inf(-1)
		}
	}
	mask := b.Constant([]int{positions, positions}, scores)
	if starts != nil {
		mask = b.Apply("documents", func() (n layers.Node, err error) {
			n.Node, err = behind(b, starts, mask)
			return n, err
		}).Node
	}
	if c.masks == nil {
		c.masks = map[int]*gorgonia.Node{}
	}
	c.masks[window] = mask
	return mask
}

// behind returns a mask with -Inf for the keys before the starts of queries, [batch, positions].
func behind(b *layers.Builder, starts, mask *gorgonia.Node) (*gorgonia.Node, error) {
	s := starts.Shape()
	numbers := make([]float64, s[1])
	for i := range numbers {
		numbers[i] = float64(i)
	}
	first, err := nn.Cast(mask.Dtype(), starts)
	if err == nil {
		first, err = gorgonia.Reshape(first, tensor.Shape{s[0], 1, s[1], 1})
	}
	if err == nil {
		first, err = gorgonia.BroadcastGt(first, b.Constant([]int{1, 1, 1, s[1]}, numbers), true,
			[]byte{3}, []byte{0, 2})
	}
	if err != nil {
		return nil, err
	}
	hidden := gorgonia.NewConstant(float32(math.Inf(-1)))
	if mask.Dtype() == tensor.Float64 {
		hidden = gorgonia.NewConstant(math.Inf(-1))
	}
	return nn.Where(first, hidden, mask)
}

// attendDropping is attention whose weights have dropout, which nn.Attention has not: it keeps the
// weights of all positions in memory, as transformers' eager attention does. mask hides what is not
// attended to.
func (m *Model) attendDropping(b *layers.Builder, p float64, mask *gorgonia.Node,
	q, k, v layers.Node) layers.Node {
	weights := b.Apply("weights of attention", func() (layers.Node, error) {
		y, err := attentionWeights(q, k, mask)
		return layers.Place(y, q, 0, 2, 1, 3), err
	})
	weights = b.Dropout(p, m.Random, weights)
	return b.Apply("attention", func() (layers.Node, error) {
		s, shared := q.Shape(), k.Shape()[2] // heads of queries share those of keys
		y, err := gorgonia.Reshape(weights.Node, tensor.Shape{s[0] * shared, s[2] / shared * s[1],
			s[1]})
		if err != nil {
			return q, err
		}
		values, err := heads(v, shared)
		if err == nil {
			y, err = nn.BatchedMatMul(false, false, y, values)
		}
		if err == nil {
			y, err = gorgonia.Reshape(y, tensor.Shape{s[0], s[2], s[1], s[3]})
		}
		if err == nil {
			y, err = gorgonia.Transpose(y, 0, 2, 1, 3)
		}
		return layers.Place(y, q), err
	})
}

// attentionWeights returns the weights of attention, [batch, heads, queries, keys].
func attentionWeights(q, k layers.Node, mask *gorgonia.Node) (*gorgonia.Node, error) {
	s, shared := q.Shape(), k.Shape()[2]
	queries, err := heads(q, shared)
	if err != nil {
		return nil, err
	}
	keys, err := heads(k, shared)
	if err != nil {
		return nil, err
	}
	y, err := nn.BatchedMatMul(false, true, queries, keys)
	if err == nil {
		y, err = scaled(y, 1/math.Sqrt(float64(s[3])))
	}
	if err == nil {
		y, err = gorgonia.Reshape(y, tensor.Shape{s[0], s[2], s[1], s[1]})
	}
	along := []byte{1}
	if err == nil && mask.Dims() == 2 { // of all samples
		along = []byte{0, 1}
		mask, err = gorgonia.Reshape(mask, tensor.Shape{1, 1, s[1], s[1]})
	}
	if err == nil {
		y, err = gorgonia.BroadcastAdd(y, mask, nil, along)
	}
	if err == nil {
		y, err = nn.SoftMax(-1, y)
	}
	return y, err
}

// heads returns x, [batch, positions, heads, d], as [batch*shared, heads/shared*positions, d].
func heads(x layers.Node, shared int) (*gorgonia.Node, error) {
	s := x.Shape()
	y, err := gorgonia.Transpose(x.Node, 0, 2, 1, 3)
	if err == nil {
		y, err = gorgonia.Reshape(y, tensor.Shape{s[0] * shared, s[2] / shared * s[1], s[3]})
	}
	return y, err
}

// dropout returns a probability that the configuration, or an adapter, asks for, 0 without Random.
func (m *Model) dropout(p float64) float64 {
	if m.Random == nil {
		return 0
	}
	return p
}

// dropped is layers.Dropout in training, with a probability that the configuration asks for.
func (m *Model) dropped(b *layers.Builder, p float64, x layers.Node) layers.Node {
	if p = m.dropout(p); p == 0 {
		return x
	}
	return b.Dropout(p, m.Random, x)
}

// scaled returns x times a number.
func scaled(x *gorgonia.Node, by float64) (*gorgonia.Node, error) {
	if by == 1 {
		return x, nil
	}
	var number any = by
	if x.Dtype() == tensor.Float32 {
		number = float32(by)
	}
	return gorgonia.HadamardProd(x, gorgonia.NewConstant(number))
}

// grows returns an error if the angles of positions change as a text grows to a context: keys in
// caches have those of before.
func (m *Model) grows(context int) error {
	if beyond, does := m.rotary.grows(); does && m.Type != gpt2 && context > beyond {
		return fmt.Errorf("%w: a context of %d with rope_parameters of type %s: the angles of all "+
			"positions change beyond %d: use a context of at most as many", backend.ErrUnsupported,
			context, m.rotary.Kind, beyond)
	}
	return nil
}
