package exec_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// states makes some inputs of a random program become values of it, of small integers.
func (r *random) states() (updates []lower.Update) {
	for i, v := range r.Values {
		in, ok := v.Op.(ir.Input)
		x := ir.ID(i)
		if !ok || x == r.list || r.next(3) == 0 {
			continue
		}
		small := func() ir.ID {
			y, _ := r.like(v.Shape)
			r.add(ir.Unary{Op: fuse.Sign}, v.Shape, 1, y)
			return ir.ID(len(r.Values) - 1)
		}
		next, axis := x, slices.Index(v.Shape.Slice(), 6)
		switch kind := r.next(4); {
		case axis >= 0 && kind < 3:
			r.add(ir.Put{Axis: axis}, v.Shape, 5, x, r.list, small())
			next = ir.ID(len(r.Values) - 1)
			if kind == 0 { // is read, too
				r.add(ir.Unary{Op: fuse.Neg}, v.Shape, 5, next)
				r.Results = append(r.Results, next, ir.ID(len(r.Values)-1))
			}
		case kind == 1:
			next, _ = r.like(v.Shape)
			if r.bounds[next] > 5 {
				next = small()
			}
		case kind == 2:
			next = small()
		}
		updates = append(updates, lower.Update{Input: in.Index, Gradient: next})
	}
	return updates
}

// TestStatesOfRandomProgramsAreValues: variables that become values of the program have those after
// each run, and every result is of what they were before, on the host and on a device.
func TestStatesOfRandomProgramsAreValues(t *testing.T) {
	for seed := range uint64(120) {
		r := &random{next: rand.New(rand.NewPCG(seed, 2)).IntN}
		r.make(int(seed))
		updates := r.states()
		require.NoError(t, r.Check())
		for _, planner := range []planner{plain, within(plan.Standard()), within(small)} {
			r.carry(t, exec.Host{}, planner, updates)
			device, closed := fake(t)
			r.carry(t, device, planner, updates)
			closed()
		}
	}
}

// carry runs a program with updates several times.
func (r *random) carry(t *testing.T, device exec.Device, planner planner, updates []lower.Update) {
	t.Helper()
	planned := require.Value(planner(&r.Program, updates...))(t)
	require.That(t, planned.Doubt == nil, "%v in\n%v", planned.Doubt, planned)
	e := require.Value(exec.New(planned, device, nil, nil))(t)
	inputs, memory := slices.Clone(r.inputs), make([]backend.Buffer, len(planned.Buffers))
	all := make([]int, len(memory))
	for i, b := range planned.Buffers {
		if all[i] = i; b.Kind == plan.Input {
			memory[i] = buffer(b.DType, inputs[b.Index])
		}
	}
	for range 4 {
		for i, b := range planned.Buffers {
			if b.Kind == plan.Input {
				e.Bind(i, memory[i])
			}
		}
		require.NoError(t, e.Run(0))
		require.NoError(t, e.Fetch())
		values := reference(t, &r.Program, inputs)
		numbersOf := func(id ir.ID) (x []float64) {
			for _, n := range values[id].Data {
				x = append(x, n.Value)
			}
			return x
		}
		for i, id := range r.Results {
			v := r.Values[id]
			dst := buffer(v.DType, make([]float64, v.Shape.Size()))
			require.NoError(t, e.Result(i, dst))
			if got, want := numbers(dst), numbersOf(id); !slices.Equal(got, want) {
				t.Fatalf("result %d is %v, want %v, in\n%v", i, got, want, planned)
			}
		}
		for _, u := range updates {
			inputs[u.Input] = numbersOf(u.Gradient)
		}
	}
	require.NoError(t, e.Pull(all...))
	for i, b := range planned.Buffers {
		if b.Kind == plan.Input && !slices.Equal(numbers(memory[i]), inputs[b.Index]) {
			t.Fatalf("input %d is %v, want %v, in\n%v", b.Index, numbers(memory[i]),
				inputs[b.Index], planned)
		}
	}
	require.Report(t, e.Close())
}
