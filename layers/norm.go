package layers

import (
	"github.com/euryale-ml/euryale/ops/nn"
)

// epsilon is what GPT-2 adds to variances.
const epsilon = 1e-5

// LayerNorm normalises the last axis, scales and shifts it: nn.LayerNorm.
//
//	in   x  [d..., n]
//	out  y  [d..., n]   placed like x
//
// Gain and bias, [n], have the name with ".gain" and ".bias". Where x is split over the Tensor
// group, too, their gradients are all-reduced in it.
//
// Errors: [ErrPlacement] if x is a partial sum or n is divided.
func (b *Builder) LayerNorm(name string, x Node) Node {
	return b.apply("LayerNorm "+name, func() (Node, error) {
		last := x.Dims() - 1
		if err := firstOf(summed("x", x), divided("x", x), whole("x", x, last)); err != nil {
			return Node{}, err
		}
		n := x.Shape()[last]
		gain, bias := b.Learn(name+".gain", Constant(1), Undivided, n),
			b.Learn(name+".bias", Constant(0), Undivided, n)
		if b.err != nil {
			return Node{}, b.err
		}
		gain, err := b.learnableFor(gain, x)
		if err != nil {
			return Node{}, err
		}
		if bias, err = b.learnableFor(bias, x); err != nil {
			return Node{}, err
		}
		y, err := nn.LayerNorm(epsilon, x.Node, gain.Node, bias.Node)
		return Place(y, x), err
	})
}
