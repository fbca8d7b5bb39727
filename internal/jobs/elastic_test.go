package jobs_test

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/launch"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// elasticMicros is how many micro-batches a step has.
const elasticMicros = 8

// elasticModel is a small regression for one micro-batch.
type elasticModel struct {
	x, y, w1, w2, cost *gorgonia.Node
	weights            gorgonia.Nodes
	norm               *gorgonia.BatchNormOp // nil without
	random             *nn.Random
	machine            *vm.Machine
	solver             solver.Solver
	wraps              func(solver.Solver) solver.Solver // nil: the machine has the solver
	said               string                            // by the machine
}

func newElasticModel(in, hidden int, way elasticWay) (*elasticModel, error) {
	g := gorgonia.NewGraph()
	random := rand.New(rand.NewPCG(1, 2))
	weights := func(name string, shape ...int) *gorgonia.Node {
		t := tensor.New(tensor.WithShape(shape...), tensor.Of(tensor.Float32))
		for i := range t.Data().([]float32) {
			t.Data().([]float32)[i] = random.Float32() - 0.5
		}
		return gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName(name),
			gorgonia.WithShape(shape...), gorgonia.WithValue(t))
	}
	y, out := tensor.Shape{4, 3}, 3
	dt := tensor.Float32
	if way.tiled { // the loss is of more classes than hidden columns
		y, out, dt = tensor.Shape{4}, 3*hidden, tensor.Int
	}
	m := &elasticModel{w1: weights("w1", in, hidden), w2: weights("w2", hidden, out),
		random: nn.NewRandom(3)}
	m.x = gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("x"), gorgonia.WithShape(4, in))
	m.y = gorgonia.NewTensor(g, dt, len(y), gorgonia.WithName("y"), gorgonia.WithShape(y...))
	m.weights = gorgonia.Nodes{m.w1, m.w2}
	h := gorgonia.Must(gorgonia.Mul(m.x, m.w1))
	if way.normed {
		gain, bias := weights("gain", 1, hidden), weights("bias", 1, hidden)
		var err error
		h, _, _, m.norm, err = gorgonia.BatchNorm(h, gain, bias, 0.25, 1e-3)
		if err != nil {
			return nil, err
		}
		m.weights = append(m.weights, gain, bias)
	}
	h = gorgonia.Must(gorgonia.Tanh(h))
	h = gorgonia.Must(nn.Dropout(0.25, m.random, h))
	if h = gorgonia.Must(gorgonia.Mul(h, m.w2)); way.tiled {
		m.cost = gorgonia.Must(nn.CrossEntropy(nn.NoLabel, h, m.y))
	} else {
		diff := gorgonia.Must(gorgonia.Sub(h, m.y))
		m.cost = gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(diff))))
	}
	_, err := gorgonia.Grad(m.cost, m.weights...)
	return m, err
}

// state is what a training leaves.
func (m *elasticModel) state() string {
	var all strings.Builder
	for _, w := range m.weights {
		fmt.Fprint(&all, w.Value().Data())
	}
	if m.norm != nil {
		mean, variance := m.norm.Stats()
		fmt.Fprint(&all, mean.Data(), variance.Data())
	}
	return all.String()
}

// run runs a micro-batch of a step and returns its loss.
func (m *elasticModel) run(step, micro int) (float64, error) {
	random := rand.New(rand.NewPCG(uint64(step), uint64(micro)))
	for _, n := range []*gorgonia.Node{m.x, m.y} {
		t := tensor.New(tensor.WithShape(n.Shape()...), tensor.Of(n.Dtype()))
		switch data := t.Data().(type) {
		case []float32:
			for i := range data {
				data[i] = random.Float32()
			}
		case []int:
			for i := range data {
				data[i] = random.IntN(m.w2.Shape()[1])
			}
		}
		if err := gorgonia.Let(n, t); err != nil {
			return 0, err
		}
	}
	if err := m.machine.RunAll(); err != nil {
		return 0, err
	}
	return float64(m.cost.Value().Data().(float32)), nil
}

// elasticRun is a job whose processes are goroutines.
type elasticRun struct {
	t        testing.TB
	name     string
	steps    int
	micros   int
	way      elasticWay
	job      func(id elastic.ID, job *session.Elastic) autograd.Job
	after    func(id elastic.ID, m *elasticModel, e *autograd.Elastic) error // each step
	solves   func(id elastic.ID, s solver.Solver) solver.Solver              // nil: s does
	ends     func(id elastic.ID, e *autograd.Elastic)
	backends func(id elastic.ID) []backend.Backend
	unfit    elastic.ID // it ends alone; 0 is none
	lacks    string     // what it has not as the others have
	early    elastic.ID // it leaves after the first step; 0 is none
	from     string     // a directory of checkpoints, "" for none
	limits   elastic.Limits
	register rendezvous.Log
	build    sync.Mutex
	running  sync.WaitGroup

	mu     sync.Mutex
	hashes []string
	errs   []error
}

// elasticWay is how processes of a job train.
type elasticWay struct {
	normed, guarded, tiled bool
	memory                 int // bytes, 0 for no bound
	shards                 vm.Shards
}

// Those of these tests.
var (
	planned     = elasticWay{}
	ofNorms     = elasticWay{normed: true}
	elasticWays = []elasticWay{planned, ofNorms}
	guarded     = elasticWay{guarded: true} // on memory that stands in for a device
	tiled       = elasticWay{guarded: true, tiled: true}
)

// guardedJob is a job whose communicators are on a device.
type guardedJob struct {
	job
	device *fakedevice.Device
}

func (j *guardedJob) Next(ctx context.Context, leave func(elastic.View) error) (
	backend.Communicator, elastic.View, error) {
	comm, view, err := j.job.Next(ctx, leave)
	if err != nil {
		return nil, view, err
	}
	return fakedevice.Over(comm, j.device), view, nil
}

// begin makes the machine of a model, and takes part in the job.
func (w elasticWay) begin(t testing.TB, m *elasticModel, job autograd.Job,
	micros int) (e *autograd.Elastic, err error) {
	adam, limit := &solver.AdamW{Rate: 0.01, WeightDecay: 0.1}, 0.5
	if m.solver = adam; w.guarded {
		d, err := fakedevice.New(host.Device{})
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() { require.NoError(t, d.Close()) })
		job = &guardedJob{job, d}
	}
	if m.wraps != nil {
		if m.machine, err = vm.New(m.x.Graph(), nil); err != nil {
			return nil, err
		}
		m.solver = m.wraps(adam)
		return autograd.NewElastic(t.Context(), job, m.solver, micros, &bySolver{m: m})
	}
	options := []vm.Option{vm.WithSolver(adam, m.weights...), vm.ClipNorm(limit),
		vm.WithElastic(t.Context(), job, micros), vm.Notice(func(text string) {
			m.said += text
			if strings.Contains(text, "no run has changed") { // although each run does
				t.Error(text)
			}
		})}
	if w.shards != 0 {
		options = append(options, vm.WithShards(w.shards))
	}
	if w.tiled {
		options = append(options, vm.WithLossTiles(2), vm.WithPrecision(vm.BF16),
			vm.WithFrozen(m.y)) // each run has another tensor
	}
	if w.memory > 0 {
		options = append(options, vm.WithMemory(w.memory))
	}
	if m.machine, err = vm.New(m.x.Graph(), nil, options...); err != nil {
		return nil, err
	}
	return m.machine.Elastic(), nil
}

// bySolver are the steps of a machine that has no solver, so that a test can have one of its own.
// For short, all elements have the gradient of the first one.
type bySolver struct {
	m    *elasticModel
	comm backend.Communicator
	mean float64
}

