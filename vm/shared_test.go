package vm_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// wide is the loss sum(x w) of a batch with parameters that are most of its memory, beside their
// gradients if it is for training.
func wide(t testing.TB, rows int, w *tensor.Dense, training bool) *model {
	m := &model{g: gorgonia.NewGraph()}
	x := m.variable("x", tensor.Float64, rows, w.Shape()[0])
	p := gorgonia.NewMatrix(m.g, tensor.Float64, gorgonia.WithShape(w.Shape()...),
		gorgonia.WithName("w"), gorgonia.WithValue(w))
	m.params = nodes{p}
	loss := sum(mul(x, p))
	if training {
		m.grad(t, loss)
	} else {
		gorgonia.Read(loss, &m.loss)
	}
	return m
}

// expectLoss compares the loss of a machine's last run with that of the host's tensors.
func (m *model) expectLoss(t *testing.T, when string, onHost *model) {
	t.Helper()
	host := machine(t, onHost.g)
	run(t, host)
	compare(t, when, m.loss, onHost.loss, 1e-12)
	require.NoError(t, host.Close())
}

// TestTrainingAndEvaluationShareParameters: whichever is made first, the device holds parameters
// once, and evaluation needs no Pull to see what training has changed. After training the host's
// tensors count again.
func TestTrainingAndEvaluationShareParameters(t *testing.T) {
	d := fake(t).(*fakedevice.Device)
	trainingAndEvaluation(t, d, func(parameters int) {
		// Beside the parameters there is their gradient, and little else.
		if _, held := d.Live(); held > 3*parameters {
			t.Errorf("the device holds %d bytes for parameters of %d", held, parameters)
		}
	})
}

// trainingAndEvaluation calls holds, with the bytes of the parameters, while there are both
// machines.
func trainingAndEvaluation(t *testing.T, d backend.Device, holds func(parameters int)) {
	for _, evaluatesFirst := range []bool{false, true} {
		t.Run(fmt.Sprint("evaluates first: ", evaluatesFirst), func(t *testing.T) {
			w, copied := ramp(tensor.Float64, 64, 100), ramp(tensor.Float64, 64, 100)
			data := w.Data().([]float64)
			train, eval := wide(t, 3, w, true), wide(t, 2, w, false)
			// on the host, with other tensors
			twin, host := wide(t, 3, copied, true), wide(t, 2, copied, false)
			var trainer *vm.Machine
			if !evaluatesFirst {
				trainer = solving(t, train, d, &solver.SGD{Rate: 0.5})
			}
			evaluator := machineOn(t, d, eval.g, vm.Eval())
			run(t, evaluator)
			eval.expectLoss(t, "before training", host)
			if evaluatesFirst {
				trainer = solving(t, train, d, &solver.SGD{Rate: 0.5})
			}
			reference := solving(t, twin, nil, &solver.SGD{Rate: 0.5})
			defer reference.Close()
			before := slices.Clone(data)
			for step := range 4 { // graphs are recorded in the second run
				run(t, trainer)
				run(t, reference)
				run(t, evaluator)
				eval.expectLoss(t, fmt.Sprint("after step ", step), host)
			}
			if last := len(data) - 1; !slices.Equal(data[1:last], before[1:last]) ||
				data[0] == data[0] || data[last] == data[last] {
				t.Error("the host's tensor has changed without Pull, but for its ends")
			}
			holds(8 * len(data))
			pull(t, evaluator, eval.params) // which anybody can who has them
			compare(t, "after Pull", w, copied, 0)
			data[0], copied.Data().([]float64)[0] = 7, 7
			run(t, evaluator)
			eval.expectLoss(t, "after the host has written", host)
			run(t, trainer)
			run(t, reference)
			require.NoError(t, trainer.Close())
			compare(t, "after Close", w, copied, 0)
			data[1], copied.Data().([]float64)[1] = 9, 9
			run(t, evaluator)
			eval.expectLoss(t, "after training", host)
			require.NoError(t, evaluator.Close())
		})
	}
}

