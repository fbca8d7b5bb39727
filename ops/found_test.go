package ops

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// disagree runs a graph of each rank's own on two ranks. Both must find out, and name
// both sides, of which each is one of the given texts.
func disagree(t *testing.T, build func(g *gorgonia.ExprGraph, comm backend.Communicator) error,
	sides ...string) {
	t.Helper()
	g := ranks(t, 2)
	errs := make([]error, 2)
	require.NoError(t, testranks.All(2, func(r int) error {
		graph := gorgonia.NewGraph()
		g.build.Lock()
		err := build(graph, g.comms[r])
		g.build.Unlock()
		testranks.NoError(err)
		m := gorgonia.NewTapeMachine(graph)
		defer m.Close()
		errs[r] = Cause(m.RunAll())
		return nil
	}))
	for r, err := range errs {
		if !errors.Is(err, backend.ErrMismatch) {
			t.Errorf("rank %d: the error is %v, want ErrMismatch", r, err)
			continue
		}
		for _, side := range sides {
			require.Fails(t, fmt.Sprintf("rank %d: the error", r), err, side)
		}
	}
}

func TestFoundShapesAreCompared(t *testing.T) {
	disagree(t, func(g *gorgonia.ExprGraph, comm backend.Communicator) error {
		shape := [][]int{{4, 6}, {6, 4}}[comm.Rank()]
		_, err := AllReduce(comm, backend.Sum, newArr(shape...).node(g, "x", tensor.Float64))
		return err
	}, "allreduce(sum) of x, (4, 6) f64", "allreduce(sum) of x, (6, 4) f64", "rank 0 called",
		"rank 1 called")
}

func TestFoundOrderIsCompared(t *testing.T) {
	disagree(t, func(g *gorgonia.ExprGraph, comm backend.Communicator) error {
		names := [][]string{{"a", "b"}, {"b", "a"}}[comm.Rank()]
		for _, name := range names {
			if _, err := AllReduce(comm, backend.Sum,
				newArr(4, 6).node(g, name, tensor.Float64)); err != nil {
				return err
			}
		}
		return nil
	}, "allreduce(sum) of a, (4, 6) f64 (call 1, collective 1 of its graph)",
		"allreduce(sum) of b, (4, 6) f64 (call 1, collective 1 of its graph)")
}

func TestFoundAxesAreCompared(t *testing.T) {
	disagree(t, func(g *gorgonia.ExprGraph, comm backend.Communicator) error {
		_, err := AllToAll(comm, comm.Rank(), 1-comm.Rank(),
			newArr(4, 4).node(g, "x", tensor.Float64))
		return err
	}, "along axes 0→1", "along axes 1→0")
}

// TestFoundOrderOfRunsIsCompared: the operands have the same names and shapes, and the ranks
// run the collectives of the same graph in another order.
func TestFoundOrderOfRunsIsCompared(t *testing.T) {
	g := ranks(t, 2)
	require.NoError(t, testranks.All(2, func(r int) error {
		graph := gorgonia.NewGraph()
		g.build.Lock()
		x := newArr(3).node(graph, "x", tensor.Float64)
		first, err := AllReduce(g.comms[r], backend.Sum, x)
		second, err2 := AllReduce(g.comms[r], backend.Sum, x)
		g.build.Unlock()
		testranks.NoError(errors.Join(err, err2))
		_, err = []*gorgonia.Node{first, second}[r].Op().Do(x.Value())
		for _, side := range []string{"collective 1 of its graph", "collective 2 of its graph"} {
			if !errors.Is(err, backend.ErrMismatch) || !strings.Contains(err.Error(), side) {
				return fmt.Errorf("the error is %v, want one that says %q", err, side)
			}
		}
		return nil
	}))
}

// TestNodesOfOneRankDoNotCount: a rank may have nodes, and collectives with others, that the
// other rank has not, before, between and behind those that both have.
func TestNodesOfOneRankDoNotCount(t *testing.T) {
	for name, machine := range map[string]func(*gorgonia.ExprGraph) gorgonia.VM{
		"tape": func(g *gorgonia.ExprGraph) gorgonia.VM { return gorgonia.NewTapeMachine(g) },
		"lisp": func(g *gorgonia.ExprGraph) gorgonia.VM { return gorgonia.NewLispMachine(g) },
	} {
		t.Run(name, func(t *testing.T) {
			g := ranks(t, 2)
			require.NoError(t, testranks.All(2, func(r int) error {
				vm := testranks.Must(g.unlike(r, machine))
				defer vm.Close()
				return Cause(vm.RunAll())
			}))
		})
	}
}

