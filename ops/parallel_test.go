package ops

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// network is a graph with a loss and what to differentiate it by.
type network func(comm backend.Communicator, g *gorgonia.ExprGraph) (loss *gorgonia.Node,
	wrt gorgonia.Nodes, err error)

// grads runs a network on every rank and returns each rank's gradients.
func (g *team) grads(net network) ([][]arr, error) {
	all := make([][]arr, len(g.comms))
	err := g.run(func(comm backend.Communicator, build sync.Locker) error {
		build.Lock()
		graph := gorgonia.NewGraph()
		loss, wrt, err := net(comm, graph)
		var dxs gorgonia.Nodes
		if err == nil {
			dxs, err = gorgonia.Grad(loss, wrt...)
		}
		if err != nil {
			build.Unlock()
			return err
		}
		m := gorgonia.NewTapeMachine(graph)
		build.Unlock()
		defer m.Close()
		if err := m.RunAll(); err != nil {
			return Cause(err)
		}
		for _, dx := range dxs {
			all[comm.Rank()] = append(all[comm.Rank()], valueArr(dx.Value()))
		}
		return nil
	})
	return all, err
}

// chain applies steps to a node, up to the first error.
func chain(x *gorgonia.Node, steps ...func(*gorgonia.Node) (*gorgonia.Node, error)) (*gorgonia.Node,
	error) {
	for _, step := range steps {
		var err error
		if x, err = step(x); err != nil {
			return nil, err
		}
	}
	return x, nil
}

func times(b *gorgonia.Node) func(*gorgonia.Node) (*gorgonia.Node, error) {
	return func(a *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Mul(a, b) }
}

func weightedSquares(w *gorgonia.Node) func(*gorgonia.Node) (*gorgonia.Node, error) {
	return func(y *gorgonia.Node) (*gorgonia.Node, error) {
		return chain(y, gorgonia.Square,
			func(y *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.HadamardProd(y, w) },
			func(y *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Sum(y) })
	}
}

func near(a, b arr) bool {
	if fmt.Sprint(a.shape) != fmt.Sprint(b.shape) {
		return false
	}
	for i := range a.data {
		if math.Abs(a.data[i]-b.data[i]) > 1e-12*math.Max(1, math.Abs(b.data[i])) {
			return false
		}
	}
	return true
}

// TestTensorParallelEqualsOneRank: a network divided by columns and rows of its
// weights has the gradients of the whole one.
func TestTensorParallelEqualsOneRank(t *testing.T) {
	rng := rand.New(rand.NewPCG(16, 0))
	x, a, b, w := gaussian(rng, 3, 4), gaussian(rng, 4, 8), gaussian(rng, 8, 2), gaussian(rng, 3, 2)
	net := func(comm backend.Communicator, g *gorgonia.ExprGraph) (*gorgonia.Node, gorgonia.Nodes,
		error) {
		r, lens := comm.Rank(), backend.Even(8, comm.Size())
		in := x.node(g, "x", tensor.Float64)
		na := a.cut(1, lens)[r].node(g, "a", tensor.Float64)
		nb := b.cut(0, lens)[r].node(g, "b", tensor.Float64)
		loss, err := chain(in,
			func(x *gorgonia.Node) (*gorgonia.Node, error) { return CopyToParallel(comm, x) },
			times(na), gorgonia.Tanh, times(nb),
			func(y *gorgonia.Node) (*gorgonia.Node, error) { return ReduceFromParallel(comm, y) },
			gorgonia.Tanh, weightedSquares(w.node(g, "w", tensor.Float64)))
		return loss, gorgonia.Nodes{in, na, nb}, err
	}
	whole := require.Value(ranks(t, 1).grads(net))(t)
	for _, P := range []int{2, 3, 4} {
		lens := backend.Even(8, P)
		parts := require.Value(ranks(t, P).grads(net))(t)
		for r, got := range parts {
			want := []arr{whole[0][0], whole[0][1].cut(1, lens)[r], whole[0][2].cut(0, lens)[r]}
			for i := range want {
				if !near(got[i], want[i]) {
					t.Errorf("%d ranks, rank %d, gradient %d: %v, want %v", P, r, i, got[i],
						want[i])
				}
			}
		}
	}
}

// TestSequenceParallelEqualsOneRank: a network that is entered by a split with
// Down, left by a gather with Up, and mixes positions between two AllToAlls, has
// the gradients of one rank, when those of its parameters are averaged; also
// where the sequence and the heads are divided unevenly.
func TestSequenceParallelEqualsOneRank(t *testing.T) {
	const heads = 4
	for _, c := range []struct {
		P, n int
		lens []int // of the sequence
		cut  []int // of the heads
	}{
		{2, 6, []int{3, 3}, []int{2, 2}},
		{4, 8, []int{2, 2, 2, 2}, []int{1, 1, 1, 1}},
		{2, 5, []int{4, 1}, []int{1, 3}},
		{3, 7, []int{1, 4, 2}, []int{2, 1, 1}},
	} {
		rng := rand.New(rand.NewPCG(17, uint64(c.n)))
		x, mix, w := gaussian(rng, c.n, 3), gaussian(rng, c.n, c.n), gaussian(rng, c.n, 2)
		a, b := gaussian(rng, 3, heads), gaussian(rng, heads, 2)
		net := func(comm backend.Communicator, g *gorgonia.ExprGraph) (*gorgonia.Node,
			gorgonia.Nodes, error) {
			var split, there, back []Option
			if comm.Size() > 1 {
				split = []Option{Splits(c.lens...)}
				there, back = []Option{AllToAllSplits(c.cut, c.lens)},
					[]Option{AllToAllSplits(c.lens, c.cut)}
			}
			in, na, nb := x.node(g, "x", tensor.Float64), a.node(g, "a", tensor.Float64),
				b.node(g, "b", tensor.Float64)
			nmix := mix.node(g, "mix", tensor.Float64)
			loss, err := chain(in, func(x *gorgonia.Node) (*gorgonia.Node, error) {
				return SplitForwardGatherBackward(comm, 0, Down(comm), x, split...)
			}, times(na), gorgonia.Tanh, func(q *gorgonia.Node) (*gorgonia.Node, error) {
				return AllToAll(comm, 1, 0, q, there...)
			}, func(q *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Mul(nmix, q) },
				gorgonia.Tanh, func(o *gorgonia.Node) (*gorgonia.Node, error) {
					return AllToAll(comm, 0, 1, o, back...)
				}, times(nb), gorgonia.Tanh, func(y *gorgonia.Node) (*gorgonia.Node, error) {
					return GatherForwardSplitBackward(comm, 0, Up(comm), y, split...)
				}, weightedSquares(w.node(g, "w", tensor.Float64)))
			return loss, gorgonia.Nodes{in, na, nb}, err
		}
		whole := require.Value(ranks(t, 1).grads(net))(t)
		parts := require.Value(ranks(t, c.P).grads(net))(t)
		for r := range parts {
			if !near(parts[r][0], whole[0][0]) {
				t.Errorf("%v, rank %d: gradient of the input %v, want %v", c.lens, r, parts[r][0],
					whole[0][0])
			}
		}
		for i := 1; i < 3; i++ {
			var all []arr
			for r := range parts {
				all = append(all, parts[r][i])
			}
			if mean := combine(backend.Avg, tensor.Float64, all); !near(mean, whole[0][i]) {
				t.Errorf("%v: gradient of parameter %d %v, want %v", c.lens, i, mean, whole[0][i])
			}
		}
	}
}
