package ops

import (
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
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// inner is the sum of the ranks' inner products.
func inner(as, bs []arr) float64 {
	total := 0.0
	for r := range as {
		for i, a := range as[r].data {
			total += a * bs[r].data[i]
		}
	}
	return total
}

// TestGradientIsTheAdjoint checks <A x, y> = <x, A' y>, summed over the ranks,
// for every linear operation whose gradient is exact. The numbers are small
// integers; only Avg divides.
func TestGradientIsTheAdjoint(t *testing.T) {
	for _, k := range testenv.OnHosts() {
		for _, P := range []int{1, 2, 3, 4} {
			t.Run(fmt.Sprint(k, P), func(t *testing.T) {
				g := ranksOn(t, P, k)
				rng := rand.New(rand.NewPCG(4, uint64(P)))
				for i, s := range linearSamples(rng, P) {
					if full() || P == 3 || i%4 == 0 {
						checkAdjoint(t, g, rng, s)
					}
				}
			})
		}
	}
}

// linearSamples are the operations with exact gradients on data that every rank
// has of its own.
func linearSamples(rng *rand.Rand, P int) []sample {
	all := samples(rng, P, tensor.Float64)
	all = slices.DeleteFunc(all, func(s sample) bool {
		for _, other := range []string{"prod", "min", "max", "Parallel", "Forward"} {
			if strings.Contains(s.name, other) {
				return true
			}
		}
		return false
	})
	for dims := 1; dims <= 3; dims++ {
		for s := range dims {
			for to := range dims {
				shape := []int{2, 3, 2}[:dims:dims]
				shape = slices.Clone(shape)
				shape[s] *= P
				xs := randomArrs(rng, P, tensor.Float64, shape...)
				ys := allToAll(xs, s, to, func(int) []int { return backend.Even(shape[s], P) })
				all = append(all, sample{fmt.Sprintf("AllToAll %d to %d of %v", s, to, shape),
					newAllToAll(s, to), xs, ys})
			}
		}
	}
	return all
}

func checkAdjoint(t *testing.T, g *team, rng *rand.Rand, s sample) {
	t.Helper()
	dys := make([]arr, len(s.ys))
	for r, y := range s.ys {
		dys[r] = randomArr(rng, tensor.Float64, y.shape...)
	}
	ys, dxs, err := g.pullback(tensor.Float64, s.xs, dys, s.op)
	require.That(t, err == nil, "%s: %v", s.name, err)
	for r := range dxs {
		require.That(t, slices.Equal(dxs[r].shape, s.xs[r].shape),
			"%s: rank %d: gradient of shape %v, want %v", s.name, r, dxs[r].shape, s.xs[r].shape)
	}
	left, right := inner(ys, dys), inner(s.xs, dxs)
	tolerance := 0.0
	if strings.Contains(s.name, "avg") {
		tolerance = 1e-12
	}
	require.That(t, math.Abs(left-right) <= tolerance, "%s: <A x, y> = %v, <x, A' y> = %v", s.name,
		left, right)
}

// TestGatherIsUndoneByReduceScatter: the exact gradient of AllGather is the sum
// over the ranks of their gradients for this rank's chunk.
func TestGatherIsUndoneByReduceScatter(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		checkGatherIsUndone(t, ranksOn(t, 3, k))
	})
}

func checkGatherIsUndone(t *testing.T, g *team) {
	const P = 3
	rng := rand.New(rand.NewPCG(5, 0))
	lens := []int{2, 0, 1}
	var xs []arr
	for _, n := range lens {
		xs = append(xs, randomArr(rng, tensor.Float64, 2, n))
	}
	dys := randomArrs(rng, P, tensor.Float64, 2, 3)
	_, dxs, err := g.pullback(tensor.Float64, xs, dys, of(AllGather, 1, Splits(lens...)))
	require.NoError(t, err)
	want := combine(backend.Sum, tensor.Float64, dys).cut(1, lens)
	for r := range P {
		require.Check(t, dxs[r].equal(want[r]), "rank %d: %v, want %v", r, dxs[r], want[r])
	}
}

// TestGradScale checks the formulas of the gather and split pairs for up, down,
// unscaled and any number, on gradients that differ between the ranks.
func TestGradScale(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, P := range []int{1, 2, 4} {
			t.Run(fmt.Sprint(P), func(t *testing.T) { checkGradScale(t, ranksOn(t, P, k)) })
		}
	})
}

