package vm_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/vm"
)

// TestLengthsOfZeroOfCollectives: a rank may have no elements of a variable, of its gradient, and
// of what it passes from one collective to another, as package ops says.
func TestLengthsOfZeroOfCollectives(t *testing.T) {
	lengthsOfZero(t, testenv.Hosts, testenv.Devices, testenv.Staged)
}

func lengthsOfZero(t *testing.T, kinds ...testenv.Kind) {
	testenv.Each(t, kinds, func(t *testing.T, k testenv.Kind) {
		for _, lens := range [][]int{{2, 0, 1}, {0, 3, 0}, {0, 0, 3}} {
			if k != testenv.Hosts {
				lens = lens[1:] // of two devices
			}
			for name, build := range emptied {
				err := testranks.Join(together(t, k, len(lens), func(r ranked) error {
					return r.passEmpty(lens, build)
				}))
				require.Check(t, err == nil, "%s %v: %v", name, lens, err)
			}
		}
	})
}

// emptied are graphs by the lengths of ranks: of x [n, 2], of which every rank has its rows of 1,
// 2, 3, ..., to all of these on every rank.
var emptied = map[string]func(comm backend.Communicator, lens []int, x node) (
	parts nodes, all node){
	"AllGather": func(comm backend.Communicator, lens []int, x node) (nodes, node) {
		return nil, must(ops.AllGather(comm, 0, x, ops.Splits(lens...)))
	},
	"AllGather, ReduceScatter": func(comm backend.Communicator, lens []int, x node) (nodes, node) {
		all := must(ops.AllGather(comm, 0, x, ops.Splits(lens...)))
		part := must(ops.ReduceScatter(comm, backend.Avg, 0, all, ops.Splits(lens...)))
		return nodes{part}, must(ops.AllGather(comm, 0, part, ops.Splits(lens...)))
	},
	"AllReduce of rows": func(comm backend.Communicator, lens []int, x node) (nodes, node) {
		all := must(ops.AllGather(comm, 0, x, ops.Splits(lens...)))
		part := must(ops.SplitForwardGatherBackward(comm, 0, 1, all, ops.Splits(lens...)))
		return nodes{part}, must(ops.GatherForwardSplitBackward(comm, 0, 1, part,
			ops.Splits(lens...)))
	},
	"AllToAll": func(comm backend.Communicator, lens []int, x node) (nodes, node) {
		columns := make([]int, comm.Size()) // all of both on the last rank
		columns[comm.Size()-1] = 2
		there := must(ops.AllToAll(comm, 1, 0, x, ops.AllToAllSplits(columns, lens)))
		back := must(ops.AllToAll(comm, 0, 1, there, ops.AllToAllSplits(lens, columns)))
		return nodes{there, back}, must(ops.AllGather(comm, 0, back, ops.Splits(lens...)))
	},
}

// passEmpty runs such a graph.
func (r ranked) passEmpty(lens []int, build func(backend.Communicator, []int, node) (
	nodes, node)) error {
	rank, rows, first := r.Comm.Rank(), 0, 0
	for s, n := range lens {
		if rows += n; s < rank {
			first += n
		}
	}
	var own, want []float64
	for i := range 2 * rows {
		if want = append(want, float64(i+1)); i/2 >= first && i/2 < first+lens[rank] {
			own = append(own, float64(i+1))
		}
	}
	r.lock.Lock()
	m := &model{g: gorgonia.NewGraph()}
	x := gorgonia.NewMatrix(m.g, tensor.Float64, gorgonia.WithShape(lens[rank], 2),
		gorgonia.WithName("x"), gorgonia.WithValue(tensor.New(tensor.WithShape(lens[rank], 2),
			tensor.WithBacking(slices.Concat(make([]float64, 0, 1), own)))))
	m.params = nodes{x}
	parts, all := build(r.Comm, lens, x)
	m.grad(r.t, sum(square(all)))
	v, err := vm.New(m.g, r.device, vm.Keep(append(parts, all, x.Deriv())...))
	r.lock.Unlock()
	testranks.NoError(err)
	for range 3 {
		if err := v.RunAll(); err != nil {
			return errors.Join(err, v.Close())
		}
		if got := floats(r.t, all.Value()); !slices.Equal(got, want) {
			return errors.Join(fmt.Errorf("%v, want %v", got, want), v.Close())
		}
		dx := floats(r.t, x.Deriv().Value())
		for i, e := range own {
			if len(dx) != len(own) || dx[i] <= 0 || dx[i]/e != dx[0]/own[0] {
				return errors.Join(fmt.Errorf("gradient %v of %v", dx, own), v.Close())
			}
		}
	}
	return v.Close()
}
