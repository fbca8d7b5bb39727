package ops

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// machineGrads builds loss = sum(w * op(x*x)) and returns the gradient of x, by
// the lisp machine's DoDiff or by Grad and the tape machine. dims are 0 for
// scalars.
func machineGrads(comm backend.Communicator, build sync.Locker, lisp bool, dt tensor.Dtype, x arr,
	w func(shape []int) arr, op constructor) (arr, error) {
	build.Lock()
	graph := gorgonia.NewGraph()
	in := x.node(graph, "x", dt)
	loss, err := weighted(comm, in, dt, w, op)
	var grads gorgonia.Nodes
	if err == nil && !lisp {
		grads, err = gorgonia.Grad(loss, in)
	}
	if err != nil {
		build.Unlock()
		return arr{}, err
	}
	var m gorgonia.VM
	if lisp {
		m = gorgonia.NewLispMachine(graph)
	} else {
		m = gorgonia.NewTapeMachine(graph)
	}
	build.Unlock()
	defer m.Close()
	if err := m.RunAll(); err != nil {
		return arr{}, Cause(err)
	}
	if !lisp {
		return valueArr(grads[0].Value()), nil
	}
	dx, err := in.Grad()
	if err != nil {
		return arr{}, err
	}
	return valueArr(dx), nil
}

func weighted(comm backend.Communicator, x *gorgonia.Node, dt tensor.Dtype, w func(shape []int) arr,
	op constructor) (*gorgonia.Node, error) {
	h, err := gorgonia.HadamardProd(x, x)
	if err != nil {
		return nil, err
	}
	y, err := op(comm, h)
	if err != nil {
		return nil, err
	}
	if y, err = gorgonia.HadamardProd(y, w(y.Shape()).node(x.Graph(), "w", dt)); err != nil {
		return nil, err
	}
	if len(y.Shape()) == 0 {
		return y, nil
	}
	return gorgonia.Sum(y)
}

// TestMachinesAgree: gradients by DoDiff, in the lisp machine, are those by
// SymDiff, for every operation with a gradient, on tensors and on scalars. The
// same for repeated use of x, whose gradients add up.
func TestMachinesAgree(t *testing.T) {
	const P = 2
	g := ranks(t, P)
	for _, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32} {
		rng := rand.New(rand.NewPCG(14, 0))
		for i, s := range samples(rng, P, dt) {
			// Gorgonia's lisp machine panics on tensors without elements, and its own
			// gradients of vectors of length 1 are wrong.
			if strings.Contains(s.name, "prod") || empty(s) || strings.HasSuffix(s.name, "[1]") ||
				!full() && i%3 != 0 && !strings.HasSuffix(s.name, "[]") {
				continue
			}
			err := g.run(func(comm backend.Communicator, build sync.Locker) error {
				var got [2]arr
				for i, lisp := range []bool{false, true} {
					w := rand.New(rand.NewPCG(15, uint64(comm.Rank())))
					var err error
					got[i], err = machineGrads(comm, build, lisp, dt, s.xs[comm.Rank()],
						func(shape []int) arr { return randomArr(w, dt, shape...) }, s.op)
					testranks.NoError(err)
				}
				if !got[0].equal(got[1]) {
					return fmt.Errorf("tape %v, lisp %v", got[0], got[1])
				}
				return nil
			})
			require.That(t, err == nil, "%s of %v: %v", s.name, dt, err)
		}
	}
}

// empty reports whether some rank has no elements.
func empty(s sample) bool {
	for r := range s.xs {
		if len(s.xs[r].data) == 0 || len(s.ys[r].data) == 0 {
			return true
		}
	}
	return false
}

// TestLispMachineAddsUp: the gradient of an x that is used twice is a sum, for
// tensors and for scalars, over several runs.
func TestLispMachineAddsUp(t *testing.T) {
	const P = 2
	g := ranks(t, P)
	for _, shape := range [][]int{{}, {3}} {
		err := g.run(func(comm backend.Communicator, build sync.Locker) error {
			build.Lock()
			graph := gorgonia.NewGraph()
			x := newArr(shape...).node(graph, "x", tensor.Float64)
			a, errA := AllReduce(comm, backend.Sum, x)
			b, errB := AllReduce(comm, backend.Avg, x)
			if err := errors.Join(errA, errB); err != nil {
				build.Unlock()
				return err
			}
			loss, err := gorgonia.Add(a, b)
			if err == nil && len(shape) > 0 {
				_, err = gorgonia.Sum(loss)
			}
			if err != nil {
				build.Unlock()
				return err
			}
			m := gorgonia.NewLispMachine(graph)
			build.Unlock()
			defer m.Close()
			if err := m.RunAll(); err != nil {
				return Cause(err)
			}
			dx := testranks.Must(x.Grad())
			for _, v := range valueArr(dx).data {
				if v != P+1 { // P from Sum, 1 from Avg
					return fmt.Errorf("shape %v: gradient %v, want %d", shape, v, P+1)
				}
			}
			return nil
		})
		require.Report(t, err)
	}
}

// TestProdFailsInLispMachine: with the reason.
func TestProdFailsInLispMachine(t *testing.T) {
	x := newArr(3).node(gorgonia.NewGraph(), "x", tensor.Float64)
	y := require.Value(AllReduce(stub{size: 2}, backend.Prod, x))(t)
	require.NoError(t, gorgonia.UnsafeLet(y, newArr(3).value(tensor.Float64)))
	op := y.Op().(*collectiveOp)
	require.Fails(t, "op.pullback", require.Err(op.pullback(x.Value(), y.Value(), y.Value())),
		ErrGradient)
}
