package fit_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/internal/testing/mlflow"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/tensorboard"
	"github.com/euryale-ml/euryale/vm"
)

// said returns what f says on standard error.
func said(t *testing.T, f func()) string {
	t.Helper()
	in, out, err := os.Pipe()
	require.NoError(t, err)
	stderr := os.Stderr
	os.Stderr = out
	f()
	os.Stderr = stderr
	require.NoError(t, out.Close())
	return string(require.Value(io.ReadAll(in))(t))
}

// tracked trains 12 steps in three epochs, until a step ends it with an error.
func tracked(t *testing.T, P, until int, kept, server string, more ...fit.Option) []*fit.Result {
	t.Helper()
	results := make([]*fit.Result, P)
	over := errors.New("over")
	err := euryale.Run(t.Context(), P, func(comm backend.Communicator, build sync.Locker) error {
		build.Lock()
		m := newLinear(12/P, true, 1)
		build.Unlock()
		training, err := vm.New(m.x.Graph(), nil, vm.WithDataParallel(comm),
			vm.WithSolver(&solver.SGD{Rate: 1. / 64}, m.w))
		if err != nil {
			return err
		}
		results[comm.Rank()], err = fit.Run(t.Context(), training, m.data(points(48)),
			append([]fit.Option{fit.Epochs(3), fit.Checkpoint(kept, 2), fit.MLflow(server, "points",
				map[string]string{"width": "2", "odd@name": "x"}),
				fit.OnStep(func(s fit.StepLoss) error {
					return map[bool]error{true: over}[s.Step == until]
				})}, more...)...)
		return errors.Join(err, training.Close())
	})
	require.Check(t, (err == nil) == (until == 0), "%d ranks until step %d: %v", P, until, err)
	return results
}

// TestARunOfMLflowHasTheTraining: each step once, in one run, also of a training that ends between
// two checkpoints and goes on on other ranks.
func TestARunOfMLflowHasTheTraining(t *testing.T) {
	for P := 1; P <= 4; P++ {
		s, kept, dir := mlflow.New(t), t.TempDir(), t.TempDir()
		says := said(t, func() {
			tracked(t, P, 5, kept, s.URL, fit.TensorBoard(dir))
			tracked(t, 5-P, 0, kept, s.URL, fit.TensorBoard(dir))
		})
		require.Check(t, says == "" && len(s.Wrong) == 0 && len(s.Runs) == 1, "%d ranks: %q, %q, "+
			"%d runs", P, says, s.Wrong, len(s.Runs))
		run := s.Runs[0]
		require.Equal(t, "the ends", run.Ends, "FAILED FINISHED ")
		require.Equal(t, "the experiment", run.Experiment, "of points")
		require.Equal(t, "params", fmt.Sprint(run.Params), fmt.Sprintf("map[batch:12 epochs:3 "+
			"odd_name:x ranks:%d samples:48 seed:1 solver:SGD width:2]", P))
		got, want := run.Curves(t), tensorboard.Shown(t, dir)
		for _, name := range []string{"step/loss", "epoch/loss"} {
			require.Equal(t, name, fmt.Sprint(got[name]), fmt.Sprint(want[name]))
		}
		require.Equal(t, "steps and epochs", fmt.Sprint(len(got["step/samples_per_second"]),
			len(got["epoch/seconds"])), "12 3")
		tracked(t, 1, 0, kept, s.URL) // it is finished
		tracked(t, 1, 0, t.TempDir(), s.URL)
		require.Equal(t, "another training", fmt.Sprint(len(s.Runs), " ", len(s.Runs[1].Logged)),
			"2 30")
	}
}

