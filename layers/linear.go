package layers

import (
	"cmp"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
)

// deviation is the standard deviation of GPT-2's weights.
const deviation = 0.02

// Columns is a linear layer whose weights the Tensor group shards by columns: each rank has a part
// of the results.
//
//	in   x  [d..., n]      Copied over the Tensor group
//	out  y  [d..., out...] y = x w + c, Split along an axis of out
//
// axis is the axis of out that is sharded. w, [n, out...], has the name plus ".weight", and c,
// [out...], the name plus ".bias".
//
// Cost: 2*d*n*out/P operations, backward twice that; no collective.
// Errors: [ErrPlacement]; those of [Builder.Learn].
func (b *Builder) Columns(name string, x Node, axis int, out ...int) Node {
	return b.columns(name, x, true, axis, out)
}

// Linear is [Builder.Columns] without a bias.
func (b *Builder) Linear(name string, x Node, axis int, out ...int) Node {
	return b.columns(name, x, false, axis, out)
}

func (b *Builder) columns(name string, x Node, bias bool, axis int, out []int) Node {
	return b.apply("linear layer "+name, func() (Node, error) {
		last := x.Dims() - 1
		if err := cmp.Or(sharded("x", x), wholeAxis("x", x, last),
			require("x", x, Tensor, Copied)); err != nil {
			return Node{}, err
		}
		if axis < 0 || axis >= len(out) {
			return Node{}, fmt.Errorf("%w: axis %d of results of shape %v is to be sharded",
				ops.ErrShape, axis, out)
		}
		w := b.Learn(name+".weight", Normal(deviation), 1+axis, append([]int{x.Shape()[last]},
			out...)...)
		var c Node
		if bias {
			c = b.Learn(name+".bias", Constant(0), axis, out...)
		}
		if b.err != nil {
			return Node{}, b.err
		}
		own := slices.Clone(w.Shape()[1:])
		n, err := linear(x.Node, 1, w.Node, c.Node, own)
		y := Place(n, x)
		y.place[Tensor], y.parts[Tensor] = Split(last+axis), w.parts[Tensor]
		return y, err
	}, "x", x)
}

// Dense is a linear layer whose weights are whole on every rank of the Tensor group.
//
//	in   x  [d..., n]
//	out  y  [d..., out]   y = x w, placed like x
//
// w, [n, out], has the name plus ".weight". If x is not Replicated over the Tensor group, w's
// gradient is all-reduced in it.
//
// Cost: 2*d*n*out operations, backward twice that. Errors: [ErrPlacement] if x is a partial sum or
// n is sharded.
func (b *Builder) Dense(name string, x Node, out int) Node {
	return b.apply("Dense "+name, func() (Node, error) {
		last := x.Dims() - 1
		if err := cmp.Or(summed("x", x), sharded("x", x), wholeAxis("x", x, last)); err != nil {
			return Node{}, err
		}
		w, err := b.learnFor(x, name+".weight", Normal(deviation), x.Shape()[last], out)
		if err != nil {
			return Node{}, err
		}
		y, err := linear(x.Node, 1, w.Node, nil, []int{out})
		return Place(y, x), err
	}, "x", x)
}

// Rows is a linear layer whose weights the Tensor group shards by rows: each rank has a part of x,
// and computes one term of a sum.
//
//	in   x  [d..., in...]  with the given number of axes in,
//	                       Split along one of them over the Tensor group
//	out  y  [d..., out]    y = x w, Partial
//
// w, [in..., out], has the name plus ".weight". Add a bias ([Builder.Bias]) after the sum, or it
// counts once for each rank.
//
// Cost: 2*d*in*out/P operations, backward twice that; no collective.
// Errors: [ErrPlacement]; those of [Builder.Learn].
func (b *Builder) Rows(name string, x Node, in int, out int) Node {
	return b.apply("Rows "+name, func() (Node, error) {
		first := x.Dims() - in
		if in < 1 || first < 1 {
			return Node{}, fmt.Errorf("%w: the last %d axes of x, of shape %v, are the input",
				ops.ErrShape, in, x.Shape())
		}
		var inputs []Placement
		for axis := x.Dims() - 1; axis >= first; axis-- {
			inputs = append(inputs, Split(axis))
		}
		err := cmp.Or(sharded("x", x), require("x", x, Tensor, inputs...))
		for axis := first; axis < x.Dims() && err == nil; axis++ {
			if x.place[Sequence] == Split(axis) {
				err = misplaced("x", x, Sequence, Split(max(0, first-1)))
			}
		}
		if err != nil {
			return Node{}, err
		}
		axis := int(x.place[Tensor])
		shape := slices.Clone(x.Shape()[first:])
		shape[axis-first] = sum(x.parts[Tensor])
		w := b.Learn(name+".weight", Normal(deviation), axis-first, append(shape, out)...)
		if b.err != nil {
			return Node{}, b.err
		}
		n, err := linear(x.Node, in, w.Node, nil, []int{out})
		y := Place(n, x)
		y.place[Tensor], y.parts[Tensor] = Partial, nil
		return y, err
	}, "x", x)
}

