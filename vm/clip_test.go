package vm_test

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/vm"
)

// TestClipNorm: norms and steps equal solver.ClipNorm's, with a limit below the norm and
// above it.
func TestClipNorm(t *testing.T) { clipNorm(t, devices) }

func clipNorm(t *testing.T, devices map[string]func(testing.TB) backend.Device) {
	models := maps.Clone(models)
	// more than a loop has operands
	models["30 learnables"] = func(t testing.TB, dt tensor.Dtype) *model {
		m := &model{g: gorgonia.NewGraph()}
		sum := m.variable("x", dt, 3)
		for i := range 30 {
			m.params = append(m.params, m.variable(fmt.Sprint("w", i), dt, 3))
			sum = add(square(m.params[i]), sum)
		}
		m.grad(t, mean(square(sum)))
		return m
	}
	for where, device := range devices {
		for name, build := range models {
			for _, limit := range []float64{1e-3, 1e3} {
				t.Run(fmt.Sprint(where, " ", name, " ", limit), func(t *testing.T) {
					apart, within := build(t, tensor.Float64), build(t, tensor.Float64)
					d := device(t)
					a := machineOn(t, d, apart.g)
					b := solving(t, within, d, &solver.SGD{Rate: 1}, vm.ClipNorm(limit))
					defer b.Close()
					for range 4 {
						run(t, a)
						grads := gorgonia.NodesToValueGrads(apart.params)
						norm, err := solver.ClipNorm(grads, limit)
						if err == nil {
							err = (&solver.SGD{Rate: 1}).Step(grads)
						}
						require.NoError(t, err)
						run(t, b)
						if got := b.Norm(); math.Abs(got-norm) > 1e-9*norm {
							t.Errorf("the norm is %v, want %v", got, norm)
						}
					}
					pull(t, b, within.params)
					for i, p := range within.params {
						compare(t, p.Name(), p.Value(), apart.params[i].Value(), 1e-9)
					}
				})
			}
		}
	}
}

// TestClipNormOfNothing: with a norm that is not finite a run is an error, and no step.
func TestClipNormOfNothing(t *testing.T) {
	for where, device := range devices {
		t.Run(where, func(t *testing.T) {
			x := vector(1, 2)
			m := product(t, x, vector(3, 4))
			adam := &solver.Adam{Rate: 0.1}
			machine := solving(t, m, device(t), adam, vm.ClipNorm(1))
			defer machine.Close()
			run(t, machine)
			pull(t, machine, m.params)
			before := m.weights(t)
			x.Data().([]float32)[0] = float32(math.Inf(1))
			if err := machine.RunAll(); !errors.Is(err, backend.ErrArgument) ||
				!strings.Contains(err.Error(), "+Inf") || !math.IsInf(machine.Norm(), 1) {
				t.Errorf("%v, with the norm %v", err, machine.Norm())
			}
			pull(t, machine, m.params)
			state := require.Value(adam.State())(t)
			if steps := backend.View[int64](state["adam.steps"])[0]; steps != 1 ||
				!slices.Equal(m.weights(t)[1], before[1]) {
				t.Errorf("after %d steps %v, before %v", steps, m.weights(t), before)
			}
			x.Data().([]float32)[0] = float32(before[0][0])
			run(t, machine)
		})
	}
}

// TestClipNormRefused: settings that cannot be.
func TestClipNormRefused(t *testing.T) {
	m := mlp(t, tensor.Float32)
	for want, options := range map[string][]vm.Option{
		"must be positive": {vm.WithSolver(&solver.SGD{Rate: 1}, m.params...),
			vm.ClipNorm(math.NaN())},
		"WithSolver": {vm.ClipNorm(1)},
	} {
		require.Fails(t, "vm.New", require.Err(vm.New(m.g, nil, options...)), backend.ErrArgument,
			want)
	}
}

// TestClipNormOfAllRanks: the norm covers the gradients of all ranks, and all stay alike.
func TestClipNormOfAllRanks(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices}, func(t *testing.T,
		k testenv.Kind) {
		const P = 3
		norms := make([]float64, P)
		err := testranks.Join(together(t, k, P, func(r ranked) error {
			m := r.build(mlp)
			machine := testranks.Must(vm.New(m.g, r.device, vm.WithSolver(&solver.Adam{Rate: 0.1},
				m.params...), vm.WithDataParallel(r.Comm, autograd.WithBuckets(1, 1)),
				vm.ClipNorm(1e-3)))
			for range 4 {
				testranks.NoError(machine.RunAll())
			}
			norms[r.Comm.Rank()] = machine.Norm()
			return errors.Join(machine.Pull(m.params...), machine.DataParallel().Check(),
				machine.Close())
		}))
		require.Check(t, err == nil && norms[0] != 0 && norms[1] == norms[0] && norms[2] ==
			norms[0], "the norms are %v: %v", norms, err)
	})
}

// TestClipNormOfParts: ranks with parts of w, and all of v, clip by one norm, in which w counts
// whole and v once, as the first rank has it; where it is not finite, no rank makes a step.
func TestClipNormOfParts(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Devices},
		func(t *testing.T, k testenv.Kind) {
			const P = 3
			onRanks(t, k, P, func(r ranked) error {
				rank := r.Comm.Rank()
				data := testranks.Must(r.Comm.Split(rank, 0))
				r.lock.Lock()
				v := vector(1, 2)
				m := product(t, v, vector(3, 4+float32(rank)))
				r.lock.Unlock()
				machine, err := vm.New(m.g, r.device, vm.WithSolver(&solver.SGD{Rate: 1},
					m.params...), vm.ClipNorm(1),
					vm.WithDataParallel(data, autograd.WithParts(r.Comm, map[string]int{"w": 0})))
				testranks.NoError(err)
				testranks.NoError(errors.Join(machine.RunAll(), machine.Pull(m.params...)))
				norm := math.Sqrt(3*3 + 4*4 + P*(1+2*2))
				if machine.Norm() != norm || math.Abs(m.weights(t)[1][0]-(3-1/norm)) > 1e-6 {
					t.Errorf("rank %d: the norm is %v, want %v; w is %v", rank, machine.Norm(),
						norm, m.weights(t)[1])
				}
				before := m.weights(t)
				if rank == 1 {
					v.Data().([]float32)[0] = float32(math.Inf(1))
					before[0][0] = math.Inf(1)
				}
				err = machine.RunAll()
				if !errors.Is(err, backend.ErrArgument) ||
					!strings.Contains(err.Error(), "the step is left out") {
					return fmt.Errorf("with a gradient that is not finite: %w", err)
				}
				testranks.NoError(machine.Pull(m.params...))
				for i, w := range m.weights(t) {
					if !slices.Equal(w, before[i]) {
						t.Errorf("rank %d: %s is %v, before %v", rank, m.params[i].Name(), w,
							before[i])
					}
				}
				return errors.Join(machine.Close(), data.Close())
			})
		})
}
