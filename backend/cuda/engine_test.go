package cuda

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/fakedevice"
	"github.com/euryale-ml/euryale/backend/host"
)

// must fails the test on an error, and returns the value otherwise.
func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newEngine returns an engine on memory that faults when the host touches it, or
// on a GPU where the tests are told so.
func newEngine(t testing.TB) *Engine {
	t.Helper()
	if d := theGPU(t); d != nil {
		e, err := NewEngine(d, nil)
		ok(t, err)
		t.Cleanup(func() { ok(t, e.Close()) })
		return e
	}
	d, err := fakedevice.New(host.Device{})
	ok(t, err)
	e, err := NewEngine(d, nil)
	ok(t, err)
	t.Cleanup(func() {
		if err := errors.Join(e.Close(), d.Close()); err != nil {
			t.Error(err)
		}
	})
	return e
}

// guarded returns the device of an engine that has guarded memory; tests of it
// are skipped on a GPU.
func guarded(t testing.TB, e *Engine) *fakedevice.Device {
	t.Helper()
	d, ok := e.device.(*fakedevice.Device)
	if !ok {
		t.Skip("it is about guarded memory")
	}
	return d
}

// touched runs f and fails if the host touches device memory.
func touched(t testing.TB, e *Engine, f func()) {
	t.Helper()
	if d, guarded := e.device.(*fakedevice.Device); guarded {
		ok(t, d.Catch(f))
		return
	}
	f()
}

// counting returns a tensor of small integers, of both signs.
func counting(dt tensor.Dtype, shape ...int) *tensor.Dense {
	x := tensor.New(tensor.Of(dt), tensor.WithShape(shape...))
	for i := range elements(shape) {
		v := (i*7+3)%11 - 5
		switch dt {
		case tensor.Float32:
			x.Float32s()[i] = float32(v)
		case tensor.Float64:
			x.Float64s()[i] = float64(v)
		case tensor.Int32:
			x.Int32s()[i] = int32(v)
		case tensor.Int64:
			x.Int64s()[i] = int64(v)
		case tensor.Int:
			x.Ints()[i] = v
		case tensor.Byte:
			x.Uint8s()[i] = byte(v + 5)
		}
	}
	return x
}

func floats(t testing.TB, e *Engine, v gorgonia.Value) []float64 {
	t.Helper()
	if s, scalar := v.(gorgonia.Scalar); scalar {
		switch x := s.Data().(type) {
		case float64:
			return []float64{x}
		case float32:
			return []float64{float64(x)}
		}
	}
	d := v.(*tensor.Dense)
	if e != nil {
		var err error
		d, err = e.ToHost(d)
		ok(t, err)
	} else {
		d = tensor.Materialize(d).(*tensor.Dense)
	}
	var all []float64
	for _, x := range d.Float32s() {
		all = append(all, float64(x))
	}
	if d.Dtype() == tensor.Float64 {
		all = slices.Clone(d.Float64s())
	}
	return all
}

// program builds a graph on inputs and returns a loss.
type program struct {
	name   string
	inputs [][]int
	exact  bool // every operation is exact on small integers
	build  func(x []*gorgonia.Node) *gorgonia.Node
}

func node(n *gorgonia.Node, err error) *gorgonia.Node {
	if err != nil {
		panic(err)
	}
	return n
}

func sum(n *gorgonia.Node) *gorgonia.Node { return node(gorgonia.Sum(n)) }

