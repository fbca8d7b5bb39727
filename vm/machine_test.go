package vm_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// must returns the node of a graph under construction.
func must(n node, err error) node {
	if err != nil {
		panic(err)
	}
	return n
}

// What graphs of these tests are built of.
type (
	node  = *gorgonia.Node
	nodes = gorgonia.Nodes
)

// These add nodes as the functions of Gorgonia do, in which nothing is wrong here.
var (
	add, sub, mul, times = ofTwo(gorgonia.Add), ofTwo(gorgonia.Sub), ofTwo(gorgonia.Mul),
		ofTwo(gorgonia.HadamardProd)
	square, neg, tanh = ofOne(gorgonia.Square), ofOne(gorgonia.Neg), ofOne(gorgonia.Tanh)
	relu, sigmoid     = ofOne(gorgonia.Rectify), ofOne(gorgonia.Sigmoid)
	sum, mean         = along(gorgonia.Sum), along(gorgonia.Mean)
)

func ofOne(f func(x node) (node, error)) func(x node) node {
	return func(x node) node { return must(f(x)) }
}

func ofTwo(f func(x, y node) (node, error)) func(x, y node) node {
	return func(x, y node) node { return must(f(x, y)) }
}

func along(f func(x node, axes ...int) (node, error)) func(x node, along ...int) node {
	return func(x node, axes ...int) node { return must(f(x, axes...)) }
}

func reshape(x node, to tensor.Shape) node { return must(gorgonia.Reshape(x, to)) }

func transpose(x node, axes ...int) node { return must(gorgonia.Transpose(x, axes...)) }

// model is a graph with a loss to train on.
type model struct {
	g      *gorgonia.ExprGraph
	params nodes
	loss   gorgonia.Value
}

// ramp returns n numbers between -1 and 1.
func ramp(dt tensor.Dtype, shape ...int) *tensor.Dense {
	t := tensor.New(tensor.Of(dt), tensor.WithShape(shape...))
	for i := range t.Len() {
		set(t, i, math.Mod(float64(i)*0.37+0.11, 2)-1)
	}
	return t
}

func (m *model) variable(name string, dt tensor.Dtype, shape ...int) node {
	if len(shape) == 0 {
		x := ramp(dt, 1).Data()
		if dt == tensor.Float32 {
			return gorgonia.NewScalar(m.g, dt, gorgonia.WithName(name),
				gorgonia.WithValue(x.([]float32)[0]))
		}
		return gorgonia.NewScalar(m.g, dt, gorgonia.WithName(name),
			gorgonia.WithValue(x.([]float64)[0]))
	}
	return gorgonia.NewTensor(m.g, dt, len(shape), gorgonia.WithShape(shape...),
		gorgonia.WithName(name), gorgonia.WithValue(ramp(dt, shape...)))
}

func (m *model) grad(t testing.TB, loss node) {
	t.Helper()
	gorgonia.Read(loss, &m.loss)
	require.NoError(t, require.Err(gorgonia.Grad(loss, m.params...)))
}

// mlp is the multi-layer perceptron of Gorgonia's example 286, with biases.
func mlp(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	x, y := m.variable("x", dt, 16, 12), m.variable("y", dt, 16, 5)
	w0, b0 := m.variable("w0", dt, 12, 7), m.variable("b0", dt, 1, 7)
	w1 := m.variable("w1", dt, 7, 5)
	m.params = nodes{w0, b0, w1}
	h := relu(must(gorgonia.BroadcastAdd(mul(x, w0), b0, nil, []byte{0})))
	p := must(gorgonia.SoftMax(mul(h, w1)))
	m.grad(t, neg(mean(times(p, y))))
	return m
}

// convnet is a small one of Gorgonia's example of that name, without dropout.
func convnet(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	x, y := m.variable("x", dt, 4, 1, 8, 8), m.variable("y", dt, 4, 5)
	w0, w1, w2 := m.variable("w0", dt, 3, 1, 3, 3), m.variable("w1", dt, 48, 6),
		m.variable("w2", dt, 6, 5)
	m.params = nodes{w0, w1, w2}
	h := relu(must(gorgonia.Conv2d(x, w0, tensor.Shape{3, 3}, []int{1, 1}, []int{1, 1},
		[]int{1, 1})))
	h = must(gorgonia.MaxPool2D(h, tensor.Shape{2, 2}, []int{0, 0}, []int{2, 2}))
	h = relu(mul(reshape(h, tensor.Shape{4, 48}), w1))
	logits := must(gorgonia.Log(must(gorgonia.SoftMax(mul(h, w2)))))
	m.grad(t, neg(mean(times(logits, y))))
	return m
}

// constant returns a number as a node.
func constant(dt tensor.Dtype, x float64) node {
	if dt == tensor.Float32 {
		return gorgonia.NewConstant(float32(x))
	}
	return gorgonia.NewConstant(x)
}

// logistic is Gorgonia's example logisticregression, with its update of the weights.
func logistic(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	x, y, w, b := m.variable("x", dt, 20, 6), m.variable("y", dt, 20), m.variable("w", dt, 6),
		m.variable("bias", dt)
	m.params = nodes{w, b}
	one := constant(dt, 1)
	prob := sigmoid(add(mul(x, w), b))
	must(gorgonia.Gt(prob, constant(dt, 0.5), false))
	first := times(neg(y), must(gorgonia.Log(prob)))
	second := times(sub(one, y), must(gorgonia.Log(sub(one, prob))))
	loss := mean(sub(first, second))
	penalty := mul(constant(dt, 0.01), sum(square(w)))
	m.grad(t, add(loss, penalty))
	sub(w, mul(constant(dt, 0.1), w.Deriv()))
	return m
}

