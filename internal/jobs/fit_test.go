package jobs_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/internal/testing/mlflow"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/tensorboard"
	"github.com/euryale-ml/euryale/vm"

	"gorgonia.org/gorgonia"
)

// The samples of a training by package fit, and how it goes through them: two steps in an epoch,
// and a save within the second one.
const (
	fitSamples = 2*4*elasticMicros + 5
	fitEpochs  = 3
)

// fitRun is an elastic job whose processes train by package fit.
type fitRun struct {
	*elasticRun
	dir   string // of checkpoints
	hook  func(id elastic.ID, s fit.StepLoss) error
	epoch func(id elastic.ID, e fit.Epoch)
	until func(id elastic.ID) context.Context
	wrong func(sample int) error // of a sample of the training
	more  []fit.Option
	runs  *mlflow.Server

	results []*fit.Result
	epochs  atomic.Int32 // for which hooks were called
}

// newFitRun starts a job of n processes.
func newFitRun(t testing.TB, n int, with func(*fitRun)) *fitRun {
	f := &fitRun{dir: t.TempDir(), hook: func(elastic.ID, fit.StepLoss) error { return nil },
		epoch: func(elastic.ID, fit.Epoch) {}, wrong: func(int) error { return nil },
		until: func(elastic.ID) context.Context { return context.Background() }}
	f.elasticRun = newElasticRun(t, "fit", 0, 0, elastic.Limits{Least: 1, Most: n}, nobody,
		ofNorms.of)
	f.runs = mlflow.New(t)
	f.micros = elasticMicros
	with(f)
	for id := range n {
		f.enter(elastic.ID(id+1), n)
	}
	return f
}

