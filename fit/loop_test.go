package fit_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	G "gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/launch"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// alone trains on one rank.
func alone(t *testing.T, s fit.Set, batch int, options ...fit.Option) *fit.Result {
	t.Helper()
	return ranks(t, 1, func(comm backend.Communicator, build sync.Locker) (*fit.Result, error) {
		r, _, err := fitLinear(t.Context(), comm, build, batch, s, nil, options...)
		return r, err
	})[0]
}

// counted is a set that counts the samples that are read.
type counted struct {
	fit.Set
	read atomic.Int64
	more chan struct{} // somebody reads
}

func newCounted(s fit.Set) *counted { return &counted{Set: s, more: make(chan struct{}, 1)} }

func (c *counted) Read(i int, row []any) error {
	c.read.Add(1)
	select {
	case c.more <- struct{}{}:
	default:
	}
	return c.Set.Read(i, row)
}

// await waits until n samples are read, which ends only if somebody reads.
func (c *counted) await(n int) error {
	for limit := time.After(time.Minute); c.read.Load() < int64(n); {
		select {
		case <-c.more:
		case <-limit:
			return fmt.Errorf("%d samples were read, want %d", c.read.Load(), n)
		}
	}
	return nil
}

// TestBatchesAreReadWhileTheMachineRuns: the samples of the next step are read before this one has
// ended, and those of the one behind it.
func TestBatchesAreReadWhileTheMachineRuns(t *testing.T) {
	const batch, steps = 4, 8
	set := newCounted(points(batch * steps))
	alone(t, set, batch, fit.Prefetch(2), fit.OnStep(func(s fit.StepLoss) error {
		return set.await(min(s.Step+2, steps) * batch)
	}))
}

// TestPrefetchIsBounded: nobody reads far ahead of the machine.
func TestPrefetchIsBounded(t *testing.T) {
	const batch, steps, readers = 2, 40, 3
	set := newCounted(points(batch * steps))
	alone(t, set, batch, fit.Prefetch(readers), fit.OnStep(func(s fit.StepLoss) error {
		if read, most := set.read.Load(), (s.Step+readers+2)*batch; read > int64(most) {
			return fmt.Errorf("after step %d %d samples are read, more than %d", s.Step, read, most)
		}
		return nil
	}))
}

// TestAHookReadsTheBatchOfItsStep: readers fill no batch that the graph still has, though they are
// as far ahead as they may be.
func TestAHookReadsTheBatchOfItsStep(t *testing.T) {
	const batch, steps, readers = 2, 8, 3
	m := newLinear(batch, false, 1)
	training, err := vm.New(m.x.Graph(), nil, vm.WithSolver(&solver.SGD{Rate: 1e-6}, m.w))
	require.NoError(t, err)
	defer training.Close()
	set := newCounted(data.Of(batch*steps, func(i int, row []any) error {
		row[0].([]float64)[0] = float64(i)
		return nil
	}))
	seen := make(map[float64]bool)
	_, err = fit.Run(t.Context(), training, m.data(set), fit.Epochs(1), fit.Prefetch(readers),
		fit.OnStep(func(s fit.StepLoss) error {
			if err := set.await(min(s.Step+readers+2, steps) * batch); err != nil {
				return err
			}
			for i := range batch {
				seen[m.x.Value().Data().([]float64)[i*2]] = true
			}
			return nil
		}))
	require.NoError(t, err)
	require.Check(t, len(seen) == batch*steps, "hooks saw %d of %d samples", len(seen), batch*steps)
}

// BenchmarkPrefetch measures a step of 50 ms with a loader that needs 0.9 of it, against one that
// needs nothing. Both wait, as for a GPU and a disk, so that other programs do not count.
func BenchmarkPrefetch(b *testing.B) {
	const batch, steps, step = 4, 40, 50 * time.Millisecond
	run := func(wait time.Duration) float64 {
		m := newLinear(batch, false, 1)
		training, err := vm.New(m.x.Graph(), nil, vm.WithSolver(&solver.SGD{Rate: 1. / 64}, m.w))
		require.NoError(b, err)
		defer training.Close()
		s := points(batch * steps)
		var read atomic.Int64
		slow := data.Of(s.Len(), func(i int, row []any) error {
			if read.Add(1)%batch == 0 {
				time.Sleep(wait)
			}
			return s.Read(i, row)
		})
		var began time.Time
		_, err = fit.Run(b.Context(), training, m.data(slow), fit.Prefetch(1),
			fit.OnStep(func(s fit.StepLoss) error {
				if s.Step == 1 { // behind the first batch, which nobody has read ahead
					began = time.Now()
				}
				time.Sleep(step)
				return nil
			}))
		require.NoError(b, err)
		return time.Since(began).Seconds() / steps
	}
	var ratios []float64
	for b.Loop() {
		without := run(0)
		ratios = append(ratios, run(step*9/10)/without)
		b.ReportMetric(without*1e3, "ms/step")
	}
	slices.Sort(ratios)
	b.ReportMetric(ratios[len(ratios)/2], "with/without")
}

