package vm_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm"
)

var solvers = map[string]func() solver.Solver{
	"sgd":       func() solver.Solver { return &solver.SGD{Rate: 0.1} },
	"sgd decay": func() solver.Solver { return &solver.SGD{Rate: 0.1, WeightDecay: 0.01} },
	"momentum": func() solver.Solver {
		return &solver.Momentum{Rate: 0.1, Momentum: 0.9}
	},
	"momentum decay": func() solver.Solver {
		return &solver.Momentum{Rate: 0.1, Momentum: 0.9, WeightDecay: 0.01}
	},
	"nesterov": func() solver.Solver {
		return &solver.Nesterov{Rate: 0.1, Momentum: 0.9}
	},
	"nesterov decay": func() solver.Solver {
		return &solver.Nesterov{Rate: 0.1, Momentum: 0.9, WeightDecay: 0.01}
	},
	"rmsprop": func() solver.Solver { return &solver.RMSProp{Rate: 0.01} },
	"rmsprop all": func() solver.Solver {
		return &solver.RMSProp{Rate: 0.01, Alpha: 0.9, Momentum: 0.5, WeightDecay: 0.01}
	},
	"adam":  func() solver.Solver { return &solver.Adam{Rate: 0.01} },
	"adamw": func() solver.Solver { return &solver.AdamW{Rate: 0.01, WeightDecay: 0.1} },
	"lion":  lion,
}

// lion is a solver that only this test has: arXiv:2302.06675, Algorithm 2.
func lion() solver.Solver {
	mix := func(u *solver.Update, beta float64) fuse.Value {
		return u.Do(fuse.Add, u.With(fuse.Mul, u.Kept(0), beta),
			u.With(fuse.Mul, u.Gradient(), 1-beta))
	}
	update := func(u *solver.Update) {
		w := u.With(fuse.Mul, u.Param(), 1-u.Rate()*0.1)
		sign := u.Do(fuse.Sign, mix(u, 0.9))
		u.SetParam(u.Do(fuse.Sub, w, u.With(fuse.Mul, sign, u.Rate())))
		u.SetKept(0, mix(u, 0.99))
	}
	return &solver.Custom{Name: "lion", Rate: 0.01, Keep: []string{"m"}, Update: update}
}

// solving returns a machine with a solver.
func solving(t testing.TB, m *model, device backend.Device, s solver.Solver,
	options ...vm.Option) *vm.Machine {
	t.Helper()
	return machineOn(t, device, m.g, append(options, vm.WithSolver(s, m.params...))...)
}

// weights returns copies of the elements of the learnables' tensors.
func (m *model) weights(t testing.TB) [][]float64 {
	t.Helper()
	var all [][]float64
	for _, p := range m.params {
		all = append(all, slices.Clone(floats(t, p.Value())))
	}
	return all
}

func pull(t testing.TB, m *vm.Machine, params nodes) {
	t.Helper()
	require.NoError(t, m.Pull(params...))
}

// TestSolverInPlan compares steps in the plan with steps after runs.
func TestSolverInPlan(t *testing.T) {
	for where, device := range devices {
		for solver, make := range solvers {
			for name, build := range models {
				for dt := range tolerances {
					t.Run(fmt.Sprint(where, " ", solver, " ", name, " ", dt), func(t *testing.T) {
						solverInPlan(t, device(t), make, func() *model { return build(t, dt) })
					})
				}
			}
		}
	}
}

// solverInPlan: 20 steps in the plan end with the bits of 20 runs without a solver, on the same
// device, with a Step of package autograd after each. The rate changes between steps, down to 0.
func solverInPlan(t *testing.T, d backend.Device, newSolver func() solver.Solver,
	build func() *model) {
	const steps = 20
	rate := solver.Cosine(0.01, 0, steps-1)
	apart, within := build(), build()
	a := machineOn(t, d, apart.g)
	after, inside := newSolver(), newSolver()
	b := solving(t, within, d, inside)
	defer b.Close()
	for step := range steps {
		after.SetRate(rate(step))
		inside.SetRate(rate(step))
		run(t, a)
		require.NoError(t, after.Step(gorgonia.NodesToValueGrads(apart.params)))
		run(t, b)
		compare(t, fmt.Sprint("loss of step ", step), within.loss, apart.loss, 0)
	}
	pull(t, b, within.params)
	if got, want := within.weights(t), apart.weights(t); !slices.EqualFunc(got, want,
		slices.Equal) {
		t.Errorf("after %d steps %v, want %v", steps, got, want)
	}
	sameState(t, inside, after)
}