var programs = []program{
	{"Add", [][]int{{3, 4}, {3, 4}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		return sum(node(gorgonia.Add(x[0], x[1])))
	}},
	{"AddMulSubSquare", [][]int{{3, 4}, {3, 4}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.HadamardProd(x[0], x[1]))
		y = node(gorgonia.Sub(y, x[0]))
		y = node(gorgonia.Square(y))
		return sum(node(gorgonia.Neg(y)))
	}},
	{"Scalars", [][]int{{5}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.Mul(x[0], gorgonia.NewConstant(float32(3))))
		y = node(gorgonia.Sub(gorgonia.NewConstant(float32(1)), y))
		y = node(gorgonia.HadamardDiv(y, gorgonia.NewConstant(float32(2))))
		return sum(node(gorgonia.Square(y)))
	}},
	{"MeanAndScalarResult", [][]int{{4, 2}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		mean := node(gorgonia.Mean(x[0]))
		return sum(node(gorgonia.Mul(node(gorgonia.Square(x[0])), mean)))
	}},
	{"SumAlongAxes", [][]int{{2, 3, 4}, {3}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.Sum(node(gorgonia.Square(x[0])), 0, 2))
		return sum(node(gorgonia.HadamardProd(y, x[1])))
	}},
	{"SumAlongFirstAndLast", [][]int{{3, 4}, {4}, {3}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		first := sum(node(gorgonia.HadamardProd(node(gorgonia.Sum(x[0], 0)), x[1])))
		last := sum(node(gorgonia.HadamardProd(node(gorgonia.Sum(x[0], 1)), x[2])))
		return node(gorgonia.Add(first, last))
	}},
	{"BroadcastRow", [][]int{{3, 4}, {1, 4}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.BroadcastAdd(x[0], x[1], nil, []byte{0}))
		return sum(node(gorgonia.Square(y)))
	}},
	{"BroadcastColumn", [][]int{{3, 4}, {3, 1}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.BroadcastHadamardProd(x[0], x[1], nil, []byte{1}))
		return sum(node(gorgonia.Square(y)))
	}},
	{"BroadcastOneElement", [][]int{{3, 4}, {1, 1}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.BroadcastAdd(x[0], x[1], nil, []byte{0, 1}))
		return sum(node(gorgonia.Square(y)))
	}},
	{"BroadcastOneSidedAxis", [][]int{{1, 4}, {1, 1}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.BroadcastAdd(x[0], x[1], nil, []byte{0, 1})) // axis 0 is repeated once
		return sum(node(gorgonia.Square(y)))
	}},
	{"Transpose", [][]int{{3, 4}, {4, 3}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.Transpose(node(gorgonia.Square(x[0])), 1, 0))
		return sum(node(gorgonia.HadamardProd(y, x[1])))
	}},
	{"TransposeOfThree", [][]int{{2, 3, 4}, {4, 2, 3}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.Transpose(x[0], 2, 0, 1))
		return sum(node(gorgonia.HadamardProd(y, x[1])))
	}},
	{"Reshape", [][]int{{3, 4}, {6, 2}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.Reshape(x[0], tensor.Shape{6, 2}))
		return sum(node(gorgonia.HadamardProd(y, x[1])))
	}},
	{"ReshapeOfTransposed", [][]int{{3, 4}, {2, 6}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.Reshape(node(gorgonia.Transpose(x[0], 1, 0)), tensor.Shape{2, 6}))
		return sum(node(gorgonia.HadamardProd(y, x[1])))
	}},
	{"Rectify", [][]int{{3, 4}, {3, 4}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		return sum(node(gorgonia.HadamardProd(node(gorgonia.Rectify(x[0])), x[1])))
	}},
	{"Comparisons", [][]int{{3, 4}, {3, 4}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		all := x[0] // comparisons have no gradient
		for _, compare := range []func(a, b *gorgonia.Node, retSame bool) (*gorgonia.Node, error){
			gorgonia.Gt, gorgonia.Gte, gorgonia.Lt, gorgonia.Lte, gorgonia.Eq, gorgonia.Ne,
		} {
			y := node(gorgonia.HadamardProd(node(compare(x[0], x[1], true)), x[1]))
			all = node(gorgonia.Add(node(gorgonia.HadamardProd(all, gorgonia.NewConstant(float32(2)))), y))
		}
		return sum(all)
	}},
	{"Max", [][]int{{3, 4}, {3}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.Max(x[0], 1))
		return sum(node(gorgonia.HadamardProd(y, x[1])))
	}},
	{"AbsAndCube", [][]int{{7}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		return sum(node(gorgonia.Abs(node(gorgonia.Cube(x[0])))))
	}},
	{"OneElement", [][]int{{1}, {1}}, true, func(x []*gorgonia.Node) *gorgonia.Node {
		return sum(node(gorgonia.Square(node(gorgonia.HadamardProd(x[0], x[1])))))
	}},
	{"ExpTanh", [][]int{{3, 4}}, false, func(x []*gorgonia.Node) *gorgonia.Node {
		return sum(node(gorgonia.Exp(node(gorgonia.Tanh(x[0])))))
	}},
	{"LogSqrtInverse", [][]int{{3, 4}}, false, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.Add(node(gorgonia.Square(x[0])), gorgonia.NewConstant(float32(1))))
		y = node(gorgonia.Log(node(gorgonia.Sqrt(y))))
		return sum(node(gorgonia.Inverse(node(gorgonia.Add(y, gorgonia.NewConstant(float32(1)))))))
	}},
	{"Mapped", [][]int{{3, 4}}, false, func(x []*gorgonia.Node) *gorgonia.Node {
		y := node(gorgonia.Sigmoid(x[0]))
		y = node(gorgonia.Add(y, node(gorgonia.Softplus(x[0]))))
		y = node(gorgonia.Log1p(y))
		return sum(node(gorgonia.Expm1(y)))
	}},
	{"LayerNorm", [][]int{{3, 4}, {1, 4}}, false, func(x []*gorgonia.Node) *gorgonia.Node {
		mean := node(gorgonia.Reshape(node(gorgonia.Mean(x[0], 1)), tensor.Shape{3, 1}))
		centred := node(gorgonia.BroadcastSub(x[0], mean, nil, []byte{1}))
		deviation := node(gorgonia.Sqrt(node(gorgonia.Mean(node(gorgonia.Square(centred)), 1))))
		y := node(gorgonia.BroadcastHadamardDiv(centred, node(gorgonia.Reshape(deviation, tensor.Shape{3, 1})), nil, []byte{1}))
		y = node(gorgonia.BroadcastHadamardProd(y, x[1], nil, []byte{0}))
		return sum(node(gorgonia.Tanh(y)))
	}},
}

