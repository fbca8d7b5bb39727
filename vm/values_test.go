package vm_test

import (
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"math"
	"slices"
	"testing"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// distant is the Engine of tensors in memory that the host cannot reach.
type distant struct{ tensor.StdEng }

func (distant) AllocAccessible() bool { return false }

// machineOn returns a machine on a device, nil for the host, that is closed at the test's end.
func machineOn(t testing.TB, d backend.Device, g *gorgonia.ExprGraph,
	options ...vm.Option) *vm.Machine {
	t.Helper()
	m := require.Value(vm.New(g, d, options...))(t)
	t.Cleanup(func() { require.Report(t, m.Close()) })
	return m
}

// machine returns a machine on the host.
func machine(t testing.TB, g *gorgonia.ExprGraph, options ...vm.Option) *vm.Machine {
	t.Helper()
	return machineOn(t, nil, g, options...)
}

func run(t testing.TB, m gorgonia.VM) {
	t.Helper()
	require.NoError(t, m.RunAll())
}

// doubled is a graph z = 2 x + 1 of a vector, with the node 2 x.
func doubled() (g *gorgonia.ExprGraph, x, inner, z node) {
	g = gorgonia.NewGraph()
	x = gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(3), gorgonia.WithName("x"))
	inner = mul(x, gorgonia.NewConstant(float32(2)))
	return g, x, inner, add(inner, gorgonia.NewConstant(float32(1)))
}

func vector(x ...float32) *tensor.Dense { return tensor.New(tensor.WithBacking(x)) }

// TestStaleValue: what is not a result has no value, whoever has run the graph before, and a
// run that fails leaves none.
func TestStaleValue(t *testing.T) {
	g, x, inner, z := doubled()
	require.NoError(t, gorgonia.Let(x, vector(1, 2, 3)))
	tape := gorgonia.NewTapeMachine(g)
	run(t, tape)
	left := z.Value()
	before := slices.Clone(left.Data().([]float32))
	m := machine(t, g)
	run(t, m)
	v := inner.Value()
	require.Check(t, v == nil, "a node that is no result has the value %v", v)
	got := z.Value().Data().([]float32)
	require.Check(t, slices.Equal(got, []float32{3, 5, 7}), "the root is %v", got)
	if got := left.Data().([]float32); !slices.Equal(got, before) {
		t.Errorf("the tape machine's value became %v, it was %v", got, before)
	}
	run(t, machine(t, g, vm.Keep(inner)))
	if got := inner.Value().Data().([]float32); !slices.Equal(got, []float32{2, 4, 6}) {
		t.Errorf("the kept node is %v", got)
	}
	run(t, m)
	if v := inner.Value(); v != nil {
		t.Errorf("the other machine's kept node still has the value %v", v)
	}
	err := gorgonia.Let(x, vector(1, 2))
	require.That(t, err != nil, "gorgonia.Let takes another shape")
	if err := gorgonia.Let(x, float32(1)); err != nil { // which Gorgonia does not check
		t.Fatal(err)
	}
	if err := m.RunAll(); err == nil {
		t.Fatal("a run with a wrong shape succeeds")
	}
	if v := z.Value(); v != nil {
		t.Errorf("after a failure, the root has the value %v", v)
	}
}

// TestLetShape: a value of the wrong shape or dtype, or none, is an error that names the
// variable and both.
func TestLetShape(t *testing.T) {
	g, x, _, z := doubled()
	m := machine(t, g)
	reshaped := vector(1, 2, 3)
	for _, test := range []struct {
		let  any
		want []string
	}{
		{nil, []string{"x", "no value"}},
		{float32(1), []string{"x", "()", "(3)"}},
		{reshaped, []string{"x", "(1, 1, 3)", "(3)", "a second graph and machine"}},
	} {
		if test.let == reshaped {
			require.NoError(t, gorgonia.Let(x, reshaped))
			require.NoError(t, reshaped.Reshape(1, 1, 3))
		} else if test.let != nil {
			require.NoError(t, gorgonia.Let(x, test.let))
		}
		err := m.RunAll()
		for _, want := range test.want {
			require.Fails(t, test.let, err, want)
		}
	}
	g2 := gorgonia.NewGraph()
	scalar := gorgonia.NewScalar(g2, tensor.Float32, gorgonia.WithName("rate"))
	neg(scalar)
	require.NoError(t, gorgonia.Let(scalar, 0.5))
	require.Fails(t, "of another dtype", machine(t, g2).RunAll(),
		"rate is float64, the graph was built for float32")
	// Machines copy to their devices what is on the host.
	onDevice := vector(1, 2, 3)
	tensor.WithEngine(distant{})(onDevice)
	require.NoError(t, gorgonia.Let(x, onDevice))
	require.Fails(t, "on a device", m.RunAll(),
		"the value of x: unsupported: the value is in the memory "+"of a device",
		"copy it to the host")
	// A column: its elements are apart in memory.
	columns := tensor.New(tensor.WithShape(3, 2), tensor.WithBacking([]float32{1, 9, 2, 9, 3, 9}))
	view := require.Value(columns.Slice(nil, gorgonia.S(0)))(t)
	require.NoError(t, gorgonia.Let(x, view))
	run(t, m)
	got := z.Value().Data().([]float32)
	require.Check(t, slices.Equal(got, []float32{3, 5, 7}), "of a view, the root is %v", got)
}