func (*bySolver) Spread() error { return nil }

func (*bySolver) Leave(bool) error { return nil }

func (s *bySolver) Enter(comm, _ backend.Communicator, _ autograd.Option) (*autograd.DataParallel,
	error) {
	s.comm = comm
	d, err := autograd.New(comm, s.m.weights)
	if err == nil {
		_, err = d.Buckets(nil)
	}
	return d, err
}

func (s *bySolver) Reduce(n int, run func(i int) error) (err error) {
	firsts := make([]float64, n)
	for i := range firsts {
		if err := run(i); err != nil {
			return err
		}
		g, _ := s.m.w1.Grad()
		firsts[i] = float64(g.Data().([]float32)[0])
	}
	s.mean, err = autograd.TreeMean(s.comm, firsts)
	return err
}

func (s *bySolver) Apply() error {
	for _, w := range s.m.weights {
		g, _ := w.Grad()
		for i := range g.Data().([]float32) {
			g.Data().([]float32)[i] = float32(s.mean)
		}
	}
	return s.m.solver.Step(gorgonia.NodesToValueGrads(s.m.weights))
}

// shared is a register that processes do not close.
type shared struct{ rendezvous.Log }

func (shared) Close() error { return nil }

var errKilled = errors.New("killed")

// start starts a process, which is killed in a micro-batch for which dies is true.
func (r *elasticRun) start(id elastic.ID, first elastic.View, dies func(step, micro int) bool) {
	r.running.Go(func() {
		hash, err := r.train(id, first, dies)
		if errors.Is(err, errKilled) || id == r.unfit {
			if err := elastic.Bury(r.t.Context(), r.register, 0, id,
				func(int, elastic.Event) {}); err != nil {
				r.t.Error(err)
			}
		}
		if errors.Is(err, errKilled) {
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.hashes, r.errs = append(r.hashes, hash), append(r.errs, err)
	})
}

func (r *elasticRun) train(id elastic.ID, first elastic.View,
	dies func(step, micro int) bool) (hash string, err error) {
	defer func() {
		switch v := recover(); v {
		case nil:
		case errKilled:
			err = errKilled
		default:
			panic(v)
		}
	}()
	r.build.Lock()
	hidden := 10
	if id == r.unfit && r.lacks == "model" {
		hidden++
	}
	m, err := newElasticModel(6, hidden, r.way)
	r.build.Unlock()
	if err != nil {
		return "", err
	}
	if r.solves != nil {
		m.wraps = func(s solver.Solver) solver.Solver { return r.solves(id, s) }
	}
	job := r.join(id, first)
	e, err := r.way.begin(r.t, m, r.job(id, job), r.micros)
	if err != nil {
		return "", fmt.Errorf("process %d: %w", id, err)
	}
	defer func() { err = errors.Join(err, e.Close(), m.machine.Close()) }()
	e.After = func() error { return r.after(id, m, e) }
	if r.from != "" {
		if err := e.Load(r.from); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("process %d: %w", id, err)
		}
	}
	for e.Next() < r.steps {
		if id == r.early && e.Next() == 1 {
			return "early", errors.Join(e.Close(), m.machine.Close())
		}
		if _, err := e.Step(func(micro int) (float64, error) {
			if dies(e.Next(), micro) {
				return 0, errKilled
			}
			return m.run(e.Next(), micro)
		}); err != nil {
			return "", fmt.Errorf("process %d: %w", id, err)
		}
	}
	if r.way.shards&vm.Parameters != 0 {
		pull := autograd.Turn{Exchange: func() error { return m.machine.Pull() }}
		if err := e.Do(pull); err != nil {
			return "", fmt.Errorf("process %d: %w", id, err)
		}
	}
	r.ends(id, e)
	err = errors.Join(e.Close(), m.machine.Close())
	return m.state(), err
}

// join makes a process take part in the job.
func (r *elasticRun) join(id elastic.ID, first elastic.View) *session.Elastic {
	return session.NewElastic(session.ElasticConfig{ID: id, Limits: r.limits,
		First: first, Register: shared{r.register},
		Backends: func() []backend.Backend { return r.backends(id) },
		Env:      rendezvous.Env{Job: r.name, Size: 1, LocalSize: 1, Timeout: 30 * time.Second}})
}

func never(int, int) bool { return false }

// newElasticRun starts a job of n processes, whose steps have elasticMicros micro-batches, or n if
// that is more.
func newElasticRun(t testing.TB, name string, n, steps int, limits elastic.Limits,
	dies func(id elastic.ID) func(step, micro int) bool, with ...func(*elasticRun)) *elasticRun {
	r := &elasticRun{t: t, name: fmt.Sprintf("%s-%d", name, rand.Uint32()), steps: steps,
		micros: max(n, elasticMicros), limits: limits, register: rendezvous.NewMemStore(),
		job:   func(_ elastic.ID, job *session.Elastic) autograd.Job { return job },
		after: nothing, ends: func(elastic.ID, *autograd.Elastic) {}, backends: standard}
	for _, f := range with {
		f(r)
	}
	ids := make([]elastic.ID, n)
	for i := range ids {
		ids[i] = elastic.ID(i + 1)
	}
	first := elastic.First(ids...)
	for _, id := range ids {
		r.start(id, first, dies(id))
	}
	return r
}

// standard are the backends of most processes.
func standard(elastic.ID) []backend.Backend { return euryale.Backends() }

// awaitReplacement returns once a replacement is ready, or after 20 s.
func awaitReplacement(job *elastic.Job) {
	for i := 0; !job.Waits() && i < 2000; i++ {
		time.Sleep(10 * time.Millisecond)
	}
}

// nothing is what most processes do after a step.
func nothing(elastic.ID, *elasticModel, *autograd.Elastic) error { return nil }

// end waits for the job, and returns the parameters that all processes have.
func (r *elasticRun) end() string {
	r.running.Wait()
	require.NoError(r.t, errors.Join(r.errs...))
	if len(slices.Compact(r.hashes)) != 1 {
		r.t.Fatalf("processes have %d different ends", len(r.hashes))
	}
	return r.hashes[0]
}

func TestTrainingGoesOnWithTheSameBitsWhenRanksDie(t *testing.T) {
	const steps = 12
	first := elasticAlone(t, steps, planned)
	for _, way := range append(elasticWays, guarded, tiled) {
		want := elasticAlone(t, steps, way)
		require.Check(t, way.normed || way.tiled || want == first,
			"%+v: other parameters than on the host", way)
		got := newElasticRun(t, "four", 4, steps, elastic.Limits{Least: 1, Most: 4}, nobody,
			way.of).end()
		require.Check(t, got == want, "%+v: four ranks end with other parameters than one", way)
		r := newElasticRun(t, "two", 2, steps, elastic.Limits{Least: 1, Most: 2},
			func(id elastic.ID) func(step, micro int) bool {
				return func(step, micro int) bool { return id == 1 && step == 3 }
			}, way.of)
		if got := r.end(); got != want {
			t.Errorf("%+v: after the death of a rank the training has other parameters", way)
		}
	}
}

// of has a job train this way.
func (w elasticWay) of(r *elasticRun) { r.way = w }

func nobody(elastic.ID) func(int, int) bool { return never }

// elasticAlone returns the end of a training on one rank.
func elasticAlone(t testing.TB, steps int, way elasticWay) string {
	return newElasticRun(t, "alone", 1, steps, elastic.Limits{Least: 1, Most: 1}, nobody,
		way.of).end()
}

// aloneBySolver is elasticAlone without a solver in the machine.
func aloneBySolver(t testing.TB, steps int) string {
	return newElasticRun(t, "alone", 1, steps, elastic.Limits{Least: 1, Most: 1}, nobody,
		func(r *elasticRun) {
			r.solves = func(_ elastic.ID, s solver.Solver) solver.Solver { return s }
		}).end()
}

