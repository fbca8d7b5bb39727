package layers

import (
	"cmp"
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
)

// AttentionOptions are the options of attention blocks.
type AttentionOptions struct {
	Heads int
	// KeyHeads is how many heads keys and values have: it divides Heads, and neighbouring heads of
	// queries share one (grouped-query attention). 0 stands for Heads.
	KeyHeads int
	Causal   bool    // a position sees only itself and those before it
	SoftCap  float64 // bounds scores: see nn.AttentionOptions
	// Appended makes Causal count from KeyLengths: see nn.AttentionOptions.
	Appended bool
	// Mask is added to the scores of every head. Its shape is repeated to [batch, 1, queries,
	// keys]. It is the same on all ranks of both groups, and has no gradient.
	Mask *gorgonia.Node
	// Window is how many keys a query sees at most with Causal: see nn.AttentionOptions.
	Window int
	// KeyStarts are integers, [batch, queries], the same on all ranks of both groups: the first
	// keys that queries see, as [Tokens.Documents] gives them.
	KeyStarts *gorgonia.Node
	// KeyLengths are integers, [batch], the same on all ranks of both groups: positions of a sample
	// from its length on are padding, which no query sees.
	KeyLengths *gorgonia.Node
	// Rotary turns queries and keys by their positions: see [Builder.Rotary]. nil turns nothing.
	Rotary *RotaryOptions
}

// shared returns the heads of keys and values.
func (o AttentionOptions) shared() int { return cmp.Or(o.KeyHeads, o.Heads) }

// width returns the width of a head.
func (o AttentionOptions) width(n int) (int, error) {
	if o.Heads < 1 || n%o.Heads != 0 {
		return 0, fmt.Errorf("%w: %d heads of a width of %d: use a divisor of the width",
			backend.ErrArgument, o.Heads, n)
	}
	if k := o.shared(); k < 1 || o.Heads%k != 0 {
		return 0, fmt.Errorf("%w: %d heads share %d heads of keys: use a divisor of the heads",
			backend.ErrArgument, o.Heads, k)
	}
	return n / o.Heads, nil
}

// Attention is self-attention, with linear layers before and after it.
//
//	in   x  [batch, positions, n] Split(1) over the Sequence group,
//	        or [positions, batch, n] Split(0)
//	out  y  like x, and placed like x
//
// Learnables have the name plus ".qkv", of shape [n, 3, heads, n/heads], and ".out"; with fewer
// heads of keys, ".q", [n, 1, heads, n/heads], and ".kv", [n, 2, key heads, n/heads], in place of
// ".qkv".
//
// The Tensor group shards the heads, and the Sequence group shards each rank's heads further: one
// all-to-all of queries, keys and values together, attention over all positions, and one all-to-all
// of the result. With fewer heads of keys, keys and values have a separate all-to-all, and the
// ranks of both groups together must divide their heads evenly.
//
// Cost: 8*d*n*n/P operations for the linear layers, and the cost of nn.Attention for the rank's
// heads; the collectives of the package comment. Errors: [ErrPlacement], also if a rank would have
// heads of queries without the keys that they share; [backend.ErrArgument] if heads do not divide
// n, or heads of keys the heads; [ops.ErrShape] if there are fewer heads than ranks that shard
// them.
func (b *Builder) Attention(name string, x Node, o AttentionOptions) Node {
	return b.within("Attention "+name, func() Node {
		if o.shared() != o.Heads {
			return b.crossed(name, x, x, o)
		}
		qkv := b.project(name+".qkv", x, o, 3)
		axis := sequenceAxis(x)
		q, k, v := b.Part(qkv, 0), b.Part(qkv, 1), b.Part(qkv, 2)
		y := b.Attend(q, k, v, [2]int{axis, axis}, o)
		return b.merge(name+".out", y, x)
	})
}