func checkGradScale(t *testing.T, g *team) {
	P := len(g.comms)
	rng := rand.New(rand.NewPCG(6, uint64(P)))
	lens := backend.Even(P+2, P)
	whole := randomArr(rng, tensor.Float64, 2, P+2, 3)
	parts := whole.cut(1, lens)
	scales := []struct {
		of   func(backend.Communicator) float64
		want float64
	}{
		{Up, float64(P)}, {Down, 1 / float64(P)},
		{func(backend.Communicator) float64 { return Unscaled }, 1},
		{func(backend.Communicator) float64 { return -0.25 }, -0.25},
		{func(backend.Communicator) float64 { return 0 }, 0},
	}
	for _, k := range scales {
		dys := randomArrs(rng, P, tensor.Float64, 2, P+2, 3)
		ys, dxs, err := g.pullback(tensor.Float64, parts, dys, func(comm backend.Communicator,
			x *gorgonia.Node) (*gorgonia.Node, error) {
			return GatherForwardSplitBackward(comm, 1, k.of(comm), x, Splits(lens...))
		})
		require.NoError(t, err)
		for r := range P {
			if want := dys[r].cut(1, lens)[r].scaled(k.want); !ys[r].equal(whole) ||
				!dxs[r].equal(want) {
				t.Errorf("gather, %d ranks, scale %v: rank %d: %v, want %v", P, k.want, r, dxs[r],
					want)
			}
		}
		chunks := randomArr(rng, tensor.Float64, 2, P+2, 3).cut(1, lens)
		ys, dxs, err = g.pullback(tensor.Float64, repeat(whole, P), chunks,
			func(comm backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
				return SplitForwardGatherBackward(comm, 1, k.of(comm), x, Splits(lens...))
			})
		require.NoError(t, err)
		for r := range P {
			if want := concat(1, chunks).scaled(k.want); !ys[r].equal(parts[r]) ||
				!dxs[r].equal(want) {
				t.Errorf("split, %d ranks, scale %v: rank %d: %v, want %v", P, k.want, r, dxs[r],
					want)
			}
		}
	}
}

// TestExtremumGradientGoesToLowestHolder has a tie and a NaN.
func TestExtremumGradientGoesToLowestHolder(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		checkHolder(t, ranksOn(t, 3, k))
	})
}

func checkHolder(t *testing.T, g *team) {
	nan := math.NaN()
	xs := []arr{
		{[]int{6}, []float64{1, 5, 2, 0, 1, nan}},
		{[]int{6}, []float64{3, 5, 2, nan, 2, nan}},
		{[]int{6}, []float64{3, 4, 2, nan, 1, 7}},
	}
	holder := map[backend.ReduceOp][]int{ // by element
		backend.Max: {1, 0, 0, 1, 1, 0}, backend.Min: {0, 2, 0, 1, 0, 0}}
	const P = 3
	whole := []arr{{[]int{6}, []float64{1, 2, 3, 4, 5, 6}}, {[]int{6}, []float64{10, 20, 30, 40, 50,
		60}}, {[]int{6}, []float64{100, 200, 300, 400, 500, 600}}}
	cases := []struct {
		name     string
		make     func(op backend.ReduceOp) constructor
		dys      []arr
		incoming []float64 // the gradient of each element of the reduction
	}{
		{"AllReduce", func(op backend.ReduceOp) constructor {
			return reducing(AllReduce, op)
		}, whole, []float64{111, 222, 333, 444, 555, 666}},
		{"ReduceScatter", func(op backend.ReduceOp) constructor {
			return of2(ReduceScatter, op, 0)
		}, whole[0].cut(0, []int{2, 2, 2}), []float64{1, 2, 3, 4, 5, 6}},
		{"Reduce", func(op backend.ReduceOp) constructor {
			return reduceTo(op, 1)
		}, whole, []float64{10, 20, 30, 40, 50, 60}},
	}
	for _, c := range cases {
		for op, holders := range holder {
			for _, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32} {
				_, dxs, err := g.pullback(dt, xs, c.dys, c.make(op))
				require.NoError(t, err)
				for r := range P {
					want := newArr(6)
					for i, h := range holders {
						if h == r {
							want.data[i] = c.incoming[i]
						}
					}
					require.Check(t, dxs[r].equal(want), "%s %v %v: rank %d: %v, want %v", c.name,
						op, dt, r, dxs[r], want)
				}
			}
		}
	}
}

// TestProdHasNoGradient: Grad says why.
func TestProdHasNoGradient(t *testing.T) {
	g := gorgonia.NewGraph()
	x := newArr(3).node(g, "x", tensor.Float64)
	y, err := AllReduce(stub{size: 2}, backend.Prod, x)
	require.NoError(t, err)
	require.Fails(t, "SymDiff", require.Err(gradient(x, y, newArr(3).node(g, "dy",
		tensor.Float64))), ErrGradient)
	_, err = gorgonia.Grad(gorgonia.Must(gorgonia.Sum(y)), x)
	require.Fails(t, "Grad", err, "AllReduce{prod} of x (3) f64: rank 0 of "+
		"world: no gradient: a product over the ranks is not linear")
}