// Bias adds a vector, which has the name plus ".bias".
//
//	in   x  [d..., n]
//	out  y  [d..., n]   y = x + c
//
// Errors: [ErrPlacement] if x is a partial sum or n is sharded.
func (b *Builder) Bias(name string, x Node) Node {
	return b.apply("Bias "+name, func() (Node, error) {
		last := x.Dims() - 1
		if err := cmp.Or(summed("x", x), sharded("x", x), wholeAxis("x", x, last)); err != nil {
			return Node{}, err
		}
		n := x.Shape()[last]
		c, err := b.learnFor(x, name+".bias", Constant(0), n)
		if err != nil {
			return Node{}, err
		}
		flat, err := reshape(x.Node, size(x.Shape())/n, n)
		if err != nil {
			return Node{}, err
		}
		if flat, err = addRow(flat, c.Node); err != nil {
			return Node{}, err
		}
		y, err := reshape(flat, x.Shape()...)
		return Place(y, x), err
	}, "x", x)
}

// linear returns x w + c, over the last in axes of x and the first in axes of w; c may be nil.
func linear(x *gorgonia.Node, in int, w, c *gorgonia.Node, out []int) (*gorgonia.Node, error) {
	shape := x.Shape()
	rows, columns, n := shape[:x.Dims()-in], size(out), size(shape[x.Dims()-in:])
	y, err := reshape(x, size(rows), n)
	if err != nil {
		return nil, err
	}
	if w, err = reshape(w, n, columns); err != nil {
		return nil, err
	}
	if y, err = gorgonia.Mul(y, w); err != nil {
		return nil, err
	}
	if c != nil {
		if y, err = addRow(y, c); err != nil {
			return nil, err
		}
	}
	return reshape(y, append(slices.Clone(rows), out...)...)
}

// addRow adds c to every row of a matrix.
func addRow(x, c *gorgonia.Node) (*gorgonia.Node, error) {
	c, err := reshape(c, 1, x.Shape()[1])
	if err != nil {
		return nil, err
	}
	return gorgonia.BroadcastAdd(x, c, nil, []byte{0})
}

// reshape is gorgonia.Reshape, and x itself if it has the shape.
func reshape(x *gorgonia.Node, shape ...int) (*gorgonia.Node, error) {
	if slices.Equal(x.Shape(), shape) {
		return x, nil
	}
	return gorgonia.Reshape(x, tensor.Shape(shape).Clone())
}

// MLP is a linear layer of hidden units with GELU and another one after it. The Tensor group
// shards the hidden units.
//
//	in   x  [d..., n]
//	out  y  [d..., n]   y = gelu(x w1 + c1) w2 + c2, placed like x
//
// Learnables have the name plus ".in" and ".out". The GELU is GPT-2's, nn.GELUTanh.
//
// Cost: 4*d*n*hidden/P operations, backward twice that; the collectives of the package comment.
// Errors: [ErrPlacement] if x is a partial sum, or meets its learnables without a split along the
// sequence.
func (b *Builder) MLP(name string, x Node, hidden int) Node {
	return b.within("MLP "+name, func() Node {
		h := b.GELU(b.Columns(name+".in", b.beginTensorParallel(x), 0, hidden))
		return b.endTensorParallel(name+".out", b.Rows(name+".out", h, 1, lastOf(x)), x)
	})
}