// graph is a program with its gradients.
type graph struct {
	*gorgonia.ExprGraph
	inputs, grads gorgonia.Nodes
	loss          *gorgonia.Node
}

func (p program) graph(t testing.TB, value func(*tensor.Dense) *tensor.Dense) graph {
	t.Helper()
	g := graph{ExprGraph: gorgonia.NewGraph()}
	for i, shape := range p.inputs {
		x := value(counting(tensor.Float32, shape...))
		g.inputs = append(g.inputs, gorgonia.NewTensor(g.ExprGraph, tensor.Float32, len(shape),
			gorgonia.WithShape(shape...), gorgonia.WithName(fmt.Sprint("x", i)), gorgonia.WithValue(x)))
	}
	g.loss = p.build(g.inputs)
	g.grads = must[gorgonia.Nodes](t)(gorgonia.Grad(g.loss, g.inputs...))
	return g
}

// results returns the loss and the gradients.
func (g graph) results(t testing.TB, e *Engine) [][]float64 {
	t.Helper()
	all := [][]float64{floats(t, e, g.loss.Value())}
	for _, n := range g.grads {
		all = append(all, floats(t, e, n.Value()))
	}
	return all
}

func (p program) onHost(t testing.TB) [][]float64 {
	t.Helper()
	g := p.graph(t, func(x *tensor.Dense) *tensor.Dense { return x })
	m := gorgonia.NewTapeMachine(g.ExprGraph)
	defer m.Close()
	ok(t, m.RunAll())
	return g.results(t, nil)
}

func (p program) onDevice(t testing.TB, e *Engine) graph {
	t.Helper()
	return p.graph(t, func(x *tensor.Dense) *tensor.Dense { return must[*tensor.Dense](t)(e.ToDevice(x)) })
}

func close32(a, b float64) bool {
	return a == b || math.Abs(a-b) <= 1e-5*max(math.Abs(a), math.Abs(b), 1)
}

func (p program) compare(t testing.TB, got, want [][]float64) {
	t.Helper()
	same := func(a, b float64) bool { return math.Float64bits(a) == math.Float64bits(b) }
	if !p.exact {
		same = close32
	}
	for i := range want {
		if !slices.EqualFunc(got[i], want[i], same) {
			t.Errorf("result %d is %v, on the host %v", i, got[i], want[i])
		}
	}
}

func TestGraphsGiveTheGradientsOfTheHost(t *testing.T) {
	for _, p := range programs {
		t.Run(p.name, func(t *testing.T) {
			want := p.onHost(t)
			e := newEngine(t)
			g := p.onDevice(t, e)
			m := must[*Machine](t)(e.NewMachine(g.ExprGraph))
			defer m.Close()
			for range 3 { // registers and memory of earlier runs must not matter
				before := e.Stats()
				ok(t, m.RunAll())
				after := e.Stats()
				if copies := after.Uploads + after.Downloads - before.Uploads - before.Downloads; copies != 0 {
					t.Errorf("%d copies of tensors between host and device", copies)
				}
				p.compare(t, g.results(t, e), want)
				m.Reset()
			}
		})
	}
}

func TestStockMachineRuns(t *testing.T) {
	p := programs[1]
	want := p.onHost(t)
	e := newEngine(t)
	g := p.onDevice(t, e)
	ok(t, e.Check(g.ExprGraph))
	m := gorgonia.NewTapeMachine(g.ExprGraph, gorgonia.WithEngine(e))
	defer m.Close()
	for range 2 {
		e.Reset()
		ok(t, m.RunAll())
		p.compare(t, g.results(t, e), want)
		m.Reset()
	}
}

func TestExecutorQueueRuns(t *testing.T) {
	d := must[*fakedevice.Device](t)(fakedevice.New(host.Device{}))
	defer d.Close()
	q := must[backend.Queue](t)(d.NewQueue())
	defer q.Close()
	e, err := NewEngine(d, q)
	if errors.Is(err, backend.ErrUnsupported) {
		t.Skip(err)
	}
	ok(t, err)
	defer e.Close()
	for _, p := range programs {
		want := p.onHost(t)
		g := p.onDevice(t, e)
		m := must[*Machine](t)(e.NewMachine(g.ExprGraph))
		ok(t, m.RunAll())
		p.compare(t, g.results(t, e), want)
		ok(t, m.Close())
	}
}