// composed is a network around an operation: the rank's loss is the sum of
// w * tanh(op(tanh(x A))).
type composed struct {
	x, a, w  *gorgonia.Node
	loss, dx *gorgonia.Node
	da       *gorgonia.Node
	vm       gorgonia.VM
}

func newComposed(comm backend.Communicator, op constructor, x, a arr,
	w func(shape []int) arr) (*composed, error) {
	g := gorgonia.NewGraph()
	c := &composed{x: x.node(g, "x", tensor.Float64), a: a.node(g, "a", tensor.Float64)}
	h, err := gorgonia.Mul(c.x, c.a)
	if err != nil {
		return nil, err
	}
	if h, err = gorgonia.Tanh(h); err != nil {
		return nil, err
	}
	y, err := op(comm, h)
	if err != nil {
		return nil, err
	}
	c.w = w(y.Shape()).node(g, "w", tensor.Float64)
	if y, err = gorgonia.Tanh(y); err != nil {
		return nil, err
	}
	if y, err = gorgonia.HadamardProd(y, c.w); err != nil {
		return nil, err
	}
	if c.loss, err = gorgonia.Sum(y); err != nil {
		return nil, err
	}
	grads, err := gorgonia.Grad(c.loss, c.x, c.a)
	if err != nil {
		return nil, err
	}
	c.dx, c.da = grads[0], grads[1]
	c.vm = gorgonia.NewTapeMachine(g)
	return c, nil
}

// TestFiniteDifferences checks gradients through tanh(x A), an operation and
// tanh, by moving every number of every rank's x and A.
func TestFiniteDifferences(t *testing.T) {
	const P = 2
	cases := map[string]constructor{
		"AllToAll 0 to 1": newAllToAll(0, 1),
		"AllToAll 1 to 0": newAllToAll(1, 0),
		"AllToAll 1 to 1": newAllToAll(1, 1),
	}
	for _, op := range []backend.ReduceOp{backend.Sum, backend.Avg, backend.Max, backend.Min} {
		cases["AllReduce "+op.String()] = reducing(AllReduce, op)
		cases["Reduce "+op.String()] = reduceTo(op, 1)
		cases["ReduceScatter "+op.String()] = of2(ReduceScatter, op, 1)
	}
	cases["AllGather"] = of(AllGather, 1)
	cases["Broadcast"] = broadcast(1)
	cases["Gather"] = of2(Gather, 0, 1)
	cases["Scatter"] = of2(Scatter, 1, 0)
	g := ranks(t, P)
	for name, op := range cases {
		t.Run(name, func(t *testing.T) { checkDifferences(t, g, op) })
	}
}

func checkDifferences(t *testing.T, g *team, op constructor) {
	const step, tolerance = 1e-5, 1e-6
	P := len(g.comms)
	losses := make([]float64, P)
	var turn barrier
	turn.init(P)
	require.NoError(t, g.run(func(comm backend.Communicator, build sync.Locker) error {
		r := comm.Rank()
		rng := rand.New(rand.NewPCG(7, uint64(r)))
		build.Lock()
		c, err := newComposed(comm, op, gaussian(rng, 2, 3), gaussian(rng, 3, 4),
			func(shape []int) arr { return gaussian(rng, shape...) })
		build.Unlock()
		testranks.NoError(err)
		defer c.vm.Close()
		total := func() (float64, error) {
			c.vm.Reset()
			err := c.vm.RunAll()
			losses[r] = valueArr(c.loss.Value()).data[0]
			turn.wait()
			all := 0.0
			for _, l := range losses {
				all += l
			}
			turn.wait()
			return all, err
		}
		if _, err := total(); err != nil {
			return err
		}
		grads := [][]float64{valueArr(c.dx.Value()).data, valueArr(c.da.Value()).data}
		for owner := range P {
			for k, n := range []*gorgonia.Node{c.x, c.a} {
				data := n.Value().Data().([]float64)
				for i := range data {
					var at [2]float64
					for side, h := range []float64{step, -step} {
						if owner == r {
							data[i] += h
						}
						if at[side], err = total(); err != nil {
							return err
						}
						if owner == r {
							data[i] -= h
						}
					}
					slope := (at[0] - at[1]) / (2 * step)
					if owner == r && math.Abs(slope-grads[k][i]) > tolerance {
						return fmt.Errorf("operand %d, element %d: gradient %v, slope %v", k, i,
							grads[k][i], slope)
					}
				}
			}
		}
		return nil
	}))
}