// iris is Gorgonia's example of that name: a linear regression.
func iris(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	x, y, theta := m.variable("x", dt, 15, 5), m.variable("y", dt, 15), m.variable("theta", dt, 5)
	m.params = nodes{theta}
	m.grad(t, mean(square(sub(mul(x, theta), y))))
	return m
}

// batchLevel is a layer, the mean of a batch, and a penalty that reads both the layer's input and
// the mean.
func batchLevel(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	x, b := m.variable("x", dt, 6, 5), m.variable("b", dt, 6, 5)
	w, v := m.variable("w", dt, 5, 4), m.variable("v", dt, 6, 5)
	m.params = nodes{w, v}
	less := sub(x, square(b))
	h := tanh(mul(less, w))
	level := mean(x)
	penalty := sum(times(times(less, level), v))
	m.grad(t, add(add(level, sum(h)), penalty))
	return m
}

// floats returns the elements of a value: those of float64 themselves, others converted.
func floats(t testing.TB, v gorgonia.Value) []float64 {
	t.Helper()
	if data, ok := v.(*tensor.Dense); ok && v.Dtype() == tensor.Float64 && !isEmpty(v.Shape()) {
		return data.Float64s()
	}
	return elements(v)
}

// compare compares two values.
func compare(t testing.TB, what string, got, want gorgonia.Value, tolerance float64) {
	t.Helper()
	require.That(t, got != nil && want != nil, "%s: %v, want %v", what, got, want)
	a, b := floats(t, got), floats(t, want)
	require.That(t, len(a) == len(b), "%s: %d elements, want %d", what, len(a), len(b))
	for i := range a {
		if d := math.Abs(a[i] - b[i]); !(d <= tolerance*max(1, math.Abs(b[i]))) {
			t.Fatalf("%s: element %d is %v, want %v", what, i, a[i], b[i])
		}
	}
}

var tolerances = map[tensor.Dtype]float64{tensor.Float64: 1e-10, tensor.Float32: 1e-5}

// fake returns a device whose memory the host cannot touch.
func fake(t testing.TB) backend.Device {
	t.Helper()
	d := require.Value(fakedevice.New(host.Device{}))(t)
	t.Cleanup(func() {
		if err := d.Close(); err != nil { // which finds memory that was not freed
			t.Error(err)
		}
	})
	return d
}

// devices are where machines run: nil is the host.
var devices = map[string]func(t testing.TB) backend.Device{
	"host": func(testing.TB) backend.Device { return nil },
	"fake": fake,
}

var models = map[string]func(testing.TB, tensor.Dtype) *model{
	"mlp": mlp, "convnet": convnet, "logistic": logistic, "iris": iris, "batch level": batchLevel}

func TestTrainsAsTheTapeMachine(t *testing.T) {
	for name, build := range models {
		for where, device := range devices {
			for dt, tolerance := range tolerances {
				t.Run(fmt.Sprint(name, " ", where, " ", dt), func(t *testing.T) {
					trainsAsTheTapeMachine(t, build, device(t), dt, tolerance)
				})
			}
		}
	}
}

// TestConvolutionsAreOneOperation: no plan of a convolutional network writes patches, or rectified
// images before they are pooled.
func TestConvolutionsAreOneOperation(t *testing.T) {
	m := machine(t, stockConvnet(2)(t, tensor.Float32).g)
	text := fmt.Sprint(m.Plan())
	for step, want := range map[string]int{
		"= convolution 3x3": 3, "= convolution-input-grad": 2, "= convolution-filter-grad": 3,
		"= relu-maxpool 2x2": 3, "= relu-maxpool-grad": 3, "im2col": 0, "= matmul": 6,
	} {
		if got := strings.Count(text, step); got != want {
			t.Errorf("the plan has %q %d times, want %d:\n%s", step, got, want, text)
		}
	}
}

// trainsAsTheTapeMachine compares losses and gradients of some steps.
func trainsAsTheTapeMachine(t *testing.T, build func(testing.TB, tensor.Dtype) *model,
	device backend.Device, dt tensor.Dtype, tolerance float64) {
	tape, plan := build(t, dt), build(t, dt)
	a := gorgonia.NewTapeMachine(tape.g, gorgonia.BindDualValues(tape.params...))
	defer a.Close()
	b := machineOn(t, device, plan.g)
	for step := range 3 {
		run(t, a)
		run(t, b)
		compare(t, fmt.Sprintf("loss of step %d", step), plan.loss, tape.loss, tolerance)
		for i := range plan.params {
			compare(t, fmt.Sprintf("gradient of %v in step %d", plan.params[i], step),
				gradient(t, plan.params[i]), gradient(t, tape.params[i]), tolerance)
		}
		for _, m := range []*model{tape, plan} {
			require.NoError(t, gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.1)).Step(
				gorgonia.NodesToValueGrads(m.params)))
		}
		a.Reset()
	}
}

func gradient(t testing.TB, n node) gorgonia.Value {
	t.Helper()
	return require.Value(n.Grad())(t)
}