// TestAugmentationDependsOnSeedEpochAndSample: not on the order of reading, and a resumed training
// sees what it would have seen.
func TestAugmentationDependsOnSeedEpochAndSample(t *testing.T) {
	var mu sync.Mutex
	var drawn []uint64
	noisy := func(dir string, readers int, stop int) (r *fit.Result, err error) {
		m := newLinear(4, true, 1)
		training, err := vm.New(m.x.Graph(), nil,
			vm.WithSolver(&solver.SGD{Rate: 1. / 64}, m.w))
		if err != nil {
			return nil, err
		}
		d := m.data(points(21))
		d.Augment = func(r *rand.Rand, row []any) {
			row[0].([]float64)[0] += float64(r.IntN(3))
			mu.Lock()
			drawn = append(drawn, r.Uint64())
			mu.Unlock()
		}
		over := errors.New("over")
		options := []fit.Option{fit.Epochs(3), fit.Prefetch(readers), fit.Seed(7),
			fit.OnStep(func(s fit.StepLoss) error {
				return map[bool]error{true: over}[s.Step == stop]
			})}
		if dir != "" {
			options = append(options, fit.Checkpoint(dir, 4))
		}
		r, err = fit.Run(t.Context(), training, d, options...)
		if stop > 0 && errors.Is(err, over) {
			err = nil
		}
		return r, errors.Join(err, training.Close())
	}
	want := require.Value(noisy("", 1, 0))(t)
	slices.Sort(drawn)
	n := len(slices.Compact(drawn))
	require.Check(t, n == 3*21, "%d numbers were drawn in 3 epochs of 21 samples", n)
	if again, err := noisy("", 4, 0); err != nil || again.Params != want.Params {
		t.Errorf("with 4 readers: %v, %v; want %v", again, err, want)
	}
	dir := t.TempDir()
	for _, stop := range []int{5, 9, 14} { // and go on with a checkpoint of step 4, 6, 8, 12
		require.NoError(t, require.Err(noisy(dir, 2, stop)))
	}
	if again, err := noisy(dir, 3, 0); err != nil || again.Params != want.Params ||
		!slices.Equal(losses(again), losses(want)) {
		t.Errorf("resumed: %v, %v; want %v", again, err, want)
	}
}

// stopsEarly trains with a metric that is given for each epoch.
func stopsEarly(t *testing.T, P, patience int, scores []float64) *fit.Result {
	return require.Value(stopsEarlyOr(t, P, patience, scores))(t)
}

// stopsEarlyOr also returns the error.
func stopsEarlyOr(t *testing.T, P, patience int, scores []float64) (*fit.Result, error) {
	return scoredBy(t, P, scores, 0, fit.EarlyStop(patience), fit.Checkpoint(t.TempDir(), 0))
}