// TestReadersOnTheHostAreRefusedBeforePull: what a machine has changed on a device is older on the
// host, which nobody there reads in silence. After Pull or Close they read it.
func TestReadersOnTheHostAreRefusedBeforePull(t *testing.T) {
	d, other, dir := fake(t), fake(t), t.TempDir()
	w := ramp(tensor.Float64, 4, 3)
	train, eval, plain := wide(t, 3, w, true), wide(t, 2, w, false), wide(t, 2, w, true)
	trainer, sgd := solving(t, train, d, &solver.SGD{Rate: 0.5}), &solver.SGD{Rate: 1}
	dp, err := autograd.New(autograd.Solo(), train.params) // which knows nothing of the machine
	file := filepath.Join(dir, "w.safetensors")
	require.NoError(t, errors.Join(err, autograd.SaveWeights(file, train.params)))
	on := func(d backend.Device, g *gorgonia.ExprGraph) error {
		m, err := vm.New(g, d)
		if err == nil {
			err = errors.Join(m.RunAll(), m.Close())
		}
		return err
	}
	saved := 0
	readers := map[string]func() error{
		"SaveWeights": func() error { return autograd.SaveWeights(file, train.params) },
		"LoadWeights": func() error { return autograd.LoadWeights(file, train.params) },
		"autograd.New": func() error {
			dp, err := autograd.New(autograd.Solo(), plain.params)
			if err == nil {
				err = dp.Close()
			}
			return err
		},
		"Save": func() error {
			saved++
			return dp.Save(filepath.Join(dir, fmt.Sprint(saved)), sgd, nil)
		},
		"Check":                     func() error { return dp.Check() },
		"Hash":                      func() error { _, err := dp.Hash(); return err },
		"a machine on the host":     func() error { return on(nil, eval.g) },
		"a machine on other device": func() error { return on(other, eval.g) },
	}
	for _, step := range []string{"first", "after Pull"} {
		run(t, trainer)
		for name, read := range readers {
			require.Fails(t, fmt.Sprintf("%s step: %s", step, name), read(), "call Pull or Close")
		}
		require.Report(t, on(d, eval.g))
		if step == "first" {
			pull(t, trainer, nil)
		} else if err := trainer.Close(); err != nil {
			t.Fatal(err)
		}
		for name, read := range readers {
			if err := read(); err != nil {
				t.Errorf("%s step, and Pull or Close: %s: %v", step, name, err)
			}
		}
	}
	require.NoError(t, dp.Close())
}

// TestACopyOfALearnableIsRefusedBeforePull: what the host copies of it is old, also for a machine
// on the same device that has run with the tensor before.
func TestACopyOfALearnableIsRefusedBeforePull(t *testing.T) {
	d := fake(t)
	w, teacher := ramp(tensor.Float64, 4, 3), ramp(tensor.Float64, 4, 3)
	trainer := solving(t, wide(t, 3, w, true), d, &solver.SGD{Rate: 0.5})
	m := machineOn(t, d, wide(t, 2, teacher, false).g)
	run(t, m)
	run(t, trainer)
	update := func() { copy(teacher.Data().([]float64), w.Data().([]float64)) }
	if update(); !strings.Contains(fmt.Sprint(m.RunAll()), "call Pull or Close") {
		t.Errorf("a machine has run with %v", teacher)
	}
	pull(t, trainer, nil)
	update()
	run(t, m)
	require.NoError(t, errors.Join(m.Close(), trainer.Close()))
}

// TestShapesOfABatchShareParameters: machines that only read parameters have one copy, too, and see
// what the host writes; a last one has it to itself.
func TestShapesOfABatchShareParameters(t *testing.T) {
	d := fake(t)
	w := ramp(tensor.Float64, 64, 100)
	first, second, host := wide(t, 3, w, false), wide(t, 2, w, false), wide(t, 2, w, false)
	a := machineOn(t, d, first.g)
	b := machineOn(t, d, second.g)
	for i := range 4 {
		w.Data().([]float64)[i] += 3
		run(t, a)
		run(t, b)
		second.expectLoss(t, fmt.Sprint("run ", i), host)
	}
	if _, held := d.(*fakedevice.Device).Live(); held > 2*8*w.Len() {
		t.Errorf("the device holds %d bytes for parameters of %d", held, 8*w.Len())
	}
	require.NoError(t, a.Close())
	w.Data().([]float64)[5] = 11
	run(t, b)
	second.expectLoss(t, "alone", host)
	require.NoError(t, b.Close())
}

