package ops

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// TestResultsShareNoMemory: changing a result leaves the operand as it was, also
// where the operation only copies, and no operation writes to its operand.
func TestResultsShareNoMemory(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, P := range []int{1, 2} {
			t.Run(fmt.Sprint(P), func(t *testing.T) { checkSharing(t, ranksOn(t, P, k)) })
		}
	})
}

func checkSharing(t *testing.T, g *team) {
	P := len(g.comms)
	rng := rand.New(rand.NewPCG(9, uint64(P)))
	for _, s := range samples(rng, P, tensor.Float64) {
		if !strings.Contains(s.name, "[2 3]") && !strings.Contains(s.name, "[4]") &&
			!strings.Contains(s.name, "[2]") {
			continue
		}
		err := g.run(func(comm backend.Communicator, build sync.Locker) error {
			r := comm.Rank()
			x, y, err := g.runOnce(comm, build, s.xs[r].value(tensor.Float64), s.op)
			testranks.NoError(err)
			if got := valueArr(x); !got.equal(s.xs[r]) {
				return fmt.Errorf("the operand is now %v", got)
			}
			if y == x {
				if P != 1 {
					return errors.New("the result is the operand")
				}
				return nil
			}
			testranks.NoError(y.(*tensor.Dense).Memset(99.0))
			if got := valueArr(x); !got.equal(s.xs[r]) {
				return fmt.Errorf("changing the result has changed the operand to %v", got)
			}
			return nil
		})
		require.Check(t, err == nil, "%s, %d ranks: %v", s.name, P, err)
	}
}

// runOnce runs an operation on a value, and returns the values of x and y.
func (g *team) runOnce(comm backend.Communicator, build sync.Locker, v gorgonia.Value,
	op constructor) (x, y gorgonia.Value, err error) {
	build.Lock()
	graph := gorgonia.NewGraph()
	node := gorgonia.NewTensor(graph, v.Dtype(), v.Shape().Dims(), gorgonia.WithName("x"),
		gorgonia.WithShape(v.Shape()...), gorgonia.WithValue(v))
	result, err := op(comm, node)
	if err != nil {
		build.Unlock()
		return nil, nil, err
	}
	m := gorgonia.NewTapeMachine(graph)
	build.Unlock()
	defer m.Close()
	if err := m.RunAll(); err != nil {
		return nil, nil, Cause(err)
	}
	return node.Value(), result.Value(), nil
}

// TestOneRankAddsNothing: in a group of one every operation with a gradient
// scale of 1 is its operand itself: no copy, no node.
func TestOneRankAddsNothing(t *testing.T) {
	comm := stub{size: 1}
	for _, s := range samples(rand.New(rand.NewPCG(10, 0)), 1, tensor.Float32) {
		g := gorgonia.NewGraph()
		x := s.xs[0].node(g, "x", tensor.Float32)
		y, err := s.op(comm, x)
		require.That(t, err == nil, "%s: %v", s.name, err)
		require.Check(t, y == x, "%s: %v", s.name, y)
	}
}

// TestStridedOperands: transposed tensors, slices of columns and slices of
// transposed tensors are read by their strides.
func TestStridedOperands(t *testing.T) {
	must := func(v tensor.View, err error) *tensor.Dense {
		require.NoError(t, err)
		return v.(*tensor.Dense)
	}
	fill := func(shape ...int) *tensor.Dense {
		return tensor.New(tensor.WithShape(shape...),
			tensor.WithBacking(tensor.Range(tensor.Float64, 0, product(shape))))
	}
	transposed := fill(3, 4)
	sliced := fill(2, 3, 4)
	for d, axes := range map[*tensor.Dense][]int{transposed: {1, 0}, sliced: {2, 0, 1}} {
		require.NoError(t, d.T(axes...))
	}
	moved := fill(3, 4)
	require.NoError(t, errors.Join(moved.T(), moved.Transpose()))
	cases := map[string]*tensor.Dense{
		"transposed":            transposed,
		"transposed and moved":  moved,
		"transposed in 3 axes":  sliced,
		"slice of a transposed": must(sliced.Slice(tensor.S(1, 3))),
		"columns":               must(fill(4, 6).Slice(nil, tensor.S(1, 5))),
		"a column":              must(fill(4, 6).Slice(nil, tensor.S(2))),
		"rows":                  must(fill(6, 4).Slice(tensor.S(1, 5))),
		"middle of 3 axes":      must(fill(2, 5, 4).Slice(nil, tensor.S(1, 3))),
		"middle and end":        must(fill(4, 5, 4).Slice(nil, tensor.S(1, 3), tensor.S(2, 4))),
		"column-major": tensor.New(tensor.WithShape(4, 3),
			tensor.AsFortran(slices.Clone(fill(12).Data().([]float64)))),
		"column-major vector": tensor.New(tensor.WithShape(4, 1),
			tensor.AsFortran([]float64{1, 2, 3, 4})),
		"column-major transposed": columnMajorTransposed(t),
	}
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		g := ranksOn(t, 2, k)
		for name, d := range cases {
			t.Run(name, func(t *testing.T) { checkStrided(t, g, d) })
		}
	})
}

