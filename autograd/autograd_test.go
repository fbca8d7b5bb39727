package autograd

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// rank is what the body of one rank of a test gets.
type rank struct {
	*testing.T
	comm  backend.Communicator
	build sync.Locker
}

// each runs a body as every rank of a world, and returns their errors. A rank
// that fails is declared failed, as euryale.Run does.
func each(t *testing.T, size int, body func(r rank) error) []error {
	t.Helper()
	return eachOn(t, testenv.Hosts, size, body)
}

// all is each, for bodies that must not fail.
func all(t *testing.T, size int, body func(r rank) error) {
	t.Helper()
	allOn(t, testenv.Hosts, size, body)
}

// eachOn is each for ranks of any kind. It skips the test where the machine has
// too few devices.
func eachOn(t *testing.T, k testenv.Kind, size int, body func(r rank) error) []error {
	t.Helper()
	var build sync.Mutex
	return testranks.Run(size, k.Connect(t, size), func(r *testenv.Rank) error {
		return body(rank{t, r.Comm, &build})
	})
}

// allOn is eachOn, for bodies that must not fail.
func allOn(t *testing.T, k testenv.Kind, size int, body func(r rank) error) {
	t.Helper()
	for i, err := range eachOn(t, k, size, body) {
		require.Check(t, err == nil, "%s, rank %d: %v", k, i, err)
	}
}

// recorder is a communicator that writes down the collectives it starts.
type recorder struct {
	backend.Communicator
	mu     sync.Mutex
	events []string
}

func (c *recorder) note(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.events = append(c.events, fmt.Sprintf(format, args...))
}

func (c *recorder) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	c.note("%v slot %d", what, what.State)
	return c.Communicator.Start(q, what, dst, src)
}

// reductions returns the bucket all-reduces and the notes of a test among the
// events, in order.
func (c *recorder) reductions() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(c.events), func(s string) bool {
		return strings.HasSuffix(s, "slot 0")
	})
}

func uniform(rng *rand.Rand, shape ...int) *tensor.Dense {
	n := tensor.Shape(shape).TotalSize()
	data := make([]float32, n)
	for i := range data {
		data[i] = (rng.Float32() - 0.5) / 2
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
}

// model is a small network with a loss, and its data.
type model struct {
	g      *gorgonia.ExprGraph
	x, y   *gorgonia.Node
	params gorgonia.Nodes
	loss   *gorgonia.Node
	// forward builds the rest of the graph, with use(w) where w is used.
	forward func(use func(*gorgonia.Node) *gorgonia.Node) error
}

// must turns the panics of gorgonia.Must into an error of the test.
func must(build func()) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	build()
	return nil
}

const features, classes = 36, 4

func newParam(g *gorgonia.ExprGraph, rng *rand.Rand, name string, shape ...int) *gorgonia.Node {
	return gorgonia.NewTensor(g, tensor.Float32, len(shape), gorgonia.WithName(name),
		gorgonia.WithShape(shape...), gorgonia.WithValue(uniform(rng, shape...)))
}

// data of batch samples; the loss is the mean over them.
func (m *model) inputs(batch int, shape ...int) {
	m.x = gorgonia.NewTensor(m.g, tensor.Float32, len(shape)+1, gorgonia.WithName("x"),
		gorgonia.WithShape(append([]int{batch}, shape...)...))
	m.y = gorgonia.NewMatrix(m.g, tensor.Float32, gorgonia.WithName("y"),
		gorgonia.WithShape(batch, classes))
}

func (m *model) meanSquare(out *gorgonia.Node) {
	m.loss = gorgonia.Must(
		gorgonia.Mean(gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Sub(out, m.y))))))
}

