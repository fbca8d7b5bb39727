package euryale_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// elasticMicros is how many micro-batches a step has.
const elasticMicros = 8

// elasticModel is a small regression for one micro-batch.
type elasticModel struct {
	x, y, w1, w2, cost *gorgonia.Node
	machine            *vm.Machine
}

func newElasticModel() (*elasticModel, error) {
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
	m := &elasticModel{w1: weights("w1", 6, 10), w2: weights("w2", 10, 3)}
	m.x = gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("x"), gorgonia.WithShape(4, 6))
	m.y = gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithName("y"), gorgonia.WithShape(4, 3))
	h := gorgonia.Must(gorgonia.Tanh(gorgonia.Must(gorgonia.Mul(m.x, m.w1))))
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
	t        *testing.T
	name     string
	steps    int
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
	r.build.Lock()
	m, err := newElasticModel()
	r.build.Unlock()
	if err != nil {
		return "", err
	}
	defer m.machine.Close()
	job, err := session.NewElastic(r.t.Context(), session.ElasticConfig{ID: id, Limits: r.limits,
		First: first, Register: shared{r.register}, Backends: euryale.Backends,
		Env: rendezvous.Env{Job: r.name, Size: 1, LocalSize: 1, Timeout: 30 * time.Second}})
	if err != nil {
		return "", err
	}
	e, err := autograd.NewElastic(r.t.Context(), job, gorgonia.Nodes{m.w1, m.w2},
		&autograd.AdamW{Rate: 0.01, WeightDecay: 0.1}, elasticMicros)
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

func never(int, int) bool { return false }

// newElasticRun starts a job of n processes.
func newElasticRun(t *testing.T, name string, n, steps int, limits elastic.Limits,
	dies func(id elastic.ID) func(step, micro int) bool) *elasticRun {
	r := &elasticRun{t: t, name: fmt.Sprintf("%s-%d", name, rand.Uint32()), steps: steps,
		limits: limits, register: rendezvous.NewMemStore()}
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