// SwiGLU is a [Builder.MLP] without biases in which other units gate the hidden units: nn.SwiGLU.
//
//	in   x  [d..., n]
//	out  y  [d..., n]   y = (silu(x w1) * (x w2)) w3, placed like x
//
// Learnables have the name plus ".in.weight", [n, 2, hidden], which is w1 and w2, and
// ".out.weight".
//
// Cost: 6*d*n*hidden/P operations, backward twice that; the collectives of the package comment.
// Errors: those of MLP.
func (b *Builder) SwiGLU(name string, x Node, hidden int) Node {
	return b.within("SwiGLU "+name, func() Node {
		both := b.columns(name+".in", b.beginTensorParallel(x), false, 1, []int{2, hidden})
		h := b.apply("gate", func() (Node, error) {
			last := both.Dims() - 1
			halves, err := nn.Split(last-1, []int{1, 1}, both.Node)
			if err != nil {
				return Node{}, err
			}
			y, err := nn.SwiGLU(halves[0], halves[1])
			if err != nil {
				return Node{}, err
			}
			shape := slices.Delete(slices.Clone(both.Shape()), last-1, last)
			y, err = reshape(y, shape...)
			axes := make([]int, last)
			for i := range axes {
				axes[i] = i
			}
			axes[last-1] = last
			return Place(y, both, axes...), err
		}, "both", both)
		return b.To(b.Rows(name+".out", h, 1, lastOf(x)), Tensor, x.place[Tensor])
	})
}

// within returns what f builds, and adds to its errors the name of what it is part of.
func (b *Builder) within(name string, f func() Node) Node {
	if b.err != nil {
		return Node{}
	}
	n := f()
	if b.err != nil {
		b.err = fmt.Errorf("%w (in %s)", b.err, name)
	}
	return n
}

// beginTensorParallel is where x enters tensor-parallel work.
func (b *Builder) beginTensorParallel(x Node) Node { return b.To(x, Tensor, Copied) }

// endTensorParallel is where tensor-parallel work ends: its terms y are added up, placed like x,
// and get a bias.
func (b *Builder) endTensorParallel(name string, y, x Node) Node {
	return b.Bias(name, b.To(y, Tensor, x.place[Tensor]))
}

// GELU is nn.GELUTanh of every element.
//
// Errors: [ErrPlacement] if x is a partial sum.
func (b *Builder) GELU(x Node) Node {
	return b.each("GELU", nn.GELUTanh, x)
}

// each is a function of every element, for which a term of a sum is no operand.
func (b *Builder) each(name string, f func(*gorgonia.Node) (*gorgonia.Node, error), x Node) Node {
	return b.apply(name, func() (Node, error) {
		if err := summed("x", x); err != nil {
			return Node{}, err
		}
		y, err := f(x.Node)
		return Place(y, x), err
	}, "x", x)
}

// Add is x + y, for x and y of the same shape and placement.
//
// Errors: [ErrPlacement] if the placements differ: otherwise a value that every rank has, say,
// would be added to a partial sum once for each rank. [ops.ErrShape] if the shapes differ.
func (b *Builder) Add(x, y Node) Node {
	return b.apply("Add", func() (Node, error) {
		for _, g := range []Group{Sequence, Tensor} {
			switch p, q := x.place[g], y.place[g]; {
			case p == q:
			case collective(q, p) != "" && collective(p, q) == "" || p.split():
				return Node{}, misplaced("y", y, g, p)
			default:
				return Node{}, misplaced("x", x, g, q)
			}
		}
		if err := alike("y", y, x); err != nil {
			return Node{}, err
		}
		if !x.Shape().Eq(y.Shape()) {
			return Node{}, fmt.Errorf("%w: x has shape %v, and y %v", ops.ErrShape, x.Shape(),
				y.Shape())
		}
		n, err := gorgonia.Add(x.Node, y.Node)
		return Place(n, x), err
	}, "x", x, "y", y)
}

// lastOf returns the length of the last axis, 0 after an error.
func lastOf(x Node) int {
	if x.Node == nil || x.Dims() == 0 {
		return 0
	}
	return x.Shape()[x.Dims()-1]
}

func size(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

func sum(lengths []int) int {
	n := 0
	for _, d := range lengths {
		n += d
	}
	return n
}
