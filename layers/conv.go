package layers

import (
	"cmp"
	"fmt"
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
)

// Images are [batch, channels, height, width]. They are sharded only along the batch: over data
// ranks, and over the Sequence group by Split(0), so that its ranks add their batches to those of
// the data ranks.

// Conv2D is nn.Conv2D with a number of filters and a bias.
//
//	in   x  [b, c, h, w]           Split(0) or Copied over the Sequence group
//	out  y  [b, filters, h', w']   placed like x
//
// Filters, [filters, c/groups, kernel...], have the name plus ".weight", and begin with a normal
// distribution for rectifiers (He et al., Delving Deep into Rectifiers, 2015); the bias has the
// name plus ".bias".
//
// Gradient and cost: those of nn.Conv2D. If x is also split over the Tensor group, gradients of
// learnables are all-reduced in it.
// Errors: [ErrPlacement] if x is a partial sum, or an axis other than the first is sharded; those
// of nn.Conv2D.
func (b *Builder) Conv2D(name string, x Node, filters int, kernel [2]int,
	o nn.ConvOptions) Node {
	return b.conv(name, x, filters, kernel, o, true)
}

// BatchNorm normalises each channel by its mean and variance over all samples of a step, scales and
// shifts it.
//
//	in   x  [b, c, ...]   Split(0) or Copied over the Sequence group, whole over the Tensor group
//	out  y  [b, c, ...]   placed like x;
//	                      y = (x - mean) / sqrt(variance + 1e-5) * gain + bias
//
// It is gorgonia.BatchNorm. Give the machine vm.SyncBatchNorm: it then takes the samples of all
// ranks of l.Data, which have equally many, and does what one rank does with the whole batch.
// Without it each rank normalises its own. Evaluation (vm.Eval) instead uses running statistics of
// mean and variance, which begin as 0 and 1, and which every step moves by a tenth, as in PyTorch;
// checkpoints have them. Gain and bias, [c], have the name plus ".gain" and ".bias".
//
// Cost: two passes over x; backward two over x and dy. For ranks see vm.SyncBatchNorm.
// Errors: [ErrPlacement]; [ops.ErrShape] if x has fewer than two axes.
func (b *Builder) BatchNorm(name string, x Node) Node {
	return b.apply("BatchNorm "+name, func() (Node, error) {
		if err := cmp.Or(images("x", x), require("x", x, Tensor, Replicated,
			Copied)); err != nil {
			return Node{}, err
		}
		if x.Dims() < 2 {
			return Node{}, fmt.Errorf("%w: x has shape %v, without channels", ops.ErrShape,
				x.Shape())
		}
		var learned [2]*gorgonia.Node
		one := make([]int, x.Dims())
		for i := range one {
			one[i] = 1
		}
		one[1] = x.Shape()[1]
		for i, init := range []Init{Constant(1), Constant(0)} {
			w, err := b.learnFor(x, name+[]string{".gain", ".bias"}[i], init, one[1])
			if err != nil {
				return Node{}, err
			}
			if learned[i], err = reshape(w.Node, one...); err != nil {
				return Node{}, err
			}
		}
		const momentum = 0.1
		y, _, _, op, err := gorgonia.BatchNorm(x.Node, learned[0], learned[1], momentum, epsilon)
		if err == nil {
			err = op.Reset() // averages begin as 0 and 1
		}
		return Place(y, x), err
	}, "x", x)
}

// ReLU sets negative elements to 0, and leaves others as they are.
//
// Errors: [ErrPlacement] if x is a partial sum.
func (b *Builder) ReLU(x Node) Node {
	return b.each("ReLU", gorgonia.Rectify, x)
}

