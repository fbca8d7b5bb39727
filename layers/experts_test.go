package layers_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/vm"
)

// routed is what a training with experts gives in a step.
type routed struct{ loss, balance, dropped float64 }

// routedTraining trains a model with a mixture of experts on all ranks of a layout.
// With padding, samples have different numbers of tokens, and the first has none.
func routedTraining(t *testing.T, k testenv.Kind, s layers.Sizes, o layers.MoEOptions,
	steps int, padding bool) []routed {
	t.Helper()
	const vocabulary, batch = 11, 4
	ids := make([]int, batch*positions)
	for i := range ids {
		ids[i] = (i*i + i/3) % (vocabulary - 1)
		if padding && i%positions >= i/positions*2 {
			ids[i] = vocabulary - 1
		}
	}
	all := make([]routed, steps)
	within(t, k, s, func(l *layers.Layout, device backend.Device, build sync.Locker) error {
		build.Lock()
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
		own := batch / s.DP
		tokens, targets := b.Tokens("tokens", 1, own, positions), b.Tokens("targets", 1, own,
			positions)
		if padding {
			o.Tokens = tokens.Padding(vocabulary - 1)
		}
		embedding := b.Learn("words", layers.Normal(0.5), 0, vocabulary, width)
		x := b.To(b.Embedding(embedding, tokens), layers.Tensor, layers.Replicated)
		x = b.To(b.Positions("p", x), layers.Sequence, layers.Split(0))
		e := b.MoE("experts", x, o)
		x = b.To(b.Add(x, e.Y), layers.Sequence, layers.Split(1))
		loss := b.CrossEntropy(b.Logits(b.LayerNorm("n", x), embedding), targets)
		learnables, err := b.Grad(b.Add(loss, e.Loss))
		scale(learnables)
		build.Unlock()
		testranks.NoError(err)
		read := gorgonia.Nodes{loss.Node, e.Loss.Node, e.Dropped.Node}
		machine := testranks.Must(vm.New(b.Graph(), device, vm.Keep(read...),
			vm.WithSolver(&solver.Momentum{Rate: 0.1, Momentum: 0.9}, learnables...), b.Training()))
		if plan := machine.Plan().String(); device != nil && !strings.Contains(plan, "host_ops=0") {
			return errors.Join(fmt.Errorf("something runs on the host: %v", plan), machine.Close())
		}
		mine := ids[l.Replica*own*positions : (l.Replica+1)*own*positions]
		next := append(slices.Clone(mine[1:]), ids[(l.Replica+1)*own*positions%len(ids)])
		for step := range steps {
			err := errors.Join(tokens.Set(mine), targets.Set(next))
			if err == nil {
				err = ops.Cause(machine.RunAll())
			}
			var v [3]float64
			for i, n := range read {
				if err == nil {
					v[i] = n.Value().Data().(float64)
					err = autograd.Sum(l.Data, &v[i])
				}
			}
			if err != nil {
				return errors.Join(err, machine.Close())
			}
			if l.Comm(layers.Tensor).Rank() == 0 && l.Data.Rank() == 0 {
				all[step] = routed{v[0], v[1], v[2]}
			}
		}
		return machine.Close()
	})
	return all
}

// TestExpertsEqualOneRank: losses and dropped tokens of 20 steps equal one rank's, on layouts of
// replicas and of ranks that shard the experts, evenly or not.
func TestExpertsEqualOneRank(t *testing.T) {
	for i, o := range []layers.MoEOptions{
		{Experts: 5, Choices: 2, Hidden: 7, Capacity: 1, Balance: 0.01},
		{Experts: 5, Choices: 2, Hidden: 7, Capacity: 0.6, Balance: 0.3},
		{Experts: 4, Hidden: 6, Capacity: 0.5, Balance: 0.1},
		{Experts: 4, Choices: 3, Hidden: 5},
	} {
		want := routedTraining(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1}, o, 20, i == 1)
		first, last := want[0], want[len(want)-1]
		require.Check(t, last.loss < first.loss && (o.Capacity > 0) == (first.dropped > 0) &&
			(o.Balance > 0) == (first.balance > 0),
			"%+v: one rank has %+v at first, and %+v at last", o, first, last)
		for _, s := range []layers.Sizes{{DP: 2, SP: 1, TP: 1}, {DP: 1, SP: 1, TP: 2}, {DP: 1,
			SP: 1, TP: 3}, {DP: 1, SP: 1, TP: 4}, {DP: 2, SP: 1, TP: 2}, {DP: 1, SP: 2, TP: 2}} {
			t.Run(fmt.Sprintf("%v of %+v", s, o), func(t *testing.T) {
				sameRouting(t, routedTraining(t, testenv.Hosts, s, o, 20, i == 1), want)
			})
		}
	}
}

func sameRouting(t *testing.T, got, want []routed) {
	t.Helper()
	for i, w := range want {
		near(t, fmt.Sprintf("step %d", i), []float64{got[i].loss, got[i].balance, got[i].dropped},
			[]float64{w.loss, w.balance, w.dropped}, 1e-10)
	}
}

// TestExpertsEqualOneRankOnDevices: so do those of ranks on devices.
func TestExpertsEqualOneRankOnDevices(t *testing.T) {
	o := layers.MoEOptions{Experts: 5, Choices: 2, Hidden: 7, Capacity: 1, Balance: 0.01}
	want := routedTraining(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1}, o, 3, false)
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for _, s := range []layers.Sizes{{DP: 1, SP: 1, TP: 2}, {DP: 2, SP: 1, TP: 2}} {
			t.Run(s.String(), func(t *testing.T) {
				sameRouting(t, routedTraining(t, k, s, o, 3, false), want)
			})
		}
	})
}