// CrossAttention is attention of the positions of x to those of memory.
//
//	in   x       [batch, queries, n] Split(1) over the Sequence group,
//	             or [queries, batch, n] Split(0)
//	     memory  [batch, keys, m] Split(1), or [keys, batch, m] Split(0)
//	out  y       like x, and placed like x
//
// Learnables have the name plus ".q", ".kv" and ".out". One all-to-all moves keys and values,
// another one queries. Cost and errors: see [Builder.Attention].
func (b *Builder) CrossAttention(name string, x, memory Node, o AttentionOptions) Node {
	return b.within("CrossAttention "+name, func() Node { return b.crossed(name, x, memory, o) })
}

// crossed is attention with queries apart from keys and values.
func (b *Builder) crossed(name string, x, memory Node, o AttentionOptions) Node {
	q := b.Part(b.project(name+".q", x, o, 1), 0)
	kv := b.projectTo(name+".kv", memory, o, 2, lastOf(x))
	y := b.Attend(q, b.Part(kv, 0), b.Part(kv, 1), [2]int{sequenceAxis(x), sequenceAxis(memory)}, o)
	return b.merge(name+".out", y, x)
}

// sequenceAxis returns the axis along which the Sequence group shards x.
func sequenceAxis(x Node) int { return int(x.place[Sequence]) }

// project returns count projections of x: [., ., count, heads, d], with all positions of this
// rank's heads.
func (b *Builder) project(name string, x Node, o AttentionOptions, count int) Node {
	return b.projectTo(name, x, o, count, lastOf(x))
}

// projectTo is project to heads of n elements together.
func (b *Builder) projectTo(name string, x Node, o AttentionOptions, count, n int) Node {
	d, heads := 0, o.Heads
	if count == 2 { // keys and values
		heads = o.shared()
	}
	x = b.apply("projection "+name, func() (Node, error) {
		if axis := sequenceAxis(x); axis != 0 && axis != 1 || x.Dims() != 3 {
			return Node{}, misplaced("x", x, Sequence, Split(1), Split(0))
		}
		var err error
		d, err = o.width(n)
		return x, err
	}, "x", x)
	y := b.Columns(name, b.beginTensorParallel(x), 1, count, heads, d)
	if o.Rotary != nil {
		y = b.turned(y, count, sequenceAxis(x), *o.Rotary)
	}
	return b.To(y, Sequence, Split(3))
}

// turned applies Rotary to projections except values, the last of several. It does so before the
// all-to-all, which moves what attention reads.
func (b *Builder) turned(y Node, count, axis int, o RotaryOptions) Node {
	if count == 1 {
		return b.Rotary(y, axis, o)
	}
	part := func(start, end int) Node {
		return b.apply("projection", func() (Node, error) {
			n, err := nn.Slice(2, start, end, 1, y.Node)
			return Place(n, y), err
		}, "y", y)
	}
	first, values := b.Rotary(part(0, count-1), axis, o), part(count-1, count)
	return b.apply("projection", func() (Node, error) {
		n, err := nn.Concat(2, first.Node, values.Node)
		return Place(n, y), err
	}, "first", first, "values", values)
}

// Part returns one of several projections.
//
//	in   x  [a, b, parts, heads, d]
//	out  y  [a, b, heads, d]   x[:, :, i], placed like x
func (b *Builder) Part(x Node, i int) Node {
	return b.apply("Part", func() (Node, error) {
		n, s := x.Node, x.Shape()
		if len(s) != 5 {
			return Node{}, fmt.Errorf("%w: x has shape %v: want 5 axes", ops.ErrShape, s)
		}
		if s[2] > 1 {
			var err error
			if n, err = nn.Slice(2, i, i+1, 1, n); err != nil {
				return Node{}, err
			}
		}
		n, err := reshape(n, s[0], s[1], s[3], s[4])
		return Place(n, x, 0, 1, 3, 4), err
	}, "x", x)
}