// ConvBlock is a convolution without bias, a batch norm and a rectifier.
//
//	in   x  [b, c, h, w]           as for [Builder.BatchNorm]
//	out  y  [b, filters, h', w']   y = relu(norm(conv(x))), placed like x
//
// Learnables have the name plus ".weight", ".norm.gain" and ".norm.bias".
//
// Errors: those of [Builder.Conv2D] and BatchNorm.
func (b *Builder) ConvBlock(name string, x Node, filters int, kernel [2]int,
	o nn.ConvOptions) Node {
	return b.within("ConvBlock "+name, func() Node {
		return b.ReLU(b.BatchNorm(name+".norm", b.conv(name, x, filters, kernel, o, false)))
	})
}

// Residual is the block of ResNet-18: two convolutions of 3x3 with batch norms, added to x.
//
//	in   x  [b, c, h, w]                     as for [Builder.BatchNorm]
//	out  y  [b, filters, h/stride, w/stride] rounded up, placed like x;
//	                                         y = relu(norm(conv(block(x))) + x)
//
// If filters is not c, or stride is not 1, x first goes through a convolution of 1x1 and a batch
// norm. Learnables have the name plus ".in" and ".out", as in [Builder.ConvBlock], and ".skip".
//
// Errors: those of ConvBlock.
// Source: He et al., Deep Residual Learning for Image Recognition, 2016.
func (b *Builder) Residual(name string, x Node, filters, stride int) Node {
	return b.within("Residual "+name, func() Node {
		three, pad, strides := [2]int{3, 3}, []int{1, 1}, []int{stride, stride}
		h := b.ConvBlock(name+".in", x, filters, three, nn.ConvOptions{Pad: pad, Stride: strides})
		h = b.conv(name+".out", h, filters, three, nn.ConvOptions{Pad: pad}, false)
		h = b.BatchNorm(name+".out.norm", h)
		if b.err == nil && (stride != 1 || x.Shape()[1] != filters) {
			x = b.conv(name+".skip", x, filters, [2]int{1, 1}, nn.ConvOptions{Stride: strides},
				false)
			x = b.BatchNorm(name+".skip.norm", x)
		}
		return b.ReLU(b.Add(h, x))
	})
}

// conv is [Builder.Conv2D] with a bias or without.
func (b *Builder) conv(name string, x Node, filters int, kernel [2]int, o nn.ConvOptions,
	biased bool) Node {
	return b.apply("Conv2D "+name, func() (Node, error) {
		if err := images("x", x); err != nil {
			return Node{}, err
		}
		groups := max(o.Groups, 1)
		if x.Dims() != 4 || x.Shape()[1]%groups != 0 || min(filters, kernel[0], kernel[1]) < 1 {
			return Node{}, fmt.Errorf("%w: x has shape %v, want (b, c, h, w), for %d filters of "+
				"%v in %d groups", ops.ErrShape, x.Shape(), filters, kernel, groups)
		}
		shape := []int{filters, x.Shape()[1] / groups, kernel[0], kernel[1]}
		w := b.Learn(name+".weight", Normal(math.Sqrt(2/float64(size(shape[1:])))), Undivided,
			shape...)
		c := Node{}
		if biased {
			c = b.Learn(name+".bias", Constant(0), Undivided, filters)
		}
		if b.err != nil {
			return Node{}, b.err
		}
		w, err := b.learnableFor(w, x)
		if err == nil && biased {
			c, err = b.learnableFor(c, x)
		}
		if err != nil {
			return Node{}, err
		}
		y, err := nn.Conv2D(o, x.Node, w.Node, c.Node)
		return Place(y, x), err
	}, "x", x)
}

// images checks that images are sharded only along the batch.
func images(operand string, x Node) error {
	if err := summed(operand, x); err != nil {
		return err
	}
	if p := x.place[Sequence]; p != Split(0) && p != Copied {
		return misplaced(operand, x, Sequence, Split(0), Copied)
	}
	if p := x.place[Tensor]; p.split() && p != Split(0) {
		return misplaced(operand, x, Tensor, Split(0), Replicated)
	}
	return nil
}