func checkStrided(t *testing.T, g *team, d *tensor.Dense) {
	P := len(g.comms)
	want := byCoordinates(t, d)
	lens := backend.Even(want.shape[0], P)
	for op, c := range map[string]sample{
		"AllReduce": {"", reducing(AllReduce, backend.Max), nil, repeat(want, P)},
		"ReduceScatter": {"", of2(ReduceScatter, backend.Min, 0, Splits(lens...)), nil, want.cut(0,
			lens)},
		"Split": {"", of2(SplitForwardGatherBackward, 0, Unscaled, Splits(lens...)), nil,
			want.cut(0, lens)},
		"AllGather": {"", of(AllGather, -1), nil, repeat(concat(len(want.shape)-1, repeat(want, P)),
			P)},
	} {
		err := g.run(func(comm backend.Communicator, build sync.Locker) error {
			// Machines write the engine of values: each rank has its own tensor header.
			mine := d.ShallowClone()
			_, y, err := g.runOnce(comm, build, mine, c.op)
			testranks.NoError(err)
			if got := valueArr(y); !got.equal(c.ys[comm.Rank()]) {
				return fmt.Errorf("%v, want %v", got, c.ys[comm.Rank()])
			}
			return nil
		})
		require.Check(t, err == nil, "%s: %v", op, err)
	}
}

func columnMajorTransposed(t *testing.T) *tensor.Dense {
	d := tensor.New(tensor.WithShape(3, 4), tensor.AsFortran([]float64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9,
		10, 11}))
	require.NoError(t, d.T())
	return d
}

// byCoordinates reads a tensor one element at a time.
func byCoordinates(t *testing.T, d *tensor.Dense) arr {
	t.Helper()
	a := newArr(slices.Clone(d.Shape())...)
	// At does not take vectors with strides
	if len(a.shape) == 1 || len(d.Strides()) != len(a.shape) {
		step := 1
		if len(d.Strides()) == 1 {
			step = d.Strides()[0]
		}
		for i := range a.data {
			a.data[i] = d.Data().([]float64)[i*step]
		}
		return a
	}
	for i := range a.data {
		v := require.Value(d.At(coordinates(i, a.shape)...))(t)
		a.data[i] = v.(float64)
	}
	return a
}

// TestTransposedGradient: the gradient that comes in may be a transposed tensor.
func TestTransposedGradient(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		checkTransposed(t, ranksOn(t, 2, k))
	})
}

func checkTransposed(t *testing.T, g *team) {
	const P = 2
	rng := rand.New(rand.NewPCG(11, 0))
	xs, dys := randomArrs(rng, P, tensor.Float64, 4, 3), randomArrs(rng, P, tensor.Float64, 6, 2)
	var back []arr
	for _, dy := range dys {
		d := dy.value(tensor.Float64).(*tensor.Dense)
		require.NoError(t, errors.Join(d.T(), d.Transpose()))
		back = append(back, valueArr(d))
	}
	want := allToAll(back, 1, 0, func(int) []int { return []int{3, 3} })
	require.NoError(t, g.run(func(comm backend.Communicator, build sync.Locker) error {
		r := comm.Rank()
		build.Lock()
		graph := gorgonia.NewGraph()
		x := xs[r].node(graph, "x", tensor.Float64)
		y, err := AllToAll(comm, 0, 1, x)
		if err == nil {
			dy := dys[r].node(gorgonia.NewGraph(), "dy", tensor.Float64).Value().(*tensor.Dense)
			err = dy.T()
			turned := gorgonia.NewMatrix(graph, tensor.Float64, gorgonia.WithName("dy"),
				gorgonia.WithShape(dy.Shape()...), gorgonia.WithValue(dy))
			if err == nil {
				x, err = gradient(x, y, turned)
			}
		}
		m := gorgonia.NewTapeMachine(graph)
		build.Unlock()
		testranks.NoError(err)
		defer m.Close()
		if err := m.RunAll(); err != nil {
			return Cause(err)
		}
		if got := valueArr(x.Value()); !got.equal(want[r]) {
			return fmt.Errorf("%v, want %v", got, want[r])
		}
		return nil
	}))
}