// scoredBy trains as many epochs as there are scores, from one of them on.
func scoredBy(t *testing.T, P int, scores []float64, epoch int, options ...fit.Option) (
	*fit.Result, error) {
	wrongs := make([]error, P)
	results := ranks(t, P, func(comm backend.Communicator, build sync.Locker) (*fit.Result, error) {
		build.Lock()
		m := newLinear(12/P, true, 1)
		build.Unlock()
		training, err := vm.New(m.x.Graph(), nil, vm.WithDataParallel(comm),
			vm.WithSolver(&solver.SGD{Rate: 1. / 64}, m.w))
		if err != nil {
			return nil, err
		}
		eval, err := vm.New(m.x.Graph(), nil, vm.Eval())
		if err != nil {
			return nil, err
		}
		epoch := epoch
		score := fit.Metric{Name: "score", Sums: func(int) int { return 1 },
			Add: func(sums []float64, samples []int) error { // ranks know parts of it
				if comm.Rank() == P-1 && len(samples) > 0 {
					sums[0] = scores[min(epoch, len(scores)-1)] // once more behind the last
				}
				return nil
			}, Value: func(sums []float64, _ float64) float64 { epoch++; return sums[0] }}
		r, err := fit.Run(t.Context(), training, m.data(points(24)), append([]fit.Option{
			fit.Epochs(len(scores)), fit.Validate(eval, m.data(points(12)), score),
			fit.Watch("score")}, options...)...)
		wrongs[comm.Rank()] = err
		return r, errors.Join(training.Close(), eval.Close())
	})
	for _, r := range results[1:] {
		if len(r.Epochs) != len(results[0].Epochs) || r.Params != results[0].Params {
			t.Errorf("ranks decide differently: %+v and %+v", r, results[0])
		}
	}
	return results[0], errors.Join(wrongs...)
}

// TestRanksStopEarlyTogether: although one rank alone has seen the samples that decide, and the
// best checkpoint is kept beside the last two.
func TestRanksStopEarlyTogether(t *testing.T) {
	for P := 2; P <= 4; P++ {
		r := stopsEarly(t, P, 3, []float64{1, 4, 3, 5, 2, 5, 1, 9})
		require.Check(t, len(r.Epochs) == 7 && strings.HasSuffix(r.Best, "step-00000008"),
			"%d ranks: %d epochs, best %s", P, len(r.Epochs), r.Best)
		kept, err := filepath.Glob(filepath.Join(filepath.Dir(r.Best), "step-*"))
		require.Check(t, err == nil && len(kept) == 3, "%d ranks: checkpoints %q, %v", P, kept, err)
	}
}

// TestTheBestCheckpointIsTheOneThatWasSaved: in a machine's second training, whose steps count on.
func TestTheBestCheckpointIsTheOneThatWasSaved(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	ranks(t, 2, func(comm backend.Communicator, build sync.Locker) (*fit.Result, error) {
		build.Lock()
		m := newLinear(6, true, 1)
		build.Unlock()
		training, err := vm.New(m.x.Graph(), nil, vm.WithDataParallel(comm),
			vm.WithSolver(&solver.SGD{Rate: 1. / 64}, m.w))
		if err != nil {
			return nil, err
		}
		var r *fit.Result
		for k, dir := range []string{first, second, first} {
			var wrong error
			r, wrong = fit.Run(t.Context(), training, m.data(points(24)), fit.Epochs(3),
				fit.Checkpoint(dir, 0))
			// The third goes on with what the first has saved.
			want := filepath.Join(dir, fmt.Sprintf("step-%08d", []int{6, 12, 6}[k]))
			if err = errors.Join(err, wrong); r.Best != want {
				t.Errorf("rank %d, training %d: best is %s, want %s", comm.Rank(), k, r.Best, want)
			}
		}
		return r, errors.Join(err, training.Close())
	})
}

// TestTrainingsWithoutABestEpochStopEarly, with an error, if the metric that decides is never a
// number. A number in one epoch is enough.
func TestTrainingsWithoutABestEpochStopEarly(t *testing.T) {
	none := math.NaN()
	r, err := stopsEarlyOr(t, 2, 3, []float64{none, none, none, none, none, none, none, none})
	if len(r.Epochs) != 3 || r.Best != "" || err == nil || !strings.Contains(err.Error(),
		`the metric "score"`) {
		t.Errorf("%d epochs, best %q, %v", len(r.Epochs), r.Best, err)
	}
	if r := stopsEarly(t, 2, 3, []float64{none, 1, none, none, none}); len(r.Epochs) != 5 ||
		!r.Epochs[1].Best {
		t.Errorf("%+v", r)
	}
}

