package layers_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// TestWrongPlacement: compositions that would give a wrong result or gradient are errors of the
// build, which name the missing collective, on one rank as on two.
func TestWrongPlacement(t *testing.T) {
	const seq, tp = layers.Sequence, layers.Tensor
	for _, c := range []struct {
		name  string
		want  string
		build func(b *layers.Builder, x layers.Node) layers.Node // x is replicated
	}{
		{"replicated meets learnables", "missing a split: To(x, layers.Sequence, layers.Split(1))",
			func(b *layers.Builder, x layers.Node) layers.Node { return b.LayerNorm("n", x) }},
		{"columns without entry", "missing a copy whose gradient is all-reduced: To(x, " +
			"layers.Tensor, layers.Copied)", func(b *layers.Builder, x layers.Node) layers.Node {
			return b.Columns("c", b.To(x, seq, layers.Split(1)), 0, 4)
		}},
		{"partial sum in a function", "missing an all-reduce: To(x, layers.Tensor, " +
			"layers.Replicated)", func(b *layers.Builder, x layers.Node) layers.Node {
			return b.GELU(partial(b, x))
		}},
		{"partial sum and replicated", "missing an all-reduce: To(x, layers.Tensor, " +
			"layers.Replicated)", func(b *layers.Builder, x layers.Node) layers.Node {
			return b.Add(partial(b, x), b.To(x, seq, layers.Split(1)))
		}},
		{"bias of a partial sum", "missing an all-reduce",
			func(b *layers.Builder, x layers.Node) layers.Node {
				return b.Bias("b", partial(b, x))
			}},
		{"norm of divided features", "missing an all-gather: To(x, layers.Tensor, " +
			"layers.Replicated)", func(b *layers.Builder, x layers.Node) layers.Node {
			return b.LayerNorm("n", b.To(b.To(x, seq, layers.Split(1)), tp, layers.Split(2)))
		}},
		{"attention of a part of the positions", "missing an all-to-all: To(q, layers.Sequence, " +
			"layers.Split(2))", func(b *layers.Builder, x layers.Node) layers.Node {
			x = b.To(x, seq, layers.Split(1))
			q := layers.Place(
				gorgonia.Must(gorgonia.Reshape(x.Node, tensor.Shape{2, x.Shape()[1], 2, 2})), x)
			return b.Attend(q, q, q, [2]int{1, 1}, layers.AttentionOptions{Causal: true})
		}},
		{"LSTM of a part of the steps", "missing an all-to-all: To(x, layers.Sequence, " +
			"layers.Split(0))", func(b *layers.Builder, x layers.Node) layers.Node {
			o := nn.RecurrentOptions{BatchFirst: true}
			return b.LSTM("l", b.To(x, seq, layers.Split(1)), 3, o)
		}},
		{"experts for a part of the positions", "missing an all-to-all: To(x, layers.Sequence, " +
			"layers.Split(0))", func(b *layers.Builder, x layers.Node) layers.Node {
			o := layers.MoEOptions{Experts: 2, Hidden: 3}
			return b.MoE("m", b.To(x, seq, layers.Split(1)), o).Y
		}},
		{"GRU of divided features", "missing an all-gather: To(x, layers.Tensor, " +
			"layers.Replicated)", func(b *layers.Builder, x layers.Node) layers.Node {
			x = b.To(b.To(x, seq, layers.Split(1)), tp, layers.Split(2))
			return b.GRU("g", x, 3, nn.RecurrentOptions{})
		}},
		{"sum of different parts", "missing an all-to-all: To(y, layers.Sequence, layers.Split(1))",
			func(b *layers.Builder, x layers.Node) layers.Node {
				return b.Add(b.To(x, seq, layers.Split(1)), b.To(x, seq, layers.Split(0)))
			}},
		{"part and whole", "missing a split: To(y, layers.Sequence, layers.Split(1))",
			func(b *layers.Builder, x layers.Node) layers.Node {
				return b.Add(b.To(x, seq, layers.Split(1)), x)
			}},
		{"wrong order", "move it over the tensor group first",
			func(b *layers.Builder, x layers.Node) layers.Node {
				return b.To(b.To(b.To(x, seq, layers.Split(1)), tp, layers.Split(1)), seq,
					layers.Replicated)
			}},
		{"parts in different orders", "shard both in one order",
			func(b *layers.Builder, x layers.Node) layers.Node {
				return b.Add(b.To(b.To(x, seq, layers.Split(1)), tp, layers.Split(1)),
					b.To(b.To(x, tp, layers.Split(1)), seq, layers.Split(1)))
			}},
		{"attention of positions that tensor ranks divide",
			"missing an all-gather: To(q, layers.Tensor, layers.Replicated)",
			func(b *layers.Builder, x layers.Node) layers.Node {
				x = layers.Place(gorgonia.Must(gorgonia.Reshape(x.Node, tensor.Shape{2, 4, 2, 2})),
					x)
				q := b.To(b.To(x, seq, layers.Split(2)), tp, layers.Split(1))
				return b.Attend(q, q, q, [2]int{1, 1}, layers.AttentionOptions{Causal: true})
			}},
		{"an embedding that was gathered", "missing a copy whose gradient is all-reduced: " +
			"To(embedding, layers.Sequence, layers.Copied)", func(b *layers.Builder,
			x layers.Node) layers.Node {
			embedding := b.To(b.To(b.Learn("w", layers.Constant(1), layers.Undivided, 4, 4), seq,
				layers.Split(0)), seq, layers.Replicated)
			return b.Embedding(embedding, b.Tokens("t", 1, 1, 4))
		}},
		{"no way back", "no collective makes it replicated",
			func(b *layers.Builder, x layers.Node) layers.Node {
				return b.To(b.To(x, tp, layers.Copied), tp, layers.Replicated)
			}},
		{"loss counted by each rank", "no collective leads there",
			func(b *layers.Builder, x layers.Node) layers.Node {
				b.Grad(layers.Place(gorgonia.Must(gorgonia.Sum(x.Node)),
					b.To(x, tp, layers.Copied)))
				return x
			}},
	} {
		for ranks := 1; ranks <= 2; ranks++ {
			t.Run(c.name, func(t *testing.T) {
				within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: ranks, TP: 1},
					func(l *layers.Layout, _ backend.Device, build sync.Locker) error {
						build.Lock()
						defer build.Unlock()
						b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
						c.build(b, layers.Whole(variable(b, "x", tensor.Float64, 2, 4, 4)))
						require.Fails(t, "b.Err", b.Err(), layers.ErrPlacement, c.want)
						return nil
					})
			})
		}
	}
}