// TestATrainingDoesNotDependOnItsServer: it has the same bits, waits for no server, and says once
// that there is none. What the server has missed it gets when it answers.
func TestATrainingDoesNotDependOnItsServer(t *testing.T) {
	want := tracked(t, 2, 0, t.TempDir(), "")
	hung, lost := make(chan struct{}), map[string]bool{}
	lose := func(s *mlflow.Server, _ int, w http.ResponseWriter, r *http.Request) bool {
		s.Lock()
		defer s.Unlock()
		call := path.Base(r.URL.Path)
		if lost[call] || call != "create" && call != "log-batch" || len(s.Experiments) == 0 {
			return false
		}
		lost[call] = true
		_, _, err := s.Answer(r)
		conn, _, wrong := w.(http.Hijacker).Hijack()
		return errors.Join(err, wrong) != nil || conn.Close() == nil
	}
	var page atomic.Bool
	cases := map[string]struct {
		fails    mlflow.Failure
		says     string
		complete bool
	}{
		"an error": {func(_ *mlflow.Server, n int, w http.ResponseWriter, _ *http.Request) bool {
			if n <= 3 {
				w.WriteHeader(http.StatusBadGateway)
			}
			return n <= 3
		}, "answers 502: the training", true},
		"a metric that it refuses": {func(_ *mlflow.Server, _ int, w http.ResponseWriter,
			r *http.Request) bool {
			text, err := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(text))
			refused := err != nil || bytes.Contains(text, []byte("samples_per_second"))
			if refused {
				w.WriteHeader(http.StatusBadRequest)
			}
			return refused
		}, "answers 400", true},
		"lost answers": {lose, "", true}, // which may all be at the end
		"a page in place of an answer": {func(_ *mlflow.Server, _ int, w http.ResponseWriter,
			r *http.Request) bool {
			shown := path.Base(r.URL.Path) == "log-batch" && !page.Swap(true)
			if shown {
				fmt.Fprint(w, "<html>")
			}
			return shown
		}, "what is no JSON", true},
		"no answer": {func(*mlflow.Server, int, http.ResponseWriter, *http.Request) bool {
			<-hung
			return true
		}, "context deadline exceeded", false},
		"another server": {func(_ *mlflow.Server, _ int, w http.ResponseWriter,
			_ *http.Request) bool {
			fmt.Fprint(w, "welcome")
			return true
		}, "invalid character", false},
		"a server of other JSON": {func(_ *mlflow.Server, n int, w http.ResponseWriter,
			_ *http.Request) bool {
			fmt.Fprint(w, "{}")
			require.Check(t, n < 100, "%d requests", n)
			return true
		}, "the answer has no run", false},
	}
	servers, took := map[string]*mlflow.Server{}, make(chan time.Duration, len(cases)+2)
	kept, late := t.TempDir(), mlflow.New(t)
	over, later := t.TempDir(), mlflow.New(t)
	lines := said(t, func() {
		var all sync.WaitGroup
		timed := func(f func()) {
			all.Go(func() {
				began := time.Now()
				f()
				took <- time.Since(began)
			})
		}
		for name, c := range cases {
			s := mlflow.New(t)
			s.Fails, servers[name] = c.fails, s
			timed(func() {
				for r, got := range tracked(t, 2, 0, t.TempDir(), s.URL) {
					require.Equal(t, name+": params", got.Params, want[r].Params)
				}
			})
		}
		timed(func() {
			tracked(t, 2, 5, kept, "http://127.0.0.1:1")
			tracked(t, 1, 0, kept, late.URL)
		})
		timed(func() {
			tracked(t, 2, 0, over, "http://127.0.0.1:1")
			tracked(t, 2, 0, over, later.URL)
		})
		all.Wait()
	})
	close(hung)
	close(took)
	for d := range took {
		require.Check(t, d < 10*time.Second, "a training takes %v", d)
	}
	require.Equal(t, "epochs of a server that comes late",
		len(late.Runs[0].Curves(t)["epoch/loss"]), 3)
	require.That(t, len(later.Runs) == 1, "the server has %d runs of a training that had ended",
		len(later.Runs))
	require.Equal(t, "epochs of a server that comes after the end",
		len(later.Runs[0].Curves(t)["epoch/loss"]), 3)
	require.Equal(t, "its run", later.Runs[0].Status, "FINISHED")
	for name, c := range cases {
		s := servers[name]
		complete := map[bool]int{true: 1}[c.complete]
		require.Check(t, strings.Count(lines, s.URL+" is sent") <= 1 && strings.Count(lines, s.URL+
			" is not complete") == 1-complete, "%s: it says\n%s", name, lines)
		require.Check(t, strings.Contains(lines, c.says), "%s: it says\n%s", name, lines)
		require.Equal(t, name+": runs", len(s.Runs), complete)
		if c.complete {
			require.Equal(t, name+": steps", len(s.Runs[0].Curves(t)["step/loss"]), 12)
			require.Equal(t, name, s.Runs[0].Status, "FINISHED")
		}
	}
}

// TestNamesThatAServerTakesForOneAreRefused, since it would have one curve of both.
func TestNamesThatAServerTakesForOneAreRefused(t *testing.T) {
	params := map[string]string{"width@1": "2", "width#1": "3"}
	err := euryale.Run(t.Context(), 2, func(comm backend.Communicator, build sync.Locker) error {
		_, _, err := fitLinear(t.Context(), comm, build, 4, points(24), nil,
			fit.MLflow("http://127.0.0.1:1", "", params))
		return err
	})
	require.Fails(t, "two params", err, `the params "width#1" and "width@1" are both "width_1"`)
}

// BenchmarkCurves measures a step of a training of eight parameters, alone and watched.
func BenchmarkCurves(b *testing.B) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, `{"run": {"info": {"run_id": "1"}}}`)
	}))
	defer s.Close()
	for name, watched := range map[string]fit.Option{"alone": fit.TensorBoard(""),
		"tensorboard": fit.TensorBoard(b.TempDir()), "mlflow": fit.MLflow(s.URL, "", nil)} {
		b.Run(name, func(b *testing.B) {
			m := newLinear(2, false, 1)
			training, err := vm.New(m.x.Graph(), nil, vm.WithSolver(&solver.SGD{Rate: 0.01}, m.w))
			require.NoError(b, err)
			defer training.Close()
			b.ResetTimer()
			_, err = fit.Run(b.Context(), training, m.data(points(2*max(b.N, 2))), watched)
			require.NoError(b, err)
		})
	}
}