func TestLogsHaveEveryEpochOnce(t *testing.T) {
	dir := t.TempDir()
	lines, table := filepath.Join(dir, "log.jsonl"), filepath.Join(dir, "log.csv")
	var out strings.Builder
	for _, epochs := range []int{2, 3} { // the second goes on
		r := alone(t, points(24), 12, fit.Epochs(epochs), fit.Log(lines, fit.JSONLines),
			fit.Log(table, fit.CSV), fit.Progress(&out),
			fit.Checkpoint(filepath.Join(dir, "run"), 0),
			fit.Schedule(solver.StepDecay(1./64, 0.5, 2)))
		text, err := os.ReadFile(lines)
		require.NoError(t, err)
		all := strings.Split(strings.TrimSpace(string(text)), "\n")
		var last fit.Epoch
		if err := json.Unmarshal([]byte(all[len(all)-1]), &last); err != nil ||
			len(all) != epochs || last.Loss != r.Epochs[epochs-1].Loss || last.Steps != 2*epochs {
			t.Errorf("%d epochs: %v in\n%s", epochs, err, text)
		}
		text, err = os.ReadFile(table)
		if err != nil || strings.Count(string(text), "\n") != epochs+1 ||
			!strings.HasPrefix(string(text), "epoch,steps,rate,loss,seconds\n1,2,0.015625,") {
			t.Errorf("%d epochs: %v in\n%s", epochs, err, text)
		}
	}
	if got := out.String(); strings.Count(got, "\n") != 3 ||
		!strings.HasPrefix(got, "epoch 1/2: loss=") || !strings.Contains(got, "epoch 3/3: loss=") {
		t.Errorf("printed:\n%s", got)
	}
}

// TestWhatDoesNotFitIsRefused, by all ranks.
func TestWhatDoesNotFitIsRefused(t *testing.T) {
	dir := t.TempDir()
	alone(t, points(24), 12, fit.Checkpoint(dir, 0))
	m := newLinear(12, false, 1)
	other := G.NewVector(m.x.Graph(), G.Float64, G.WithShape(5), G.WithName("other"))
	training := require.Value(vm.New(m.x.Graph(), nil, vm.WithSolver(
		&solver.Momentum{Rate: 1. / 64, Momentum: 0.5}, m.w)))(t)
	defer training.Close()
	with := func(change func(d *fit.Data)) fit.Data {
		d := m.data(points(24))
		change(&d)
		return d
	}
	good, more := m.data(points(24)), m.data(points(25))
	huge := data.Of(24, func(_ int, row []any) error {
		row[1].([]float64)[0] = math.MaxFloat64
		return nil
	})
	for name, refused := range map[string]struct {
		data   fit.Data
		option fit.Option
		says   string
	}{
		"no set":    {with(func(d *fit.Data) { d.Set = nil }), fit.Epochs(1), "Set is nil"},
		"no inputs": {with(func(d *fit.Data) { d.Inputs = nil }), fit.Epochs(1), "no Inputs"},
		"no loss":   {with(func(d *fit.Data) { d.Loss = nil }), fit.Epochs(1), "Loss is nil"},
		"an op":     {with(func(d *fit.Data) { d.Inputs[0] = m.loss }), fit.Epochs(1), "variable"},
		"few":       {with(func(d *fit.Data) { d.Set = points(5) }), fit.Epochs(1), "fewer than a"},
		"weights":   {with(func(d *fit.Data) { d.Weights = other }), fit.Epochs(1), "shape [12]"},
		"no epochs": {good, fit.Epochs(0), "an epoch"},
		"no metric": {good, fit.Watch("bleu"), `"bleu"`},
		"other":     {more, fit.Checkpoint(dir, 0), "24 samples"},
		"infinite":  {with(func(d *fit.Data) { d.Set = huge }), fit.Epochs(1), "vm.ClipNorm"},
	} {
		_, err := fit.Run(t.Context(), training, refused.data, refused.option)
		require.Fails(t, name, err, refused.says)
	}
}

// The tests below start this test binary as the ranks of a job.

func TestMain(m *testing.M) { proctest.Main(m, func(name string) error { return process(name) }) }