// TestSharedParameters: machines of two graphs with the same tensors train and evaluate the
// same parameters.
func TestSharedParameters(t *testing.T) {
	build := func(rows int, w *tensor.Dense) (*model, node) {
		m := &model{g: gorgonia.NewGraph()}
		x := m.variable("x", tensor.Float64, rows, 3)
		p := gorgonia.NewMatrix(m.g, tensor.Float64, gorgonia.WithShape(3, 2),
			gorgonia.WithName("w"), gorgonia.WithValue(w))
		m.params = nodes{p}
		return m, must(gorgonia.Sum(mul(x, p)))
	}
	w := ramp(tensor.Float64, 3, 2)
	train, loss := build(8, w)
	train.grad(t, loss)
	eval, sum := build(5, w)
	gorgonia.Read(sum, &eval.loss)
	trainer, evaluator := machine(t, train.g), machine(t, eval.g, vm.Eval())
	run(t, evaluator)
	before := eval.loss.Data().(float64)
	run(t, trainer)
	require.NoError(t, gorgonia.NewVanillaSolver().Step(gorgonia.NodesToValueGrads(train.params)))
	require.NoError(t, trainer.Pull(train.params...))
	run(t, evaluator)
	want := valuesByDo(t, eval.g)[sum].Data().(float64)
	// in another order
	if got := eval.loss.Data().(float64); got == before || math.Abs(got-want) > 1e-12 {
		t.Errorf("after a step the evaluation is %v, want %v; before it was %v", got, want, before)
	}
	err := trainer.Pull(sum)
	require.Check(t, err != nil, "Pull of a node of another graph succeeds")
}

// TestGradientsAreOverwritten: two runs do not add up, and gradients reach the dual values of
// a tape machine that has run the graph before.
func TestGradientsAreOverwritten(t *testing.T) {
	m := mlp(t, tensor.Float64)
	tape := gorgonia.NewTapeMachine(m.g, gorgonia.BindDualValues(m.params...))
	run(t, tape)
	var want [][]float64
	for _, p := range m.params {
		g := require.Value(p.Grad())(t)
		want = append(want, slices.Clone(g.Data().([]float64)))
	}
	ours := machine(t, m.g)
	for range 3 {
		run(t, ours)
		for i, p := range m.params {
			g := require.Value(p.Grad())(t)
			compare(t, p.Name(), g, tensor.New(tensor.WithBacking(want[i])), 1e-10)
		}
	}
}

// TestChangedSlice: gorgonia.UnsafeLet may give an operation another slice between runs.
func TestChangedSlice(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(4),
		gorgonia.WithValue(vector(1, 2, 3, 4)))
	y := must(gorgonia.Slice(x, gorgonia.S(0, 2)))
	m := machine(t, g)
	run(t, m)
	require.NoError(t, gorgonia.UnsafeLet(y, gorgonia.S(2, 4)))
	run(t, m)
	got := y.Value().Data().([]float32)
	require.Check(t, slices.Equal(got, []float32{3, 4}), "after the slice has changed, %v", got)
}

// counter is an operation that a machine does not know: it gives its operand back, counts,
// and fails on demand.
type counter struct {
	runs int
	err  error
}

