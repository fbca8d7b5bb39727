package layers

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
)

// LSTM is a layer of long short-term memory, nn.LSTM, from a state of zeros.
//
//	in   x  [steps, batch, n], or [batch, steps, n] with o.BatchFirst
//	out  y  [steps, batch, hidden], or [batch, steps, hidden], placed like x
//
// A rank needs all steps of a sample, but either group may shard the batch. If the Sequence group
// shards the steps, To(x, Sequence, Split(axis of the batch)) is the all-to-all that shards the
// batch instead, and To(y, Sequence, Split(axis of the steps)) reverses it.
//
// Learnables have the name plus ".weight_ih", ".weight_hh", ".bias_ih" and ".bias_hh". They begin
// with numbers between -1/sqrt(hidden) and 1/sqrt(hidden), as in PyTorch. Every rank has all of
// them whole. If the Tensor group shards the batch, their gradients are all-reduced in it.
//
// Cost: that of nn.LSTM for the samples of the rank; no collective.
// Errors: [ErrPlacement] if x is a partial sum, or steps or n are sharded; those of nn.LSTM.
func (b *Builder) LSTM(name string, x Node, hidden int, o nn.RecurrentOptions) Node {
	return b.recurrent("LSTM "+name, name, x, hidden, 4, o,
		func(x, state *gorgonia.Node, w []*gorgonia.Node) (*gorgonia.Node, error) {
			y, _, _, err := nn.LSTM(o, x, state, state, w[0], w[1], w[2], w[3])
			return y, err
		})
}

// GRU is a layer of gated recurrent units, nn.GRU, from a state of zeros. The rest is as for
// [Builder.LSTM].
func (b *Builder) GRU(name string, x Node, hidden int, o nn.RecurrentOptions) Node {
	return b.recurrent("GRU "+name, name, x, hidden, 3, o,
		func(x, state *gorgonia.Node, w []*gorgonia.Node) (*gorgonia.Node, error) {
			y, _, err := nn.GRU(o, x, state, w[0], w[1], w[2], w[3])
			return y, err
		})
}

// recurrent is a layer with the given number of gates, which layer builds.
func (b *Builder) recurrent(what, name string, x Node, hidden, gates int, o nn.RecurrentOptions,
	layer func(x, state *gorgonia.Node, w []*gorgonia.Node) (*gorgonia.Node, error)) Node {
	return b.apply(what, func() (Node, error) {
		batch := 1
		if o.BatchFirst {
			batch = 0
		}
		if err := samples(x, batch); err != nil {
			return Node{}, err
		}
		n, rows := lastOf(x), gates*hidden
		uniform := func(r *rand.Rand) float64 {
			return (2*r.Float64() - 1) / math.Sqrt(float64(hidden))
		}
		var w []*gorgonia.Node
		for _, part := range []struct {
			name  string
			shape []int
		}{{".weight_ih", []int{rows, n}}, {".weight_hh", []int{rows, hidden}},
			{".bias_ih", []int{rows}}, {".bias_hh", []int{rows}}} {
			learnable, err := b.learnFor(x, name+part.name, uniform, part.shape...)
			if err != nil {
				return Node{}, err
			}
			w = append(w, learnable.Node)
		}
		state := []int{1, x.Shape()[batch], hidden}
		zeros := b.Constant(state, make([]float64, size(state)))
		y, err := layer(x.Node, zeros, w)
		return Place(y, x), err
	}, "x", x)
}

// samples checks that x has three axes, and that ranks shard it along the batch alone, so that a
// rank has whole samples.
func samples(x Node, batch int) error {
	if x.Dims() != 3 {
		return fmt.Errorf("%w: x has shape %v: want 3 axes", ops.ErrShape, x.Shape())
	}
	return cmp.Or(require("x", x, Sequence, Split(batch), Copied),
		require("x", x, Tensor, Replicated, Copied, Split(batch)))
}