// sameState compares the states of two solvers, bit by bit.
func sameState(t *testing.T, got, want solver.Solver) {
	t.Helper()
	a, err := got.State()
	b, err2 := want.State()
	require.NoError(t, errors.Join(err, err2))
	require.That(t, len(a) == len(b), "a state of %d, want %d", len(a), len(b))
	for name, x := range b {
		require.Check(t, slices.Equal(a[name].Bytes(), x.Bytes()), "%s differs", name)
	}
}

// traffic is a device that counts the bytes that its queues move, and the memory that is in use.
type traffic struct {
	backend.Device
	moved, inUse int
}

// queue is what a machine needs of a queue.
type queue interface {
	fuse.Queue
	Capture(f func() error) (*backend.Graph, error)
	Recording() *backend.Recording
	Multiply(p kernels.Product) error
	ConvolutionScratch(c kernels.Convolution) (int, error)
	Convolve(c kernels.Convolution, dst, x, y, scratch backend.Buffer) error
	Im2Col(dst, src backend.Buffer, i kernels.Images) error
	Col2Im(dst, src backend.Buffer, i kernels.Images) error
	MaxPool(dst, src backend.Buffer, i kernels.Images) error
	MaxPoolGrad(dx, x, dy backend.Buffer, i kernels.Images) error
	TakeRows(dst, src, indices backend.Buffer, r kernels.Rows) error
	AddRows(dst, src, indices backend.Buffer, r kernels.Rows) error
	PutRows(dst, src, indices backend.Buffer, r kernels.Rows) error
	Attention(kernels.Attention) error
	AttentionGrad(kernels.AttentionGrad) error
}

type countedQueue struct {
	queue
	device *traffic
}

func (d *traffic) NewQueue() (backend.Queue, error) {
	q, err := d.Device.NewQueue()
	if err != nil {
		return nil, err
	}
	return countedQueue{q.(queue), d}, nil
}

func (d *traffic) Alloc(nbytes int) (backend.Buffer, error) {
	b, err := d.Device.Alloc(nbytes)
	d.inUse += b.Len()
	return b, err
}

func (d *traffic) Free(b backend.Buffer) error {
	d.inUse -= b.Len()
	return d.Device.Free(b)
}

func (q countedQueue) Move(dst, src backend.Buffer) error {
	q.device.moved += dst.NBytes()
	return q.queue.Move(dst, src)
}

// TestStepStaysOnDevice: over 1,000 steps a device takes nothing but inputs that change and the
// numbers of the step, gives back what is read, and needs no more memory.
func TestStepStaysOnDevice(t *testing.T) {
	d := &traffic{Device: fake(t)}
	m := mlp(t, tensor.Float32)
	machine := solving(t, m, d, &solver.Adam{Rate: 1e-4})
	defer machine.Close()
	run(t, machine)
	before := d.inUse
	// passes of Adam with a number, the distance of uploads
	const numbers, aligned, loss = 7, 256, 4
	for step := range 1000 {
		d.moved = 0
		run(t, machine)
		require.That(t, d.moved <= numbers*aligned+loss, "step %d moves %d bytes", step, d.moved)
	}
	require.Check(t, d.inUse == before, "after 1,000 steps %d bytes are in use, before %d", d.inUse,
		before)
	size := 0
	for _, p := range m.params {
		size += 4 * p.Shape().TotalSize()
	}
	for _, want := range []int{size, 0} { // the second one finds them on the host
		d.moved = 0
		if pull(t, machine, m.params); d.moved != want {
			t.Errorf("Pull moves %d bytes, want %d", d.moved, want)
		}
	}
}

// product is a graph with the learnables v and w, and the loss sum(v w).
func product(t testing.TB, v, w *tensor.Dense) *model {
	m := &model{g: gorgonia.NewGraph()}
	for i, x := range []*tensor.Dense{v, w} {
		name := string("vw"[i])
		m.params = append(m.params, gorgonia.NewVector(m.g, tensor.Float32, gorgonia.WithShape(2),
			gorgonia.WithName(name), gorgonia.WithValue(x)))
	}
	m.grad(t, sum(times(m.params[0], m.params[1])))
	return m
}