// newMLP has two layers and biases, of which b2 is added without a broadcast
// where the batch is 1.
func newMLP(batch int, seed uint64) *model {
	rng := rand.New(rand.NewPCG(seed, 7))
	m := &model{g: gorgonia.NewGraph()}
	m.inputs(batch, features)
	w1, b1 := newParam(m.g, rng, "w1", features, 16), newParam(m.g, rng, "b1", 1, 16)
	w2, b2 := newParam(m.g, rng, "w2", 16, classes), newParam(m.g, rng, "b2", 1, classes)
	m.params = gorgonia.Nodes{w1, b1, w2, b2}
	m.forward = func(use func(*gorgonia.Node) *gorgonia.Node) error {
		return must(func() {
			h := gorgonia.Must(gorgonia.Mul(m.x, use(w1)))
			h = gorgonia.Must(gorgonia.BroadcastAdd(h, use(b1), nil, []byte{0}))
			h = gorgonia.Must(gorgonia.Tanh(h))
			h = gorgonia.Must(gorgonia.Mul(h, use(w2)))
			m.meanSquare(gorgonia.Must(gorgonia.BroadcastAdd(h, use(b2), nil, []byte{0})))
		})
	}
	return m
}

func newCNN(batch int, seed uint64) *model {
	rng := rand.New(rand.NewPCG(seed, 8))
	m := &model{g: gorgonia.NewGraph()}
	m.inputs(batch, 1, 6, 6)
	k1, k2 := newParam(m.g, rng, "k1", 4, 1, 3, 3), newParam(m.g, rng, "k2", 4, 4, 3, 3)
	w := newParam(m.g, rng, "w", 4*3*3, classes)
	m.params = gorgonia.Nodes{k1, k2, w}
	m.forward = func(use func(*gorgonia.Node) *gorgonia.Node) error {
		one := []int{1, 1}
		return must(func() {
			h := gorgonia.Must(gorgonia.Conv2d(m.x, use(k1), tensor.Shape{3, 3}, one, one, one))
			h = gorgonia.Must(gorgonia.Rectify(h))
			h = gorgonia.Must(gorgonia.MaxPool2D(h, tensor.Shape{2, 2}, []int{0, 0}, []int{2, 2}))
			h = gorgonia.Must(gorgonia.Conv2d(h, use(k2), tensor.Shape{3, 3}, one, one, one))
			h = gorgonia.Must(gorgonia.Tanh(h))
			h = gorgonia.Must(gorgonia.Reshape(h, tensor.Shape{batch, 4 * 3 * 3}))
			m.meanSquare(gorgonia.Must(gorgonia.Mul(h, use(w))))
		})
	}
	return m
}

// newSums adds parameters without a broadcast, so that they share gradients.
func newSums(batch int, seed uint64) *model {
	rng := rand.New(rand.NewPCG(seed, 9))
	m := &model{g: gorgonia.NewGraph()}
	m.inputs(batch, features)
	a, b := newParam(m.g, rng, "a", batch, features), newParam(m.g, rng, "b", batch, features)
	w := newParam(m.g, rng, "w", features, classes)
	m.params = gorgonia.Nodes{a, b, w}
	m.forward = func(use func(*gorgonia.Node) *gorgonia.Node) error {
		return must(func() {
			h := gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Add(use(a), use(b)))))
			h = gorgonia.Must(gorgonia.HadamardProd(gorgonia.Must(gorgonia.Cube(h)), m.x))
			m.meanSquare(gorgonia.Must(gorgonia.Mul(h, use(w))))
		})
	}
	return m
}

// setting says how a training run of the tests is made.
type setting struct {
	model  func(batch int, seed uint64) *model
	global int // batch
	steps  int
	solver func() gorgonia.Solver
	hooks  string // "all", "some" or "none"
	dual   bool   // BindDualValues
	lisp   bool
	opts   []Option
}

func momentum() gorgonia.Solver {
	return gorgonia.NewMomentum(gorgonia.WithLearnRate(0.05), gorgonia.WithMomentum(0.9))
}