// TestDifferentOpsHashDifferently: neither the machine's merging nor the graph's
// takes one collective for another, and a repeated one is not dropped.
func TestDifferentOpsHashDifferently(t *testing.T) {
	world, other := stub{name: "world", size: 2}, stub{name: "other", size: 2}
	make := map[string]constructor{
		"sum":           reducing(AllReduce, backend.Sum),
		"max":           reducing(AllReduce, backend.Max),
		"from parallel": ReduceFromParallel,
		"to parallel":   CopyToParallel,
		"0 to 1":        newAllToAll(0, 1),
		"1 to 0":        newAllToAll(1, 0),
		"0 to 0":        newAllToAll(0, 0),
		"0 to 1 uneven": newAllToAll(0, 1, AllToAllSplits([]int{1, 3}, nil)),
		"0 to 1 other":  newAllToAll(0, 1, AllToAllSplits([]int{3, 1}, nil)),
		"gather 0":      of(AllGather, 0),
		"gather 1":      of(AllGather, 1),
		"gather uneven": of(AllGather, 0, Splits(4, 2)),
		"up": func(c backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
			return GatherForwardSplitBackward(c, 0, Up(c), x)
		},
		"unscaled":    of2(GatherForwardSplitBackward, 0, Unscaled),
		"broadcast 0": broadcast(0),
		"broadcast 1": broadcast(1),
	}
	g := gorgonia.NewGraph()
	x := newArr(4, 4).node(g, "x", tensor.Float64)
	seen := map[uint32]string{}
	nodes := map[int64]bool{}
	for name, c := range make {
		for _, comm := range []stub{world, other} {
			for range 3 {
				y := require.Value(c(comm, x))(t)
				name := name + " on " + comm.name
				before, ok := seen[y.Hashcode()]
				require.Check(t, !ok, "%s has the hash of %s", name, before)
				require.Check(t, !nodes[y.ID()], "%s was merged", name)
				seen[y.Hashcode()], nodes[y.ID()] = name, true
			}
		}
	}
}

// TestHashIsTheSameOnEveryRank: also where shapes differ by rank, the op's hash
// does not.
func TestHashIsTheSameOnEveryRank(t *testing.T) {
	var want uint32
	for r := range 4 {
		g := gorgonia.NewGraph()
		lens := []int{3, 1, 2, 1}
		x := newArr(lens[r], 7).node(g, "x", tensor.Float64)
		y, err := AllToAll(stub{rank: r, size: 4}, 1, 0, x, AllToAllSplits([]int{2, 2, 2, 1}, lens))
		require.NoError(t, err)
		if h := y.Op().Hashcode(); r == 0 {
			want = h
		} else if h != want {
			t.Errorf("rank %d: hash %x, rank 0 %x", r, h, want)
		}
	}
}

// forest builds branches that do not depend on one another, each with
// collectives, and their gradients. Rank r of a graph that is not uniform also
// has computations of its own, some equal to each other on some ranks only.
func forest(comm backend.Communicator, seed uint64, uniform bool) (*gorgonia.ExprGraph,
	gorgonia.Nodes, error) {
	rng := rand.New(rand.NewPCG(12, seed))
	g := gorgonia.NewGraph()
	var leaves, losses gorgonia.Nodes
	for i := range 2 + rng.IntN(3) {
		x := randomArr(rng, tensor.Float64, 4, 4).node(g, fmt.Sprint("x", i), tensor.Float64)
		leaves = append(leaves, x)
		h := x
		for range 1 + rng.IntN(4) {
			var err error
			if !uniform {
				// On rank 1 these factors are one constant, and the products one node.
				base := h
				for _, k := range []float64{1, float64(comm.Rank())} {
					part, e := gorgonia.Mul(base, gorgonia.NewConstant(k))
					if e != nil {
						return nil, nil, e
					}
					if part, e = AllReduce(comm, backend.Max, part); e != nil {
						return nil, nil, e
					}
					if h, e = gorgonia.Add(h, part); e != nil {
						return nil, nil, e
					}
				}
			}
			switch rng.IntN(5) {
			case 0:
				h, err = AllReduce(comm, backend.Sum, h)
			case 1:
				h, err = AllToAll(comm, rng.IntN(2), rng.IntN(2), h)
				if err == nil {
					h, err = gorgonia.Reshape(h, tensor.Shape{4, 4})
				}
			case 2:
				h, err = Broadcast(comm, rng.IntN(comm.Size()), h)
			case 3:
				h, err = gorgonia.Mul(h, leaves[rng.IntN(len(leaves))])
			default:
				h, err = gorgonia.Tanh(h)
			}
			if err != nil {
				return nil, nil, err
			}
		}
		h, err := gorgonia.Sum(h)
		if err != nil {
			return nil, nil, err
		}
		losses = append(losses, h)
	}
	loss := losses[0]
	for _, l := range losses[1:] {
		var err error
		if loss, err = gorgonia.Add(loss, l); err != nil {
			return nil, nil, err
		}
	}
	_, err := gorgonia.Grad(loss, leaves...)
	return g, append(losses, loss), err
}