func (c *counter) Arity() int    { return 1 }
func (c *counter) Type() hm.Type { return hm.NewFnType(hm.TypeVariable('a'), hm.TypeVariable('a')) }
func (c *counter) InferShape(x ...gorgonia.DimSizer) (tensor.Shape, error) {
	return x[0].(tensor.Shape).Clone(), nil
}
func (c *counter) Do(x ...gorgonia.Value) (gorgonia.Value, error) {
	c.runs++
	return x[0], c.err
}
func (c *counter) ReturnsPtr() bool      { return false }
func (c *counter) CallsExtern() bool     { return false }
func (c *counter) OverwritesInput() int  { return -1 }
func (c *counter) WriteHash(h hash.Hash) { h.Write([]byte{byte(c.runs)}) }
func (c *counter) Hashcode() uint32      { return fnv.New32a().Sum32() }
func (c *counter) String() string        { return "counter" }

// TestCaptureSplit: on a device that records graphs, what runs on the host splits the graph, and
// the values stay those of the host.
func TestCaptureSplit(t *testing.T) {
	g, x, inner, _ := doubled()
	op := &counter{}
	y := must(gorgonia.ApplyOp(op, must(gorgonia.Exp(must(gorgonia.SoftMax(inner))))))
	z := must(gorgonia.SoftMax(square(y)))
	require.NoError(t, gorgonia.Let(x, vector(1, 2, 3)))
	want := valuesByDo(t, g)[z]
	m := machineOn(t, fake(t), g)
	op.runs = 0
	for runs := range 4 {
		run(t, m)
		compare(t, fmt.Sprint("run ", runs), z.Value(), want, 1e-5)
		require.Check(t, op.runs == runs+1, "after %d runs the operation ran %d times", runs+1,
			op.runs)
	}
	require.NoError(t, gorgonia.Let(x, vector(3, 2, 1)))
	run(t, m)
	want = valuesByDo(t, g)[z]
	compare(t, "with another input", z.Value(), want, 1e-5)
}

// TestOpaque: an operation that the machine does not know runs once in each run, even if
// nobody wants its result, and the nodes around it are computed as ever.
func TestOpaque(t *testing.T) {
	g, x, inner, _ := doubled()
	op := &counter{}
	y := must(gorgonia.ApplyOp(op, inner))
	square := must(gorgonia.Square(y))
	require.NoError(t, gorgonia.Let(x, vector(1, 2, 3)))
	m := machine(t, g)
	for runs := range 3 {
		run(t, m)
		if got := square.Value().Data().([]float32); op.runs != runs+1 ||
			!slices.Equal(got, []float32{4, 16, 36}) {
			t.Errorf("after %d runs it ran %d times and gives %v", runs+1, op.runs, got)
		}
	}
	op.err = errors.New("no more")
	require.Fails(t, "its error becomes", m.RunAll(), op.err, "counter")
}

// TestPlansAreByWholeValues: two slices of one value differ in their limits only, and stay two.
func TestPlansAreByWholeValues(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(6),
		gorgonia.WithValue(vector(1, 2, 3, 4, 5, 6)))
	a := must(gorgonia.Slice(square(x), gorgonia.S(0, 3)))
	b := must(gorgonia.Slice(square(x), gorgonia.S(3, 6)))
	d := sub(b, a)
	m := machine(t, g)
	run(t, m)
	if got := d.Value().Data().([]float32); !slices.Equal(got, []float32{15, 21, 27}) {
		t.Errorf("the difference of two slices is %v", got)
	}
}

// TestRead: targets of gorgonia.Read are filled, variables and constants too, and a value that
// is there is written over, as the tape machine does.
func TestRead(t *testing.T) {
	g, x, inner, _ := doubled()
	var ofX, ofInner gorgonia.Value
	gorgonia.Read(x, &ofX)
	gorgonia.Read(inner, &ofInner)
	m := machine(t, g)
	var first gorgonia.Value
	for _, data := range [][]float32{{1, 2, 3}, {4, 5, 6}} {
		require.NoError(t, gorgonia.Let(x, vector(data...)))
		run(t, m)
		got, twice := ofX.Data().([]float32), ofInner.Data().([]float32)
		require.Check(t, slices.Equal(got, data) && twice[2] == 2*data[2] && ofX != x.Value(),
			"of %v Read gives %v and %v", data, got, twice)
		if first == nil {
			first = ofInner
		} else if first != ofInner {
			t.Error("the second run makes another value")
		}
	}
}

func TestClosedRaced(t *testing.T) {
	g, _, _, _ := doubled()
	m := machine(t, g)
	require.NoError(t, m.Close())
	err := m.RunAll()
	require.Check(t, err != nil, "a closed machine runs")
}
