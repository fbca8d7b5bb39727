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
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// frozenModel is a graph of x w and of the frozen matrix 2w, of n rows and columns.
type frozenModel struct {
	model
	w, y, twice node
}

func newFrozenModel(w *tensor.Dense) *frozenModel {
	m := &frozenModel{model: model{g: gorgonia.NewGraph()}}
	n := w.Shape()[0]
	m.w = gorgonia.NewMatrix(m.g, tensor.Float32, gorgonia.WithShape(n, n),
		gorgonia.WithName("w"), gorgonia.WithValue(w))
	m.twice = add(m.w, m.w)
	m.y = mul(m.variable("x", tensor.Float32, n, n), m.twice)
	return m
}

// filledWith returns a matrix of one number.
func filledWith(n int, x float32) *tensor.Dense {
	all := make([]float32, n*n)
	for i := range all {
		all[i] = x
	}
	return tensor.New(tensor.WithShape(n, n), tensor.WithBacking(all))
}

// on returns a machine of the model, on whose plan nothing but the product of x is left.
func (m *frozenModel) on(t *testing.T, d backend.Device, options ...vm.Option) *vm.Machine {
	t.Helper()
	machine := machineOn(t, d, m.g, append(options, vm.Keep(m.y), vm.WithFrozen(m.w),
		vm.WithPrecision(vm.BF16))...)
	text := fmt.Sprint(machine.Plan())
	require.Check(t, strings.Contains(text, "once") && !strings.Contains(text, "of w f32") &&
		!strings.Contains(text, "add"), "runs compute what none changes:\n%s", text)
	return machine
}

// A value of frozen variables is computed when they are set, and again when they are set to other
// tensors. All machines that have them share it, and a device has nothing else of them.
func TestWhatNoRunChangesIsComputedWhenItIsSet(t *testing.T) {
	const n = 64
	for name, d := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		first, second := filledWith(n, 3), filledWith(n, 5)
		m, other := newFrozenModel(first), newFrozenModel(first)
		a, b := m.on(t, d), other.on(t, d, vm.Eval())
		if d, ok := d.(*fakedevice.Device); ok {
			_, held := d.Live()
			values := a.Summary().Memory.Values + b.Summary().Memory.Values
			left := held - int(values) - 2*4*n*n - 2*n*n // x of each, and the value in BF16
			require.Check(t, left < 4*n*n, "%d bytes besides", left)
		}
		x := floats(t, m.g.Inputs()[1].Value())
		row := 0.0
		for _, f := range x[:n] {
			row += f
		}
		want := func(what string, machine *vm.Machine, y node, w float64) {
			t.Helper()
			run(t, machine)
			got := floats(t, y.Value())[0]
			require.Check(t, got > 2*w*row-1 && got < 2*w*row+1, "%s, %s: %v, want %v", name,
				what, got, 2*w*row)
		}
		want("the first tensor", a, m.y, 3)
		want("another machine", b, other.y, 3)
		require.NoError(t, gorgonia.Let(m.w, second))
		want("the second tensor", a, m.y, 5)
		want("the other machine still has the first", b, other.y, 3)
		require.NoError(t, gorgonia.Let(other.w, second))
		want("now it has the second", b, other.y, 5)
		require.NoError(t, a.Pull())
	}
}

// A result that no run changes is there after each run.
func TestAResultThatNoRunChangesIsThere(t *testing.T) {
	for name, d := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		m := newFrozenModel(filledWith(2, 3))
		machine := m.on(t, d, vm.Keep(m.twice))
		for _, w := range []float32{3, 7} {
			require.NoError(t, gorgonia.Let(m.w, filledWith(2, w)))
			run(t, machine)
			twice := float64(2 * w)
			require.Slices(t, name, floats(t, m.twice.Value()),
				[]float64{twice, twice, twice, twice})
		}
	}
}

// writers write the variable w of a rank, on all ranks.
var writers = map[string]func(r ranked, w *tensor.Dense, dir string) error{
	"a broadcast of what is frozen": func(r ranked, w *tensor.Dense, dir string) error {
		return r.trains(w, "v", nil)
	},
	"a broadcast of a learnable": func(r ranked, w *tensor.Dense, dir string) error {
		return r.trains(w, "w", nil)
	},
	"steps": func(r ranked, w *tensor.Dense, dir string) error {
		return r.trains(w, "w", func(m *vm.Machine) error {
			return errors.Join(m.RunAll(), m.RunAll(), m.Pull())
		})
	},
	"steps of shards": func(r ranked, w *tensor.Dense, dir string) error {
		return r.trains(w, "w", func(m *vm.Machine) error {
			return errors.Join(m.RunAll(), m.Pull())
		}, vm.WithShards(vm.SolverState|vm.Gradients|vm.Parameters))
	},
	"Load": func(r ranked, w *tensor.Dense, dir string) error {
		return r.trains(w, "v", func(m *vm.Machine) error {
			all := w.Data().([]float32)
			before := slices.Clone(all)
			clear(all)
			err := m.DataParallel().Save(dir, m.Solver(), nil)
			copy(all, before)
			return errors.Join(err, m.DataParallel().Load(dir, m.Solver(), nil))
		})
	},
	"LoadWeights": func(r ranked, w *tensor.Dense, dir string) error {
		file := filepath.Join(dir, fmt.Sprint(r.Comm.Rank(), ".safetensors"))
		other := newFrozenModel(filledWith(2, 7)).w
		err := autograd.SaveWeights(file, nodes{other})
		return errors.Join(err, autograd.LoadWeights(file, nodes{newFrozenModel(w).w}))
	},
	"Step of a solver of Gorgonia": func(r ranked, w *tensor.Dense, dir string) error {
		m := newFrozenModel(w)
		sum := gorgonia.Must(gorgonia.Sum(m.twice))
		grads, err := gorgonia.Grad(sum, m.w)
		if err != nil {
			return err
		}
		dp, err := autograd.New(r.Comm, nodes{m.w})
		if err != nil {
			return err
		}
		dp.UseGradients(grads)
		tape := gorgonia.NewTapeMachine(m.g)
		return errors.Join(tape.RunAll(), dp.Step(gorgonia.NewVanillaSolver()), tape.Close(),
			dp.Close())
	},
}