// TestPull: learnables change on the host by Pull and Close only, and are marked until then; what
// the host gives, by gorgonia.Let or between Pull and a run, is what the next run takes.
func TestPull(t *testing.T) {
	a, b := []float32{1, 2}, []float32{4, 8}
	first := vector(slices.Clone(a)...)
	m := product(t, first, vector(slices.Clone(b)...))
	var before gorgonia.Value
	gorgonia.Read(m.params[0], &before)
	machine := solving(t, m, fake(t), &solver.SGD{Rate: 1})
	step := func() {
		t.Helper()
		run(t, machine)
		if got := before.Data().([]float32); !slices.Equal(got, a) {
			t.Errorf("gorgonia.Read gives %v, the value before the step is %v", got, a)
		}
		for i := range a { // each gradient is the other one before the step
			a[i], b[i] = a[i]-b[i], b[i]-a[i]
		}
	}
	expect := func(what string, of node, want []float32) {
		t.Helper()
		got := of.Value().Data().([]float32)
		require.Check(t, slices.Equal(got, want), "%s: %v is %v, want %v", what, of, got, want)
	}
	step()
	x := first.Data().([]float32)
	require.Check(t, x[0] != x[0] && x[1] != x[1], "on the host, after a step, there is %v", x)
	pull(t, machine, m.params[:1])
	expect("after Pull,", m.params[0], a)
	a[0] = 5
	first.Data().([]float32)[0] = 5
	step()
	other := vector(1, -1)
	require.NoError(t, gorgonia.Let(m.params[1], other))
	copy(b, other.Data().([]float32))
	step()
	require.NoError(t, machine.Close())
	expect("after Close,", m.params[0], a)
	expect("after Close,", m.params[1], b)
	pull(t, machine, m.params)
}

func TestDiscardFreesADeviceAndLeavesTheHostAsTheLastPullDid(t *testing.T) {
	d := fake(t).(*fakedevice.Device)
	x := vector(1, 2)
	m := product(t, x, vector(4, 8))
	machine := solving(t, m, d, &solver.SGD{Rate: 1})
	run(t, machine)
	pull(t, machine, m.params)
	pulled := slices.Clone(x.Data().([]float32))
	run(t, machine)
	require.NoError(t, machine.Discard())
	_, held := d.Live()
	now := x.Data().([]float32)
	require.Check(t, held == 0 && slices.Equal(now, pulled) && now[0] == 1-4,
		"the device has %d bytes, the host %v", held, now)
	require.NoError(t, machine.Discard())
	require.Check(t, machine.RunAll() != nil, "a machine runs after Discard")
}

// TestKeptGradient: gradients are nil unless they are kept.
func TestKeptGradient(t *testing.T) {
	for where, device := range devices {
		m := mlp(t, tensor.Float64)
		machine := solving(t, m, device(t), &solver.SGD{Rate: 0.1}, vm.Keep(m.params[0].Deriv()))
		run(t, machine)
		v := m.params[0].Deriv().Value()
		require.Check(t, v != nil, "%s: a kept gradient has no value", where)
		if v := m.params[1].Deriv().Value(); v != nil {
			t.Errorf("%s: another gradient has the value %v", where, v)
		}
		require.NoError(t, machine.Close())
	}
}