// enter starts a process of a job that n processes have begun.
func (f *fitRun) enter(id elastic.ID, n int) {
	var ids []elastic.ID
	for i := range n {
		ids = append(ids, elastic.ID(i+1))
	}
	f.running.Go(func() {
		result, hash, err := f.fit(id, elastic.First(ids...))
		if err != nil {
			if err := elastic.Bury(f.t.Context(), f.register, 0, id,
				func(int, elastic.Event) {}); err != nil {
				f.t.Error(err)
			}
		}
		if errors.Is(err, errKilled) || errors.Is(err, autograd.ErrFinished) {
			return
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.errs = append(f.errs, err)
		if err == nil {
			f.hashes, f.results = append(f.hashes, hash), append(f.results, result)
		}
	})
}

func (f *fitRun) fit(id elastic.ID, first elastic.View) (result *fit.Result, hash string,
	err error) {
	defer func() {
		if v := recover(); v == errKilled {
			err = errKilled
		} else if v != nil {
			panic(v)
		}
	}()
	f.build.Lock()
	m, err := newElasticModel(6, 10, f.way)
	f.build.Unlock()
	if err != nil {
		return nil, "", err
	}
	if _, err = f.way.begin(f.t, m, f.job(id, f.join(id, first)), f.micros); err != nil {
		return nil, "", err
	}
	defer func() { err = errors.Join(err, m.machine.Close()) }()
	f.build.Lock()
	judge, err := vm.New(m.x.Graph(), nil, vm.Eval(), vm.Keep(m.cost))
	f.build.Unlock()
	if err != nil {
		return nil, "", err
	}
	defer judge.Close()
	inputs := func(n int) fit.Data {
		set := samplesOf(n)
		if n == fitSamples {
			set = data.Of(n, func(i int, row []any) error {
				return errors.Join(f.wrong(i), samplesOf(n).Read(i, row))
			})
		}
		return fit.Data{Set: set, Inputs: gorgonia.Nodes{m.x, m.y}, Loss: m.cost}
	}
	result, err = fit.Run(f.until(id), m.machine, inputs(fitSamples), append([]fit.Option{
		fit.Epochs(fitEpochs), fit.Random(m.random), fit.Checkpoint(f.dir, 3),
		fit.Schedule(func(step int) float64 { return 0.01 / float64(1+step) }),
		fit.Validate(judge, inputs(4*elasticMicros), highest),
		fit.OnEpoch(func(e fit.Epoch) error { f.epochs.Add(1); f.epoch(id, e); return nil }),
		fit.OnStep(func(s fit.StepLoss) error { return f.hook(id, s) }),
		fit.TensorBoard(filepath.Join(f.dir, "shown")), fit.MLflow(f.runs.URL, "fit", nil)},
		f.more...)...)
	if err == nil {
		hash = m.state()
	}
	return result, hash, err
}

// highest is the loss as a metric of which more is better: the first epoch is the best one.
var highest = fit.Metric{Name: "highest", Value: func(_ []float64, loss float64) float64 {
	return loss
}}

// restoring makes a training lower its rate after each epoch but the first, to which it returns.
func restoring() []fit.Option {
	return []fit.Option{fit.Watch("highest"), fit.ReduceOnPlateau(0.5, 1), fit.RestoreBest()}
}

// samplesOf are samples of the elastic model.
func samplesOf(n int) fit.Set {
	return data.Of(n, func(i int, row []any) error {
		random := rand.New(rand.NewPCG(7, uint64(i)))
		for _, values := range row {
			for k := range values.([]float32) {
				values.([]float32)[k] = random.Float32()
			}
		}
		return nil
	})
}

// severed is a job that is cut off from the others in a call.
type severed struct {
	*session.Elastic
	at    int // which call it is
	late  bool
	calls int // so far
}

func (s *severed) Next(ctx context.Context, leave func(elastic.View) error) (
	backend.Communicator, elastic.View, error) {
	comm, view, err := s.Elastic.Next(ctx, leave)
	return &severedComm{comm, s}, view, err
}

type severedComm struct {
	backend.Communicator
	job *severed
}

func (s *severedComm) Start(q backend.Queue, c backend.Collective, dst,
	src backend.Buffer) (w backend.Work, err error) {
	s.job.calls++
	last := s.job.calls-1 == s.job.at
	if last && !s.job.late {
		s.Abort(errors.New("the call was cut off"))
	}
	w, err = s.Communicator.Start(q, c, dst, src)
	if last && s.job.late && err == nil {
		err = w.Join(context.Background())
		s.Abort(errors.New("cut off behind the call"))
	}
	return w, err
}

// ended waits for the job, and returns what all processes that have finished have come to.
func (f *fitRun) ended() (hash string, epochs string) {
	hash = f.end()
	shown := tensorboard.Shown(f.t, filepath.Join(f.dir, "shown"))
	require.Equal(f.t, "steps and epochs shown", fmt.Sprint(len(shown["step/loss"]),
		len(shown["epoch/loss"])), fmt.Sprint(2*fitEpochs, fitEpochs))
	require.Check(f.t, len(f.runs.Runs) == 1 && len(f.runs.Wrong) == 0, "%d runs, and wrong is %v",
		len(f.runs.Runs), f.runs.Wrong)
	sent := f.runs.Runs[0].Curves(f.t)
	require.Equal(f.t, "the run", f.runs.Runs[0].Status, "FINISHED")
	require.Equal(f.t, "epochs sent", fmt.Sprint(sent["epoch/loss"]),
		fmt.Sprint(shown["epoch/loss"]))
	for _, r := range f.results {
		for i := range r.Epochs {
			r.Epochs[i].Seconds = 0
		}
		epochs = fmt.Sprintf("%+v", r.Epochs)
		require.Check(f.t, epochs == fmt.Sprintf("%+v", f.results[0].Epochs) &&
			r.Params == f.results[0].Params && len(r.Epochs) == fitEpochs &&
			filepath.Dir(r.Best) == f.dir, "processes end with %+v and %+v", r, f.results[0])
	}
	return hash, epochs
}

// fitAlone is the end of a training on one rank by vm.WithTree, without an elastic job.
func fitAlone(t *testing.T, more ...fit.Option) (hash, epochs string) {
	m := require.Value(newElasticModel(6, 10, ofNorms))(t)
	m.machine = require.Value(vm.New(m.x.Graph(), nil, vm.WithTree(elasticMicros), vm.ClipNorm(0.5),
		vm.WithSolver(&solver.AdamW{Rate: 0.01, WeightDecay: 0.1}, m.weights...)))(t)
	defer m.machine.Close()
	in := fit.Data{Set: samplesOf(fitSamples), Inputs: gorgonia.Nodes{m.x, m.y}, Loss: m.cost}
	judge := require.Value(vm.New(m.x.Graph(), nil, vm.Eval(), vm.Keep(m.cost)))(t)
	defer judge.Close()
	validation := in
	validation.Set = samplesOf(4 * elasticMicros)
	r := require.Value(fit.Run(t.Context(), m.machine, in, append(more, fit.Epochs(fitEpochs),
		fit.Random(m.random), fit.Validate(judge, validation, highest),
		fit.Checkpoint(t.TempDir(), 0),
		fit.Schedule(func(step int) float64 { return 0.01 / float64(1+step) }))...))(t)
	for i := range r.Epochs {
		r.Epochs[i].Seconds = 0
		r.Epochs[i].Metrics = nil // added up in other parts
	}
	return m.state(), fmt.Sprintf("%+v", r.Epochs)
}

// TestATrainingByFitHasTheSameBitsWhereverARankIsCutOff: in each call of the training, which
// validates and saves, also where the other rank does not notice; with the losses of each epoch,
// the curves, and the best epoch where this is restored.
func TestATrainingByFitHasTheSameBitsWhereverARankIsCutOff(t *testing.T) {
	cutOffInEachCall(t, 2, ofNorms)
	cutOffInEachCall(t, 2, ofNorms, restoring()...)
	for _, shards := range []vm.Shards{vm.SolverState, everything} {
		cutOffInEachCall(t, 4, elasticWay{normed: true, shards: shards}, restoring()...)
	}
}

func cutOffInEachCall(t *testing.T, ranks int, way elasticWay, more ...fit.Option) {
	parameters, _ := fitAlone(t, more...)
	with := func(job func(id elastic.ID, job *session.Elastic) autograd.Job) func(f *fitRun) {
		return func(f *fitRun) { f.job, f.more, f.way = job, more, way }
	}
	want, losses := newFitRun(t, 1, func(f *fitRun) { f.more = more }).ended()
	require.Equal(t, "an elastic training has other parameters than one of a tree", want,
		parameters)
	var alone *severed
	hash, epochs := newFitRun(t, ranks, with(func(id elastic.ID,
		job *session.Elastic) autograd.Job {
		if id != 2 {
			return job
		}
		alone = &severed{Elastic: job, at: -1}
		return alone
	})).ended()
	calls := alone.calls
	require.Check(t, hash == want && epochs == losses && calls > 60,
		"%d ranks end, after %d calls, with other parameters or\n%s, want\n%s", ranks, calls,
		epochs, losses)
	stride := 9
	if os.Getenv("EURYALE_FULL") != "" {
		stride = 1
	}
	for call := 0; call < calls; call += stride {
		f := newFitRun(t, ranks, with(func(id elastic.ID,
			job *session.Elastic) autograd.Job {
			if id != elastic.ID(1+call/stride%4/2) { // also rank 0, which has the curves
				return job
			}
			return &severed{Elastic: job, at: call, late: call%2 == 0}
		}))
		hash, epochs := f.ended()
		require.Check(t, hash == want && epochs == losses, "call %d: other parameters, or\n%s,"+
			" want\n%s", call, epochs, losses)
		steps := len(f.runs.Runs[0].Curves(t)["step/loss"])
		require.Equal(t, fmt.Sprintf("call %d: steps sent", call), steps, 2*fitEpochs)
		heard := int(f.epochs.Load())
		require.Check(t, heard <= ranks*fitEpochs, "call %d: hooks heard of %d epochs", call, heard)
	}
}

// TestTheNextRank0TellsOfTheEndWhereRank0DiesInTheLastEpoch: the last epoch is in the curves, and
// the run is finished.
func TestTheNextRank0TellsOfTheEndWhereRank0DiesInTheLastEpoch(t *testing.T) {
	f := newFitRun(t, 2, func(f *fitRun) {
		f.epoch = func(id elastic.ID, e fit.Epoch) {
			if id == 1 && e.Epoch == fitEpochs {
				panic(errKilled)
			}
		}
	})
	f.end()
	shown := tensorboard.Shown(t, filepath.Join(f.dir, "shown"))
	require.Equal(t, "epochs shown", len(shown["epoch/loss"]), fitEpochs)
	require.Check(t, slices.ContainsFunc(f.runs.Runs, func(r *mlflow.Run) bool {
		return r.Status == "FINISHED"
	}), "no run is finished")
}

// TestATrainingThatFailsOnAllRanksIsAFailedRun: an error of a hook of any rank ends all, and one of
// a sample each rank that reads it, the last one, too.
func TestATrainingThatFailsOnAllRanksIsAFailedRun(t *testing.T) {
	broken := errors.New("broken")
	for name, with := range map[string]func(f *fitRun){
		"a hook": func(f *fitRun) {
			f.hook = func(id elastic.ID, s fit.StepLoss) error {
				return map[bool]error{true: broken}[id == 2 && s.Step == 3]
			}
		},
		"a sample": func(f *fitRun) {
			f.wrong = func(sample int) error {
				return map[bool]error{true: broken}[sample == fitSamples/2]
			}
		},
	} {
		f := newFitRun(t, 2, with)
		f.running.Wait()
		for _, err := range f.errs {
			require.Check(t, errors.Is(err, broken) || len(f.errs) > 1, "%s: %v", name, err)
		}
		runs := f.runs.Runs
		require.Check(t, len(runs) == 1 && runs[0].Status == "FAILED", "%s: the runs are %+v", name,
			runs)
	}
}

// TestARankIsToldToEndAndTheOthersGoOn: it leaves without a step that is repeated, and who takes
// its place ends with all epochs, and so does the only rank once another one has its parameters.
func TestARankIsToldToEndAndTheOthersGoOn(t *testing.T) {
	want, losses := newFitRun(t, 1, func(*fitRun) {}).ended()
	for n := 1; n <= 2; n++ {
		ctx, stop := context.WithCancel(t.Context())
		var in atomic.Bool
		f := newFitRun(t, n, func(f *fitRun) {
			f.until = func(id elastic.ID) context.Context {
				if id == 1 {
					return ctx
				}
				return context.Background()
			}
			f.hook = func(id elastic.ID, s fit.StepLoss) error {
				switch {
				case id > elastic.ID(n):
					in.Store(true)
				case s.Step == 3:
					stop()
				case s.Step > 3 && n > 1 && id > 1: // until the replacement is in
					for i := 0; !in.Load() && i < 1000; i++ {
						time.Sleep(time.Millisecond)
					}
				}
				return nil
			}
		})
		f.enter(elastic.ID(n+1), n)
		f.running.Wait()
		f.errs = slices.DeleteFunc(f.errs, func(err error) bool { return err == nil })
		require.Check(t, len(f.errs) == 1 && errors.Is(f.errs[0], fit.ErrStopped),
			"%d ranks: the errors are %v", n, f.errs)
		f.errs = nil
		hash, epochs := f.ended()
		require.Check(t, hash == want && epochs == losses && in.Load(),
			"%d ranks: other parameters, or\n%s, want\n%s, or nobody came: %t", n, epochs, losses,
			!in.Load())
	}
}
