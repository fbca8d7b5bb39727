package ops

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// thinned makes the group's communicators sparse.
func (g *team) thinned(t *testing.T, how sparse.Selection) {
	t.Helper()
	for r, comm := range g.comms {
		c := require.Value(sparse.New(comm, how))(t)
		g.wrap(r, c)
	}
}

// halves has numbers of which a few are large.
func halves(rng *rand.Rand, shape ...int) arr {
	a := newArr(shape...)
	for i := range a.data {
		a.data[i] = float64(float32(rng.NormFloat64()))
	}
	return a
}

// sentOf is a with zeros for what is below a limit.
func sentOf(a arr, limit float64) arr {
	s := newArr(a.shape...)
	for i, v := range a.data {
		if math.Abs(v) >= limit {
			s.data[i] = v
		}
	}
	return s
}

func TestSparseGradientIsStraightThroughToWhatWasSent(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			for _, op := range []backend.ReduceOp{backend.Sum, backend.Avg} {
				t.Run(fmt.Sprintf("%v %v", op, dt), func(t *testing.T) {
					checkStraightThrough(t, k, dt, op)
				})
			}
		}
	})
}

func checkStraightThrough(t *testing.T, k testenv.Kind, dt tensor.Dtype, op backend.ReduceOp) {
	const limit = 1
	g := ranksOn(t, 2, k)
	g.thinned(t, sparse.Threshold(limit))
	rng := rand.New(rand.NewPCG(1, uint64(op)))
	xs, dys := []arr{halves(rng, 20, 30), halves(rng, 20, 30)}, []arr{randomArr(rng, dt, 20, 30),
		randomArr(rng, dt, 20, 30)}
	dys[0].data[3] = math.Inf(1)
	ys, dxs, err := g.pullback(dt, xs, dys, reducing(SparseAllReduce, op))
	require.NoError(t, err)
	for r := range xs {
		checkSparse(t, op, ys[r], []arr{sentOf(xs[0], limit), sentOf(xs[1], limit)})
		for i, dx := range dxs[r].data {
			want := dys[0].data[i] + dys[1].data[i]
			if op == backend.Avg {
				want /= 2
			}
			if math.Abs(xs[r].data[i]) < limit {
				want = 0
			}
			require.That(t, dx == want, "rank %d: gradient %d is %v, want %v", r, i, dx, want)
		}
	}
}

func checkSparse(t *testing.T, op backend.ReduceOp, y arr, sent []arr) {
	t.Helper()
	for i, got := range y.data {
		want := float32(sent[0].data[i]) + float32(sent[1].data[i])
		if op == backend.Avg {
			want /= 2
		}
		if float32(got) != want {
			t.Fatalf("%v: element %d is %v, want %v", op, i, got, want)
		}
	}
}

// Two nodes on one operand are two reductions, each with what it has kept itself.
func TestSparseNodesShareNoResidual(t *testing.T) {
	g := ranks(t, 2)
	g.thinned(t, sparse.Threshold(1.5))
	x := newArr(4)
	for i := range x.data {
		x.data[i] = 1 // late by one run
	}
	require.NoError(t, g.run(func(comm backend.Communicator, build sync.Locker) error {
		build.Lock()
		graph := gorgonia.NewGraph()
		in := x.node(graph, "x", tensor.Float32)
		a, errA := SparseAllReduce(comm, backend.Sum, in)
		b, errB := SparseAllReduce(comm, backend.Sum, in)
		build.Unlock()
		testranks.NoError(errors.Join(errA, errB))
		if a == b || a.Op().Hashcode() == b.Op().Hashcode() {
			return fmt.Errorf("one node for both: %v", a.Op())
		}
		m := gorgonia.NewTapeMachine(graph)
		defer m.Close()
		for run := 1; run <= 4; run++ {
			if err := m.RunAll(); err != nil {
				return Cause(err)
			}
			want := 0.0
			if run%2 == 0 {
				want = 4
			}
			for _, y := range []*gorgonia.Node{a, b} {
				if got := valueArr(y.Value()).data; !slices.Equal(
					got, []float64{want, want, want, want}) {
					return fmt.Errorf("run %d: %v is %v, want %v", run, y.Op(), got, want)
				}
			}
			m.Reset()
		}
		return nil
	}))
}