// trains makes a machine that trains v or w, where w is frozen for v, and calls f with it.
func (r ranked) trains(w *tensor.Dense, of string, f func(m *vm.Machine) error,
	options ...vm.Option) error {
	r.lock.Lock()
	g := newFrozenModel(w)
	v := g.variable("v", tensor.Float32, 2, 2)
	learnable, frozen := map[string]node{"v": v, "w": g.w}[of], nodes(nil)
	if of == "v" {
		frozen = nodes{g.w}
	}
	loss := gorgonia.Must(gorgonia.Sum(add(g.twice, v)))
	_, err := gorgonia.Grad(loss, learnable)
	r.lock.Unlock()
	m, err2 := vm.New(g.g, r.device, append(options, vm.WithSolver(&solver.SGD{Rate: 0.5},
		learnable), vm.WithDataParallel(r.Comm, autograd.WithFrozen(frozen...)))...)
	if err = errors.Join(err, err2); err != nil {
		return err
	}
	if f != nil {
		err = f(m)
	}
	return errors.Join(err, m.Close())
}

// TestWhoeverWritesAFrozenVariableMakesWhatIsKeptOfItStale: what is computed of it once and copies
// on devices, of every machine of the process. A machine that trains, as for a Generator that has
// the Learnables of a training; what rank 0 gives the others; what is loaded.
func TestWhoeverWritesAFrozenVariableMakesWhatIsKeptOfItStale(t *testing.T) {
	for what, write := range writers {
		for _, k := range []testenv.Kind{testenv.Hosts, testenv.Devices} {
			dir := t.TempDir()
			onRanks(t, k, 2, func(r ranked) error {
				w := filledWith(2, float32(3+r.Comm.Rank()))
				var checks []func()
				for i, d := range []backend.Device{nil, fake(t), r.device} {
					r.lock.Lock()
					m := newFrozenModel(w)
					same := add(m.w, m.g.ByName("x")[0]) // which runs compute, from a copy of w
					r.lock.Unlock()
					m.g.ByName("x")[0].Value().(*tensor.Dense).Zero()
					reads, err := vm.New(m.g, d, vm.Keep(m.y, m.twice, same), vm.WithFrozen(m.w),
						vm.WithPrecision(vm.BF16))
					testranks.NoError(err)
					checks = append(checks, func() {
						testranks.NoError(reads.RunAll())
						now := float64(w.Data().([]float32)[0])
						name := fmt.Sprintf("%s, ranks on %v, device %d, w %v", what, k, i, now)
						require.Slices(t, name, []float64{floats(t, m.twice.Value())[0],
							floats(t, same.Value())[0]}, []float64{2 * now, now})
					})
					defer func() { testranks.NoError(reads.Close()) }()
				}
				check := func() {
					for _, c := range checks {
						c()
					}
				}
				check()
				testranks.NoError(write(r, w, dir))
				check()
				return nil
			})
		}
	}
}

// What cannot be computed is an error of each run until it can: nobody has the memory that was for
// it, which is freed once.
func TestWhatCannotBeComputedOnceIsAnErrorOfEachRun(t *testing.T) {
	for name, d := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		m := &model{g: gorgonia.NewGraph()}
		ids := gorgonia.NewVector(m.g, tensor.Int, gorgonia.WithShape(2), gorgonia.WithName("ids"),
			gorgonia.WithValue(tensor.New(tensor.WithBacking([]int{0, 9}))))
		table := m.variable("table", tensor.Float32, 2, 2)
		y := add(m.variable("x", tensor.Float32, 2, 2),
			require.Value(nn.ByIndices(0, table, ids))(t))
		machine := machineOn(t, d, m.g, vm.Keep(y), vm.WithFrozen(table, ids))
		for range 2 {
			err := machine.RunAll()
			require.Fails(t, name, err, "index 1 is 9, out of range")
			require.Check(t, !strings.Contains(err.Error(), "freed"), "%s: %v", name, err)
		}
		require.NoError(t, gorgonia.Let(ids, tensor.New(tensor.WithBacking([]int{0, 1}))))
		run(t, machine)
	}
}
