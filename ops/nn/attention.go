package nn

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
)

// AttentionOptions are those of [Attention]. The zero value is full attention.
type AttentionOptions struct {
	// Causal hides later keys: query i sees the keys j <= i + keys - queries, so that the last query
	// sees all. The result of a query that sees none is 0.
	Causal bool
	// Scale is what scores are multiplied with; 0 stands for 1/sqrt(d).
	Scale float64
}

// Attention returns scaled dot-product attention of each head.
//
//	in   q     [batch, heads, queries, d]
//	     k, v  [batch, heads, keys, d]
//	out  y     [batch, heads, queries, d]   y = softmax(scale q kᵀ) v, over the keys that a query sees
//
// Operands of another order of axes, such as [batch, queries, heads, d], are transposed first: package vm
// reads them as they lie.
//
// Gradient: with w the softmax, dv = wᵀ dy, and with ds = scale w (dy vᵀ - sum(dy y)), dq = ds k and
// dk = dsᵀ q.
// Cost: 4*batch*heads*queries*keys*d operations, half of them if it is causal; backward 2.5 times that.
// Nothing of queries x keys is kept. In package vm it is one kernel, FlashAttention-2 (Dao 2023) on GPUs,
// which take d up to 256.
// Errors: [ops.ErrShape] if the operands do not fit; [backend.ErrArgument] if Scale is negative or not
// finite; [ops.ErrDType].
func Attention(q, k, v *gorgonia.Node, o AttentionOptions) (*gorgonia.Node, error) {
	if o.Scale == 0 && q != nil && q.Dims() == 4 {
		o.Scale = 1 / math.Sqrt(float64(q.Shape()[3]))
	}
	return build("Attention", "q k v", AttentionSpec(o), q, k, v)
}

// AttentionSpec is [Attention] of q, k and v, with a scale that is not 0.
type AttentionSpec struct {
	Causal bool
	Scale  float64
}

// String returns "Attention{causal, scale 0.125}".
func (s AttentionSpec) String() string { return s.name("Attention") }

func (s AttentionSpec) name(name string) string {
	if s.Causal {
		return fmt.Sprintf("%s{causal, scale %v}", name, s.Scale)
	}
	return fmt.Sprintf("%s{scale %v}", name, s.Scale)
}

func (s AttentionSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	q, k, v := in[0], in[1], in[2]
	if len(q) != 4 || len(k) != 4 || q[0] != k[0] || q[1] != k[1] || q[3] != k[3] || !k.Eq(v) {
		return nil, fmt.Errorf("%w: q has shape %v, k %v and v %v, want (b, h, queries, d) and twice (b, h, keys, d)", ops.ErrShape, q, k, v)
	}
	if !(s.Scale > 0) || math.IsInf(s.Scale, 1) {
		return nil, fmt.Errorf("%w: the scale is %v", backend.ErrArgument, s.Scale)
	}
	return q.Clone(), nil
}

// gradients are of q, k and v, each from q, k, v, y and dy.
func (s AttentionSpec) gradients([]tensor.Shape) []gradient {
	all := make([]gradient, 3)
	for i := range all {
		all[i] = gradient{AttentionGradSpec{s, i}, []int{0, 1, 2, result, dy}}
	}
	return all
}

func (s AttentionSpec) f32(y array[float32], x []array[float32]) error { return attention(s, y, x) }
func (s AttentionSpec) f64(y array[float64], x []array[float64]) error { return attention(s, y, x) }

func attention[T float](s AttentionSpec, y array[T], x []array[T]) error {
	sums := make([]float64, y.shape[3])
	eachQuery(s, x[0], x[1], func(i int, keys []int, w []float64) {
		clear(sums)
		for n, j := range keys {
			for c := range sums {
				sums[c] += w[n] * float64(x[2].row(j)[c])
			}
		}
		round(y.row(i), sums)
	})
	return nil
}

// row returns row i of all: the elements along the last axis.
func (a array[T]) row(i int) []T {
	n := a.shape[len(a.shape)-1]
	return a.data[i*n:][:n]
}

// eachQuery calls f for each query with the keys that it sees, as rows of all heads, and their softmax.
func eachQuery[T float](s AttentionSpec, q, k array[T], f func(i int, keys []int, w []float64)) {
	queries, all := q.shape[2], k.shape[2]
	for i := range product(q.shape[:3]) {
		seen := all
		if s.Causal {
			seen = min(max(i%queries+1+all-queries, 0), all)
		}
		keys, w := make([]int, seen), make([]float64, seen)
		most, sum := math.Inf(-1), 0.0
		for n := range keys {
			keys[n] = i/queries*all + n
			w[n] = s.Scale * inner(q.row(i), k.row(keys[n]))
			most = max(most, w[n])
		}
		for n := range w {
			w[n] = math.Exp(w[n] - most)
			sum += w[n]
		}
		for n := range w {
			w[n] /= sum
		}
		f(i, keys, w)
	}
}

// inner returns the product of two vectors.
func inner[T float](x, y []T) float64 {
	sum := 0.0
	for i, v := range x {
		sum += float64(v) * float64(y[i])
	}
	return sum
}

// AttentionGradSpec is the gradient of an [AttentionSpec] by operand Of, from q, k, v, y and dy.
type AttentionGradSpec struct {
	Forward AttentionSpec
	Of      int // 0 is q, 1 k and 2 v
}

// String returns "AttentionGradQ{causal, scale 0.125}", or that with K or V.
func (s AttentionGradSpec) String() string {
	return s.Forward.name("AttentionGrad" + "QKV"[s.Of:s.Of+1])
}

func (s AttentionGradSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	return in[s.Of].Clone(), nil
}

func (s AttentionGradSpec) gradients([]tensor.Shape) []gradient { return nil }

func (s AttentionGradSpec) f32(dx array[float32], x []array[float32]) error {
	return attentionGrad(s, dx, x)
}

func (s AttentionGradSpec) f64(dx array[float64], x []array[float64]) error {
	return attentionGrad(s, dx, x)
}

func attentionGrad[T float](s AttentionGradSpec, dx array[T], x []array[T]) error {
	q, k, v, y, dy := x[0], x[1], x[2], x[3], x[4]
	sums := make([]float64, len(dx.data))
	add := func(to int, factor float64, row []T) {
		for c, e := range row {
			sums[to*len(row)+c] += factor * float64(e)
		}
	}
	eachQuery(s.Forward, q, k, func(i int, keys []int, w []float64) {
		of := inner(dy.row(i), y.row(i))
		for n, j := range keys {
			ds := func() float64 { return s.Forward.Scale * w[n] * (inner(dy.row(i), v.row(j)) - of) }
			switch s.Of {
			case 0:
				add(i, ds(), k.row(j))
			case 1:
				add(j, ds(), q.row(i))
			case 2:
				add(j, w[n], dy.row(i))
			}
		}
	})
	round(dx.data, sums)
	return nil
}
