package layers

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/ops/nn"
)

// Dropout is nn.Dropout with one mask for the whole x: each rank has its part of it.
//
//	in   x  [batch, positions, d...] Split(1) over the Sequence group,
//	        or [positions, batch, d...] Split(0)
//	out  y  like x, and placed like x
//
// Whether an element is zero depends on the seed and step of random, the number of this
// Dropout, the sample's number in the batch of all replicas, and the element's place in the whole
// sample, so every layout trains alike, from the first run on. Call random.Next(l.Replica * batch)
// after each run.
//
// Gradient: that of nn.Dropout, with the same mask.
// Cost: that of nn.Dropout; if ranks shard x, each draws the whole mask.
// Errors: [ErrPlacement] if x is a partial sum, or not split along the sequence; those of
// nn.Dropout.
func (b *Builder) Dropout(p float64, random *nn.Random, x Node) Node {
	return b.apply("Dropout", func() (Node, error) {
		positions := sequenceAxis(x)
		if positions != 0 && positions != 1 || x.Dims() < 2 {
			return Node{}, misplaced("x", x, Sequence, Split(1), Split(0))
		}
		if err := summed("x", x); err != nil {
			return Node{}, err
		}
		if random != nil {
			random.Place(b.layout.Replica * x.Shape()[1-positions])
		}
		whole, sharded := b.wholeShape(x)
		if !sharded && positions == 1 {
			y, err := nn.Dropout(p, random, x.Node)
			return Place(y, x), err
		}
		// batch first, and back: a Dropout counts samples along axis 0
		axes := make([]int, len(whole))
		for i := range axes {
			axes[i] = i
		}
		axes[1-positions], axes[positions] = 0, 1
		whole[0], whole[1] = whole[axes[0]], whole[axes[1]]
		ones := b.variable(fmt.Sprint("ones", whole), b.tensor(whole,
			slices.Repeat([]float64{1}, size(whole))))
		mask, err := nn.Dropout(p, random, ones)
		if err == nil && positions == 0 {
			mask, err = gorgonia.Transpose(mask, axes...)
		}
		if err == nil {
			mask, err = b.partLike(x, mask)
		}
		if err != nil {
			return Node{}, err
		}
		y, err := gorgonia.HadamardProd(x.Node, mask)
		return Place(y, x), err
	}, "random", random, "x", x)
}

// wholeShape returns the shape of the tensor that x is this rank's part of, and whether there are
// other parts.
func (b *Builder) wholeShape(x Node) (shape []int, sharded bool) {
	shape = x.Shape().Clone()
	for _, g := range x.order() {
		if p := x.place[g]; p.split() {
			shape[p] = sum(x.parts[g])
			sharded = sharded || b.layout.groups[g].Size() > 1
		}
	}
	return shape, sharded
}

// partLike returns the part of whole that x is of another tensor of that shape.
func (b *Builder) partLike(x Node, whole *gorgonia.Node) (part *gorgonia.Node, err error) {
	order := x.order()
	part = whole
	for _, g := range []Group{order[1], order[0]} {
		if p := x.place[g]; err == nil && p.split() && b.layout.groups[g].Size() > 1 {
			part, err = own(b.layout.groups[g], part, int(p), x.parts[g])
		}
	}
	return part, err
}

// order returns the groups, beginning with the one that sharded last.
func (n Node) order() [2]Group {
	if n.place[Sequence] == n.place[Tensor] {
		return [2]Group{n.inner, 1 - n.inner}
	}
	return [2]Group{Tensor, Sequence}
}
