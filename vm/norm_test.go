package vm_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	read "github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// normed is a batch normalisation of a graph of its own.
type normed struct {
	x  node
	y  *gorgonia.Value
	op *gorgonia.BatchNormOp
}

func newNormed(dt tensor.Dtype) normed {
	m := &model{g: gorgonia.NewGraph()}
	x := m.variable("x", dt, 3, 2, 2, 2)
	y, _, _, op, err := gorgonia.BatchNorm(x, m.variable("gain", dt, 1, 2, 1, 1),
		m.variable("bias", dt, 1, 2, 1, 1), 0.25, 1e-3)
	return normed{x, valueOf(must(y, err)), op}
}

// newTrained is newNormed of x * w, with the gradient of w: as in every network that trains, the
// input of the batch normalisation has a gradient.
func newTrained(dt tensor.Dtype) normed {
	m := &model{g: gorgonia.NewGraph()}
	x, w := m.variable("x", dt, 3, 2, 2, 2), m.variable("w", dt, 3, 2, 2, 2)
	gain, bias := m.variable("gain", dt, 1, 2, 1, 1), m.variable("bias", dt, 1, 2, 1, 1)
	y, _, _, op, err := gorgonia.BatchNorm(times(x, w), gain, bias, 0.25, 1e-3)
	loss := sum(square(must(y, err)))
	if _, err := gorgonia.Grad(loss, w, gain, bias); err != nil {
		panic(err)
	}
	return normed{x, valueOf(y), op}
}

// valueOf is where runs leave the value of a node that others read.
func valueOf(n node) *gorgonia.Value {
	v := new(gorgonia.Value)
	gorgonia.Read(n, v)
	return v
}

// let gives x a batch that differs between steps.
func (n normed) let(t *testing.T, step int) {
	t.Helper()
	part, err := ramp(n.x.Dtype(), 3+step, 2, 2, 2).Slice(gorgonia.S(step, step+3))
	if err == nil {
		err = gorgonia.Let(n.x, part.Materialize())
	}
	require.NoError(t, err)
}

// TestRunningStatistics: a batch normalisation has the running statistics that the tape machine
// gives it, keeps them while machines for training and evaluation take turns, and evaluates with
// them.
func TestRunningStatistics(t *testing.T) {
	for where, device := range devices {
		for dt, tolerance := range tolerances {
			t.Run(fmt.Sprint(where, " ", dt), func(t *testing.T) {
				runningStatistics(t, device(t), newNormed(dt), newNormed(dt), 10*tolerance)
			})
			t.Run(fmt.Sprint(where, " ", dt, " with gradients"), func(t *testing.T) {
				runningStatistics(t, device(t), newTrained(dt), newTrained(dt), 10*tolerance)
			})
		}
	}
}

func runningStatistics(t *testing.T, d backend.Device, want, got normed, tolerance float64) {
	tape := gorgonia.NewTapeMachine(want.x.Graph())
	defer tape.Close()
	train, evaluate := machineOn(t, d, got.x.Graph()), machineOn(t, d, got.x.Graph(), vm.Eval())
	text := evaluate.Plan().String()
	require.Check(t, strings.Contains(text, "host_ops=0"), "operations run by Do in\n%s", text)
	for step := range 20 {
		want.let(t, step)
		got.let(t, step)
		run(t, tape)
		run(t, train)
		compare(t, "training", *got.y, *want.y, tolerance)
		mean, variance := want.op.Stats()
		gotMean, gotVariance := got.op.Stats()
		compare(t, fmt.Sprint("mean of step ", step), gotMean, mean, tolerance)
		compare(t, fmt.Sprint("variance of step ", step), gotVariance, variance, tolerance)
		run(t, evaluate)
		tape.Reset()
	}
	last := gorgonia.NewTapeMachine(want.x.Graph(), gorgonia.EvalMode())
	defer last.Close()
	run(t, last)
	compare(t, "evaluation", *got.y, *want.y, tolerance)
}

// TestAveragesDoNotDependOnWhoSetsTheMode: a batch norm that the user switches off, gives other
// averages, or lets another machine evaluate between runs has the averages of one that just trains,
// bit by bit; one that the user switches on, and so resets, begins anew.
func TestAveragesDoNotDependOnWhoSetsTheMode(t *testing.T) {
	want, got := newTrained(tensor.Float32), newTrained(tensor.Float32)
	plain, train := machine(t, want.x.Graph()), machineOn(t, nil, got.x.Graph())
	evaluate := machine(t, got.x.Graph(), vm.Eval())
	bits := func(n normed) string {
		mean, variance := n.op.Stats()
		return fmt.Sprintf("%x %x", mean.Data(), variance.Data())
	}
	for step := range 12 {
		want.let(t, step)
		got.let(t, step)
		var err error
		switch step % 6 {
		case 1:
			err = got.op.SetTraining(false)
		case 2:
			run(t, evaluate)
		case 3: // as a checkpoint does
			mean, variance := got.op.Stats()
			mean, variance = mean.Clone().(tensor.Tensor), variance.Clone().(tensor.Tensor)
			err = errors.Join(got.op.Reset(), got.op.SetStats(mean, variance))
		case 4:
			err = errors.Join(got.op.SetTraining(true), want.op.Reset())
		}
		require.NoError(t, err)
		run(t, plain)
		run(t, train)
		if bits(got) != bits(want) || !read.Trains(got.op) {
			t.Fatalf("step %d: %s, want %s; trains: %v", step, bits(got), bits(want),
				read.Trains(got.op))
		}
	}
}

