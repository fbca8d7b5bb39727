package vm_test

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/internal/vm/plan"
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

// TestWhatGoesWrongInRecordedStepsIsNamedInThree: a GPU that becomes slow, and in which layer, a
// straggler, and a bucket.
func TestWhatGoesWrongInRecordedStepsIsNamedInThree(t *testing.T) {
	wrongIsNamed(t, testenv.Devices, 256)
}

// wrongIsNamed trains two ranks, of which one then multiplies matrices of n rows in addition, or
// comes late, or both copy as many beside a bucket.
func wrongIsNamed(t *testing.T, k testenv.Kind, n int) {
	t.Helper()
	const late, before, noticed = 1, 8, 3
	busy := 0 // steps on hosts, which other tests keep busy
	if k != testenv.GPUs || k.Sampled() {
		busy = 60
	}
	for what, want := range map[string][]string{
		"GPU":    {"rank 1 was late by", "its GPU takes", "longer than it did, mostly in w0"},
		"rank":   {"rank 1 was late by"},
		"bucket": {"all ranks: bucket 1 takes", "longer than it did"},
	} {
		t.Run(what, func(t *testing.T) {
			onRanks(t, k, 2, func(r ranked) error {
				rec := observe.New(r.Comm.Rank(), 1000)
				watch := observe.NewWatch(r.World, rec, io.Discard)
				watch.Start(r.Comm.Device())
				defer watch.Close()
				slow := &congested{Base: backend.Wrap(r.Comm)}
				comm := backend.WithHooks(slow, rec)
				training := func(rows int) *vm.Machine {
					m := r.build(func(t testing.TB, dt tensor.Dtype) *model {
						return slowed(t, dt, rows)
					})
					machine := testranks.Must(vm.New(m.g, r.device, vm.WithSolver(
						&solver.SGD{Rate: 0.1}, m.params...), vm.WithDataParallel(comm,
						autograd.WithBuckets(1, 1))))
					testranks.NoError(machine.RunAll()) // not recorded
					return machine
				}
				step := func(machine *vm.Machine) {
					testranks.NoError(machine.RunAll())
					told, err := autograd.Gather(comm, watch.Sample()...)
					testranks.NoError(err)
					watch.Step(observe.StepInfo{}, told)
				}
				well, rows := training(1), 1
				watch.Begin()
				for range before {
					step(well)
				}
				testranks.NoError(well.Close())
				if what == "GPU" && r.Comm.Rank() == late {
					rows = n
				}
				if what == "bucket" {
					slow.room = testranks.Must(r.Comm.Device().Alloc(16 * n * n))
					defer r.Comm.Device().Free(slow.room)
				}
				ill := training(rows)
				watch.Begin()
				missing := func() (all []string) {
					for _, part := range want {
						if !strings.Contains(fmt.Sprint(watch.Verdicts()), part) {
							all = append(all, part)
						}
					}
					return all
				}
				for n := 0; n < noticed || n < busy && missing() != nil; n++ {
					if what == "rank" && r.Comm.Rank() == late {
						time.Sleep(100 * time.Millisecond)
					}
					step(ill)
				}
				if parts := missing(); parts != nil {
					t.Errorf("rank %d: the verdicts are %v, want %q", r.Comm.Rank(),
						watch.Verdicts(), parts)
				}
				testranks.NoError(ill.Close())
				return rec.Close()
			})
		})
	}
}

// congested is a communicator whose recorded all-reduces of bucket 1 come after copies.
type congested struct {
	backend.Base
	room backend.Buffer // that is copied, none if it is empty
}

func (c *congested) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	const copies, bucket = 100, 1
	if o := what.Origin; backend.Recorded(q) && c.room.Len() > 0 && o != nil &&
		o.Purpose == backend.ForSync && o.Ordinal == bucket+1 {
		half := c.room.Len() / 2
		for range copies {
			if err := q.Copy(c.room.Slice(0, half), c.room.Slice(half, 2*half)); err != nil {
				return nil, err
			}
		}
	}
	return c.Pass(q, what, count, dst, src)
}

// TestPlansKnowTheLayersOfTheirSteps: with the gradients of a bucket, and on one rank.
func TestPlansKnowTheLayersOfTheirSteps(t *testing.T) {
	for P := 1; P <= 2; P++ {
		onRanks(t, testenv.Hosts, P, func(r ranked) error {
			m := r.build(mlp)
			machine := testranks.Must(vm.New(m.g, r.device, vm.WithSolver(&solver.SGD{Rate: 0.1},
				m.params...), vm.WithDataParallel(r.Comm)))
			got := slices.Compact(machine.Plan().(*plan.Plan).Layers())
			if want := []string{"w0", "b0", "w1", "w1 backward", "b0 backward",
				"w0 backward", "update"}; !slices.Equal(got, want) {
				t.Errorf("%d ranks: the layers are %q, want %q:\n%v", P, got, want, machine.Plan())
			}
			return machine.Close()
		})
	}
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
