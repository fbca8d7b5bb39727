package ops

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// full reports whether to test every combination rather than a sample.
func full() bool { return os.Getenv("EURYALE_FULL") == "1" }

// team is ranks that are goroutines of this process.
type team struct {
	ranks []*testenv.Rank
	comms []backend.Communicator
	build sync.Mutex // held while a rank builds a graph
}

// ranks connects P ranks over shared memory.
func ranks(t testing.TB, P int) *team { return ranksOn(t, P, testenv.Hosts) }

// ranksOn connects P ranks. It skips the test where the machine has too few devices.
func ranksOn(t testing.TB, P int, k testenv.Kind) *team {
	t.Helper()
	g := &team{ranks: testranks.New(t, P, 20*time.Second, k.Connect(t, P)).Ranks}
	for _, r := range g.ranks {
		g.comms = append(g.comms, r.Comm)
	}
	return g
}

// wrap puts a wrapper, which is closed instead, around the communicator of rank r.
func (g *team) wrap(r int, c backend.Communicator) { g.comms[r], g.ranks[r].Comm = c, c }

// run runs f on every rank at once. A rank that fails ends the others.
func (g *team) run(f func(comm backend.Communicator, build sync.Locker) error) error {
	return testranks.All(len(g.comms), func(r int) error {
		err := testranks.Ended(func() error { return f(g.comms[r], &g.build) })
		if err != nil {
			g.comms[r].Abort(err)
		}
		return err
	})
}

// constructor adds an operation to a graph.
type constructor func(comm backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error)

// of returns a constructor of an operation with an argument beside its operand, and options.
func of[A any](f func(backend.Communicator, A, *gorgonia.Node, ...Option) (*gorgonia.Node, error),
	a A, opts ...Option) constructor {
	return func(comm backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
		return f(comm, a, x, opts...)
	}
}

// of2 is of with two arguments.
func of2[A, B any](f func(backend.Communicator, A, B, *gorgonia.Node, ...Option) (*gorgonia.Node,
	error), a A, b B, opts ...Option) constructor {
	return func(comm backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
		return f(comm, a, b, x, opts...)
	}
}

// reducing is of without options.
func reducing(f func(backend.Communicator, backend.ReduceOp, *gorgonia.Node) (*gorgonia.Node,
	error), op backend.ReduceOp) constructor {
	return func(comm backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
		return f(comm, op, x)
	}
}

func reduceTo(op backend.ReduceOp, root int) constructor {
	return func(comm backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
		return Reduce(comm, op, root, x)
	}
}

func broadcast(root int) constructor {
	return func(comm backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
		return Broadcast(comm, root, x)
	}
}

// forward runs an operation on each rank's x in the tape machine and returns
// each rank's y.
func (g *team) forward(dt tensor.Dtype, xs []arr, op constructor) ([]arr, error) {
	ys := make([]arr, len(xs))
	err := g.run(func(comm backend.Communicator, build sync.Locker) error {
		r := comm.Rank()
		m, y, err := func() (gorgonia.VM, *gorgonia.Node, error) {
			build.Lock()
			defer build.Unlock()
			graph := gorgonia.NewGraph()
			y, err := op(comm, xs[r].node(graph, "x", dt))
			if err != nil {
				return nil, nil, err
			}
			return gorgonia.NewTapeMachine(graph), y, nil
		}()
		testranks.NoError(err)
		defer m.Close()
		if err := m.RunAll(); err != nil {
			return Cause(err)
		}
		ys[r] = valueArr(y.Value())
		if !slices.Equal(ys[r].shape, y.Shape()) {
			return fmt.Errorf("the value has shape %v, the node %v", ys[r].shape, y.Shape())
		}
		return nil
	})
	return ys, err
}

