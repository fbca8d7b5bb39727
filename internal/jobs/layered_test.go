package jobs_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops"
)

// topologies of four ranks; the first one is flat.
var topologies = []string{"", "2x2", "2x2:minor", "0,1,1,0", "4x1"}

// onTopologies runs a rank of four on every topology, which must give the
// numbers of the flat one, and make so many hierarchical calls.
func onTopologies(t *testing.T, calls int, rank func(comm backend.Communicator,
	build sync.Locker) ([]float32, error)) {
	t.Helper()
	var flat [4][]float32
	for _, topology := range topologies {
		t.Setenv("EURYALE_TOPOLOGY", topology)
		err := euryale.Run(context.Background(), len(flat), func(comm backend.Communicator,
			build sync.Locker) error {
			got, err := rank(comm, build)
			if err != nil {
				return err
			}
			h, ok := backend.As[*hierarchy.Communicator](comm)
			if !ok {
				flat[comm.Rank()] = got
				return nil
			}
			if want := flat[comm.Rank()]; !slices.Equal(got, want) {
				return fmt.Errorf("%v, flat %v", got, want)
			}
			if n := h.Stats().Calls; n != calls {
				return fmt.Errorf("%d hierarchical calls, want %d", n, calls)
			}
			return nil
		}, host.Backend{})
		require.Check(t, err == nil, "topology %q: %v", topology, err)
	}
}

// counting returns a tensor of small integers that differ between ranks.
func counting(rank int, shape ...int) *tensor.Dense {
	x := make([]float32, tensor.Shape(shape).TotalSize())
	for i := range x {
		x[i] = float32((i*(rank+3))%11 - 5)
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
}

func TestNodesAreHierarchicalForwardAndBackward(t *testing.T) {
	for name, op := range map[string]func(backend.Communicator, *gorgonia.Node) (*gorgonia.Node,
		error){
		"AllReduce": func(c backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
			return ops.AllReduce(c, backend.Avg, x)
		},
		"ReduceScatter": func(c backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
			return ops.ReduceScatter(c, backend.Sum, 0, x)
		},
		"AllGather": func(c backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
			return ops.AllGather(c, 1, x)
		},
	} {
		t.Run(name, func(t *testing.T) {
			onTopologies(t, 2, func(comm backend.Communicator, build sync.Locker) ([]float32,
				error) {
				return pullback(comm, build, op)
			})
		})
	}
}

// pullback returns y and dx of y = op(x), for the loss sum of w*y.
func pullback(comm backend.Communicator, build sync.Locker, op func(backend.Communicator,
	*gorgonia.Node) (*gorgonia.Node, error)) ([]float32, error) {
	build.Lock()
	y, dx, g, err := graph(comm, op)
	build.Unlock()
	if err != nil {
		return nil, err
	}
	vm := gorgonia.NewTapeMachine(g)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		return nil, err
	}
	return append(slices.Clone(y.Value().Data().([]float32)), dx.Value().Data().([]float32)...), nil
}

func graph(comm backend.Communicator, op func(backend.Communicator, *gorgonia.Node) (*gorgonia.Node,
	error)) (y, dx *gorgonia.Node, g *gorgonia.ExprGraph, err error) {
	g = gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(8, 3), gorgonia.WithName("x"),
		gorgonia.WithValue(counting(comm.Rank(), 8, 3)))
	if y, err = op(comm, x); err != nil {
		return nil, nil, nil, err
	}
	w := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(y.Shape()...),
		gorgonia.WithName("w"), gorgonia.WithValue(counting(comm.Rank()+4, y.Shape()...)))
	weighted, err := gorgonia.HadamardProd(w, y)
	if err != nil {
		return nil, nil, nil, err
	}
	loss, err := gorgonia.Sum(weighted)
	if err != nil {
		return nil, nil, nil, err
	}
	grads, err := gorgonia.Grad(loss, x)
	if err != nil {
		return nil, nil, nil, err
	}
	return y, grads[0], g, nil
}

func TestDataParallelIsHierarchical(t *testing.T) {
	const steps, buckets = 3, 6
	// Ranks compare their parameters and, as goroutines, where these are, and get those of rank 0.
	const calls = 2 + buckets + steps*buckets
	onTopologies(t, calls, func(comm backend.Communicator, build sync.Locker) ([]float32, error) {
		build.Lock()
		g := gorgonia.NewGraph()
		var params, outs gorgonia.Nodes
		for i := range buckets {
			x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(4, 6),
				gorgonia.WithName(fmt.Sprint("x", i)), gorgonia.WithValue(
					counting(comm.Rank()+i, 4, 6)))
			w := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(6, 8),
				gorgonia.WithName(fmt.Sprint("w", i)), gorgonia.WithValue(counting(i, 6, 8)))
			params, outs = append(params, w), append(outs, gorgonia.Must(gorgonia.Mul(x, w)))
		}
		loss := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.ReduceAdd(outs))))
		_, err := gorgonia.Grad(loss, params...)
		build.Unlock()
		if err != nil {
			return nil, err
		}
		dp, err := autograd.New(comm, params, autograd.WithBuckets(1, 1))
		if err != nil {
			return nil, err
		}
		defer dp.Close()
		vm := gorgonia.NewTapeMachine(g)
		defer vm.Close()
		solver := gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.25)) // exact
		for range steps {
			if err := vm.RunAll(); err != nil {
				return nil, err
			}
			grads, err := dp.Sync()
			if err != nil {
				return nil, err
			}
			if err := solver.Step(grads); err != nil {
				return nil, err
			}
			vm.Reset()
		}
		var all []float32
		for _, w := range params {
			all = append(all, w.Value().Data().([]float32)...)
		}
		return all, nil
	})
}