// train runs one rank and returns its parameters.
func (s setting) train(r rank, comm backend.Communicator) (values [][]float32, err error) {
	local := s.global / comm.Size()
	r.build.Lock()
	m := s.model(local, uint64(comm.Rank())) // every rank begins with other values
	r.build.Unlock()
	d, err := New(comm, m.params, s.opts...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	r.build.Lock()
	vm, err := s.machine(m, d)
	r.build.Unlock()
	if err != nil {
		return nil, err
	}
	defer func() { vm.Close() }()
	solver := s.solver()
	for step := range s.steps {
		m.feed(step, s.global, comm.Rank()*local)
		if s.lisp { // it can run once: Reset does not rewind it
			vm = gorgonia.NewLispMachine(m.g)
		}
		if err := vm.RunAll(); err != nil {
			return nil, errors.Join(err, d.Err())
		}
		grads, err := d.Sync()
		if err != nil {
			return nil, err
		}
		if err := solver.Step(grads); err != nil {
			return nil, err
		}
		vm.Reset()
	}
	for _, p := range m.params {
		values = append(values, slices.Clone(p.Value().Data().([]float32)))
	}
	return values, d.Check()
}

func (s setting) machine(m *model, d *DataParallel) (gorgonia.VM, error) {
	var failed error
	err := m.forward(func(w *gorgonia.Node) *gorgonia.Node {
		if s.hooks == "none" || s.hooks == "some" && w == m.params[1] {
			return w
		}
		y, err := d.Hook(w)
		failed = errors.Join(failed, err)
		return y
	})
	if err = errors.Join(err, failed); err != nil {
		return nil, err
	}
	if s.lisp {
		return gorgonia.NewLispMachine(m.g), nil
	}
	if _, err := gorgonia.Grad(m.loss, m.params...); err != nil {
		return nil, err
	}
	if s.dual {
		return gorgonia.NewTapeMachine(m.g, gorgonia.BindDualValues(m.params...)), nil
	}
	return gorgonia.NewTapeMachine(m.g), nil
}

// feed binds this rank's part of a global batch.
func (m *model) feed(step, global, first int) {
	rng := rand.New(rand.NewPCG(uint64(step), 99))
	x, y := uniform(rng, global, features), uniform(rng, global, classes)
	local := m.y.Shape()[0]
	gorgonia.Let(m.x, tensor.New(tensor.WithShape(m.x.Shape()...),
		tensor.WithBacking(x.Float32s()[first*features:(first+local)*features])))
	gorgonia.Let(m.y, tensor.New(tensor.WithShape(m.y.Shape()...),
		tensor.WithBacking(y.Float32s()[first*classes:(first+local)*classes])))
}

// run is runOn the host.
func (s setting) run(t *testing.T, size int) [][]float32 {
	t.Helper()
	return s.runOn(t, testenv.Hosts, size)
}

// runOn trains on size ranks, checks that all end bitwise identical, and returns
// the parameters.
func (s setting) runOn(t *testing.T, k testenv.Kind, size int) [][]float32 {
	t.Helper()
	results := make([][][]float32, size)
	allOn(t, k, size, func(r rank) error {
		var err error
		results[r.comm.Rank()], err = s.train(r, r.comm)
		return err
	})
	for r := range results {
		if !slices.EqualFunc(results[r], results[0], slices.Equal[[]float32]) {
			t.Errorf("rank %d ends with other parameters than rank 0", r)
		}
	}
	return results[0]
}

func checkClose(t *testing.T, got, want [][]float32, rtol, atol float32) {
	t.Helper()
	require.That(t, len(got) == len(want), "%d parameters, want %d", len(got), len(want))
	for p := range want {
		for i, w := range want[p] {
			if diff := got[p][i] - w; max(diff, -diff) > atol+rtol*max(w, -w) {
				t.Fatalf("parameter %d [%d] = %v, want %v", p, i, got[p][i], w)
			}
		}
	}
}

func TestTrainingEqualsSingleProcess(t *testing.T) {
	for name, m := range map[string]func(int, uint64) *model{"mlp": newMLP, "cnn": newCNN} {
		t.Run(name, func(t *testing.T) {
			s := setting{model: m, global: 8, steps: 50, solver: momentum, hooks: "all",
				opts: []Option{WithBuckets(1, 300)}}
			want := s.run(t, 1)
			testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
				for _, size := range []int{2, 4} {
					t.Run(fmt.Sprint(size), func(t *testing.T) {
						checkClose(t, s.runOn(t, k, size), want, 1e-5, 1e-6)
					})
				}
			})
		})
	}
}