// TestShapesOfABatchShareASolver: machines for two sizes of a batch train the same parameters by
// one solver, with the bits of its Step after runs without it, also on two devices.
func TestShapesOfABatchShareASolver(t *testing.T) {
	one := fake(t)
	for where, devices := range map[string][2]backend.Device{"host": {}, "a device": {one, one},
		"a device and the host": {one, nil}} {
		t.Run(where, func(t *testing.T) {
			w, copied := ramp(tensor.Float64, 12, 5), ramp(tensor.Float64, 12, 5)
			inside, after := &solver.Adam{Rate: 0.1}, &solver.Adam{Rate: 0.1}
			var machines, apart [2]*vm.Machine
			var shapes, twins [2]*model
			for i, rows := range []int{3, 2} {
				shapes[i], twins[i] = wide(t, rows, w, true), wide(t, rows, copied, true)
				machines[i] = solving(t, shapes[i], devices[i], inside)
				apart[i] = machine(t, twins[i].g)
			}
			for _, i := range []int{0, 0, 0, 1, 0, 0, 1, 1} {
				run(t, machines[i])
				if devices[0] != devices[1] {
					pull(t, machines[i], shapes[i].params)
				}
				run(t, apart[i])
				require.NoError(t, after.Step(gorgonia.NodesToValueGrads(twins[i].params)))
			}
			pull(t, machines[0], shapes[0].params)
			compare(t, "parameters", w, copied, 1e-12)
			state := require.Value(inside.State())(t)
			for _, m := range machines {
				require.NoError(t, m.Close())
			}
			sameSteps := require.Value(inside.State())(t)
			for name, x := range state {
				require.Check(t, slices.Equal(x.Bytes(), sameSteps[name].Bytes()),
					"Close changes %s", name)
			}
			compare(t, "parameters after Close", w, copied, 1e-12)
		})
	}
}

// TestBatchesAreNoParameters: machines for one graph that get a new batch for each run, and use it
// one after the other, find a place for it once.
func TestBatchesAreNoParameters(t *testing.T) {
	d := fake(t).(*fakedevice.Device)
	m := wide(t, 3, ramp(tensor.Float64, 12, 5), true)
	trainer := solving(t, m, d, &solver.SGD{Rate: 0.1})
	defer trainer.Close()
	evaluator := machineOn(t, d, m.g, vm.Eval())
	before := 0
	for step := range 10 {
		require.NoError(t, gorgonia.Let(m.g.ByName("x")[0], ramp(tensor.Float64, 3, 12)))
		run(t, trainer)
		run(t, evaluator)
		switch now := d.Allocs(); {
		case step == 2:
			before = now
		case step > 2 && now != before:
			t.Fatalf("step %d allocates", step)
		}
	}
}

// TestMemoryIsFlat: training and evaluation in turn, with other batches, take no more memory after
// 1,000 steps.
func TestMemoryIsFlat(t *testing.T) {
	d := fake(t).(*fakedevice.Device)
	memoryIsFlat(t, d, func() string {
		n, nbytes := d.Live()
		return fmt.Sprintf("%d allocations of %d bytes, %d taken from the host", n, nbytes,
			d.Allocs())
	})
}

func memoryIsFlat(t *testing.T, d backend.Device, held func() string) {
	w := ramp(tensor.Float64, 12, 5)
	train, eval := wide(t, 3, w, true), wide(t, 2, w, false)
	trainer := solving(t, train, d, &solver.Adam{Rate: 1e-3})
	defer trainer.Close()
	evaluator := machineOn(t, d, eval.g, vm.Eval())
	before := ""
	for step := range 1000 {
		require.NoError(t, gorgonia.Let(train.g.ByName("x")[0], ramp(tensor.Float64, 3, 12)))
		run(t, trainer)
		if step%10 == 0 {
			run(t, evaluator)
		}
		switch now := held(); {
		case step == 20:
			before = now
		case step > 20 && now != before:
			t.Fatalf("after step %d: %s; after step 20: %s", step, now, before)
		}
	}
}

// TestOutOfMemory: New says for what there is no room, and what takes most.
func TestOutOfMemory(t *testing.T) {
	full := errors.New("full")
	const most = 51200 // bytes of the parameters
	for _, test := range []struct {
		room int
		want []string
	}{
		{0, []string{"the values of a run, which needs most in step", "w (51200 bytes)"}},
		{most + 10000, []string{"51200 bytes for w:", "state 0 of w (51200 bytes)", "state 1 of w",
			"close other machines"}},
		{4*most + 4096, []string{"bytes for inputs and constants"}},
	} {
		d := fake(t).(*fakedevice.Device)
		left := test.room
		d.Host.Fail = func(_ int, doing string, nbytes int) error {
			if doing != "alloc" {
				return nil
			}
			if left -= nbytes; left < 0 {
				return full
			}
			return nil
		}
		m := wide(t, 3, ramp(tensor.Float64, 64, 100), true)
		_, err := vm.New(m.g, d, vm.WithSolver(&solver.Adam{Rate: 1}, m.params...))
		require.That(t, errors.Is(err, full), "room for %d bytes: %v", test.room, err)
		for _, want := range test.want {
			require.Fails(t, fmt.Sprintf("room for %d bytes", test.room), err, want)
		}
	}
}