// TestGroupedAttentionRefused: ranks must have the keys that their heads of queries share, and have
// no mask of heads that others have.
func TestGroupedAttentionRefused(t *testing.T) {
	for _, c := range []struct {
		name, want string
		wraps      error
		o          layers.AttentionOptions
		mask       []int
	}{
		{"heads apart from their keys", "shards k into lengths of [2 1]", layers.ErrPlacement,
			layers.AttentionOptions{Heads: 6, KeyHeads: 3}, nil},
		{"fewer heads of keys than ranks", "each needs a part", ops.ErrShape,
			layers.AttentionOptions{Heads: 6, KeyHeads: 1}, nil},
		{"heads of keys that divide no heads", "6 heads share 4 heads of keys", backend.ErrArgument,
			layers.AttentionOptions{Heads: 6, KeyHeads: 4}, nil},
		{"a mask of heads", "use one for all", layers.ErrPlacement,
			layers.AttentionOptions{Heads: 6, KeyHeads: 2}, []int{3, 4, 4}},
	} {
		for _, s := range []layers.Sizes{{DP: 1, SP: 2, TP: 1}, {DP: 1, SP: 1, TP: 2}} {
			t.Run(fmt.Sprint(c.name, s), func(t *testing.T) {
				within(t, testenv.Hosts, s, func(l *layers.Layout, _ backend.Device,
					build sync.Locker) error {
					build.Lock()
					defer build.Unlock()
					b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
					x := layers.Whole(variable(b, "x", tensor.Float64, 2, 4, 6))
					o := c.o
					if c.mask != nil {
						o.Mask = variable(b, "mask", tensor.Float64, c.mask...)
					}
					b.Attention("a", b.To(x, layers.Sequence, layers.Split(1)), o)
					require.Fails(t, "b.Err", b.Err(), c.wraps, c.want)
					return nil
				})
			})
		}
	}
}

