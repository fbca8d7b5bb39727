package euryale_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
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
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// elasticMicros is how many micro-batches a step has.
const elasticMicros = 8

// elasticModel is a small regression for one micro-batch.
type elasticModel struct {
	x, y, w1, w2, cost *gorgonia.Node
	random             *nn.Random
	machine            *vm.Machine
}

func newElasticModel(in, hidden int) (*elasticModel, error) {
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
	m := &elasticModel{w1: weights("w1", in, hidden), w2: weights("w2", hidden, 3),
		random: nn.NewRandom(3)}
	m.x = gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("x"), gorgonia.WithShape(4, in))
	m.y = gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("y"), gorgonia.WithShape(4, 3))
	h := gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Mul(m.x, m.w1))))
	h = gorgonia.Must(nn.Dropout(0.25, m.random, h))
	diff := gorgonia.Must(gorgonia.Sub(gorgonia.Must(gorgonia.Mul(h, m.w2)), m.y))
	m.cost = gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(diff))))
	if _, err := gorgonia.Grad(m.cost, m.w1, m.w2); err != nil {
		return nil, err
	}
	var err error
	m.machine, err = vm.New(g, nil)
	return m, err
}

// run runs a micro-batch of a step and returns its loss.
func (m *elasticModel) run(step, micro int) (float64, error) {
	random := rand.New(rand.NewPCG(uint64(step), uint64(micro)))
	for _, n := range []*gorgonia.Node{m.x, m.y} {
		t := tensor.New(tensor.WithShape(n.Shape()...), tensor.Of(tensor.Float32))
		for i := range t.Data().([]float32) {
			t.Data().([]float32)[i] = random.Float32()
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
	limits   elastic.Limits
	register rendezvous.Store
	build    sync.Mutex
	running  sync.WaitGroup

	mu     sync.Mutex
	hashes []string
	errs   []error
}

// shared is a register that processes do not close.
type shared struct{ rendezvous.Store }

func (shared) Close() error { return nil }

var errKilled = errors.New("killed")

// start starts a process, which is killed in a micro-batch for which dies is true.
func (r *elasticRun) start(id elastic.ID, first elastic.View, dies func(step, micro int) bool) {
	r.running.Go(func() {
		hash, err := r.train(id, first, dies)
		if errors.Is(err, errKilled) {
			if err := elastic.Bury(r.t.Context(), r.register, id); err != nil {
				r.t.Error(err)
			}
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
		if recover() == errKilled {
			err = errKilled
		}
	}()
	r.build.Lock()
	m, err := newElasticModel(6, 10)
	r.build.Unlock()
	if err != nil {
		return "", err
	}
	defer m.machine.Close()
	job, err := r.join(id, first)
	if err != nil {
		return "", err
	}
	e, err := autograd.NewElastic(r.t.Context(), job, gorgonia.Nodes{m.w1, m.w2},
		&autograd.AdamW{Rate: 0.01, WeightDecay: 0.1}, r.micros)
	if err != nil {
		return "", fmt.Errorf("process %d: %w", id, err)
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	for e.Next() < r.steps {
		if _, err := e.Step(func(micro int) (float64, error) {
			if dies(e.Next(), micro) {
				return 0, errKilled
			}
			return m.run(e.Next(), micro)
		}); err != nil {
			return "", fmt.Errorf("process %d: %w", id, err)
		}
	}
	return fmt.Sprint(m.w1.Value().Data(), m.w2.Value().Data()), nil
}

// join makes a process take part in the job.
func (r *elasticRun) join(id elastic.ID, first elastic.View) (*session.Elastic, error) {
	return session.NewElastic(r.t.Context(), session.ElasticConfig{ID: id, Limits: r.limits,
		First: first, Register: shared{r.register}, Backends: euryale.Backends,
		Env: rendezvous.Env{Job: r.name, Size: 1, LocalSize: 1, Timeout: 30 * time.Second}})
}

func never(int, int) bool { return false }

// newElasticRun starts a job of n processes, whose steps have elasticMicros micro-batches, or n if
// that is more.
func newElasticRun(t testing.TB, name string, n, steps int, limits elastic.Limits,
	dies func(id elastic.ID) func(step, micro int) bool) *elasticRun {
	r := &elasticRun{t: t, name: fmt.Sprintf("%s-%d", name, rand.Uint32()), steps: steps,
		micros: max(n, elasticMicros), limits: limits, register: rendezvous.NewMemStore()}
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

// end waits for the job, and returns the parameters that all processes have.
func (r *elasticRun) end() string {
	r.running.Wait()
	if err := errors.Join(r.errs...); err != nil {
		r.t.Fatal(err)
	}
	if len(slices.Compact(r.hashes)) != 1 {
		r.t.Fatalf("processes have %d different ends", len(r.hashes))
	}
	return r.hashes[0]
}

func TestTrainingGoesOnWithTheSameBitsWhenRanksDie(t *testing.T) {
	nobody := func(elastic.ID) func(int, int) bool { return never }
	const steps = 12
	want := newElasticRun(t, "alone", 1, steps, elastic.Limits{Least: 1, Most: 1}, nobody).end()
	if got := newElasticRun(t, "four", 4, steps, elastic.Limits{Least: 1, Most: 4},
		nobody).end(); got != want {
		t.Error("four ranks end with other parameters than one")
	}
	r := newElasticRun(t, "two", 2, steps, elastic.Limits{Least: 1, Most: 2},
		func(id elastic.ID) func(step, micro int) bool {
			return func(step, micro int) bool { return id == 1 && step == 3 }
		})
	if got := r.end(); got != want {
		t.Error("after the death of a rank the training has other parameters")
	}
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
	nobody := func(elastic.ID) func(int, int) bool { return never }
	want := newElasticRun(t, "all", ranks, steps, elastic.Limits{Least: 1, Most: ranks}, nobody)
	r := newElasticRun(t, "halves", ranks, steps, elastic.Limits{Least: 1, Most: ranks},
		func(id elastic.ID) func(int, int) bool {
			rank := int(id) - 1
			return func(step, micro int) bool { // half of the ranks die in each try
				return step == 1 && rank > 0 && rank >= ranks/(micro/rank)/2
			}
		})
	if r.end() != want.end() {
		t.Error("after four tries of a step the training has other parameters")
	}
}

func TestRanksThatCannotConnectSayWhy(t *testing.T) {
	t.Setenv("EURYALE_BACKEND", "nope")
	r := newElasticRun(t, "nope", 2, 4, elastic.Limits{Least: 1, Most: 2},
		func(elastic.ID) func(int, int) bool { return never })
	r.running.Wait()
	for _, err := range r.errs {
		if err == nil || !strings.Contains(err.Error(), `"nope"`) {
			t.Errorf("the error is %v", err)
		}
	}
}

func TestAClosedElasticTrainingRefusesSteps(t *testing.T) {
	r := &elasticRun{t: t, name: fmt.Sprintf("closed-%d", rand.Uint32()),
		limits: elastic.Limits{Least: 1, Most: 1}, register: rendezvous.NewMemStore()}
	job, err := r.join(1, elastic.First(1))
	if err != nil {
		t.Fatal(err)
	}
	m, err := newElasticModel(6, 10)
	if err != nil {
		t.Fatal(err)
	}
	defer m.machine.Close()
	e, err := autograd.NewElastic(t.Context(), job, gorgonia.Nodes{m.w1, m.w2},
		&autograd.SGD{Rate: 0.1}, elasticMicros)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := e.Step(func(int) (float64, error) { return 0, nil }); !errors.Is(err,
		backend.ErrClosed) {
		t.Errorf("a step after Close returns %v", err)
	}
	if e.Rank() != 0 || e.Size() != 1 || e.DataParallel() == nil {
		t.Errorf("it was rank %d of %d", e.Rank(), e.Size())
	}
}

func TestNewcomersTakeTheStateOfTheOthersAndGoOn(t *testing.T) {
	nobody := func(elastic.ID) func(int, int) bool { return never }
	const steps = 60
	want := newElasticRun(t, "alone", 1, steps, elastic.Limits{Least: 1, Most: 1}, nobody).end()
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
		})
	r.running.Go(func() {
		<-comes
		r.start(3, elastic.First(1, 2), func(int, int) bool { in.Store(true); return false })
	})
	if got := r.end(); got != want {
		t.Error("after two deaths and a newcomer the training has other parameters")
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
	newcomers := 5
	if os.Getenv("EURYALE_FULL") != "" {
		newcomers = 50
	}
	var done atomic.Bool
	r := newElasticRun(t, "leaks", 1, 1, elastic.Limits{Least: 1, Most: 2},
		func(elastic.ID) func(int, int) bool { return never })
	r.end()
	files, goroutines := count()
	r = newElasticRun(t, "leaks", 1, 1<<20, elastic.Limits{Least: 1, Most: 2},
		func(elastic.ID) func(int, int) bool {
			return func(int, int) bool { return done.Load() }
		})
	for i := range newcomers { // each comes, and dies in its first step
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

func (s *seen) Next(ctx context.Context) (backend.Communicator, elastic.View, error) {
	comm, view, err := s.Elastic.Next(ctx)
	s.comm = comm
	return comm, view, err
}

// BenchmarkElasticStep compares, by turns, a step of Elastic with what it consists of.
func BenchmarkElasticStep(b *testing.B) {
	for _, ranks := range []int{1, 2} {
		b.Run(fmt.Sprintf("ranks=%d", ranks), func(b *testing.B) {
			r := &elasticRun{t: b, name: fmt.Sprintf("bench-%d", rand.Uint32()),
				limits: elastic.Limits{Least: 1, Most: ranks}, register: rendezvous.NewMemStore()}
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
	m, err := newElasticModel(256, 512)
	p, failed := newElasticModel(256, 512)
	r.build.Unlock()
	if err = errors.Join(err, failed); err != nil {
		return 0, err
	}
	defer m.machine.Close()
	defer p.machine.Close()
	job, err := r.join(id, first)
	if err != nil {
		return 0, err
	}
	s := &seen{Elastic: job}
	e, err := autograd.NewElastic(r.t.Context(), s, gorgonia.Nodes{m.w1, m.w2},
		&autograd.AdamW{Rate: 0.01}, elasticMicros)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	dp, err := autograd.New(s.comm, gorgonia.Nodes{p.w1, p.w2}, autograd.WithTree(elasticMicros))
	if err != nil {
		return 0, err
	}
	defer dp.Close()
	solver, share := &autograd.AdamW{Rate: 0.01}, elasticMicros/e.Size()
	plain := func(step int) error {
		losses := make([]float64, share)
		err := dp.Accumulate(share, func(i int) (err error) {
			p.random.Seek(uint64(step*elasticMicros+i), 0)
			losses[i], err = p.run(step, e.Rank()*share+i)
			return err
		})
		grads, failed := dp.Sync()
		_, lost := autograd.TreeMean(s.comm, losses)
		return errors.Join(err, failed, lost, solver.Step(grads))
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