func TestSparseIsTheSameInBothMachines(t *testing.T) {
	g := ranks(t, 2)
	g.thinned(t, sparse.TopK(0.3))
	rng := rand.New(rand.NewPCG(5, 5))
	xs, w := []arr{halves(rng, 5, 4), halves(rng, 5, 4)}, halves(rng, 5, 4)
	grads := make([][2]arr, 2)
	for i, lisp := range []bool{false, true} {
		require.NoError(t, g.run(func(comm backend.Communicator, build sync.Locker) (err error) {
			comm.(*sparse.Communicator).Reset()
			grads[comm.Rank()][i], err = machineGrads(comm, build, lisp, tensor.Float64,
				xs[comm.Rank()], func([]int) arr { return w }, reducing(SparseAllReduce,
					backend.Avg))
			return err
		}))
	}
	for r, both := range grads {
		zeros := 0
		for i, dx := range both[0].data {
			if dx != both[1].data[i] {
				t.Errorf("rank %d: gradient %d is %v by Grad and %v by the lisp machine", r, i, dx,
					both[1].data[i])
			}
			if dx == 0 {
				zeros++
			}
		}
		if zeros != 14 {
			t.Errorf("rank %d: %d gradients are zero, want those of 14 elements that were not sent",
				r, zeros)
		}
	}
}

func TestSparseArguments(t *testing.T) {
	g := gorgonia.NewGraph()
	x, ints := newArr(3).node(g, "x", tensor.Float64), newArr(3).node(g, "i", tensor.Int64)
	thin := require.Value(sparse.New(stub{size: 2}, sparse.TopK(0.1)))(t)
	for name, c := range map[string]struct {
		comm backend.Communicator
		op   backend.ReduceOp
		x    *gorgonia.Node
		want error
	}{
		"dense": {stub{size: 2}, backend.Sum, x, backend.ErrArgument},
		"max":   {thin, backend.Max, x, backend.ErrArgument},
		"dtype": {thin, backend.Sum, ints, ErrDType},
		"nil":   {nil, backend.Sum, x, backend.ErrArgument},
	} {
		if _, err := SparseAllReduce(c.comm, c.op, c.x); !errors.Is(err, c.want) ||
			!strings.HasPrefix(err.Error(), "ops: SparseAllReduce: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	y := require.Value(SparseAllReduce(thin, backend.Sum, x))(t)
	dx := require.Value(gradient(x, y, newArr(3).node(g, "dy", tensor.Float64)))(t)
	require.Fails(t, "the gradient's gradient", require.Err(dx.Op().(gorgonia.SDOp).SymDiff(nil,
		nil, nil)), ErrGradient)
}

// AllReduce over 16 bits is the compressed one: y and dx travel as such.
func TestCompressedAllReduceHasItsGradient(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		g := ranksOn(t, 2, k)
		wires := make([]*half.Communicator, 2)
		for r, comm := range g.comms {
			w := require.Value(half.New(comm, backend.BF16))(t)
			g.wrap(r, w)
			wires[r] = w
		}
		rng := rand.New(rand.NewPCG(3, 3))
		xs := []arr{randomArr(rng, tensor.Float32, 50), randomArr(rng, tensor.Float32, 50)}
		dys := []arr{randomArr(rng, tensor.Float32, 50), randomArr(rng, tensor.Float32, 50)}
		ys, dxs, err := g.pullback(tensor.Float32, xs, dys, reducing(AllReduce, backend.Sum))
		require.NoError(t, err)
		for r := range xs {
			for i := range xs[r].data {
				if ys[r].data[i] != xs[0].data[i]+xs[1].data[i] ||
					dxs[r].data[i] != dys[0].data[i]+dys[1].data[i] {
					t.Fatalf("rank %d: element %d is %v, its gradient %v", r, i, ys[r].data[i],
						dxs[r].data[i])
				}
			}
			if n := wires[r].Counters(); n.Calls != 2 || n.Bytes != n.Dense/2 {
				t.Errorf("rank %d: the counters are %+v", r, n)
			}
		}
	})
}