// TestAKilledTrainingGoesOnWithTheSameBits: by SIGKILL of one rank, in the middle of an epoch, and
// by SIGTERM of one rank, which saves.
func TestAKilledTrainingGoesOnWithTheSameBits(t *testing.T) {
	want := ""
	for _, how := range []string{"whole", "KILL", "TERM"} {
		dir := t.TempDir()
		job := func(name string) (string, error) {
			var out proctest.Notice
			self, err := os.Executable()
			require.NoError(t, err)
			err = launch.Run(t.Context(), launch.Job{
				Program: self, Ranks: 2, Stdout: &out, Stderr: &out,
				Env: append(os.Environ(), "EURYALE_TEST_SCENARIO="+name, "FIT_TEST_DIR="+dir),
			})
			return out.String(), err
		}
		if how != "whole" {
			if out, err := job(how); err == nil || strings.Contains(out, "params=") {
				t.Fatalf("%s: it ends with %v\n%s", how, err, out)
			} else if how == "TERM" && !strings.Contains(out, "(terminated) after step ") {
				// 7, unless the signal takes longer than a step
				t.Errorf("%s: %v\n%s", how, err, out)
			}
		}
		out, err := job("whole")
		_, params, ok := strings.Cut(out, "params=")
		require.That(t, err == nil && ok, "%s: %v\n%s", how, err, out)
		if want == "" {
			want = params
		}
		require.Equal(t, fmt.Sprintf("%s: params", how), params, want)
	}
}

// process is a rank, whose rank 1 is killed or told to stop in the second epoch of four steps.
func process(how string) error {
	comm, err := euryale.Init(context.Background())
	if err != nil {
		return err
	}
	signals := map[string]syscall.Signal{"KILL": syscall.SIGKILL, "TERM": syscall.SIGTERM}
	at := map[string]int{"KILL": 7, "TERM": 6}
	tell := fit.OnStep(func(s fit.StepLoss) error {
		if signal, ok := signals[how]; ok && s.Step == at[how] && comm.Rank() == 1 {
			self, err := os.FindProcess(os.Getpid())
			if err != nil {
				return err
			}
			return self.Signal(signal) // which compiles on Windows, too
		}
		return nil
	})
	r, _, err := fitLinear(context.Background(), comm, new(sync.Mutex), 12, points(43), nil, tell,
		fit.Epochs(4), fit.Checkpoint(os.Getenv("FIT_TEST_DIR"), 2))
	if err != nil {
		return err
	}
	if comm.Rank() == 0 {
		fmt.Printf("params=%s\n", r.Params)
	}
	return comm.Close()
}

// seeks is random numbers that note where they are sought.
type seeks struct {
	autograd.Random
	all []string
}

func (s *seeks) Seek(step uint64, first int) { s.all = append(s.all, fmt.Sprint(step, " ", first)) }

// TestEachRunHasItsRandomNumbersAndRate: by the step and the place of its samples in the batch. A
// rate of 0 changes nothing.
func TestEachRunHasItsRandomNumbersAndRate(t *testing.T) {
	got := make([]*seeks, 2)
	ranks(t, 2, func(comm backend.Communicator, build sync.Locker) (*fit.Result, error) {
		s := &seeks{}
		got[comm.Rank()] = s
		r, w, err := fitLinear(t.Context(), comm, build, 4, points(24),
			[]vm.Option{vm.Accumulate(3)}, fit.Random(s), fit.Random(&seeks{}),
			fit.Schedule(solver.Constant(0)))
		require.Slices(t, "with a rate of 0 the weights became", w, []float64{1, -2})
		return r, err
	})
	for r, want := range [][]string{
		{"0 0", "0 2", "0 4", "1 0", "1 2", "1 4"}, {"0 6", "0 8", "0 10", "1 6", "1 8", "1 10"},
	} {
		require.Check(t, slices.Equal(got[r].all, want), "rank %d sought %q, want %q", r,
			got[r].all, want)
	}
}

// none is a set whose Read would panic.
type none []float64

func (s none) Len() int                    { return len(s) }
func (s none) Read(i int, row []any) error { return fmt.Errorf("sample %v", s[i]) }

func TestATrainingWithoutSamplesIsAnError(t *testing.T) {
	require.NoError(t, euryale.Run(t.Context(), 2, func(comm backend.Communicator,
		build sync.Locker) error {
		_, _, err := fitLinear(t.Context(), comm, build, 4, none{}, nil)
		says(t, "no samples", err, "fit.Data: there are no samples")
		return nil
	}))
}