// pullback runs an operation forward and, by its SymDiff, backward from dys.
func (g *team) pullback(dt tensor.Dtype, xs, dys []arr, op constructor) (ys, dxs []arr, err error) {
	ys, dxs = make([]arr, len(xs)), make([]arr, len(xs))
	err = g.run(func(comm backend.Communicator, build sync.Locker) error {
		r := comm.Rank()
		m, y, dx, err := func() (gorgonia.VM, *gorgonia.Node, *gorgonia.Node, error) {
			build.Lock()
			defer build.Unlock()
			graph := gorgonia.NewGraph()
			x := xs[r].node(graph, "x", dt)
			y, err := op(comm, x)
			if err != nil {
				return nil, nil, nil, err
			}
			dx, err := gradient(x, y, dys[r].node(graph, "dy", dt))
			if err != nil {
				return nil, nil, nil, err
			}
			return gorgonia.NewTapeMachine(graph), y, dx, nil
		}()
		testranks.NoError(err)
		defer m.Close()
		if err := m.RunAll(); err != nil {
			return Cause(err)
		}
		ys[r], dxs[r] = valueArr(y.Value()), valueArr(dx.Value())
		return nil
	})
	return ys, dxs, err
}

// gradient returns the node of the gradient of y's op. Of a group of one, y is x.
func gradient(x, y, dy *gorgonia.Node) (*gorgonia.Node, error) {
	if x == y {
		return dy, nil
	}
	dxs, err := y.Op().(gorgonia.SDOp).SymDiff(gorgonia.Nodes{x}, y, dy)
	if err != nil {
		return nil, err
	}
	return dxs[0], nil
}

// arr is a tensor for references: row-major, its numbers as float64.
type arr struct {
	shape []int
	data  []float64
}

func newArr(shape ...int) arr { return arr{shape, make([]float64, product(shape))} }

// randomArr has small integers, -4 to 4, or 0 to 4 for dtypes without sign.
func randomArr(rng *rand.Rand, dt tensor.Dtype, shape ...int) arr {
	a := newArr(shape...)
	for i := range a.data {
		a.data[i] = float64(rng.IntN(9) - 4)
		if dt == tensor.Uint8 {
			a.data[i] = float64(rng.IntN(5))
		}
	}
	return a
}

func (a arr) equal(b arr) bool {
	return slices.Equal(a.shape, b.shape) && slices.Equal(a.data, b.data)
}

func (a arr) clone() arr { return arr{slices.Clone(a.shape), slices.Clone(a.data)} }

// cut returns the pieces of a along an axis. It goes by coordinates.
func (a arr) cut(axis int, lens []int) []arr {
	var pieces []arr
	at := 0
	for _, n := range lens {
		shape := slices.Clone(a.shape)
		shape[axis] = n
		p := newArr(shape...)
		for i := range p.data {
			c := coordinates(i, shape)
			c[axis] += at
			p.data[i] = a.data[index(c, a.shape)]
		}
		pieces, at = append(pieces, p), at+n
	}
	return pieces
}

// concat is the inverse of cut.
func concat(axis int, pieces []arr) arr {
	shape := slices.Clone(pieces[0].shape)
	shape[axis] = 0
	for _, p := range pieces {
		shape[axis] += p.shape[axis]
	}
	a := newArr(shape...)
	at := 0
	for _, p := range pieces {
		for i, v := range p.data {
			c := coordinates(i, p.shape)
			c[axis] += at
			a.data[index(c, shape)] = v
		}
		at += p.shape[axis]
	}
	return a
}

// scaled returns a times k.
func (a arr) scaled(k float64) arr {
	b := a.clone()
	for i := range b.data {
		b.data[i] *= k
	}
	return b
}

func coordinates(i int, shape []int) []int {
	c := make([]int, len(shape))
	for axis := len(shape) - 1; axis >= 0; axis-- {
		c[axis], i = i%shape[axis], i/shape[axis]
	}
	return c
}

func index(c, shape []int) int {
	i := 0
	for axis, n := range shape {
		i = i*n + c[axis]
	}
	return i
}