// TestPlansOfElasticTrainingsHaveTheBitsOfATree: of WithTree on one rank, with the averages of
// batch norms.
func TestPlansOfElasticTrainingsHaveTheBitsOfATree(t *testing.T) {
	const steps = 5
	m := require.Value(newElasticModel(6, 10, ofNorms))(t)
	m.machine = require.Value(vm.New(m.x.Graph(), nil, vm.WithTree(elasticMicros), vm.ClipNorm(0.5),
		vm.WithSolver(&solver.AdamW{Rate: 0.01, WeightDecay: 0.1}, m.weights...)))(t)
	defer m.machine.Close()
	for step := range steps {
		for micro := range elasticMicros {
			m.random.Seek(uint64(step*elasticMicros+micro), 0)
			require.NoError(t, require.Err(m.run(step, micro)))
		}
	}
	require.Equal(t, "an elastic training has other bits", m.state(),
		elasticAlone(t, steps, ofNorms))
}

// lossy is a job whose communicators lose calls: before their beginning, or unnoticed by the other
// ranks at their end.
type lossy struct {
	*session.Elastic
	loses     func(call int) bool
	unnoticed bool
	calls     int  // so far
	open      bool // the communicator of Next
}

// Next fails if the communicator of the generation before is open: its memory could not be given
// back while kernels of the next one wait.
func (l *lossy) Next(ctx context.Context, leave func(elastic.View) error) (backend.Communicator,
	elastic.View, error) {
	comm, view, err := l.Elastic.Next(ctx, leave)
	if err == nil && l.open {
		err = errors.New("the rank connects before it has left the generation before")
	}
	if err != nil {
		return nil, view, err
	}
	l.open = true
	return &lossyComm{comm, l}, view, nil
}

type lossyComm struct {
	backend.Communicator
	job *lossy
}

func (l *lossyComm) Close() error {
	l.job.open = false
	return l.Communicator.Close()
}

func (l *lossyComm) Start(q backend.Queue, c backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	l.job.calls++
	if !l.job.loses(l.job.calls - 1) {
		return l.Communicator.Start(q, c, dst, src)
	}
	lost := &backend.Error{Rank: l.Rank(), Peer: -1, Cause: errors.New("the call was cut off")}
	if !l.job.unnoticed {
		return nil, lost
	}
	w, err := l.Communicator.Start(q, c, dst, src)
	if err == nil {
		err = w.Join(context.Background())
	}
	return nil, cmp.Or(err, error(lost))
}

// TestARankMayBeCutOffInAnyCall: whatever is under way, at the beginning of a generation and in a
// step, and also where the other rank does not notice that the call has failed.
func TestARankMayBeCutOffInAnyCall(t *testing.T) {
	const steps, calls = 4, 48
	stride := 17
	if os.Getenv("EURYALE_FULL") != "" {
		stride = 1
	}
	ways := append(append(elasticWays, guarded, tiled), shardedWays...)
	for k, way := range ways { // each has other calls
		want := elasticAlone(t, steps, way)
		for call := 5 * k % stride; call < calls; call += stride {
			for _, unnoticed := range []bool{false, true} {
				cutOff(t, way, steps, want, unnoticed, func(n int) bool { return n == call },
					fmt.Sprint("call ", call))
			}
		}
	}
	cutOffTwice(t, guarded, steps, 15, stride/4+1)
	cutOffTwice(t, shardedWays[1], steps, 15, stride/4+1)
	cutOffTwice(t, shardedWays[3], steps, 20, stride/4+1)
}

// cutOffTwice cuts a rank off in a call behind the first step, and again
// while the ranks recover.
func cutOffTwice(t *testing.T, way elasticWay, steps, first, stride int) {
	const calls = 9
	want := elasticAlone(t, steps, way)
	for again := 1; again < calls; again += stride {
		cutOff(t, way, steps, want, again%2 == 0, func(n int) bool {
			return n == first || n == first+again
		}, fmt.Sprintf("calls %d and %d", first, first+again))
	}
}

// cutOff runs a job of two processes, or five that have shards, of which one loses calls.
func cutOff(t *testing.T, way elasticWay, steps int, want string, unnoticed bool,
	loses func(call int) bool, what string) {
	n := 2
	if way.shards != 0 {
		n = 5
	}
	r := newElasticRun(t, "cut", n, steps, elastic.Limits{Least: 1, Most: n}, nobody, way.of,
		func(r *elasticRun) {
			r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
				if id != 2 {
					return job
				}
				return &lossy{job, loses, unnoticed, 0, false}
			}
		})
	require.Check(t, r.end() == want, "%+v: %s, unnoticed %t: the training has other parameters",
		way, what, unnoticed)
}

func TestAPanicIsNotTheEndOfATraining(t *testing.T) {
	panicked := make(chan struct{})
	var in atomic.Bool
	r := newElasticRun(t, "panics", 2, 60, elastic.Limits{Least: 1, Most: 2},
		func(id elastic.ID) func(step, micro int) bool {
			return func(step, micro int) bool {
				if id == 1 && step == 3 {
					defer close(panicked)
					panic(errKilled) // Close is deferred
				}
				if step > 3 && !in.Load() {
					time.Sleep(20 * time.Millisecond)
				}
				return false
			}
		})
	r.running.Go(func() {
		<-panicked
		r.start(3, elastic.First(1, 2), func(int, int) bool { in.Store(true); return false })
	})
	if r.end(); !in.Load() {
		t.Error("nobody has taken the place of the process that panicked")
	}
}

func TestRanksMayDieInEachTryOfAStep(t *testing.T) {
	const ranks, steps = 16, 3
	limits := elastic.Limits{Least: 1, Most: ranks}
	want := newElasticRun(t, "all", ranks, steps, limits, nobody)
	r := newElasticRun(t, "halves", ranks, steps, limits, func(id elastic.ID) func(int, int) bool {
		rank := int(id) - 1
		return func(step, micro int) bool { // half of the ranks die in each try
			return step == 1 && rank > 0 && rank >= ranks/(micro/rank)/2
		}
	})
	require.Equal(t, "after four tries of a step the training has other parameters", r.end(),
		want.end())
}

func TestRanksThatCannotConnectSayWhy(t *testing.T) {
	t.Setenv("EURYALE_BACKEND", "nope")
	r := newElasticRun(t, "nope", 2, 4, elastic.Limits{Least: 1, Most: 2},
		func(elastic.ID) func(int, int) bool { return never })
	r.running.Wait()
	for _, err := range r.errs {
		require.Fails(t, "EURYALE_BACKEND", err, `"nope"`)
	}
}

func lossless(int) bool { return false }

// oneElastic begins a training of one rank.
func oneElastic(t *testing.T, way elasticWay, loses func(call int) bool) (*elasticModel,
	*autograd.Elastic) {
	r := &elasticRun{t: t, name: fmt.Sprintf("one-%d", rand.Uint32()), backends: standard,
		limits: elastic.Limits{Least: 1, Most: 1}, register: rendezvous.NewMemStore()}
	job := r.join(1, elastic.First(1))
	m := require.Value(newElasticModel(6, 10, way))(t)
	e := require.Value(way.begin(t, m, &lossy{job, loses, false, 0, false}, elasticMicros))(t)
	t.Cleanup(func() { require.NoError(t, errors.Join(e.Close(), m.machine.Close())) })
	return m, e
}