func TestHooksChangeNoBit(t *testing.T) {
	for name, m := range map[string]func(int, uint64) *model{"mlp": newMLP, "cnn": newCNN} {
		t.Run(name, func(t *testing.T) {
			hooksChangeNoBit(t, setting{model: m, global: 4, steps: 5, solver: momentum,
				opts: []Option{WithBuckets(1, 300)}})
		})
	}
}

func hooksChangeNoBit(t *testing.T, s setting) {
	t.Helper()
	s.hooks = "none"
	want := s.run(t, 2)
	for _, s.hooks = range []string{"none", "some", "all"} {
		for _, s.dual = range []bool{false, true} {
			require.Check(t, slices.EqualFunc(s.run(t, 2), want, slices.Equal[[]float32]),
				"hooks %s, dual values %v: other bits", s.hooks, s.dual)
		}
	}
}

// TestBiasWithoutBroadcast: with one sample a bias shares its gradient with the
// layer's sum, and Gorgonia overwrites such values in place.
func TestBiasWithoutBroadcast(t *testing.T) {
	hooksChangeNoBit(t, setting{model: newSums, global: 2, steps: 5, solver: momentum, dual: true})
}

// TestOwnGradientsStayIntact: until Sync, a parameter's own gradient is there
// with a hook as it is without.
func TestOwnGradientsStayIntact(t *testing.T) {
	gradients := func(r rank, hooks string, dual bool) (all [][]float32, err error) {
		m := newSums(2, 1)
		d, err := New(r.comm, m.params)
		if err != nil {
			return nil, err
		}
		defer d.Close()
		vm, err := setting{hooks: hooks, dual: dual}.machine(m, d)
		if err != nil {
			return nil, err
		}
		defer vm.Close()
		m.feed(0, 2, 0)
		if err := vm.RunAll(); err != nil {
			return nil, err
		}
		for _, p := range m.params {
			g, err := p.Grad()
			if err != nil {
				return nil, err
			}
			all = append(all, slices.Clone(g.Data().([]float32)))
		}
		return all, nil
	}
	all(t, 1, func(r rank) error {
		want := testranks.Must(gradients(r, "none", true))
		for _, dual := range []bool{false, true} {
			got := testranks.Must(gradients(r, "all", dual))
			if !slices.EqualFunc(got, want, slices.Equal[[]float32]) {
				r.Errorf("dual values %v: other gradients", dual)
			}
		}
		return nil
	})
}

func TestLispMachine(t *testing.T) {
	s := setting{model: newMLP, global: 4, steps: 10, solver: momentum, hooks: "none"}
	want := s.run(t, 1)
	s.lisp = true
	for _, hooks := range []string{"none", "some", "all"} {
		s.hooks = hooks
		checkClose(t, s.run(t, 2), want, 1e-5, 1e-6)
	}
}