// TestBranchesDoNotDeadlock runs graphs with independent branches that hold
// collectives, with every rank at its own pace.
func TestBranchesDoNotDeadlock(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		checkBranches(t, ranksOn(t, 2, k))
	})
}

func checkBranches(t *testing.T, g *team) {
	const P = 2
	seeds := 60
	if full() {
		seeds = 200
	}
	for seed := range seeds {
		var sums [P]float64
		err := g.run(func(comm backend.Communicator, build sync.Locker) error {
			r := comm.Rank()
			build.Lock()
			graph, losses, err := forest(comm, uint64(seed), seed%2 == 0)
			if err != nil {
				build.Unlock()
				return err
			}
			m := gorgonia.NewTapeMachine(graph)
			build.Unlock()
			defer m.Close()
			time.Sleep(time.Duration(rand.IntN(200)) * time.Microsecond)
			if err := m.RunAll(); err != nil {
				return Cause(err)
			}
			sums[r] = valueArr(losses[len(losses)-1].Value()).data[0]
			return nil
		})
		require.That(t, err == nil, "seed %d: %v", seed, err)
	}
}

// TestOrderIsProgramOrderOnHost: machines run collectives in the order in which they
// were added to the graph, on every rank, whatever else the rank's graph has.
func TestOrderIsProgramOrderOnHost(t *testing.T) {
	for seed := range uint64(100) {
		var want []string
		for r := range 4 {
			order := require.Value(collectiveOrder(stub{rank: r, size: 4}, seed, seed%2 == 0))(t)
			if r == 0 {
				want = order
			} else if !slices.Equal(order, want) {
				t.Fatalf("seed %d: rank %d runs %v, rank 0 %v", seed, r, order, want)
			}
		}
	}
}

// collectiveOrder returns the collectives of a forest in the order of the tape
// machine.
func collectiveOrder(comm backend.Communicator, seed uint64, uniform bool) ([]string, error) {
	g, _, err := forest(comm, seed, uniform)
	if err != nil {
		return nil, err
	}
	sorted, err := gorgonia.Sort(g)
	if err != nil {
		return nil, err
	}
	var order []string
	last := int64(-1)
	for _, n := range slices.Backward(sorted) {
		if op, ok := n.Op().(*collectiveOp); ok {
			order = append(order, op.String())
			if n.ID() < last {
				return nil, fmt.Errorf("node %d runs after node %d", n.ID(), last)
			}
			last = n.ID()
		}
	}
	return order, nil
}

// TestOrderIsTheSameInEveryProcess sorts graphs in processes of their own, which
// have their own map orders and addresses.
func TestOrderIsTheSameInEveryProcess(t *testing.T) {
	const key = "EURYALE_TEST_ORDER"
	if os.Getenv(key) != "" {
		for seed := range uint64(20) {
			order := require.Value(collectiveOrder(stub{rank: 1, size: 2}, seed, true))(t)
			fmt.Println("order:", order)
		}
		return
	}
	var want []byte
	for i := range 3 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestOrderIsTheSameInEveryProcess$",
			"-test.count=1")
		cmd.Env = append(os.Environ(), key+"=1")
		out, err := cmd.CombinedOutput()
		require.That(t, err == nil, "%v\n%s", err, out)
		lines := bytes.Split(out, []byte("\n"))
		lines = slices.DeleteFunc(lines, func(l []byte) bool {
			return !bytes.HasPrefix(l, []byte("order:"))
		})
		out = bytes.Join(lines, nil)
		require.That(t, len(lines) == 20 && (i <= 0 || bytes.Equal(out, want)),
			"process %d:\n%s\nbefore:\n%s", i, out, want)
		want = out
	}
}