func TestAClosedElasticTrainingRefusesSteps(t *testing.T) {
	_, e := oneElastic(t, planned, lossless)
	for range 2 {
		require.Report(t, e.Close())
	}
	_, err := e.Step(func(int) (float64, error) { return 0, nil })
	require.Check(t, errors.Is(err, backend.ErrClosed), "a step after Close returns %v", err)
	if e.Rank() != 0 || e.Size() != 1 || e.DataParallel() == nil {
		t.Errorf("it was rank %d of %d", e.Rank(), e.Size())
	}
}

// TestPlansOfAShareAreKept: ranks of a generation that has the size of one before make no others.
func TestPlansOfAShareAreKept(t *testing.T) {
	m, e := oneElastic(t, planned, func(call int) bool { return call == 12 })
	first, generation := m.machine.Plan(), e.DataParallel()
	for e.Next() < 8 {
		require.NoError(t, require.Err(e.Step(func(micro int) (float64, error) {
			return m.run(e.Next(), micro)
		})))
	}
	if e.DataParallel() == generation || m.machine.Plan() != first {
		t.Errorf("the same generation %t, the same plan %t", e.DataParallel() == generation,
			m.machine.Plan() == first)
	}
}

// TestMachinesOfElasticTrainingsRunInSteps alone, and once for each micro-batch.
func TestMachinesOfElasticTrainingsRunInSteps(t *testing.T) {
	for want, step := range map[string]func(m *elasticModel, e *autograd.Elastic) error{
		"outside": func(m *elasticModel, e *autograd.Elastic) error {
			_, err := m.run(0, 0)
			return err
		},
		"0 times": func(m *elasticModel, e *autograd.Elastic) error {
			_, err := e.Step(func(int) (float64, error) { return 0, nil })
			return err
		},
		"2 times": func(m *elasticModel, e *autograd.Elastic) error {
			_, err := e.Step(func(i int) (float64, error) {
				_, err := m.run(0, i)
				m.random.Next(0)
				_, twice := m.run(0, i)
				return 0, errors.Join(err, twice)
			})
			return err
		},
	} {
		m, e := oneElastic(t, planned, lossless)
		require.Fails(t, "step", step(m, e), backend.ErrArgument, want)
	}
}

// elsewhere is a device that no elastic training is on.
type elsewhere struct{ backend.Device }

func (elsewhere) Name() string { return "elsewhere" }

// closed is a job of which nothing is used but its end.
type closed struct {
	job
	n, released int
}

type job interface{ autograd.Job }

func (*closed) Next(context.Context, func(elastic.View) error) (backend.Communicator, elastic.View,
	error) {
	return nil, elastic.View{}, errors.New("nobody lets it in")
}

func (c *closed) Close(bool) error {
	c.n++
	return nil
}

func (c *closed) Release(backend.Communicator) error {
	c.released = c.n
	return nil
}

// TestElasticMachinesRefuseWhatTheyCannotDo: and end the part of the process in the job.
func TestElasticMachinesRefuseWhatTheyCannotDo(t *testing.T) {
	m := require.Value(newElasticModel(6, 10, planned))(t)
	option := vm.WithSolver(&solver.SGD{Rate: 1}, m.weights...)
	job := &closed{}
	for want, options := range map[string][]vm.Option{
		"WithDataParallel": {option, vm.WithDataParallel(autograd.Solo())},
		"or WithTree":      {option, vm.WithTree(4)},
		"WithSolver, too":  {},
		"WithElastic says": {option, vm.Accumulate(2)},
		"0 micro-batches":  {option, vm.WithElastic(t.Context(), job, 0)},
		"elsewhere":        {option, vm.Keep()},
		"nobody lets it":   {option},
	} {
		var device backend.Device
		if want == "elsewhere" {
			device = elsewhere{}
		}
		options = append([]vm.Option{vm.WithElastic(t.Context(), job, 8)}, options...)
		require.Fails(t, "New", require.Err(vm.New(m.x.Graph(), device, options...)), want)
		require.Check(t, job.n == 1 && job.released == 1,
			"%q: the job is closed %d times, and its devices %d", want, job.n, job.released)
		job.n, job.released = 0, 0
	}
}

// TestCheckpointsOfGenerationsAreOfOneTraining: they count its steps, and a Save removes those that
// an earlier generation has written, also if the ranks of then are gone.
func TestCheckpointsOfGenerationsAreOfOneTraining(t *testing.T) {
	for i, way := range []elasticWay{planned, planned, guarded} {
		dir := t.TempDir()
		healed(t, 60, way, saves(dir, i > 0, 6))
		onlyStep(t, dir, 60)
	}
}

// TestALostRankIsNotTheEndOfALimitOfMemory: the rank that is left has more sums of gradients.
func TestALostRankIsNotTheEndOfALimitOfMemory(t *testing.T) {
	const steps = 5
	way, most := planned, 0
	var said []string
	run := func(dies func(id elastic.ID) func(step, micro int) bool) string {
		return newElasticRun(t, "limit", 2, steps, elastic.Limits{Least: 1, Most: 2}, dies, way.of,
			func(r *elasticRun) {
				r.after = func(id elastic.ID, m *elasticModel, e *autograd.Elastic) error {
					if s := m.machine.Summary().Memory; id == 2 {
						most = int(s.Total() - s.Workspace)
						said = append(said, m.said)
					}
					return nil
				}
			}).end()
	}
	want := run(nobody)
	if way.memory = most; run(nobody) != want {
		t.Error("a limit changes parameters")
	}
	if run(func(id elastic.ID) func(step, micro int) bool {
		return func(step, micro int) bool { return id == 1 && step == 2 }
	}) != want {
		t.Error("other parameters after the loss of a rank")
	}
	if n := len(said); said[n-4] != "" || !strings.Contains(said[n-1], "8 of 8 micro-batches") ||
		most <= way.memory {
		t.Errorf("%d bytes of %d: it says %q", most, way.memory, said)
	}
}

// TestAnElasticTrainingGoesOnFromACheckpoint: with the bits of one that has lost nobody, also where
// a rank is lost in the first step, or in any call of Load, and is replaced.
func TestAnElasticTrainingGoesOnFromACheckpoint(t *testing.T) {
	const before, steps = 2, 5
	for i, way := range append(elasticWays, guarded) {
		dir := t.TempDir()
		from := func(r *elasticRun) { r.way, r.from = way, dir }
		run := func(steps int, with ...func(*elasticRun)) *elasticRun {
			return newElasticRun(t, "resumes", 2, steps, elastic.Limits{Least: 2, Most: 2},
				nobody, append(with, from)...)
		}
		run(before, func(r *elasticRun) { r.after = saves(dir, i > 0, before) }).end()
		want := elasticAlone(t, steps, way)
		dies := run(steps, func(r *elasticRun) {
			r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
				if id == 1 {
					return job
				}
				cut := 8 + i // the 4 calls of Load are 8 to 11
				return &lossy{job, func(n int) bool { return n == cut }, i%2 == 0, 0, false}
			}
		})
		require.Check(t, dies.end() == want,
			"%+v: other parameters after a call of Load was cut off", way)
		r := newElasticRun(t, "resumes", 2, steps, elastic.Limits{Least: 2, Most: 2},
			func(id elastic.ID) func(step, micro int) bool {
				return func(int, int) bool { return id == 1 }
			}, from)
		r.start(3, elastic.First(1, 2), never)
		require.Check(t, r.end() == want,
			"%+v: other parameters after the death of a rank in the first step", way)
	}
}

