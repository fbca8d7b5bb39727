package nn

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/ops"
)

// AttentionOptions are the options of [Attention]. The zero value is full attention.
type AttentionOptions struct {
	// Causal hides later keys: query i sees the keys j <= i + keys - queries, so that the last
	// query sees all. The result of a query that sees none is 0.
	Causal bool
	// Scale is what scores are multiplied with; 0 stands for 1/sqrt(d).
	Scale float64
}

// Attention returns scaled dot-product attention of each head.
//
//	in   q     [batch, heads, queries, d]
//	     k, v  [batch, heads, keys, d]
//	out  y     [batch, heads, queries, d]   y = softmax(scale q kᵀ) v, over the keys
//	                                        that a query sees
//
// Operands of another order of axes, such as [batch, queries, heads, d], are transposed first:
// package vm reads them as they lie.
//
// Gradient: with w the softmax, dv = wᵀ dy, and with ds = scale w (dy vᵀ - sum(dy y)), dq = ds k
// and dk = dsᵀ q. Cost: 4*batch*heads*queries*keys*d operations, half of them if it is causal;
// backward 2.5 times that, and in the tape machine for each of the three gradients again. Nothing
// of queries x keys is kept. In package vm it is one kernel, FlashAttention-2 (Dao 2023) on GPUs,
// which take d up to 256. Errors: [ops.ErrShape] if the operands do not fit; [backend.ErrArgument]
// if Scale is negative or not finite; [ops.ErrDType].
func Attention(q, k, v *gorgonia.Node, o AttentionOptions) (*gorgonia.Node, error) {
	if o.Scale == 0 && q != nil && q.Dims() == 4 {
		o.Scale = 1 / math.Sqrt(float64(q.Shape()[3]))
	}
	return build("Attention", "q k v", attentionSpec(o), q, k, v)
}

// attentionSpec is [Attention] of q, k and v, with a scale that is not 0.
type attentionSpec struct {
	Causal bool
	Scale  float64
}

// String returns "Attention{causal, scale 0.125}".
func (s attentionSpec) String() string { return s.name("Attention") }

func (s attentionSpec) name(name string) string {
	if s.Causal {
		return fmt.Sprintf("%s{causal, scale %v}", name, s.Scale)
	}
	return fmt.Sprintf("%s{scale %v}", name, s.Scale)
}

func (s attentionSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	q, k, v := in[0], in[1], in[2]
	if len(q) != 4 || len(k) != 4 || q[0] != k[0] || q[1] != k[1] || q[3] != k[3] || !k.Eq(v) {
		return nil, fmt.Errorf("%w: q has shape %v, k %v and v %v, want (b, h, queries, d) and "+
			"twice (b, h, keys, d)", ops.ErrShape, q, k, v)
	}
	if !(s.Scale > 0) || math.IsInf(s.Scale, 1) {
		return nil, fmt.Errorf("%w: the scale is %v", backend.ErrArgument, s.Scale)
	}
	return q.Clone(), nil
}

// gradients are of q, k and v, each from q, k, v, y and dy.
func (s attentionSpec) gradients([]tensor.Shape) []gradient {
	all := make([]gradient, 3)
	for i := range all {
		all[i] = gradient{attentionGradSpec{s, i}, []int{0, 1, 2, result, dy}}
	}
	return all
}

func (s attentionSpec) program(b program.Builder, x ...program.Value) program.Value {
	y, _ := b.Attention(program.Attention(s), x[0], x[1], x[2])
	return y
}

// attentionGradSpec is the gradient of an [attentionSpec] by operand Of, from q, k, v, y and dy.
type attentionGradSpec struct {
	Forward attentionSpec
	Of      int // 0 is q, 1 k and 2 v
}

// String returns "AttentionGradQ{causal, scale 0.125}", or that with K or V.
func (s attentionGradSpec) String() string {
	return s.Forward.name("AttentionGrad" + "QKV"[s.Of:s.Of+1])
}

func (s attentionGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return in[s.Of].Clone(), nil
}

func (s attentionGradSpec) gradients([]tensor.Shape) []gradient { return nil }

// program computes what the forward pass keeps for the gradient again.
func (s attentionGradSpec) program(b program.Builder, x ...program.Value) program.Value {
	o := program.Attention(s.Forward)
	y, lse := b.Attention(o, x[0], x[1], x[2])
	dq, dk, dv := b.AttentionGrad(o, x[0], x[1], x[2], y, lse, x[4])
	return [...]program.Value{dq, dk, dv}[s.Of]
}