func gaussian(rng *rand.Rand, shape ...int) arr {
	a := newArr(shape...)
	for i := range a.data {
		a.data[i] = rng.NormFloat64()
	}
	return a
}

// barrier lets ranks of one process meet.
type barrier struct {
	mu      sync.Mutex
	all     sync.Cond
	n, here int
	round   int
}

func (b *barrier) init(n int) { b.n, b.all.L = n, &b.mu }

func (b *barrier) wait() {
	b.mu.Lock()
	defer b.mu.Unlock()
	round := b.round
	if b.here++; b.here == b.n {
		b.here, b.round = 0, round+1
		b.all.Broadcast()
	}
	for b.round == round {
		b.all.Wait()
	}
}

// TestGradientsHaveGradients: the gradient of an AllToAll is an AllToAll, whose
// gradient is the first one again; likewise for the other linear operations.
func TestGradientsHaveGradients(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, P := range []int{2, 3} {
			t.Run(fmt.Sprint(P), func(t *testing.T) { checkTwice(t, ranksOn(t, P, k)) })
		}
	})
}

func checkTwice(t *testing.T, g *team) {
	P := len(g.comms)
	rng := rand.New(rand.NewPCG(8, 0))
	for _, s := range linearSamples(rng, P) {
		if !full() && !strings.Contains(s.name, "AllToAll") && rng.IntN(8) != 0 {
			continue
		}
		once := s.op
		twice := func(comm backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
			y, err := once(comm, x)
			if err != nil {
				return nil, err
			}
			dy := newArr(y.Shape()...).node(x.Graph(), "between", tensor.Float64)
			dx, err := gradient(x, y, dy)
			if err != nil {
				return nil, err
			}
			return gradient(dy, dx, x) // of the type of x, so that x will do as the gradient
		}
		s.name, s.op = "twice "+s.name, twice
		s.checkClose(t, g)
	}
}

// checkClose is check with room for one rounding, which Avg needs.
func (s sample) checkClose(t *testing.T, g *team) {
	t.Helper()
	ys, err := g.forward(tensor.Float64, s.xs, s.op)
	require.That(t, err == nil, "%s: %v", s.name, err)
	for r, y := range ys {
		for i, v := range y.data {
			if math.Abs(v-s.ys[r].data[i]) > 1e-14 {
				t.Fatalf("%s: rank %d has %v, want %v", s.name, r, y, s.ys[r])
			}
		}
	}
}

// TestExtremumGradientHasGradient: the gradient of a maximum is linear in what
// comes in, and its own gradient is what the holders of the maximum send back,
// in both machines.
func TestExtremumGradientHasGradient(t *testing.T) {
	const P = 2
	g := ranks(t, P)
	xs := []arr{{[]int{3}, []float64{1, 5, 2}}, {[]int{3}, []float64{3, 4, 2}}}
	ws := []arr{{[]int{3}, []float64{10, 20, 30}}, {[]int{3}, []float64{1, 2, 3}}}
	want := arr{[]int{3}, []float64{1, 20, 30}} // held by ranks 1, 0, 0
	for _, lisp := range []bool{false, true} {
		err := g.run(func(comm backend.Communicator, build sync.Locker) error {
			r := comm.Rank()
			build.Lock()
			graph := gorgonia.NewGraph()
			x, dy := xs[r].node(graph, "x", tensor.Float64), newArr(3).node(graph, "dy",
				tensor.Float64)
			loss, err := chain(x, func(x *gorgonia.Node) (*gorgonia.Node, error) {
				return AllReduce(comm, backend.Max, x)
			}, func(y *gorgonia.Node) (*gorgonia.Node, error) { return gradient(x, y, dy) },
				func(dx *gorgonia.Node) (*gorgonia.Node, error) {
					return gorgonia.HadamardProd(dx, ws[r].node(graph, "w", tensor.Float64))
				}, func(y *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Sum(y) })
			var m gorgonia.VM
			if err == nil && lisp {
				m = gorgonia.NewLispMachine(graph)
			} else if err == nil {
				_, err = gorgonia.Grad(loss, dy)
				m = gorgonia.NewTapeMachine(graph)
			}
			build.Unlock()
			testranks.NoError(err)
			defer m.Close()
			if err := m.RunAll(); err != nil {
				return Cause(err)
			}
			got, err := dy.Grad()
			if err == nil && !valueArr(got).equal(want) {
				err = fmt.Errorf("%v, want %v", valueArr(got), want)
			}
			return err
		})
		require.Check(t, err == nil, "lisp machine %v: %v", lisp, err)
	}
}
