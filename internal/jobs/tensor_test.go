package jobs_test

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// tensorRun is an elastic job whose processes are goroutines, and shard the weights of a model.
type tensorRun struct {
	*elasticRun
	first    elastic.View
	tensor   int
	replaces bool // who ends is replaced, as by the launcher
	numbers  sync.Mutex
	last     elastic.ID
}

// newTensorRun starts a job of n processes.
func newTensorRun(t *testing.T, n, parts, steps int, with ...func(*tensorRun)) *tensorRun {
	r := &tensorRun{elasticRun: &elasticRun{t: t, name: fmt.Sprintf("tensor-%d", rand.Uint32()),
		steps: steps, micros: elasticMicros, limits: elastic.Limits{Least: 1, Most: n},
		register: rendezvous.NewMemStore(), backends: standard, after: nothing,
		job: func(_ elastic.ID, job *session.Elastic) autograd.Job { return job }}, tensor: parts}
	var ids []elastic.ID
	for i := range n {
		ids = append(ids, elastic.ID(i+1))
	}
	r.first, r.last = elastic.First(ids...), elastic.ID(n)
	for _, f := range with {
		f(r)
	}
	for _, id := range ids {
		r.begin(id)
	}
	return r
}

// begin starts a process.
func (r *tensorRun) begin(id elastic.ID) {
	r.running.Go(func() {
		hash, err := r.run(id)
		var stopped *elastic.StoppedError
		left := errors.As(err, &stopped) && (stopped.Why == elastic.Surplus ||
			stopped.Why == elastic.LeftBehind)
		if left || errors.Is(err, errKilled) || errors.Is(err, errTold) {
			if err := elastic.Bury(r.t.Context(), r.register, 0, id,
				func(int, elastic.Event) {}); err != nil {
				r.t.Error(err)
			}
			if r.replaces {
				r.numbers.Lock()
				r.last++
				r.begin(r.last)
				r.numbers.Unlock()
			}
			if !errors.Is(err, errTold) {
				return
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.hashes, r.errs = append(r.hashes, hash), append(r.errs, err)
	})
}

var errTold = errors.New("told to end")

// run is a process of the job. It returns the hash of the whole model.
func (r *tensorRun) run(id elastic.ID) (hash string, err error) {
	defer func() {
		switch v := recover(); v {
		case nil:
		case errKilled:
			err = errKilled
		default:
			panic(v)
		}
	}()
	const width, positions, words = 6, 4, 7
	job := r.job(id, r.join(id, r.first))
	layout, err := layers.NewElasticLayout(r.t.Context(), job, r.tensor)
	if err != nil {
		return "", err
	}
	r.build.Lock()
	b := layers.NewBuilder(gorgonia.NewGraph(), layout, tensor.Float32, 1)
	b.Batches(1)
	tokens, targets := b.Tokens("tokens", 1, 2, positions), b.Tokens("targets", 1, 2, positions)
	embedding := b.Learn("words", layers.Normal(0.1), 0, words, width)
	random := nn.NewRandom(3)
	x := b.To(b.Embedding(embedding, tokens), layers.Tensor, layers.Replicated)
	x = b.Add(x, b.Attention("attention", b.LayerNorm("norm1", x), layers.AttentionOptions{
		Heads: 3, Causal: true}))
	x = b.Dropout(0.25, random, b.Add(x, b.MLP("mlp", b.LayerNorm("norm2", x), 2*width)))
	loss := b.CrossEntropy(b.Logits(b.LayerNorm("norm", x), embedding), targets)
	learnables, err := b.Grad(loss)
	r.build.Unlock()
	if err != nil {
		return "", err
	}
	m := &elasticModel{solver: &solver.AdamW{Rate: 0.01, WeightDecay: 0.1}}
	options := []vm.Option{vm.Keep(loss.Node), vm.ClipNorm(0.5),
		vm.WithSolver(m.solver, learnables...), vm.WithElastic(r.t.Context(), job, r.micros),
		vm.Notice(func(text string) { m.said += text })}
	if r.way.shards != 0 {
		options = append(options, vm.WithShards(r.way.shards))
	}
	m.machine, err = vm.New(b.Graph(), nil, options...)
	if err != nil {
		return "", err
	}
	e := m.machine.Elastic()
	defer func() { err = errors.Join(err, e.Close(), m.machine.Close(), layout.Close()) }()
	e.After = func() error { return r.after(id, m, e) }
	var done bool
	if err := e.Share(&done); err != nil {
		return "", err
	}
	if r.from != "" {
		if err := e.Load(r.from); err != nil || e.Next() == 0 {
			return "", fmt.Errorf("resumes from step %d: %w", e.Next(), err)
		}
	}
	for e.Next() < r.steps {
		_, err := e.Step(func(micro int) (float64, error) {
			draws := rand.New(rand.NewPCG(uint64(e.Next()), uint64(micro)))
			draw := func() (ids []int) {
				for range 2 * positions {
					ids = append(ids, draws.IntN(words))
				}
				return ids
			}
			err := cmp.Or(tokens.Set(draw()), targets.Set(draw()), m.machine.RunAll())
			if err != nil {
				return 0, err
			}
			return float64(loss.Value().Data().(float32)), nil
		})
		if err != nil {
			return "", fmt.Errorf("process %d: %w", id, err)
		}
	}
	if !done {
		err = e.Do(autograd.Turn{Exchange: func() (err error) {
			random.Seek(0, 0) // which ran other micro-batches on each rank
			if err = e.DataParallel().Check(); err == nil {
				hash, err = e.DataParallel().Hash()
			}
			return err
		}, Apply: func(float64) { done = true }})
	}
	return hash, err
}

// TestTensorRanksHeal: one after the other dies, each in a call that is drawn, and is replaced or
// not, with drawn numbers of tensor ranks and replicas. The model has the bits of one replica.
func TestTensorRanksHeal(t *testing.T) {
	const steps = 12
	seeds := 20
	if os.Getenv("EURYALE_FULL") != "" {
		seeds = 400
	}
	want, died := map[int]string{}, 0
	for seed := range seeds {
		random := rand.New(rand.NewPCG(62, uint64(seed)))
		parts := 2 + random.IntN(2)
		if want[parts] == "" {
			r := newTensorRun(t, parts, parts, steps)
			want[parts] = r.end()
		}
		n := parts * (2 + random.IntN(2))
		d := &deaths{steps: map[elastic.ID]int{}}
		victims := random.Perm(n)[:1+random.IntN(3)]
		r := newTensorRun(t, n, parts, steps, func(r *tensorRun) {
			r.replaces = random.IntN(3) > 0
			if !r.replaces {
				victims = victims[:1]
			}
			r.after = d.stepped
			calls := random.Perm(300)
			r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
				number := slices.Index(victims, int(id)-1)
				if number < 0 {
					return job
				}
				return &mortal{job, d, number, calls[number], 0}
			}
		})
		r.running.Wait()
		died += int(d.dead.Load())
		for i, err := range r.errs {
			require.Check(t, err == nil && (r.hashes[i] == want[parts] || r.hashes[i] == "") ||
				errors.Is(err, autograd.ErrFinished), "seed %d, %d x %d ranks, of which %v die: "+
				"%v, or other parameters", seed, n/parts, parts, victims, err)
		}
		require.Check(t, slices.Contains(r.hashes, want[parts]), "seed %d: nobody has finished: %v",
			seed, errors.Join(r.errs...))
	}
	require.Check(t, died > seeds/2, "only %d ranks have died", died)
}

// TestTheLossOfAllRanksWithAPartOfTheModelEndsTheTraining: by an error that names them.
func TestTheLossOfAllRanksWithAPartOfTheModelEndsTheTraining(t *testing.T) {
	r := newTensorRun(t, 4, 2, 8, func(r *tensorRun) {
		r.after = func(id elastic.ID, _ *elasticModel, e *autograd.Elastic) error {
			if e.Next() == 3 && id%2 == 1 {
				panic(errKilled)
			}
			return nil
		}
	})
	r.running.Wait()
	require.Equal(t, "errors", len(r.errs), 2)
	for _, err := range r.errs {
		require.Fails(t, "the training", err, "one part of the parameters (process 0, process 2)",
			"last checkpoint")
	}
}

// TestTensorRanksSayHowManyCopiesTheyHave: at the start, and when that changes.
func TestTensorRanksSayHowManyCopiesTheyHave(t *testing.T) {
	var said string
	r := newTensorRun(t, 4, 2, 4, func(r *tensorRun) {
		r.after = func(id elastic.ID, m *elasticModel, e *autograd.Elastic) error {
			switch {
			case id == 1: // the first rank of the first replica
				said = m.said
			case id == 4 && e.Next() == 2:
				panic(errKilled)
			}
			return nil
		}
	})
	r.running.Wait()
	for others := range 2 {
		text := fmt.Sprintf("on other replicas: %d", others)
		require.Check(t, strings.Count(said, text) == 1, "they say %q", said)
	}
}

// comes starts so many replacements, and waits a while until two of them are ready.
func (r *tensorRun) comes(n int, job *elastic.Job) {
	for range n {
		r.last++
		r.begin(r.last)
	}
	for i := 0; n == 2 && !job.Ready() && i < 2000; i++ {
		time.Sleep(10 * time.Millisecond)
	}
}

// TestTensorRanksLeaveOnceAnotherOneHasTheirPart: ranks that are told to end leave once another one
// has their part, and the others of their replica with them. Where nobody is there to have it, the
// first rank that has it stays.
func TestTensorRanksLeaveOnceAnotherOneHasTheirPart(t *testing.T) {
	const steps = 8
	want := newTensorRun(t, 2, 2, steps).end()
	for _, is := range []struct {
		n, come int
		told    []elastic.ID
		leave   int
	}{
		{4, 0, []elastic.ID{1}, 1}, {2, 0, []elastic.ID{1}, 0}, {4, 0, []elastic.ID{1, 3}, 1},
		{2, 1, []elastic.ID{2}, 0}, {2, 2, []elastic.ID{1}, 1}, {2, 2, []elastic.ID{2, 1}, 2},
		{4, 2, []elastic.ID{2, 4}, 2}, {4, 2, []elastic.ID{1, 2, 3, 4}, 4},
	} {
		var last atomic.Int32
		r := newTensorRun(t, is.n, 2, steps, func(r *tensorRun) {
			var first atomic.Pointer[session.Elastic]
			r.job = func(id elastic.ID, job *session.Elastic) autograd.Job {
				if id == 1 {
					first.Store(job)
				}
				return job
			}
			r.after = func(id elastic.ID, _ *elasticModel, e *autograd.Elastic) error {
				if e.Next() == 2 && id == 1 {
					r.comes(is.come, first.Load().Job())
				}
				if e.Next() == 2 && slices.Contains(is.told, id) {
					e.Retire(errTold)
				}
				last.Store(int32(e.Size()))
				return nil
			}
		})
		r.running.Wait()
		ended := 0
		for i, err := range r.errs {
			switch {
			case errors.Is(err, errTold):
				ended++
			case !errors.Is(err, autograd.ErrFinished): // which nobody has needed
				require.Check(t, err == nil && (r.hashes[i] == want || r.hashes[i] == ""),
					"%+v: %v, or other parameters", is, err)
			}
		}
		require.Check(t, ended == is.leave && slices.Contains(r.hashes, want),
			"%+v: %d have left", is, ended)
		require.Check(t, last.Load() == 2 || is.come > 0, "%+v: %d ranks at the end", is,
			last.Load())
	}
}

// TestCheckpointsOfTensorRanksAreForAnyNumberOfReplicas: one saves, others go on.
func TestCheckpointsOfTensorRanksAreForAnyNumberOfReplicas(t *testing.T) {
	const before, steps = 3, 6
	want := newTensorRun(t, 2, 2, steps).end()
	dir := t.TempDir()
	newTensorRun(t, 4, 2, before, func(r *tensorRun) { r.after = saves(dir, true, before) }).end()
	for _, n := range []int{2, 4, 6} {
		r := newTensorRun(t, n, 2, steps, func(r *tensorRun) { r.from = dir })
		require.Check(t, r.end() == want, "%d ranks: other parameters", n)
	}
}

// TestElasticLayoutsRefuseWhatTheyCannotDo: by errors that say what to do.
func TestElasticLayoutsRefuseWhatTheyCannotDo(t *testing.T) {
	for want, r := range map[string]*tensorRun{
		"start a multiple of 2": newTensorRun(t, 3, 2, 1),
		"0 tensor ranks":        newTensorRun(t, 1, 0, 1),
		"whose ranks shard weights: leave one of them out": newTensorRun(t, 2, 2, 1,
			func(r *tensorRun) { r.way.shards = vm.SolverState }),
	} {
		r.running.Wait()
		for _, err := range r.errs {
			require.Fails(t, "the training", err, want)
		}
	}
}