// TestLoadOfAnElasticTrainingIsNotOfItsDataParallel: whose steps would begin at 0, without a word.
func TestLoadOfAnElasticTrainingIsNotOfItsDataParallel(t *testing.T) {
	newElasticRun(t, "refuses", 1, 2, elastic.Limits{Least: 1, Most: 1}, nobody,
		func(r *elasticRun) {
			r.from = t.TempDir() // without a checkpoint: training begins
			r.after = func(_ elastic.ID, m *elasticModel, e *autograd.Elastic) error {
				err := e.DataParallel().Load(r.from, m.solver, nil)
				require.Fails(t, "Load of the DataParallel", err, backend.ErrArgument)
				require.Fails(t, "Load after a step", e.Load(r.from), backend.ErrArgument)
				return nil
			}
		}).end()
}

// TestARankMayBeLostInASave: the others go on, and save again.
func TestARankMayBeLostInASave(t *testing.T) {
	const steps = 6
	for i, way := range []elasticWay{planned, planned, guarded} {
		dir := t.TempDir()
		save := saves(dir, i == 1, 1)
		r := newElasticRun(t, "saves", 2, steps, elastic.Limits{Least: 1, Most: 2}, nobody, way.of,
			func(r *elasticRun) {
				r.after = func(id elastic.ID, m *elasticModel, e *autograd.Elastic) error {
					if id == 1 && e.Next() == 3 {
						return errKilled
					}
					return save(id, m, e)
				}
			})
		if got := r.end(); got != elasticAlone(t, steps, way) {
			t.Errorf("%+v: other parameters than without checkpoints", way)
		}
		onlyStep(t, dir, steps)
	}
}

// TestTheFirstCheckpointIsOfTheTraining: also if nobody learns that it was saved, since rank 0 is
// cut off behind that. Later ones take its place.
func TestTheFirstCheckpointIsOfTheTraining(t *testing.T) {
	const steps = 4
	for call := 11; call < 18; call++ { // of the first Save
		dir := t.TempDir()
		r := newElasticRun(t, "first", 2, steps, elastic.Limits{Least: 1, Most: 2}, nobody,
			planned.of, func(r *elasticRun) {
				r.after = saves(dir, false, 1)
				r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
					if id > 1 {
						return job
					}
					return &lossy{job, func(n int) bool { return n == call }, false, 0, false}
				}
			})
		r.end()
		onlyStep(t, dir, steps)
	}
}

// saves returns what saves to a directory, behind the training or not, after every n-th step.
func saves(dir string, behind bool, n int) func(elastic.ID, *elasticModel,
	*autograd.Elastic) error {
	return func(_ elastic.ID, m *elasticModel, e *autograd.Elastic) error {
		dp := e.DataParallel()
		save := dp.Save
		if behind {
			save = dp.SaveAsync
		}
		if e.Next()%n > 0 {
			return nil
		}
		return save(dir, m.solver, e.Next(), autograd.KeepLast(1))
	}
}

// onlyStep checks that a directory has the checkpoint of a step, and nothing else.
func onlyStep(t *testing.T, dir string, step int) {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(dir, "*[0-9a-f]")) // not the lock
	want := fmt.Sprintf("step-%08d", step)
	require.Check(t, err == nil && len(all) == 1 && filepath.Base(all[0]) == want,
		"there are %v, want %s; %v", all, want, err)
}

func TestReplacementsTakeTheStateOfTheOthersAndGoOn(t *testing.T) {
	heals(t, append(elasticWays, guarded, tiled)...)
}

// heals has a replacement take the place of a process that has died, and go on when the other one
// dies.
func heals(t *testing.T, ways ...elasticWay) {
	const steps = 60
	for _, way := range ways {
		want := elasticAlone(t, steps, way)
		if got := healed(t, steps, way, nothing); got != want {
			t.Errorf("%+v: after deaths and a replacement the training has other parameters", way)
		}
	}
}

func healed(t *testing.T, steps int, way elasticWay, after func(elastic.ID,
	*elasticModel, *autograd.Elastic) error) string {
	var in atomic.Bool
	comes := make(chan struct{})
	r := newElasticRun(t, "heals", 2, steps, elastic.Limits{Least: 1, Most: 2},
		func(id elastic.ID) func(step, micro int) bool {
			return func(step, micro int) bool {
				if id == 1 && step == 3 {
					close(comes)
					return true
				}
				if step > 3 && !in.Load() {
					time.Sleep(20 * time.Millisecond)
				}
				return id == 2 && step > 5 && in.Load()
			}
		}, way.of, func(r *elasticRun) { r.after = after })
	r.running.Go(func() {
		<-comes
		r.start(3, elastic.First(1, 2), func(int, int) bool { in.Store(true); return false })
	})
	return r.end()
}

// slow is a backend with a driver that takes its time to start.
type slow struct {
	backend.Backend
	start func()
}

func (s slow) Available() error {
	s.start()
	return s.Backend.Available()
}

// TestAReplacementThatCannotTakePartEndsAlone: the others do each step without it. Its model is
// another one, it has not what the others connect by, its calls fail, or the others' progress has a
// number that it cannot be given.
func TestAReplacementThatCannotTakePartEndsAlone(t *testing.T) {
	endsAlone(t, guarded, "model")
	for _, lacks := range []string{"model", "backends", "calls", "progress"} {
		endsAlone(t, planned, lacks)
	}
}

func endsAlone(t *testing.T, way elasticWay, lacks string) {
	const joins, steps = 2, 6
	want := elasticAlone(t, steps, way)
	r := newElasticRun(t, "unfit", 2, steps, elastic.Limits{Least: 1, Most: 3}, nobody, way.of,
		func(r *elasticRun) {
			jobs := map[elastic.ID]*elastic.Job{}
			r.unfit, r.lacks = 3, lacks
			r.backends = func(id elastic.ID) []backend.Backend {
				if id == 3 && lacks == "backends" {
					return euryale.Backends()[:1]
				}
				return euryale.Backends()
			}
			r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
				r.mu.Lock()
				defer r.mu.Unlock()
				jobs[id] = job.Job()
				if id == 3 && lacks == "calls" {
					return &lossy{job, func(int) bool { return true }, false, 0, false}
				}
				return job
			}
			r.after = func(id elastic.ID, _ *elasticModel, e *autograd.Elastic) error {
				if lacks == "progress" {
					require.NoError(t, e.Share(&[]float64{math.NaN()}))
				}
				if e.Next() != joins || id != 1 {
					return nil
				}
				r.start(3, elastic.First(1, 2), never)
				r.mu.Lock()
				job := jobs[id]
				r.mu.Unlock()
				awaitReplacement(job)
				return nil
			}
		})
	r.running.Wait()
	failed := slices.IndexFunc(r.errs, func(err error) bool { return err != nil })
	says := map[string]string{"progress": "JSON has no such number"}[lacks]
	require.That(t, failed >= 0 && strings.Contains(r.errs[failed].Error(), "process 3") &&
		strings.Contains(r.errs[failed].Error(), says),
		"%+v, %s: the errors are %v", way, lacks, r.errs)
	r.errs, r.hashes = slices.Delete(r.errs, failed, failed+1), slices.Delete(r.hashes, failed,
		failed+1)
	require.Check(t, r.end() == want, "%+v, %s: other parameters than without it", way, lacks)
}

// broken is a backend that is not available any more, or that cannot connect.
type broken struct {
	backend.Backend
	connects *atomic.Int32 // how often it still does
	vanishes bool
}

func (b broken) Available() error {
	if b.vanishes && b.connects.Load() <= 0 {
		return errKilled
	}
	return b.Backend.Available()
}

func (b broken) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	if b.connects.Add(-1) < 0 {
		return nil, errKilled
	}
	return b.Backend.Connect(ctx, w)
}