func TestEverySolver(t *testing.T) {
	solvers := map[string]func() gorgonia.Solver{
		"vanilla": func() gorgonia.Solver {
			return gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.1))
		},
		"momentum": momentum,
		"adam": func() gorgonia.Solver {
			return gorgonia.NewAdamSolver(gorgonia.WithLearnRate(0.01))
		},
		"rmsprop": func() gorgonia.Solver {
			return gorgonia.NewRMSPropSolver(gorgonia.WithLearnRate(0.01))
		},
		"adagrad": func() gorgonia.Solver { return gorgonia.NewAdaGradSolver() },
	}
	for name, solver := range solvers {
		t.Run(name, func(t *testing.T) {
			s := setting{model: newMLP, global: 4, steps: 5, solver: solver, hooks: "all"}
			checkClose(t, s.run(t, 2), s.plain(t), 1e-4, 1e-5)
			s.hooks, s.dual = "none", true
			checkClose(t, s.run(t, 2), s.plain(t), 1e-4, 1e-5)
		})
	}
}

// plain is an ordinary training loop of Gorgonia, without this package.
func (s setting) plain(t *testing.T) (values [][]float32) {
	m := s.model(s.global, 0)
	require.NoError(t, m.forward(func(w *gorgonia.Node) *gorgonia.Node { return w }))
	require.NoError(t, require.Err(gorgonia.Grad(m.loss, m.params...)))
	vm := gorgonia.NewTapeMachine(m.g, gorgonia.BindDualValues(m.params...))
	defer vm.Close()
	solver := s.solver()
	for step := range s.steps {
		m.feed(step, s.global, 0)
		require.NoError(t, vm.RunAll())
		require.NoError(t, solver.Step(gorgonia.NodesToValueGrads(m.params)))
		vm.Reset()
	}
	for _, p := range m.params {
		values = append(values, p.Value().Data().([]float32))
	}
	return values
}

// probe is an identity op that notes when the backward pass comes through.
type probe struct {
	identity
	note func()
}

func (o *probe) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	if o.note != nil {
		o.note()
	}
	return gorgonia.CloneValue(in[0])
}

func (o *probe) DiffWRT(int) []bool { return []bool{true} }

func (o *probe) SymDiff(_ gorgonia.Nodes, _, dy *gorgonia.Node) (gorgonia.Nodes, error) {
	dx, err := gorgonia.ApplyOp(&probe{identity{o.d, o.p, "probe"}, func() {
		o.d.comm.(*recorder).note("backward of layer 1")
	}}, dy)
	return gorgonia.Nodes{dx}, err
}

func TestBucketLeavesInsideBackwardRaced(t *testing.T) {
	const size = 2
	events := make([][]string, size)
	all(t, size, func(r rank) error {
		c := &recorder{Communicator: r.comm}
		rng := rand.New(rand.NewPCG(1, 1))
		m := &model{g: gorgonia.NewGraph()}
		r.build.Lock()
		m.inputs(2, features)
		w1, w2, w3 := newParam(m.g, rng, "w1", features, 8), newParam(m.g, rng, "w2", 8, 8),
			newParam(m.g, rng, "w3", 8, classes)
		m.params = gorgonia.Nodes{w1, w2, w3}
		r.build.Unlock()
		d := testranks.Must(New(c, m.params, WithBuckets(1, 1)))
		defer d.Close()
		m.forward = func(use func(*gorgonia.Node) *gorgonia.Node) error {
			return must(func() {
				h := gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Mul(m.x, use(w1)))))
				h = gorgonia.Must(
					gorgonia.ApplyOp(&probe{identity: identity{d, d.params[0], "pass"}}, h))
				h = gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Mul(h, use(w2)))))
				m.meanSquare(gorgonia.Must(gorgonia.Mul(h, use(w3))))
			})
		}
		r.build.Lock()
		vm, err := setting{hooks: "all"}.machine(m, d)
		r.build.Unlock()
		if err != nil {
			return err
		}
		defer vm.Close()
		for step := range 3 {
			m.feed(step, 4, 2*c.Rank())
			testranks.NoError(vm.RunAll())
			c.note("end of the run")
			if _, err := d.Sync(); err != nil {
				return err
			}
			vm.Reset()
		}
		events[c.Rank()] = c.reductions()
		return nil
	})
	step := []string{"allreduce(avg) slot 1", "allreduce(avg) slot 2", "backward of layer 1",
		"allreduce(avg) slot 3", "end of the run"}
	want := slices.Repeat(step, 3)
	for r := range events {
		if !slices.Equal(events[r], want) {
			t.Errorf("rank %d: events\n%s\nwant\n%s", r, strings.Join(events[r], "\n"),
				strings.Join(want, "\n"))
		}
	}
}