// TestPaddingTakesNoRoomOfExperts: tokens get from experts what they get without padding behind
// them, and losses and dropped choices are theirs alone. A sample of padding does not count.
func TestPaddingTakesNoRoomOfExperts(t *testing.T) {
	within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1}, func(l *layers.Layout,
		_ backend.Device, _ sync.Locker) error {
		for choices := 1; choices <= 2; choices++ {
			var want []float64
			for _, ids := range [][]int{{3, 4, 5, 6}, {3, 4, 5, 6, 0, 0, 0, 0},
				{3, 4, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}} {
				batch := max(1, len(ids)/8)
				b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 5)
				tokens := b.Tokens("tokens", 1, batch, len(ids)/batch).Padding(0)
				embedding := b.Learn("words", layers.Normal(1), layers.Undivided, 9, 6)
				x := b.To(b.Embedding(embedding, tokens), layers.Sequence, layers.Split(0))
				// so that the capacity of an expert does not depend on the positions
				capacity := 0.5 * 4 / float64(choices*len(ids)/batch)
				e := b.MoE("moe", x, layers.MoEOptions{Experts: 4, Choices: choices, Hidden: 5,
					Capacity: capacity, Balance: 1, Tokens: tokens})
				testranks.NoError(b.Err())
				m := testranks.Must(vm.New(b.Graph(), nil, vm.Eval(),
					vm.Keep(e.Y.Node, e.Loss.Node, e.Dropped.Node)))
				testranks.NoError(errors.Join(tokens.Set(ids), m.RunAll(), m.Close()))
				y := e.Y.Node.Value().Data().([]float64)
				got := append(slices.Clone(y[:4*6]), e.Loss.Value().Data().(float64),
					e.Dropped.Value().Data().(float64))
				if want == nil {
					want = got
				}
				require.Check(t, got[25] != 0, "%v: nothing is dropped", ids)
				near(t, fmt.Sprint(ids), got, want, 1e-12)
				for i, x := range y[4*6:] {
					if x != 0 {
						t.Errorf("%v: padding gets %v as element %d", ids, x, i)
					}
				}
			}
		}
		return nil
	})
}

// TestAMoEThatKnowsOfNoPaddingIsRefused in either order, by both names.
func TestAMoEThatKnowsOfNoPaddingIsRefused(t *testing.T) {
	within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1}, func(l *layers.Layout,
		_ backend.Device, _ sync.Locker) error {
		for order, build := range map[string]func(b *layers.Builder, tokens *layers.Tokens,
			moe func(tokens *layers.Tokens)){
			"before": func(_ *layers.Builder, tokens *layers.Tokens, moe func(*layers.Tokens)) {
				tokens.Padding(1)
				moe(nil)
			},
			"other tokens": func(b *layers.Builder, tokens *layers.Tokens,
				moe func(*layers.Tokens)) {
				b.Tokens("targets", 1, 2, 4).Padding(1)
				moe(tokens)
			},
			"after": func(b *layers.Builder, tokens *layers.Tokens, moe func(*layers.Tokens)) {
				moe(nil)
				tokens.Padding(1)
			},
		} {
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
			x := b.To(layers.Whole(variable(b, "x", tensor.Float64, 2, 4, 4)), layers.Sequence,
				layers.Split(0))
			build(b, b.Tokens("tokens", 1, 2, 4), func(tokens *layers.Tokens) {
				b.MoE("moe", x, layers.MoEOptions{Experts: 2, Hidden: 1, Tokens: tokens})
			})
			require.Fails(t, order, b.Err(), backend.ErrArgument, "MoE moe and the padding of ")
		}
		return nil
	})
}

// TestExpertsRefused: options that cannot be, and groups that are too large.
func TestExpertsRefused(t *testing.T) {
	for _, c := range []struct {
		o     layers.MoEOptions
		s     layers.Sizes
		wraps error
		want  string
	}{
		{layers.MoEOptions{Hidden: 1}, layers.Sizes{DP: 1, SP: 1, TP: 1}, backend.ErrArgument,
			"Experts:0"},
		{layers.MoEOptions{Experts: 2, Choices: 3, Hidden: 1}, layers.Sizes{DP: 1, SP: 1, TP: 1},
			backend.ErrArgument, "Choices:3"},
		{layers.MoEOptions{Experts: 2, Hidden: 1, Capacity: -1},
			layers.Sizes{DP: 1, SP: 1, TP: 1}, backend.ErrArgument, "Capacity:-1"},
		{layers.MoEOptions{Experts: 2, Hidden: 1}, layers.Sizes{DP: 1, SP: 1, TP: 3},
			ops.ErrShape, "use fewer ranks"},
		{layers.MoEOptions{Experts: 1, Hidden: 1}, layers.Sizes{DP: 1, SP: 1, TP: 2},
			ops.ErrShape, "each needs a part"},
	} {
		within(t, testenv.Hosts, c.s, func(l *layers.Layout, _ backend.Device,
			build sync.Locker) error {
			build.Lock()
			defer build.Unlock()
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
			x := layers.Whole(variable(b, "x", tensor.Float64, 2, 4, 4))
			b.MoE("m", b.To(x, layers.Sequence, layers.Split(0)), c.o)
			require.Fails(t, "b.Err", b.Err(), c.wraps, c.want)
			return nil
		})
	}
}