// TestARankThatCannotConnectAgainEndsAlone: another one was lost, and the rest go on.
func TestARankThatCannotConnectAgainEndsAlone(t *testing.T) {
	const steps = 6
	want := elasticAlone(t, steps, planned)
	for _, vanishes := range []bool{false, true} {
		r := newElasticRun(t, "again", 4, steps, elastic.Limits{Least: 1, Most: 4},
			func(id elastic.ID) func(step, micro int) bool {
				return func(step, _ int) bool { return id == 4 && step == 2 }
			}, func(r *elasticRun) {
				r.unfit = 1
				r.backends = func(id elastic.ID) []backend.Backend {
					if id != 1 {
						return []backend.Backend{host.Backend{}}
					}
					once := &atomic.Int32{}
					once.Store(1)
					return []backend.Backend{broken{host.Backend{}, once, vanishes}}
				}
			})
		r.running.Wait()
		ended := 0
		for i, err := range r.errs {
			if err == nil && r.hashes[i] == want {
				ended++
			}
		}
		require.Check(t, ended == 2, "vanishes %t: %d ranks end as they should, %v", vanishes,
			ended, r.errs)
	}
}

// stateless is a solver whose state is lost.
type stateless struct{ solver.Solver }

func (stateless) State() (map[string]backend.Buffer, error) { return nil, errKilled }

// TestARankThatCannotHandOverEndsAlone: another one does.
func TestARankThatCannotHandOverEndsAlone(t *testing.T) {
	const joins, steps = 2, 6
	want := aloneBySolver(t, steps)
	r := newElasticRun(t, "stateless", 2, steps, elastic.Limits{Least: 1, Most: 3}, nobody,
		func(r *elasticRun) {
			var first *elastic.Job
			r.unfit = 1
			r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
				if id == 1 {
					first = job.Job()
				}
				return job
			}
			r.solves = func(id elastic.ID, s solver.Solver) solver.Solver {
				if id == 1 {
					return stateless{s}
				}
				return s
			}
			r.after = func(id elastic.ID, _ *elasticModel, e *autograd.Elastic) error {
				if e.Next() == joins && id == 1 {
					r.start(3, elastic.First(1, 2), never)
					awaitReplacement(first)
				}
				return nil
			}
		})
	require.Equal(t, "other parameters than without it", r.end(), want)
}

// TestNobodyWaitsForAReplacementThatLoads: its graph and its data, between JoinElastic and vm.New,
// and drivers.
func TestNobodyWaitsForAReplacementThatLoads(t *testing.T) {
	for _, driver := range []bool{false, true} {
		loadsSlowly(t, driver)
	}
}

func loadsSlowly(t *testing.T, driver bool) {
	const joins, loads, steps = 1, 5, 9
	var back bool
	var first *elastic.Job
	loading, loaded := make(chan struct{}), make(chan struct{})
	load := sync.OnceFunc(func() { close(loading); <-loaded })
	newElasticRun(t, "loads", 1, steps, elastic.Limits{Least: 1, Most: 2}, nobody, planned.of,
		func(r *elasticRun) {
			r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
				if id == 1 {
					first = job.Job()
				} else if !driver { // it has joined
					load()
				}
				return job
			}
			r.backends = func(id elastic.ID) []backend.Backend {
				return append(euryale.Backends(), slow{host.Backend{}, func() {
					if id > 1 && driver {
						load()
					}
				}})
			}
			r.after = func(id elastic.ID, _ *elasticModel, e *autograd.Elastic) error {
				if id > 1 {
					return nil
				}
				switch e.Next() {
				case joins:
					r.start(2, elastic.First(1), never)
					<-loading
				case loads:
					require.Check(t, e.Size() <= 1 && !first.Waits(),
						"a replacement that loads counts as ready")
					close(loaded)
					awaitReplacement(first)
				case steps:
					back = e.Size() == 2
				}
				return nil
			}
		}).end()
	require.Check(t, back, "the replacement does no steps")
}

// TestARecoveryIsCountedBesideAWaitingReplacement: who is let in after the step that was repeated.
func TestARecoveryIsCountedBesideAWaitingReplacement(t *testing.T) {
	var r *elasticRun
	var survivor atomic.Pointer[session.Elastic]
	newElasticRun(t, "counts", 2, 6, elastic.Limits{Least: 1, Most: 2},
		func(id elastic.ID) func(step, micro int) bool {
			return func(step, micro int) bool {
				if id == 2 && step == 3 && micro == 0 { // which it has only where it is alone
					r.start(3, elastic.First(1, 2), never)
					for range 2000 {
						if survivor.Load().Job().Waits() {
							return false
						}
						time.Sleep(10 * time.Millisecond)
					}
					t.Error("no replacement waits")
				}
				return id == 1 && step == 3
			}
		}, planned.of, func(run *elasticRun) {
			r = run
			r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
				if id == 2 {
					survivor.Store(job)
				}
				return job
			}
			r.ends = func(id elastic.ID, e *autograd.Elastic) {
				if n, took := e.Recoveries(); n != int(3-id) || n > 0 && took <= 0 {
					t.Errorf("process %d has recovered %d times, in %v", id, n, took)
				}
			}
		}).end()
}

// trainsElastic is a process of an elastic job. The second one kills itself in a step if
// EURYALE_TEST_DIES is "yes", and the other one does a step alone and waits until somebody comes.
// If it "closes", it closes its part then and stays; if it "stays", that is after the last step;
// and it "aborts" in each try. Each "leaves" in the middle, with 0.
func trainsElastic() error {
	const steps, recorded = 12, 5
	how := os.Getenv("EURYALE_TEST_DIES")
	began, dies := time.Now(), how == "yes"
	self, err := elastic.ReadEnv(os.Getenv("EURYALE_ELASTIC"))
	if err != nil {
		return err
	}
	job, err := euryale.JoinElastic(context.Background())
	if err != nil {
		return err
	}
	m, err := newElasticModel(6, 10, ofNorms)
	if err != nil {
		return err
	}
	m.machine, err = vm.New(m.x.Graph(), nil, vm.WithSolver(&solver.AdamW{Rate: 0.01},
		m.weights...), vm.WithElastic(context.Background(), job, elasticMicros))
	if err != nil {
		return err
	}
	e, alone := m.machine.Elastic(), false
	for e.Next() < steps {
		for i := 0; dies && e.Size() == 1 && alone && !job.Job().Waits() && i < 3000; i++ {
			time.Sleep(10 * time.Millisecond)
		}
		if how == "closes" && self.Process == 2 && e.Next() == recorded {
			err := m.machine.Close()
			time.Sleep(time.Hour)
			return err
		}
		if how == "leaves" && e.Next() == recorded {
			return nil
		}
		_, err := e.Step(func(micro int) (float64, error) {
			if how == "aborts" && self.Process == 2 && e.Next() >= recorded {
				e.Comm().Abort(errors.New("it has had enough"))
			}
			if dies && self.Process == 2 && e.Next() == recorded {
				p, err := os.FindProcess(os.Getpid())
				return 0, errors.Join(err, p.Kill(), errors.New("it lives on"))
			}
			return m.run(e.Next(), micro)
		})
		if err != nil {
			return err
		}
		if self.Process > 2 && !alone {
			fmt.Printf("back=%v\n", time.Since(began))
		}
		if n, took := e.Recoveries(); n > 0 && !alone {
			fmt.Printf("alone=%v\n", took)
		}
		alone = alone || self.Process > 2 || e.Size() == 1
	}
	where := e.Comm().Device().Name()
	err = m.machine.Close()
	if how == "late" && self.Process == 1 {
		return errors.New("the disk is full")
	}
	fmt.Printf("process=%d device=%s params=%x\n", self.Process, where,
		sha256.Sum256([]byte(m.state())))
	if how == "stays" && self.Process == 2 {
		time.Sleep(7 * time.Second) // says which process that is
	}
	return err
}