func TestMemoryIsFlatOverAThousandRuns(t *testing.T) {
	var p program
	for _, candidate := range programs {
		if candidate.name == "LayerNorm" {
			p = candidate
		}
	}
	e := newEngine(t)
	g := p.onDevice(t, e)
	m := must[*Machine](t)(e.NewMachine(g.ExprGraph))
	defer m.Close()
	ok(t, m.RunAll())
	m.Reset()
	device := guarded(t, e)
	blocks, nbytes := device.Live()
	heap := func() uint64 {
		runtime.GC()
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	before := heap()
	for range 1000 {
		ok(t, m.RunAll())
		m.Reset()
	}
	if b, n := device.Live(); b != blocks || n != nbytes {
		t.Errorf("device memory grew from %d blocks of %d bytes to %d of %d", blocks, nbytes, b, n)
	}
	if after := heap(); after > before+1<<20 {
		t.Errorf("host memory grew from %d to %d bytes", before, after)
	}
	if s := e.Stats(); s.Downloads != 0 || s.Uploads != int64(len(p.inputs)) {
		t.Errorf("%+v after 1,000 runs", s)
	}
}

func TestHostInputsAreCopiedAndCounted(t *testing.T) {
	p := programs[1]
	want := p.onHost(t)
	e := newEngine(t)
	g := p.graph(t, func(x *tensor.Dense) *tensor.Dense { return x })
	m := must[*Machine](t)(e.NewMachine(g.ExprGraph))
	defer m.Close()
	ok(t, m.RunAll())
	if s := e.Stats(); s.Uploads == 0 {
		t.Errorf("host inputs were not counted: %+v", s)
	}
	p.compare(t, g.results(t, e), want)
}

func TestHostAccessIsCaught(t *testing.T) {
	e := newEngine(t)
	x := must[*tensor.Dense](t)(e.ToDevice(counting(tensor.Float32, 3, 4)))
	err := guarded(t, e).Catch(func() { x.Float32s()[5]++ })
	if !errors.Is(err, fakedevice.ErrTouched) || !strings.Contains(err.Error(), "byte 20 of an allocation of 48 bytes") {
		t.Error(err)
	}
}

func TestCheckNamesTheOperationAndWhatToDo(t *testing.T) {
	for name, c := range map[string]struct {
		build  func(x *gorgonia.Node) *gorgonia.Node
		advice string
	}{
		"matrix product": {func(x *gorgonia.Node) *gorgonia.Node { return node(gorgonia.Mul(x, x)) }, "matrix products"},
		"slice":          {func(x *gorgonia.Node) *gorgonia.Node { return node(gorgonia.Slice(x, gorgonia.S(0))) }, "slices"},
		"softmax":        {func(x *gorgonia.Node) *gorgonia.Node { return node(gorgonia.SoftMax(x)) }, "Exp"},
		"sine":           {func(x *gorgonia.Node) *gorgonia.Node { return node(gorgonia.Sin(x)) }, "no such function"},
		"booleans":       {func(x *gorgonia.Node) *gorgonia.Node { return node(gorgonia.Gt(x, x, false)) }, "retSame"},
		"concatenation":  {func(x *gorgonia.Node) *gorgonia.Node { return node(gorgonia.Concat(0, x, x)) }, "AllGather"},
		"dropout":        {func(x *gorgonia.Node) *gorgonia.Node { return node(gorgonia.Dropout(x, 0.5)) }, "mask"},
		"read": {func(x *gorgonia.Node) *gorgonia.Node {
			var v gorgonia.Value
			gorgonia.Read(x, &v)
			return x
		}, "ToHost"},
	} {
		e := newEngine(t)
		g := gorgonia.NewGraph()
		x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(3, 3), gorgonia.WithName("x"))
		c.build(x)
		_, err := e.NewMachine(g)
		if !errors.Is(err, backend.ErrUnsupported) || !strings.Contains(fmt.Sprint(err), c.advice) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestScalarsMayDoAnything(t *testing.T) {
	e := newEngine(t)
	g := gorgonia.NewGraph()
	x := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(3), gorgonia.WithName("x"),
		gorgonia.WithValue(must[*tensor.Dense](t)(e.ToDevice(counting(tensor.Float32, 3)))))
	y := node(gorgonia.Sin(node(gorgonia.Sum(x))))
	var v gorgonia.Value
	gorgonia.Read(y, &v)
	m := must[*Machine](t)(e.NewMachine(g))
	defer m.Close()
	ok(t, m.RunAll())
	want := math.Sin(float64(-2 + 5 + 1))
	if got := floats(t, nil, v); !close32(got[0], want) {
		t.Errorf("%v, want %v", got, want)
	}
}