func TestOneRankSendsNothing(t *testing.T) {
	s := setting{model: newMLP, global: 4, steps: 3, solver: momentum, hooks: "some"}
	all(t, 1, func(r rank) error {
		c := &recorder{Communicator: r.comm}
		_, err := s.train(r, c)
		require.Check(r, len(c.events) == 0, "a single rank started %v", c.events)
		return err
	})
}

func TestNothingGrowsOnHost(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	const size, steps = 2, 1000
	s := setting{model: newMLP, global: 4, solver: momentum, hooks: "some"}
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	s.steps = 50
	s.run(t, size) // pools fill
	before := heap()
	s.steps = steps
	s.run(t, size)
	if after := heap(); after > before+1<<20 {
		t.Errorf("the heap grew from %d to %d bytes in %d steps", before, after, steps)
	}
}

func TestErrorOfPeerEndsTheStep(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	for _, hooks := range []string{"all", "none"} {
		cause := errors.New("no more coffee")
		begin := time.Now()
		errs := each(t, 3, func(r rank) error {
			s := setting{model: newMLP, global: 6, steps: 100, solver: func() gorgonia.Solver {
				return &stopping{comm: r.comm, cause: cause}
			}, hooks: hooks}
			_, err := s.train(r, r.comm)
			return err
		})
		took := time.Since(begin)
		require.Check(t, took <= 20*time.Second, "hooks %s: it took %v", hooks, took)
		for i, err := range errs {
			var e *backend.Error
			if !errors.Is(err, backend.ErrAborted) || !errors.As(err, &e) {
				t.Errorf("hooks %s: rank %d: %v, want an abort", hooks, i, err)
				continue
			}
			for _, part := range []string{"no more coffee", fmt.Sprintf("rank %d", i), "bucket 0",
				"b2", "w1"} {
				require.Fails(t, fmt.Sprintf("hooks %s: rank %d", hooks, i), err, part)
			}
		}
	}
}

// stopping is a solver with which rank 1 aborts after the third step.
type stopping struct {
	comm  backend.Communicator
	cause error
	steps int
}

func (s *stopping) Step([]gorgonia.ValueGrad) error {
	if s.steps++; s.steps == 3 && s.comm.Rank() == 1 {
		s.comm.Abort(s.cause)
	}
	return nil
}

// closing is a communicator that counts how often it is closed.
type closing struct {
	backend.Communicator
	closed *int
}

func (c closing) Close() error {
	*c.closed++
	return c.Communicator.Close()
}

// What WithCompression has made is closed, whether New succeeds or not.
func TestCompressionIsClosedRaced(t *testing.T) {
	for name, differ := range map[string]bool{"New succeeds": false, "ranks differ": true} {
		t.Run(name, func(t *testing.T) {
			all(t, 2, func(r rank) error {
				closed := 0
				compress := func(c backend.Communicator) (backend.Communicator, error) {
					return closing{c, &closed}, nil
				}
				opts := []Option{WithCompression(compress)}
				if differ && r.comm.Rank() == 1 {
					opts = append(opts, WithSum())
				}
				err := r.teach(&solver.SGD{}, func(*lesson) error { return nil }, opts...)
				if errors.Is(err, backend.ErrMismatch) != differ || closed != 1 {
					return fmt.Errorf("closed %d times, the error is %w", closed, err)
				}
				return nil
			})
		})
	}
}