// TestSolverResumes: another machine goes on with learnables and the solver's state, bitwise
// identically, and a solver may be given another state between runs.
func TestSolverResumes(t *testing.T) {
	for where, device := range devices {
		t.Run(where, func(t *testing.T) {
			d := device(t)
			whole, begun, resumed := mlp(t, tensor.Float32), mlp(t, tensor.Float32),
				mlp(t, tensor.Float32)
			newSolver := func() solver.Solver {
				return &solver.AdamW{Rate: 0.01, WeightDecay: 0.1}
			}
			s1, s2, s3 := newSolver(), newSolver(), newSolver()
			a, b, c := solving(t, whole, d, s1), solving(t, begun, d, s2),
				solving(t, resumed, d, s3)
			defer a.Close()
			defer b.Close()
			defer c.Close()
			run(t, c) // something else, which the state replaces
			for range 5 {
				run(t, a)
				run(t, b)
			}
			pull(t, b, begun.params)
			state, err := s2.State()
			if err == nil {
				err = s3.SetState(state)
			}
			require.NoError(t, err)
			for i, p := range begun.params {
				require.NoError(t, gorgonia.Let(resumed.params[i],
					p.Value().(*tensor.Dense).Clone()))
			}
			for range 5 {
				run(t, a)
				run(t, c)
			}
			pull(t, a, whole.params)
			pull(t, c, resumed.params)
			if got, want := resumed.weights(t), whole.weights(t); !slices.EqualFunc(got, want,
				slices.Equal) {
				t.Errorf("resumed: %v, want %v", got, want)
			}
			sameState(t, s3, s1)
		})
	}
}

// foreign is a solver of another package.
type foreign struct{ solver.Solver }

// TestSolverRefused: what a machine cannot train says so in New, and a run that fails is no step.
func TestSolverRefused(t *testing.T) {
	refused := func(want error, text string, g *gorgonia.ExprGraph, s solver.Solver,
		learnables ...node) {
		t.Helper()
		m, err := vm.New(g, nil, vm.WithSolver(s, learnables...))
		if err == nil {
			m.Close()
		}
		require.Check(t, err != nil && (want == nil || errors.Is(err, want)) &&
			strings.Contains(err.Error(), text), "%v, want %v with %q", err, want, text)
	}
	m := mlp(t, tensor.Float32)
	g, x, _, _ := doubled()
	sgd := &solver.SGD{Rate: 1}
	refused(backend.ErrArgument, "no learnables", m.g, sgd)
	refused(backend.ErrUnsupported, "foreign", m.g, foreign{sgd}, m.params...)
	refused(backend.ErrArgument, "Rate", m.g, &solver.SGD{Rate: -1}, m.params...)
	refused(nil, "no gradient", g, sgd, x)
	refused(nil, "not a variable", g, sgd, m.params...)

	adam := &solver.AdamW{Rate: 0.01}
	holder := solving(t, m, nil, adam)
	run(t, holder)
	before := m.weights(t)
	adam.WeightDecay = 0.1
	require.Fails(t, "with a decay that began later", holder.RunAll(), backend.ErrArgument,
		"WeightDecay")
	state := require.Value(adam.State())(t)
	if steps := backend.View[int64](state["adam.steps"])[0]; steps != 1 ||
		!slices.EqualFunc(m.weights(t), before, slices.Equal) {
		t.Errorf("after a run that failed the solver counts %d steps", steps)
	}
	require.NoError(t, holder.Close())
	run(t, machine(t, m.g, vm.WithSolver(adam, m.params...))) // which begins with a decay

	view := require.Value(tensor.New(tensor.WithShape(2, 2),
		tensor.WithBacking([]float32{1, 2, 3, 4})).Slice(nil, gorgonia.S(0)))(t)
	p := product(t, vector(1, 2), vector(3, 4))
	require.NoError(t, gorgonia.Let(p.params[0], view))
	require.Fails(t, "a learnable that is a column", machine(t, p.g, vm.WithSolver(sgd,
		p.params...)).RunAll(), "contiguous")
}

// TestSolverLeavesExchangedGradients: where ranks exchange gradients, a machine does not apply
// those of its rank alone.
func TestSolverLeavesExchangedGradients(t *testing.T) {
	require.NoError(t, testranks.Join(testranks.Run(1, testenv.Hosts.Connect(t, 1),
		func(r *testenv.Rank) error {
			m := &model{g: gorgonia.NewGraph()}
			w := m.variable("w", tensor.Float32, 3)
			m.params = nodes{w}
			dp := testranks.Must(autograd.New(r.Comm, m.params))
			defer dp.Close()
			m.grad(t, sum(square(must(dp.Hook(w)))))
			if other, err := vm.New(m.g, nil, vm.WithSolver(&solver.SGD{Rate: 1}, w)); !errors.Is(
				err, backend.ErrUnsupported) || !strings.Contains(err.Error(), "Sync") {
				t.Errorf("%v, %v", other, err)
			}
			return nil
		})))
}
