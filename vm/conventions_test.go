package vm_test

import (
	"fmt"
	"math"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/conventions"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// TestNumbersThatAreNotFiniteAreAsInPyTorch computes operations on NaN, infinities, the largest and
// the least numbers, and their gradients. Three runs give bitwise identical results.
func TestNumbersThatAreNotFiniteAreAsInPyTorch(t *testing.T) { asInPyTorch(t, devices) }

func asInPyTorch(t *testing.T, devices map[string]func(testing.TB) backend.Device) {
	cases, version, err := conventions.Cases()
	require.That(t, err == nil && version != "" && len(cases) >= 150, "%d cases of PyTorch %q: %v",
		len(cases), version, err)
	for where, device := range devices {
		d := device(t)
		for i, c := range cases {
			t.Run(fmt.Sprint(where, " ", c.Op, " ", c.DType, " ", i), func(t *testing.T) {
				conventional(t, conventions.VM, c, func(g *gorgonia.ExprGraph) (gorgonia.VM,
					error) {
					return vm.New(g, d)
				})
			})
		}
	}
}

// TestOursOnTheTapeMachineAreAsInPyTorch is the same of the tape machine.
func TestOursOnTheTapeMachineAreAsInPyTorch(t *testing.T) {
	cases, _, err := conventions.Cases()
	require.NoError(t, err)
	for i, c := range cases {
		if c.Unsafe(conventions.Tape) {
			continue
		}
		t.Run(fmt.Sprint(c.Op, " ", c.DType, " ", i), func(t *testing.T) {
			conventional(t, conventions.Tape, c, func(g *gorgonia.ExprGraph) (gorgonia.VM, error) {
				return gorgonia.NewTapeMachine(g), nil
			})
		})
	}
}

// conventional runs a case three times.
func conventional(t *testing.T, e conventions.Runner, c conventions.Case,
	machine conventions.Maker) {
	t.Helper()
	all := require.Value(c.Compute(3, machine))(t)
	for _, r := range all[1:] {
		require.Check(t, e != conventions.VM || sameResults(r, all[0]), "runs differ: %v and %v",
			all[0], r)
	}
	_, others := c.Explain(e, all[0])
	require.Check(t, len(others) <= 0, "operands %v: %+v", c.X, others)
}

// sameResults compares bits, but NaN is NaN.
func sameResults(a, b conventions.Results) bool {
	same := func(x, y conventions.Numbers) bool {
		for i := range x {
			if math.Float64bits(x[i]) != math.Float64bits(y[i]) &&
				!(math.IsNaN(x[i]) && math.IsNaN(y[i])) {
				return false
			}
		}
		return len(x) == len(y)
	}
	ok := same(a.Y, b.Y)
	for i := range a.Grads {
		ok = ok && same(a.Grads[i], b.Grads[i])
	}
	return ok
}

// TestEveryConventionIsSeen: docs/ops.md has no convention that no engine follows.
func TestEveryConventionIsSeen(t *testing.T) {
	lines := require.Value(conventions.Lines(map[conventions.Runner]conventions.Maker{
		conventions.VM: func(g *gorgonia.ExprGraph) (gorgonia.VM, error) {
			return vm.New(g, nil)
		},
		conventions.Tape: func(g *gorgonia.ExprGraph) (gorgonia.VM, error) {
			return gorgonia.NewTapeMachine(g), nil
		},
	}))(t)
	seen := map[string]bool{}
	for _, l := range lines {
		for _, says := range l.Says {
			for _, s := range says {
				seen[s] = true
			}
		}
	}
	for _, r := range conventions.Rules() {
		require.Check(t, seen[r.Says], "no result shows the convention %q", r.Says)
	}
}

// TestNaNWinsReductions: one NaN, wherever it lies, is the result of the sum, mean or maximum that
// it is part of, and of no other; beside -Inf, too.
func TestNaNWinsReductions(t *testing.T) { nanWins(t, devices) }

func nanWins(t *testing.T, devices map[string]func(testing.TB) backend.Device) {
	for where, device := range devices {
		d := device(t)
		for name, reduce := range map[string]reduction{"sum": gorgonia.Sum, "mean": gorgonia.Mean,
			"max": gorgonia.Max} {
			for _, shape := range [][]int{{3, 5}, {1, 700}, {700, 1}, {130, 70}, {40, 1100}} {
				for _, axes := range [][]int{{0}, {1}, {0, 1}} {
					for dt := range tolerances {
						t.Run(fmt.Sprint(where, " ", name, " ", shape, axes, dt),
							func(t *testing.T) {
								oneNaN(t, d, reduce, dt, shape, axes)
							})
					}
				}
			}
		}
	}
}

type reduction = func(x node, along ...int) (node, error)

func oneNaN(t *testing.T, d backend.Device, reduce reduction, dt tensor.Dtype, shape, axes []int) {
	m := &model{g: gorgonia.NewGraph()}
	x := m.variable("x", dt, shape...)
	var y gorgonia.Value
	gorgonia.Read(must(reduce(x, axes...)), &y)
	v := machineOn(t, d, m.g)
	n := shape[0] * shape[1]
	for _, at := range []int{0, n / 2, n - 1} {
		value := tensor.New(tensor.Of(dt), tensor.WithShape(shape...))
		for i := range n {
			if set(value, i, float64(i%7)); (i+at)%3 == 0 {
				set(value, i, math.Inf(-1))
			}
		}
		set(value, at, math.NaN())
		require.NoError(t, gorgonia.Let(x, value))
		run(t, v)
		want := 0 // the result with the NaN
		switch {
		case len(axes) == 1 && axes[0] == 0:
			want = at % shape[1]
		case len(axes) == 1:
			want = at / shape[1]
		}
		for i, e := range floats(t, y) {
			require.That(t, math.IsNaN(e) == (i == want),
				"NaN at %d: result %d is %v, NaN should be in %d", at, i, e, want)
		}
	}
}

// TestNormsThatOverflowAreNaN: norms over batches and groups hide no overflow of their variance,
// either.
func TestNormsThatOverflowAreNaN(t *testing.T) {
	for where, device := range devices {
		d := device(t)
		for name, build := range map[string]func(x, gain, bias node) (node, error){
			"batch": func(x, gain, bias node) (node, error) {
				y, _, _, _, err := gorgonia.BatchNorm(x, gain, bias, 0.1, 1e-5)
				return y, err
			},
			"group": func(x, gain, bias node) (node, error) {
				return gorgonia.GroupNorm(x, gain, bias, 2, 2, 1e-5)
			},
		} {
			m := &model{g: gorgonia.NewGraph()}
			x := m.variable("x", tensor.Float32, 2, 2, 2, 2)
			gain := m.variable("gain", tensor.Float32, 1, 2, 1, 1)
			bias := m.variable("bias", tensor.Float32, 1, 2, 1, 1)
			for i := range x.Value().Data().([]float32) {
				x.Value().Data().([]float32)[i] = float32(i) * 1e30
			}
			m.params = nodes{x}
			m.grad(t, sum(must(build(x, gain, bias))))
			v := machineOn(t, d, m.g)
			for range 3 {
				if run(t, v); !math.IsNaN(float64(m.loss.Data().(float32))) {
					t.Errorf("%s: the loss of a %s norm of 1e30 is %v, want NaN", where, name,
						m.loss)
				}
			}
			require.Report(t, v.Close())
		}
	}
}