// TestAKilledProcessIsReplaced: and nobody can tell that by the parameters.
func TestAKilledProcessIsReplaced(t *testing.T) {
	t.Setenv("EURYALE_BACKEND", "host")
	killedAndReplaced(t, time.Second, 2*time.Second)
}

// TestAnErrorAfterTheLastStepFailsTheJob: the process is not replaced, and the other one ends well.
func TestAnErrorAfterTheLastStepFailsTheJob(t *testing.T) {
	t.Setenv("EURYALE_BACKEND", "host")
	out, err := elasticProcesses(t, "late")
	var f *launch.Failed
	require.Check(t, errors.As(err, &f) && f.Rank == 0 &&
		strings.Contains(out, "the disk is full") && !strings.Contains(out,
		"takes its place"), "the error is %v\n%s", err, out)
}

// TestATrainingThatNobodyHasFinishedFailsTheJob: although all processes say 0.
func TestATrainingThatNobodyHasFinishedFailsTheJob(t *testing.T) {
	t.Setenv("EURYALE_BACKEND", "host")
	out, err := elasticProcesses(t, "leaves")
	var f *launch.Failed
	require.Check(t, errors.As(err, &f) && f.ExitCode() == 1 &&
		strings.Contains(err.Error(), "last step"), "the error is %v\n%s", err, out)
}

// TestAProcessIsOverOnceItHasEnded: one that closes its part before the last step and stays is
// ended when the others have done that, and of one that stays after it the launcher tells.
func TestAProcessIsOverOnceItHasEnded(t *testing.T) {
	t.Setenv("EURYALE_BACKEND", "host")
	t.Setenv("EURYALE_TIMEOUT", "4s")
	var both sync.WaitGroup
	for how, says := range map[string]string{
		"closes": "process 1 hangs: ",
		"stays":  "the job waits for process 1 (pid ",
	} {
		both.Go(func() { // each waits for the timeout
			began := time.Now()
			out, err := elasticProcesses(t, how)
			require.Check(t, err == nil && strings.Contains(out, says),
				"it %s: %v, and it is not said that %q:\n%s", how, err, says, out)
			took := time.Since(began)
			require.Check(t, took <= proctest.Within(20*time.Second),
				"it %s: the job ends after %v", how, took)
		})
	}
	both.Wait()
}

// TestARankThatAbortsInEachTryLeaves: the job goes on, and another process takes its place.
func TestARankThatAbortsInEachTryLeaves(t *testing.T) {
	t.Setenv("EURYALE_BACKEND", "host")
	want := require.Value(elasticProcesses(t, ""))(t)
	out, err := elasticProcesses(t, "aborts")
	params := regexp.MustCompile(`params=\w+`)
	require.Check(t, err == nil && params.FindString(out) == params.FindString(want) &&
		strings.Contains(out, "process 1: the others go on without it") && strings.Contains(out,
		"process 2 takes its place"), "%v\n%s", err, out)
}

// elasticProcesses runs a job of two processes, of which one dies or not.
func elasticProcesses(t *testing.T, dies string) (output string, err error) {
	var out, notices strings.Builder
	err = launch.Run(t.Context(), launch.Job{Program: os.Args[0], Ranks: 2, Plain: true,
		Elastic: &launch.Elastic{Least: 1}, Stdout: &out, Stderr: &out,
		Notice: func(text string) { fmt.Fprintln(&notices, text) },
		Env: append(os.Environ(), "EURYALE_TEST_SCENARIO=trains elastic",
			"EURYALE_TEST_DIES="+dies)})
	return out.String() + notices.String(), err
}

// killedAndReplaced kills one of two processes. The other one goes on alone, and with the process
// that takes the place of the first one, after a time. It returns the devices of the two.
func killedAndReplaced(t *testing.T, alone, back time.Duration) (devices []string) {
	var outputs [2]string
	for i, dies := range []string{"", "yes"} {
		var err error
		if outputs[i], err = elasticProcesses(t, dies); err != nil {
			t.Fatalf("%v\n%s", err, outputs[i])
		}
	}
	ends := regexp.MustCompile(`params=\w+`)
	all := ends.FindAllString(strings.Join(outputs[:], ""), -1)
	require.Check(t, len(all) == 4 && len(slices.Compact(all)) == 1, "the processes end with %v",
		all)
	for name, promise := range map[string]time.Duration{"alone": alone, "back": back} {
		found := regexp.MustCompile(name + `=(\S+)`).FindStringSubmatch(outputs[1])
		require.That(t, found != nil, "nobody was %s:\n%s", name, outputs[1])
		took, err := time.ParseDuration(found[1])
		require.Check(t, err == nil && took <= proctest.Within(promise), "it is %s after %s, %v",
			name, found[1], err)
		t.Log(found[0])
	}
	return regexp.MustCompile(`device=\S+`).FindAllString(outputs[1], -1)
}

// TestEachGenerationHasItsTraces: and leaves those of the ones before.
func TestEachGenerationHasItsTraces(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("EURYALE_TRACE", filepath.Join(dir, "run"))
	newElasticRun(t, "traces", 3, 6, elastic.Limits{Least: 1, Most: 3},
		func(id elastic.ID) func(step, micro int) bool {
			return func(step, micro int) bool { return step == int(id) }
		}).running.Wait()
	for name, ranks := range map[string]int{"run": 0, "run.g0": 3, "run.g1": 2, "run.g2": 1} {
		for rank := range 3 {
			text, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("%s.%d.json", name, rank)))
			if got := strings.Contains(string(text), `"collective"`); got != (rank < ranks) {
				t.Errorf("a trace of rank %d in %s: %t, %v", rank, name, got, err)
			}
		}
	}
}

// TestATrainingGoesOnWithoutItsFiles: traces and plans. A disk that is full, say, is known before
// the work, or no reason to end it.
func TestATrainingGoesOnWithoutItsFiles(t *testing.T) {
	const steps = 5
	want := elasticAlone(t, steps, planned)
	dir := filepath.Join(t.TempDir(), "traces")
	require.NoError(t, os.Mkdir(dir, 0o700))
	t.Setenv("EURYALE_TRACE", filepath.Join(dir, "run"))
	t.Setenv("EURYALE_PLAN", filepath.Join(dir, "plan.txt"))
	if newElasticRun(t, "traceless", 2, steps, elastic.Limits{Least: 1, Most: 2},
		func(id elastic.ID) func(step, micro int) bool {
			return func(step, micro int) bool { return id == 1 && step == 2 }
		}, planned.of, func(r *elasticRun) {
			r.after = func(elastic.ID, *elasticModel, *autograd.Elastic) error {
				return os.RemoveAll(dir)
			}
		}).end() != want {
		t.Error("other parameters than with traces")
	}
}

// TestAFaultIsOfTheFirstGeneration: a later one may have no such rank.
func TestAFaultIsOfTheFirstGeneration(t *testing.T) {
	const steps = 5
	want := elasticAlone(t, steps, planned)
	t.Setenv("EURYALE_FAULT", "abort,rank=1,call=30")
	if newElasticRun(t, "fault", 2, steps, elastic.Limits{Least: 1, Most: 2},
		func(id elastic.ID) func(step, micro int) bool {
			return func(step, micro int) bool { return id == 2 && step == 3 }
		}, planned.of).end() != want {
		t.Error("other parameters than without a fault")
	}
}

