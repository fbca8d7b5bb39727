package layers

import (
	"cmp"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/ops/nn"
)

// epsilon is what GPT-2 adds to variances.
const epsilon = 1e-5

// LayerNorm normalises, scales and shifts the last axis: nn.LayerNorm.
//
//	in   x  [d..., n]
//	out  y  [d..., n]   placed like x
//
// Gain and bias, [n], have the name plus ".gain" and ".bias". If x is also split over the Tensor
// group, their gradients are all-reduced in it.
//
// Errors: [ErrPlacement] if x is a partial sum or n is sharded.
func (b *Builder) LayerNorm(name string, x Node) Node {
	return b.norm("LayerNorm ", name, x, []string{".gain", ".bias"},
		func(own []*gorgonia.Node) (*gorgonia.Node, error) {
			return nn.LayerNorm(epsilon, x.Node, own[0], own[1])
		})
}

// RMSNorm divides the last axis by the root of its mean square, and scales it: nn.RMSNorm.
//
//	in   x  [d..., n]
//	out  y  [d..., n]   placed like x
//
// The gain, [n], has the name plus ".gain". Its gradient is all-reduced as in [Builder.LayerNorm].
//
// Errors: [ErrPlacement] if x is a partial sum or n is sharded.
func (b *Builder) RMSNorm(name string, epsilon float64, x Node) Node {
	return b.norm("RMSNorm ", name, x, []string{".gain"},
		func(own []*gorgonia.Node) (*gorgonia.Node, error) {
			return nn.RMSNorm(epsilon, x.Node, own[0])
		})
}

// norm is a norm of the last axis with learnables, vectors of its length: the first one is a gain,
// which begins as 1; a second one is a bias.
func (b *Builder) norm(kind, name string, x Node, learnables []string,
	norm func(own []*gorgonia.Node) (*gorgonia.Node, error)) Node {
	return b.apply(kind+name, func() (Node, error) {
		last := x.Dims() - 1
		if err := cmp.Or(summed("x", x), sharded("x", x), wholeAxis("x", x, last)); err != nil {
			return Node{}, err
		}
		own := make([]*gorgonia.Node, len(learnables))
		for i, suffix := range learnables {
			w, err := b.learnFor(x, name+suffix, Constant(float64(1-i)), x.Shape()[last])
			if err != nil {
				return Node{}, err
			}
			own[i] = w.Node
		}
		y, err := norm(own)
		return Place(y, x), err
	}, "x", x)
}
