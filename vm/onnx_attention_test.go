package vm_test

import (
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops/nn"
)

// onnxAttention builds attention of q, k and v of four axes, or of three, with heads in each row, a
// mask of floats or booleans, and lengths. ONNX's causal attention lets query i see the keys up to
// i, or, with lengths, up to i + length - queries: this is a mask where [nn.Attention] differs.
func onnxAttention(c *onnxCase) (nodes, error) {
	x := [3]node{c.nodes[0], c.nodes[1], c.nodes[2]}
	rows := x[0].Dims() == 3
	for i, name := range []string{"q_num_heads", "kv_num_heads", "kv_num_heads"} {
		if s := x[i].Shape(); rows {
			heads := c.int(name, 0)
			x[i] = reshape(x[i], tensor.Shape{s[0], s[1], heads, s[2] / heads})
			x[i] = transpose(x[i], 0, 2, 1, 3)
		}
	}
	q, k := x[0].Shape(), x[1].Shape()
	shown := c.numbers("shown", []float64{0}, 1)
	hidden := c.numbers("hidden", []float64{math.Inf(-1)}, 1)
	o := nn.AttentionOptions{Scale: c.number("scale", 0), SoftCap: c.number("softcap", 0),
		Causal: c.int("is_causal", 0) != 0}
	if len(c.nodes) > 3 && c.nodes[3] != nil {
		o.Mask, o.MaskGradient = c.nodes[3], c.DY != nil
		if o.Mask.Dtype() == tensor.Bool {
			o.Mask, o.MaskGradient = must(nn.Where(o.Mask, shown, hidden)), false
		}
	}
	if len(c.nodes) > 6 {
		o.KeyLengths = c.nodes[6]
	}
	if o.Causal && o.KeyLengths != nil {
		o.Appended = c.int("hides_keys_alone", 0) == 0 // as in PyTorch
	} else if o.Causal && q[2] != k[2] {
		if o.Causal = false; o.Mask != nil {
			shown = o.Mask
		}
		o.Mask = must(nn.Where(c.seen(q[2], k[2]), shown, hidden))
	}
	y, err := nn.Attention(x[0], x[1], x[2], o)
	if err != nil || !rows {
		return nodes{y}, err
	}
	s := y.Shape()
	y = transpose(y, 0, 2, 1, 3)
	return result(gorgonia.Reshape(y, tensor.Shape{s[0], s[2], s[1] * s[3]}))
}

// seen is 1 where query i sees a key, those up to i, and 0 elsewhere.
func (c *onnxCase) seen(queries, keys int) node {
	var data []float64
	for i := range queries {
		for j := range keys {
			data = append(data, map[bool]float64{true: 1}[j <= i])
		}
	}
	return c.numbers("seen", data, queries, keys)
}

// numbers is an input of the dtype of the first one.
func (c *onnxCase) numbers(name string, data []float64, shape ...int) node {
	x := tensor.New(tensor.Of(c.nodes[0].Dtype()), tensor.WithShape(shape...))
	for i, v := range data {
		set(x, i, v)
	}
	return gorgonia.NodeFromAny(c.graph, x, gorgonia.WithName(name))
}