// TestSamplesThatReadMakesAtRandomAreNotCompared: by chance a rank gets the same ones a few times.
func TestSamplesThatReadMakesAtRandomAreNotCompared(t *testing.T) {
	require.NoError(t, euryale.Run(t.Context(), 2, func(comm backend.Communicator,
		build sync.Locker) error {
		var reads atomic.Int64
		mirrored := data.Of(24, func(_ int, row []any) error {
			is := int64(comm.Rank())
			if reads.Add(1) > 3 {
				is = 1 - is
			}
			row[0].([]float64)[0] = float64(is)
			return nil
		})
		build.Lock()
		m := newLinear(4, false, 1)
		build.Unlock()
		_, err := fit.Evaluate(comm, machine(t, m.x.Graph(), vm.Eval()), m.data(mirrored))
		return err
	}))
}

// TestRanksThatDifferAreFoundBeforeTheFirstStep: in samples, metrics, schedules and parameters.
func TestRanksThatDifferAreFoundBeforeTheFirstStep(t *testing.T) {
	own := func(rank int) fit.Set {
		return data.Of(24, func(i int, row []any) error {
			row[0].([]float64)[0] = float64(i + 24*rank)
			return nil
		})
	}
	for want, train := range map[string]func(comm backend.Communicator, build sync.Locker) error{
		"the first sample of rank 1 is not that of rank 0": func(comm backend.Communicator,
			build sync.Locker) error {
			_, _, err := fitLinear(t.Context(), comm, build, 4, own(comm.Rank()), nil)
			return err
		},
		"the rate of fit.Schedule begins with 0.5": func(comm backend.Communicator,
			build sync.Locker) error {
			_, _, err := fitLinear(t.Context(), comm, build, 4, points(24), nil,
				fit.Schedule(solver.Constant(float64(1+comm.Rank())/2)))
			return err
		},
		`a metric is "m0"`: func(comm backend.Communicator, build sync.Locker) error {
			build.Lock()
			m := newLinear(4, false, 1)
			build.Unlock()
			value := func([]float64, float64) float64 { return 1 }
			_, err := fit.Evaluate(comm, machine(t, m.x.Graph(), vm.Eval()), m.data(points(24)),
				fit.Metric{Name: fmt.Sprint("m", comm.Rank()), Value: value})
			return err
		},
		"w f64(2) is not the same on rank 1": func(comm backend.Communicator,
			build sync.Locker) error {
			build.Lock()
			m := newLinear(4, false, 1)
			build.Unlock()
			training := machine(t, m.x.Graph(), sgd(m.w), vm.WithDataParallel(comm))
			m.w.Value().Data().([]float64)[0] += float64(comm.Rank())
			_, err := fit.Run(t.Context(), training, m.data(points(24)),
				fit.OnStep(func(fit.StepLoss) error {
					t.Error("there is a step")
					return nil
				}))
			return err
		},
	} {
		require.NoError(t, euryale.Run(t.Context(), 2, func(comm backend.Communicator,
			build sync.Locker) error {
			says(t, want, train(comm, build), want)
			return nil
		}))
	}
}

// TestRanksWithOtherDataAreRefusedBeforeTheFirstStep: weights or a validation on one rank alone.
func TestRanksWithOtherDataAreRefusedBeforeTheFirstStep(t *testing.T) {
	for what, validated := range map[string]bool{"weights: true": false, "validation: true": true} {
		require.NoError(t, euryale.Run(t.Context(), 2, func(comm backend.Communicator,
			build sync.Locker) error {
			build.Lock()
			m := newLinear(6, !validated && comm.Rank() == 1, 1)
			build.Unlock()
			training, err := vm.New(m.x.Graph(), nil, vm.WithDataParallel(comm),
				vm.WithSolver(&solver.SGD{Rate: 1. / 64}, m.w))
			if err != nil {
				return err
			}
			defer training.Close()
			options := []fit.Option{fit.OnStep(func(fit.StepLoss) error {
				t.Errorf("%s: there is a step", what)
				return nil
			})}
			if validated && comm.Rank() == 1 {
				eval, err := vm.New(m.x.Graph(), nil, vm.Eval())
				if err != nil {
					return err
				}
				defer eval.Close()
				options = append(options, fit.Validate(eval, m.data(points(24))))
			}
			if _, err = fit.Run(t.Context(), training, m.data(points(24)),
				options...); !errors.Is(err, backend.ErrMismatch) ||
				!strings.Contains(err.Error(), what) {
				t.Errorf("%s: %v", what, err)
			}
			return nil
		}))
	}
}