// combine is a reduction over ranks, in rank order.
func combine(op backend.ReduceOp, dt tensor.Dtype, xs []arr) arr {
	y := xs[0].clone()
	for i := range y.data {
		for _, x := range xs[1:] {
			switch op {
			case backend.Sum, backend.Avg:
				y.data[i] += x.data[i]
			case backend.Prod:
				y.data[i] *= x.data[i]
			case backend.Min:
				y.data[i] = min(y.data[i], x.data[i])
			case backend.Max:
				y.data[i] = max(y.data[i], x.data[i])
			}
		}
		if op == backend.Avg {
			y.data[i] /= float64(len(xs))
		}
		y.data[i] = rounded(y.data[i], dt)
	}
	return y
}

// rounded is v as the dtype holds it.
func rounded(v float64, dt tensor.Dtype) float64 {
	switch dt {
	case tensor.Float64:
		return v
	case tensor.Float32:
		return float64(float32(v))
	case tensor.Uint8:
		return float64(byte(int64(v)))
	}
	return float64(int64(v))
}

// node makes an input node that holds a.
func (a arr) node(g *gorgonia.ExprGraph, name string, dt tensor.Dtype) *gorgonia.Node {
	if len(a.shape) == 0 {
		return gorgonia.NewScalar(g, dt, gorgonia.WithName(name), gorgonia.WithValue(a.value(dt)))
	}
	return gorgonia.NewTensor(g, dt, len(a.shape), gorgonia.WithShape(a.shape...),
		gorgonia.WithName(name), gorgonia.WithValue(a.value(dt)))
}

func (a arr) value(dt tensor.Dtype) gorgonia.Value {
	if len(a.shape) == 0 {
		v := stock.Scalar(dt)
		switch v := v.(type) {
		case *gorgonia.F64:
			*v = gorgonia.F64(a.data[0])
		case *gorgonia.F32:
			*v = gorgonia.F32(a.data[0])
		case *gorgonia.I64:
			*v = gorgonia.I64(a.data[0])
		case *gorgonia.I32:
			*v = gorgonia.I32(a.data[0])
		case *gorgonia.I:
			*v = gorgonia.I(a.data[0])
		case *gorgonia.U8:
			*v = gorgonia.U8(a.data[0])
		}
		return v
	}
	return tensor.New(tensor.WithShape(a.shape...), tensor.WithBacking(backing(dt, a.data)))
}

func backing(dt tensor.Dtype, data []float64) any {
	switch dt {
	case tensor.Float64:
		return slices.Clone(data)
	case tensor.Float32:
		return converted[float32](data)
	case tensor.Int64:
		return converted[int64](data)
	case tensor.Int32:
		return converted[int32](data)
	case tensor.Int:
		return converted[int](data)
	default:
		return converted[byte](data)
	}
}

type number interface {
	float32 | float64 | int | int32 | int64 | byte
}

func converted[T number](data []float64) []T {
	out := make([]T, len(data))
	for i, v := range data {
		out[i] = T(v)
	}
	return out
}

func widened[T number](data []T) []float64 {
	out := make([]float64, len(data))
	for i, v := range data {
		out[i] = float64(v)
	}
	return out
}

// valueArr reads a value that is in row-major order, as results must be.
func valueArr(v gorgonia.Value) arr {
	a := arr{shape: slices.Clone(v.Shape())}
	if len(a.shape) > 0 && product(a.shape) == 0 { // Data would panic
		return newArr(a.shape...)
	}
	switch data := v.Data().(type) {
	case []float64:
		a.data = slices.Clone(data)
	case []float32:
		a.data = widened(data)
	case []int64:
		a.data = widened(data)
	case []int32:
		a.data = widened(data)
	case []int:
		a.data = widened(data)
	case []byte:
		a.data = widened(data)
	case float64:
		a.data = []float64{data}
	case float32:
		a.data = []float64{float64(data)}
	case int64:
		a.data = []float64{float64(data)}
	case int32:
		a.data = []float64{float64(data)}
	case int:
		a.data = []float64{float64(data)}
	case byte:
		a.data = []float64{float64(data)}
	}
	if a.shape == nil {
		a.shape = []int{}
	}
	return a
}

func dtypes() []tensor.Dtype {
	return []tensor.Dtype{tensor.Float64, tensor.Float32, tensor.Int64, tensor.Int32, tensor.Int,
		tensor.Uint8}
}