// partial is a partial sum over the Tensor group, split along the sequence.
func partial(b *layers.Builder, x layers.Node) layers.Node {
	x = b.To(b.To(x, layers.Sequence, layers.Split(1)), layers.Tensor, layers.Copied)
	return b.Rows("rows", b.Columns("columns", x, 0, 4), 1, 4)
}

// TestRefused: arguments that cannot be.
func TestRefused(t *testing.T) {
	within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 2, TP: 1}, func(l *layers.Layout,
		_ backend.Device, build sync.Locker) error {
		build.Lock()
		defer build.Unlock()
		for want, f := range map[string]func(b *layers.Builder, x layers.Node){
			"each needs a part": func(b *layers.Builder, x layers.Node) {
				b.Attention("a", b.To(x, layers.Sequence, layers.Split(1)),
					layers.AttentionOptions{Heads: 1})
			},
			"use a divisor": func(b *layers.Builder, x layers.Node) {
				b.Attention("a", b.To(x, layers.Sequence, layers.Split(1)),
					layers.AttentionOptions{Heads: 3})
			},
			"another learnable": func(b *layers.Builder, _ layers.Node) {
				b.Learn("w", layers.Constant(1), layers.Undivided, 2)
				b.Learn("w", layers.Constant(1), layers.Undivided, 2)
			},
			"x has shape": func(b *layers.Builder, x layers.Node) {
				b.Add(x, layers.Whole(variable(b, "y", tensor.Float64, 2, 4, 1)))
			},
			"want 4 axes": func(b *layers.Builder, x layers.Node) {
				b.Attend(x, x, x, [2]int{1, 1}, layers.AttentionOptions{Causal: true})
			},
			"no axis 7": func(b *layers.Builder, x layers.Node) {
				b.To(x, layers.Tensor, layers.Split(7))
			},
		} {
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
			f(b, layers.Whole(variable(b, "x", tensor.Float64, 2, 4, 4)))
			if err := b.Err(); err == nil || !strings.Contains(err.Error(), want) ||
				!errors.Is(err, backend.ErrArgument) && !errors.Is(err, ops.ErrShape) {
				t.Errorf("%v, want %q", err, want)
			}
		}
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
		tokens := b.Tokens("t", 1, 1, 4)
		b.Embedding(b.Learn("w", layers.Constant(1), 0, 3, 2), tokens)
		for _, ids := range [][]int{{0, 1, 2, 3}, {0}} {
			require.Fails(t, fmt.Sprintf("tokens %v", ids), tokens.Set(ids), backend.ErrArgument)
		}
		return nil
	})
}

// A model whose tokens nobody has set does not train on zeros: the first run is an error that names
// them.
func TestTokensThatAreNotSetAreAnError(t *testing.T) {
	for _, tp := range []int{1, 2} { // with a mask of the vocabulary
		sizes := layers.Sizes{DP: 1, SP: 1, TP: tp}
		within(t, testenv.Hosts, sizes, func(l *layers.Layout, _ backend.Device,
			build sync.Locker) error {
			build.Lock()
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
			tokens := b.Tokens("text", 1, 1, 4)
			y := b.To(b.Embedding(b.Learn("words", layers.Normal(1), 0, 6, 2), tokens),
				layers.Tensor, layers.Replicated)
			build.Unlock()
			machine, err := vm.New(b.Graph(), nil, vm.Keep(y.Node))
			testranks.NoError(errors.Join(b.Err(), err))
			defer machine.Close()
			if err := machine.RunAll(); err == nil || !strings.Contains(err.Error(),
				"text.0 has no value") || !strings.Contains(err.Error(), "layers.Tokens") {
				return fmt.Errorf("a run without tokens: %w", err)
			}
			for i := range 3 {
				testranks.NoError(errors.Join(tokens.Set([]int{i, 1, 2, 3}), machine.RunAll()))
			}
			return nil
		})
	}
}