func TestGenerationsLeaveNothingBehind(t *testing.T) {
	count := func() (files, goroutines int) {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("there is no /proc")
		}
		return len(fds), runtime.NumGoroutine()
	}
	replacements := 5
	if os.Getenv("EURYALE_FULL") != "" {
		replacements = 50
	}
	var done atomic.Bool
	r := newElasticRun(t, "leaks", 1, 1, elastic.Limits{Least: 1, Most: 2},
		func(elastic.ID) func(int, int) bool { return never })
	r.end()
	files, goroutines := count()
	r = newElasticRun(t, "leaks", 1, 1<<20, elastic.Limits{Least: 1, Most: 2},
		func(elastic.ID) func(int, int) bool { return func(int, int) bool { return done.Load() } })
	for i := range replacements { // each comes, and dies in its first step
		in := make(chan struct{})
		r.start(elastic.ID(i+2), elastic.First(1), func(int, int) bool { close(in); return true })
		<-in
	}
	done.Store(true)
	r.running.Wait()
	for range 100 { // goroutines that are told to end do so in a while
		if f, g := count(); f <= files && g <= goroutines {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	f, g := count()
	t.Errorf("%d files and %d goroutines have become %d and %d", files, goroutines, f, g)
}

// seen is a job whose present communicator can be had.
type seen struct {
	*session.Elastic
	comm backend.Communicator
}

func (s *seen) Next(ctx context.Context, leave func(elastic.View) error) (backend.Communicator,
	elastic.View, error) {
	comm, view, err := s.Elastic.Next(ctx, leave)
	s.comm = comm
	return comm, view, err
}

// BenchmarkElasticStep compares, by turns, a step of Elastic with what it consists of.
func BenchmarkElasticStep(b *testing.B) {
	for _, ranks := range []int{1, 2} {
		b.Run(fmt.Sprintf("ranks=%d", ranks), func(b *testing.B) {
			r := &elasticRun{t: b, name: fmt.Sprintf("bench-%d", rand.Uint32()),
				backends: standard,
				limits:   elastic.Limits{Least: 1, Most: ranks}, register: rendezvous.NewMemStore()}
			first := []elastic.View{elastic.First(1), elastic.First(1, 2)}[ranks-1]
			ratios := make([]float64, ranks)
			for rank := range ranks {
				r.running.Go(func() {
					var err error
					if ratios[rank], err = r.compare(elastic.ID(rank+1), first, b.N); err != nil {
						b.Error(err)
					}
				})
			}
			r.running.Wait()
			b.ReportMetric(ratios[0], "elastic/plain")
		})
	}
}

// compare does steps by turns, and returns the ratio of the medians of their times.
func (r *elasticRun) compare(id elastic.ID, first elastic.View, n int) (ratio float64, err error) {
	r.build.Lock()
	m, err := newElasticModel(256, 512, planned)
	p, failed := newElasticModel(256, 512, planned)
	r.build.Unlock()
	if err = errors.Join(err, failed); err != nil {
		return 0, err
	}
	job := r.join(id, first)
	s := &seen{Elastic: job}
	e, err := r.way.begin(r.t, m, s, elasticMicros)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, e.Close(), m.machine.Close()) }()
	p.machine, err = vm.New(p.x.Graph(), nil, vm.ClipNorm(0.5), vm.WithDataParallel(s.comm),
		vm.WithTree(elasticMicros), vm.WithSolver(&solver.AdamW{Rate: 0.01, WeightDecay: 0.1},
			p.weights...))
	if err != nil {
		return 0, err
	}
	defer p.machine.Close()
	begin, share, _ := autograd.TreeShare(elasticMicros, e.Rank(), e.Size())
	plain := func(number int) error {
		losses := make([]float64, share)
		for i := range losses {
			p.random.Seek(uint64(number*elasticMicros+begin+i), 0)
			var err error
			if losses[i], err = p.run(number, begin+i); err != nil {
				return err
			}
		}
		_, err := autograd.TreeMean(s.comm, losses)
		return err
	}
	var times [2][]time.Duration
	for step := range n {
		start := time.Now()
		if _, err := e.Step(func(i int) (float64, error) { return m.run(step, i) }); err != nil {
			return 0, err
		}
		between := time.Now()
		if err := plain(step); err != nil {
			return 0, err
		}
		times[0] = append(times[0], between.Sub(start))
		times[1] = append(times[1], time.Since(between))
	}
	median := func(all []time.Duration) float64 {
		slices.Sort(all)
		return float64(all[len(all)/2])
	}
	return median(times[0]) / median(times[1]), nil
}

// TestARankThatFailsAfterEachStepIsLeftOut: one rank checks the others alone, and no rank is lost,
// so that it would fail after each step of the training. Of two ranks either may be at fault.
func TestARankThatFailsAfterEachStepIsLeftOut(t *testing.T) {
	const steps = 30
	r := newElasticRun(t, "after", 2, steps, elastic.Limits{Least: 1, Most: 2}, nobody,
		func(r *elasticRun) {
			r.after = func(id elastic.ID, _ *elasticModel, e *autograd.Elastic) error {
				if id == 1 {
					return e.DataParallel().Check()
				}
				return nil
			}
		})
	r.running.Wait()
	ended := slices.DeleteFunc(slices.Clone(r.errs), func(err error) bool { return err == nil })
	require.Check(t, len(r.errs) == 2 && len(ended) == 1 && strings.Contains(ended[0].Error(),
		"Check"), "the errors are %v", r.errs)
}

// failing is a solver of which a step fails once it has changed parameters.
type failing struct {
	solver.Solver
	begun int
	fails func(step int) error
}

func (f *failing) Step(params []gorgonia.ValueGrad) error {
	f.begun++
	return cmp.Or(f.Solver.Step(params), f.fails(f.begun-1))
}

// TestAnErrorOfTheSolverIsFinalWhateverItIs: also one that looks like the loss of a rank, on all
// ranks or on one of them, whichever applies the step first: in the step, or, where it was cut off
// from the others, in the recovery.
func TestAnErrorOfTheSolverIsFinalWhateverItIs(t *testing.T) {
	const steps, bad, calls = 5, 2, 14
	want := aloneBySolver(t, steps)
	for call := calls; call >= 9; call-- { // of one rank, which is cut off there
		for _, both := range []bool{true, false} {
			begun := map[elastic.ID]*failing{}
			r := newElasticRun(t, "final", 2, steps, elastic.Limits{Least: 1, Most: 2}, nobody,
				func(r *elasticRun) {
					r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
						return &lossy{job, func(n int) bool { return id == 2 && n == call }, true,
							0, false}
					}
					r.solves = func(id elastic.ID, s solver.Solver) solver.Solver {
						f := &failing{Solver: s, fails: func(step int) error {
							if step == bad && (both || id == 2) {
								return &backend.Error{Peer: -1, Cause: errKilled}
							}
							return nil
						}}
						r.mu.Lock()
						defer r.mu.Unlock()
						begun[id] = f
						return f
					}
				})
			r.running.Wait()
			for id, f := range begun {
				if n := map[bool]int{true: bad + 1, false: steps}[both || id == 2]; f.begun != n {
					t.Errorf("call %d, both %t: rank %d has applied %d steps, want %d", call, both,
						id-1, f.begun, n)
				}
			}
			if !both && r.end() != want || both && len(r.errs) > 0 {
				t.Errorf("call %d, both %t: ended wrong: %v", call, both, r.errs)
			}
		}
	}
}

// TestNoStepFollowsOneThatHasPanicked: the parameters may have taken half a step.
func TestNoStepFollowsOneThatHasPanicked(t *testing.T) {
	_, e := oneElastic(t, planned, lossless)
	var err error
	for range 2 {
		func() {
			defer func() { _ = recover() }()
			_, err = e.Step(func(int) (float64, error) { panic(errKilled) })
		}()
	}
	require.Fails(t, "e.Step", err, "panicked")
}