// merge brings results of attention back to the positions of x, and adds up the terms of the heads.
func (b *Builder) merge(name string, y, x Node) Node {
	if b.err != nil {
		return Node{}
	}
	y = b.To(y, Sequence, x.place[Sequence])
	return b.endTensorParallel(name, b.Rows(name, y, 2, lastOf(x)), x)
}

// Attend is nn.Attention of queries, keys and values that a program has projected itself.
//
//	in   q     [batch, queries, heads, d], or [queries, batch, heads, d]
//	     k, v  [batch, keys, heads, d], or [keys, batch, heads, d]
//	out  y     like q
//
// positions are the sequence axes of q, and of k and v: 0 or 1. All are Split(2) over the Sequence
// group: To(q, Sequence, Split(2)) is the all-to-all that gives a rank all positions of its heads.
// Attend ignores the options Heads and Rotary: there may be fewer heads of keys.
//
// Errors: [ErrPlacement]; [ops.ErrShape]; those of nn.Attention.
func (b *Builder) Attend(q, k, v Node, positions [2]int, o AttentionOptions) Node {
	return b.apply("Attend", func() (Node, error) {
		if m := o.Mask; m != nil && m.Dims() > 2 && m.Shape()[m.Dims()-3] != 1 {
			return Node{}, fmt.Errorf("%w: the mask has shape %v, with numbers for each head, but "+
				"ranks shard heads: use one for all", ErrPlacement, m.Shape())
		}
		for i, x := range []Node{q, k, v} {
			name := [...]string{"q", "k", "v"}[i]
			axis := positions[min(i, 1)]
			if x.Dims() != 4 || axis != 0 && axis != 1 {
				return Node{}, fmt.Errorf("%w: %s has shape %v, with positions along axis %d: "+
					"want 4 axes, and positions along 0 or 1", ops.ErrShape, name, x.Shape(), axis)
			}
			if err := cmp.Or(require(name, x, Sequence, Split(2)), summed(name, x),
				wholeAxis(name, x, axis), wholeAxis(name, x, 3)); err != nil {
				return Node{}, err
			}
			if x.place[Tensor] != q.place[Tensor] {
				return Node{}, misplaced(name, x, Tensor, q.place[Tensor])
			}
			if err := sharing(name, x, q); err != nil {
				return Node{}, err
			}
		}
		var operands [3]*gorgonia.Node
		for i, x := range []Node{q, k, v} {
			var err error
			if operands[i], err = gorgonia.Transpose(x.Node,
				headsFirst[positions[min(i, 1)]]...); err != nil {
				return Node{}, err
			}
		}
		y, err := nn.Attention(operands[0], operands[1], operands[2], nn.AttentionOptions{
			Causal: o.Causal, Appended: o.Appended, Window: o.Window, SoftCap: o.SoftCap,
			Mask: o.Mask, KeyLengths: o.KeyLengths, KeyStarts: o.KeyStarts})
		if err != nil {
			return Node{}, err
		}
		y, err = gorgonia.Transpose(y, headsLast[positions[0]]...)
		return Place(y, q), err
	}, "q", q, "k", k, "v", v)
}

// sharing checks that this rank has the heads of keys that its heads of queries share: like
// [alike], except that each part of x may be a share of q's.
func sharing(operand string, x, q Node) error {
	for g, p := range x.place {
		all, of := q.parts[g], x.parts[g]
		is := p == Split(2) && len(all) == len(of)
		for i := 0; is && i < len(of); i++ {
			is = of[i]*sum(all) == all[i]*sum(of)
		}
		if is {
			x.parts[g] = all
		}
	}
	return alike(operand, x, q)
}

// headsFirst are the axes of [batch, heads, positions, d] in a tensor by its axis of positions, and
// headsLast the way back.
var (
	headsFirst = [2][]int{{1, 2, 0, 3}, {0, 2, 1, 3}}
	headsLast  = [2][]int{{2, 0, 1, 3}, {0, 2, 1, 3}}
)
