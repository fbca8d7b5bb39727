package vm_test

import (
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/vm"
)

// TestALateRankOfRecordedStepsIsNamed: the host starts such a step as a whole, and sees neither
// calls nor waits. The device has their times.
func TestALateRankOfRecordedStepsIsNamed(t *testing.T) {
	lateRankIsNamed(t, testenv.Devices, 256)
}

// lateRankIsNamed trains two ranks, of which one multiplies matrices of n rows before all else.
func lateRankIsNamed(t *testing.T, k testenv.Kind, n int) {
	t.Helper()
	const late, warmUp, steps = 1, 3, 12
	onRanks(t, k, 2, func(r ranked) error {
		rec := observe.New(r.Comm.Rank(), 1000)
		watch := observe.NewWatch(r.World, rec, io.Discard)
		watch.Start(r.Comm.Device())
		defer watch.Close()
		comm, rows := backend.WithHooks(r.Comm, rec), 1
		if r.Comm.Rank() == late {
			rows = n
		}
		m := r.build(func(t testing.TB, dt tensor.Dtype) *model { return slowed(t, dt, rows) })
		machine := testranks.Must(vm.New(m.g, r.device, vm.WithSolver(&solver.SGD{Rate: 0.1},
			m.params...), vm.WithDataParallel(comm, autograd.WithBuckets(1, 1))))
		for step := range warmUp + steps {
			if step == warmUp {
				watch.Begin()
			}
			testranks.NoError(machine.RunAll())
			told, err := autograd.Gather(comm, watch.Sample()...)
			testranks.NoError(err)
			if step >= warmUp {
				watch.Step(observe.StepInfo{Number: step}, told)
			}
		}
		if v := watch.Verdicts(); len(v) == 0 || v[0].Rank != late ||
			!strings.Contains(v[0].String(), "its GPU computed for longer") {
			t.Errorf("the verdicts are %v", v)
		}
		// The first run is not recorded. The last bucket's gradients are there first.
		calls, want := 0, len(m.params)*(warmUp+steps-1)
		for _, e := range rec.Events() {
			if strings.HasSuffix(e.Comm, ", graph 1") && !e.End.Before(e.Start) {
				calls++
			}
		}
		first := slices.Collect(maps.Keys(rec.Totals()))
		first = slices.DeleteFunc(first, func(k observe.Kind) bool { return k.Bucket != 1 })
		if calls != want || r.Comm.Rank() != late && (len(first) != 1 ||
			rec.Totals()[first[0]].Exposed < steps*watch.Verdicts()[0].Late/2) {
			t.Errorf("%d calls of replays, want %d: %v", calls, want, rec.Totals())
		}
		testranks.NoError(machine.Close())
		return rec.Close()
	})
}

// slowed is an mlp whose input comes after matrix multiplications.
func slowed(t testing.TB, dt tensor.Dtype, rows int) *model {
	m := &model{g: gorgonia.NewGraph()}
	x, y := m.variable("x", dt, 16, 12), m.variable("y", dt, 16, 5)
	w0, w1 := m.variable("w0", dt, 12, 7), m.variable("w1", dt, 7, 5)
	m.params = nodes{w0, w1}
	zeros := gorgonia.NewMatrix(m.g, dt, gorgonia.WithName("zeros"),
		gorgonia.WithValue(tensor.New(tensor.Of(dt), tensor.WithShape(rows, rows))))
	long := zeros
	for range 8 {
		long = mul(long, zeros)
	}
	h := relu(mul(must(gorgonia.Add(x, mean(long))), w0))
	m.grad(t, neg(mean(times(must(gorgonia.SoftMax(mul(h, w1))), y))))
	return m
}