// unlike builds a graph that is alike on both ranks only where they communicate.
func (g *team) unlike(r int, machine func(*gorgonia.ExprGraph) gorgonia.VM) (gorgonia.VM, error) {
	g.build.Lock()
	defer g.build.Unlock()
	comm, graph := g.comms[r], gorgonia.NewGraph()
	own := newArr(4, 6).node(graph, fmt.Sprint("own", r), tensor.Float64)
	if r == 0 {
		own = gorgonia.Must(gorgonia.Square(own))
	}
	gathered, err := AllGather(comm, 0, own)
	if err != nil {
		return nil, err
	}
	x := newArr(4, 6).node(graph, "x", tensor.Float64)
	y, err := AllReduce(comm, backend.Max, x)
	if err != nil {
		return nil, err
	}
	cost, err := gorgonia.Add(gorgonia.Must(gorgonia.Sum(y)), gorgonia.Must(gorgonia.Sum(gathered)))
	if err != nil {
		return nil, err
	}
	vm := machine(graph)
	if _, lisp := vm.(interface{ UnbindAll() }); lisp {
		return vm, nil // it differentiates by itself
	}
	if _, err := gorgonia.Grad(cost, x); err != nil {
		return nil, err
	}
	return machine(graph), nil
}

// TestFoundErrorsSayItOnce: the error of a run begins with what has happened where, and says no
// rank, group, operation or shape twice.
func TestFoundErrorsSayItOnce(t *testing.T) {
	g := ranks(t, 2)
	g.comms[1].Abort(errors.New("enough"))
	graph := gorgonia.NewGraph()
	x := newArr(4, 6).node(graph, "x", tensor.Float64)
	require.NoError(t, require.Err(AllReduce(g.comms[0], backend.Sum,
		gorgonia.Must(gorgonia.Square(x)))))
	m := gorgonia.NewTapeMachine(graph)
	defer m.Close()
	err := Cause(m.RunAll())
	var e *Error
	require.That(t, errors.As(err, &e) && e.Op == "AllReduce{sum}" && e.Rank == 0 && e.Comm ==
		g.comms[0].Name(), "the error is %#v", err)
	if text := err.Error(); !strings.HasPrefix(text, "AllReduce{sum} of the result of ") ||
		!strings.Contains(text, " (4, 6) f64: rank 0 of "+g.comms[0].Name()+": ") {
		t.Errorf("the error %q begins with something else", text)
	}
	for _, once := range []string{"AllReduce", "(4, 6)", "rank 0", g.comms[0].Name(), "enough"} {
		n := strings.Count(strings.ToLower(err.Error()), strings.ToLower(once))
		require.Check(t, n == 1, "the error %q says %q %d times", err, once, n)
	}
}

// TestFoundDownDivides: x/P, as PyTorch's division by the world size, and not x times 1/P.
func TestFoundDownDivides(t *testing.T) {
	for _, P := range []int{2, 3, 49} {
		for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			differs := false
			p := onHost{stub{size: P}}
			for i := 1; i < 100; i++ {
				x := float64(i)
				got := arr{[]int{1}, []float64{x}}
				v, memory, err := fresh(dt, tensor.Shape{1})
				require.NoError(t, err)
				want, product := x/float64(P), x*(1/float64(P))
				if dt == tensor.Float32 {
					backend.View[float32](memory)[0] = float32(x)
					want, product = float64(float32(x)/float32(P)),
						float64(float32(x)*float32(1/float64(P)))
				} else {
					backend.View[float64](memory)[0] = x
				}
				differs = differs || want != product
				require.NoError(t, rescale(p, memory, Down(stub{size: P})))
				if got = valueArr(v); got.data[0] != want {
					t.Errorf("%v: %v/%d is %v, want %v", dt, x, P, got.data[0], want)
				}
			}
			require.Check(t, differs == (P != 2), "%v: a product with 1/%d has other bits: %v", dt,
				P, differs)
		}
	}
}
