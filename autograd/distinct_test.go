package autograd

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// Ranks that are goroutines and share a graph, or one tensor of graphs of their own, are refused on
// all ranks.
func TestGoroutineRanksThatShareLearnablesAreRefused(t *testing.T) {
	shared := vectors(3)
	for name, paramsOf := range map[string]func(rank int) gorgonia.Nodes{
		"a graph": func(int) gorgonia.Nodes { return shared },
		"a tensor": func(rank int) gorgonia.Nodes {
			own := vectors(3)
			if rank > 0 {
				require.Report(t, gorgonia.Let(own[1], shared[1].Value()))
			}
			return own
		},
	} {
		params := make([]gorgonia.Nodes, 3)
		for rank := range params {
			params[rank] = paramsOf(rank)
		}
		for i, err := range each(t, 3, func(r rank) error {
			_, err := New(r.comm, params[r.comm.Rank()])
			return err
		}) {
			want := "ranks 0 and 1, which are goroutines of one process, share the tensor " +
				"of parameter 0, w0"
			if name == "a tensor" {
				want = "ranks 1 and 2, which are goroutines of one process, share the tensor " +
					"of parameter 1, w1"
			}
			require.Fails(t, fmt.Sprintf("%s, rank %d", name, i), err, backend.ErrArgument, want)
		}
	}
}

// Tied weights are one node: as two nodes of one tensor they would be two parameters, and Adam
// would move twice as far.
func TestTiedWeightsAreOneNode(t *testing.T) {
	tied := vectors(2)
	whole := tensor.New(tensor.WithBacking([]float64{1, 1, 1}))
	g := gorgonia.NewGraph()
	a := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(3), gorgonia.WithName("a"),
		gorgonia.WithValue(whole))
	part := require.Value(whole.Slice(gorgonia.S(0, 2)))(t)
	b := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(2), gorgonia.WithName("b"),
		gorgonia.WithValue(part))
	for i, err := range each(t, 2, func(r rank) error {
		if r.comm.Rank() == 1 {
			_, err := New(r.comm, tied)
			return err
		}
		_, err := New(r.comm, gorgonia.Nodes{a, b})
		return err
	}) {
		require.Check(t, err != nil && strings.Contains(err.Error(), "parameters 0, a, and 1, b, "+
			"are one tensor") &&
			(i == 0) == errors.Is(err, backend.ErrArgument), "rank %d: %v", i, err)
	}
	// Used twice, w has the sum of both gradients, and Adam's first step is its rate.
	all(t, 2, func(r rank) error {
		r.build.Lock()
		g := gorgonia.NewGraph()
		w := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(2), gorgonia.WithName("w"),
			gorgonia.WithInit(gorgonia.Ones()))
		loss := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.HadamardProd(w, w))))
		_, err := gorgonia.Grad(loss, w)
		vm := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(w))
		r.build.Unlock()
		defer vm.Close()
		d, err2 := New(r.comm, gorgonia.Nodes{w})
		testranks.NoError(errors.Join(err, err2))
		err = errors.Join(vm.RunAll(), d.Step(&solver.Adam{Rate: 0.1}))
		if got := w.Value().Data().([]float64)[0]; math.Abs(got-0.9) > 1e-7 {
			err = errors.Join(err, fmt.Errorf("Adam moves from 1 to %v", got))
		}
		return errors.Join(err, d.Close())
	})
}