// TestNothingGrowsOnHost runs one graph a thousand times.
func TestNothingGrowsOnHost(t *testing.T) {
	const P, runs = 2, 1000
	g := ranks(t, P)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	var before, after uint64
	var goroutines int
	var turn barrier
	turn.init(P)
	require.NoError(t, g.run(func(comm backend.Communicator, build sync.Locker) error {
		rng := rand.New(rand.NewPCG(13, 0))
		build.Lock()
		c, err := newComposed(comm, newAllToAll(1, 0), gaussian(rng, 16, 8), gaussian(rng, 8, 32),
			func(shape []int) arr { return gaussian(rng, shape...) })
		build.Unlock()
		testranks.NoError(err)
		defer c.vm.Close()
		for i := range runs + 50 {
			if i == 50 || i == runs+49 {
				turn.wait()
				if comm.Rank() == 0 {
					after = heap()
					if i == 50 {
						before, goroutines = after, runtime.NumGoroutine()
					}
				}
				turn.wait()
			}
			c.vm.Reset()
			if err := c.vm.RunAll(); err != nil {
				return Cause(err)
			}
		}
		return nil
	}))
	require.Check(t, after <= before+256<<10, "the heap grew from %d to %d bytes over %d runs",
		before, after, runs)
	n := runtime.NumGoroutine()
	require.Check(t, n <= goroutines, "%d goroutines, %d before", n, goroutines)
}

// TestErrorsNameOpAndRank: what a machine returns leads to the communicator's
// error.
func TestErrorsNameOpAndRank(t *testing.T) {
	const P = 2
	g := ranks(t, P)
	cause := errors.New("the test has had enough")
	g.comms[1].Abort(cause)
	err := testranks.All(1, func(r int) error {
		comm := g.comms[r]
		graph := gorgonia.NewGraph()
		if _, err := AllReduce(comm, backend.Sum,
			newArr(3).node(graph, "x", tensor.Float64)); err != nil {
			return err
		}
		m := gorgonia.NewTapeMachine(graph)
		defer m.Close()
		return Cause(m.RunAll())
	})
	var failed *backend.Error
	require.Check(t, errors.As(err, &failed) && errors.Is(err, backend.ErrAborted) &&
		strings.Contains(err.Error(), "AllReduce{sum} of x (3) f64: rank 0 of "+
			g.comms[0].Name()+": because of rank 1: "), "%v", err)
	other := context.Canceled
	require.Check(t, Cause(other) == other && Cause(nil) == nil, "Cause changes errors of others")
}

// TestValuesAreCheckedAtRunTime: a value that was bound to a node later and does
// not fit, is an error before anything is sent.
func TestValuesAreCheckedAtRunTime(t *testing.T) {
	op := &collectiveOp{comm: stub{size: 2}, fwd: transform{kind: backend.AllReduce, scatter: none,
		gather: none, scale: 1}, dtype: tensor.Float64, in: tensor.Shape{2, 3},
		out: tensor.Shape{2, 3}}
	device := tensor.New(tensor.WithShape(2, 3), tensor.Of(tensor.Float64),
		tensor.FromMemory(uintptr(unsafe.Pointer(new([6]float64))), 48), tensor.WithEngine(
			deviceEngine{}))
	cases := []struct {
		v    gorgonia.Value
		is   error
		want string
	}{
		{nil, backend.ErrArgument, "the operand has no value"},
		{newArr(3, 2).value(tensor.Float64), ErrShape, "the value has shape (3, 2), the graph " +
			"was built for (2, 3)"},
		{newArr(2, 3).value(tensor.Float32), ErrDType, "the value is float32, the graph was " +
			"built for float64"},
		{gorgonia.NewF64(1), ErrShape, "the value has shape ()"},
		{device, backend.ErrUnsupported, "the value is in the memory of a device"},
	}
	for _, c := range cases {
		_, err := op.Do(c.v)
		require.Fails(t, "op.Do", err, c.is, c.want)
	}
	require.Fails(t, "op.Do", require.Err(op.Do()), backend.ErrArgument)
}

// deviceEngine says that its memory is not the host's.
type deviceEngine struct{ tensor.StdEng }

func (deviceEngine) AllocAccessible() bool { return false }