// TestBatchNormEvaluates: in evaluation, value and gradient follow from the present averages.
func TestBatchNormEvaluates(t *testing.T) {
	m := &model{g: gorgonia.NewGraph()}
	x := gorgonia.NewMatrix(m.g, tensor.Float64, gorgonia.WithName("x"),
		gorgonia.WithValue(tensor.New(tensor.WithShape(2, 2),
			tensor.WithBacking([]float64{1, 2, 3, 4}))))
	ones := func(name string) node {
		return gorgonia.NewMatrix(m.g, tensor.Float64, gorgonia.WithShape(1, 2),
			gorgonia.WithName(name), gorgonia.WithInit(gorgonia.Ones()))
	}
	y, _, _, op, err := gorgonia.BatchNorm(x, ones("gain"), ones("bias"), 0.1, 1)
	m.params = nodes{x}
	m.grad(t, sum(must(y, err)))
	e := machine(t, m.g, vm.Eval(), vm.Keep(y))
	for _, test := range []struct{ mean, variance, y, dx []float64 }{
		{[]float64{1, 0}, []float64{3, 0}, []float64{1, 3, 2, 5}, []float64{0.5, 1, 0.5, 1}},
		{[]float64{0, 2}, []float64{0, 15}, []float64{2, 1, 4, 1.5}, []float64{1, 0.25, 1, 0.25}},
	} {
		require.NoError(t, op.SetStats(tensor.New(tensor.WithBacking(test.mean)),
			tensor.New(tensor.WithBacking(test.variance))))
		run(t, e)
		compare(t, "value", y.Value(), tensor.New(tensor.WithBacking(test.y)), 1e-12)
		compare(t, "gradient", gradient(t, x), tensor.New(tensor.WithBacking(test.dx)), 1e-12)
	}
}

// TestABatchNormThatNothingHasTrainedEvaluatesWithTheVariance1, as in PyTorch, whatever machine is
// made first; averages that a program has set stay.
func TestABatchNormThatNothingHasTrainedEvaluatesWithTheVariance1(t *testing.T) {
	for where, device := range devices {
		for dt := range tolerances {
			n := newNormed(dt)
			n.let(t, 0)
			run(t, machineOn(t, device(t), n.x.Graph(), vm.Eval()))
			mean, variance := n.op.Stats()
			zeros, ones := tensor.New(tensor.Of(dt), tensor.WithShape(mean.Shape()...)),
				tensor.Ones(dt, mean.Shape()...)
			compare(t, where+": mean", mean, zeros, 0)
			compare(t, where+": variance", variance, ones, 0)
			require.NoError(t, n.op.SetStats(ones, zeros))
			run(t, machineOn(t, device(t), n.x.Graph(), vm.Eval()))
			compare(t, where+": variance of a program", variance, zeros, 0)
		}
	}
}

// TestABatchNormOfOneValuePerChannelIsRefusedInTraining, as in PyTorch; evaluation takes it.
func TestABatchNormOfOneValuePerChannelIsRefusedInTraining(t *testing.T) {
	for _, shape := range [][]int{{1, 2}, {1, 3, 1, 1}} {
		for _, loss := range []bool{false, true} {
			m := &model{g: gorgonia.NewGraph()}
			one := slices.Repeat([]int{1}, len(shape))
			one[1] = shape[1]
			x := m.variable("x", tensor.Float64, shape...)
			m.params = nodes{x}
			y, _, _, op, err := gorgonia.BatchNorm(x, m.variable("gain", tensor.Float64, one...),
				m.variable("bias", tensor.Float64, one...), 0.1, 1e-5)
			if must(y, err); loss {
				m.grad(t, sum(square(y)))
			}
			_, err = vm.New(m.g, nil)
			require.Fails(t, shape, err, backend.ErrArgument, "one value per channel")
			run(t, machine(t, m.g, vm.Eval()))
			_, variance := op.Stats()
			compare(t, "variance", variance, tensor.Ones(tensor.Float64, shape[1]), 0)
		}
	}
}
