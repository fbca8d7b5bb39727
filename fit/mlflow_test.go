package fit_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/tensorboard"
	"github.com/euryale-ml/euryale/vm"
)

// tracking is a server that speaks the REST API of mlflow.org/docs/latest/rest-api.html, as far as
// trainings use it, and refuses what the page does not have.
type tracking struct {
	*httptest.Server
	fails failure

	mu          sync.Mutex
	requests    int
	experiments []string
	runs        []*trackedRun
	wrong       []string
}

// failure may take request n, from 1, from a server.
type failure func(s *tracking, n int, w http.ResponseWriter, r *http.Request) bool

// trackedRun is a run that the server has.
type trackedRun struct {
	experiment, status, ended string
	tags, params              map[string]string
	logged                    []loggedMetric
}

type loggedMetric struct {
	Key       string  `json:"key"`
	Value     float64 `json:"value"`
	Timestamp int64   `json:"timestamp"`
	Step      int     `json:"step"`
}

type pair struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

func newTracking(t *testing.T) *tracking {
	s := &tracking{}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

// ServeHTTP answers a request.
func (s *tracking) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.requests++
	n := s.requests
	s.mu.Unlock()
	if s.fails != nil && s.fails(s, n, w, r) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	reply, code, err := s.answer(r)
	if err != nil {
		status := http.StatusNotFound
		if code == "INVALID_PARAMETER_VALUE" {
			status = http.StatusBadRequest
			s.wrong = append(s.wrong, err.Error())
		}
		w.WriteHeader(status)
		reply = map[string]any{"error_code": code, "message": err.Error()}
	}
	_ = json.NewEncoder(w).Encode(reply)
}

// answer returns the answer to a request, or a code and an error.
func (s *tracking) answer(r *http.Request) (reply any, code string, err error) {
	const wrong, none = "INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"
	var q struct {
		Name          string         `json:"name"`
		ExperimentID  string         `json:"experiment_id"`
		ExperimentIDs []string       `json:"experiment_ids"`
		Filter        string         `json:"filter"`
		MaxResults    int            `json:"max_results"`
		StartTime     int64          `json:"start_time"`
		RunName       string         `json:"run_name"`
		Tags          []pair         `json:"tags"`
		RunID         string         `json:"run_id"`
		Metrics       []loggedMetric `json:"metrics"`
		Params        []pair         `json:"params"`
		Status        string         `json:"status"`
		EndTime       int64          `json:"end_time"`
	}
	if r.Method == http.MethodPost {
		in := json.NewDecoder(r.Body)
		in.DisallowUnknownFields()
		if err := in.Decode(&q); err != nil {
			return nil, wrong, err
		}
	}
	var of *trackedRun
	if q.RunID != "" {
		var k int
		if _, err := fmt.Sscanf(q.RunID, "run%d", &k); err != nil || k >= len(s.runs) {
			return nil, none, fmt.Errorf("no run %s", q.RunID)
		}
		of = s.runs[k]
	}
	switch strings.TrimPrefix(r.Method+" "+r.URL.Path, "POST /api/2.0/mlflow/") {
	case "GET /api/2.0/mlflow/experiments/get-by-name":
		name := r.URL.Query().Get("experiment_name")
		if !slices.Contains(s.experiments, name) {
			return nil, none, fmt.Errorf("no experiment %s", name)
		}
		return map[string]any{"experiment": map[string]any{"experiment_id": "of " + name}}, "", nil
	case "experiments/create":
		s.experiments = append(s.experiments, q.Name)
		return map[string]any{"experiment_id": "of " + q.Name}, "", nil
	case "runs/create":
		of = &trackedRun{experiment: q.ExperimentID, status: "RUNNING",
			tags: map[string]string{}, params: map[string]string{}}
		for _, tag := range q.Tags {
			of.tags[tag.Key] = tag.Value
		}
		if q.StartTime == 0 || q.ExperimentID == "" {
			return nil, wrong, errors.New("a run without a start or an experiment")
		}
		s.runs = append(s.runs, of)
		return map[string]any{"run": s.show(len(s.runs) - 1)}, "", nil
	case "runs/search":
		found := []any{}
		for k, run := range s.runs {
			for key, value := range run.tags {
				if slices.Contains(q.ExperimentIDs, run.experiment) && len(found) < q.MaxResults &&
					q.Filter == fmt.Sprintf("tags.`%s` = '%s'", key, value) {
					found = append(found, s.show(k))
				}
			}
		}
		return map[string]any{"runs": found}, "", nil
	case "runs/update":
		if !slices.Contains([]string{"RUNNING", "FINISHED", "FAILED", "KILLED"}, q.Status) {
			return nil, wrong, fmt.Errorf("status %q", q.Status)
		}
		if of.status = q.Status; q.EndTime > 0 {
			of.ended += q.Status + " "
		}
		return map[string]any{}, "", nil
	case "runs/log-batch":
		if len(q.Metrics) > 1000 || len(q.Params) > 100 {
			return nil, wrong, fmt.Errorf("%d metrics, %d params", len(q.Metrics), len(q.Params))
		}
		for _, p := range q.Params {
			if old, ok := of.params[p.Key]; ok && old != p.Value {
				return nil, wrong, fmt.Errorf("param %s is %s", p.Key, old)
			}
			of.params[p.Key] = p.Value
		}
		for _, m := range q.Metrics {
			if strings.ContainsAny(m.Key, "@#") || m.Timestamp == 0 {
				return nil, wrong, fmt.Errorf("metric %+v", m)
			}
		}
		of.logged = append(of.logged, q.Metrics...)
		return map[string]any{}, "", nil
	}
	return nil, wrong, fmt.Errorf("%s %s", r.Method, r.URL.Path)
}

// show returns a run as the server does: with the last value of each metric.
func (s *tracking) show(k int) any {
	last := map[string]loggedMetric{}
	for _, m := range s.runs[k].logged {
		if old, ok := last[m.Key]; !ok || m.Step >= old.Step {
			last[m.Key] = m
		}
	}
	metrics, params := []loggedMetric{}, []pair{}
	for _, m := range last {
		metrics = append(metrics, m)
	}
	for key, value := range s.runs[k].params {
		params = append(params, pair{key, value})
	}
	return map[string]any{"info": map[string]any{"run_id": fmt.Sprint("run", k)},
		"data": map[string]any{"metrics": metrics, "params": params}}
}

// curves are what a run has, each step once.
func (r *trackedRun) curves(t *testing.T) tensorboard.Curves {
	t.Helper()
	c := tensorboard.Curves{}
	for _, m := range r.logged {
		require.NoError(t, c.Add(m.Key, m.Step, float32(m.Value)))
	}
	return c
}

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
		s, kept, dir := newTracking(t), t.TempDir(), t.TempDir()
		says := said(t, func() {
			tracked(t, P, 5, kept, s.URL, fit.TensorBoard(dir))
			tracked(t, 5-P, 0, kept, s.URL, fit.TensorBoard(dir))
		})
		require.Check(t, says == "" && len(s.wrong) == 0 && len(s.runs) == 1, "%d ranks: %q, %q, "+
			"%d runs", P, says, s.wrong, len(s.runs))
		run := s.runs[0]
		require.Equal(t, "the ends", run.ended, "FAILED FINISHED ")
		require.Equal(t, "the experiment", run.experiment, "of points")
		require.Equal(t, "params", fmt.Sprint(run.params), fmt.Sprintf("map[batch:12 epochs:3 "+
			"odd_name:x ranks:%d samples:48 seed:1 solver:SGD width:2]", P))
		got, want := run.curves(t), tensorboard.Shown(t, dir)
		for _, name := range []string{"step/loss", "epoch/loss"} {
			require.Equal(t, name, fmt.Sprint(got[name]), fmt.Sprint(want[name]))
		}
		require.Equal(t, "steps and epochs", fmt.Sprint(len(got["step/samples_per_second"]),
			len(got["epoch/seconds"])), "12 3")
		tracked(t, 1, 0, kept, s.URL) // it is finished
		tracked(t, 1, 0, t.TempDir(), s.URL)
		require.Equal(t, "another training", fmt.Sprint(len(s.runs), " ", len(s.runs[1].logged)),
			"2 30")
	}
}

// TestATrainingDoesNotDependOnItsServer: it has the same bits, waits for no server, and says once
// that there is none. What the server has missed it gets when it answers.
func TestATrainingDoesNotDependOnItsServer(t *testing.T) {
	want := tracked(t, 2, 0, t.TempDir(), "")
	hung, lost := make(chan struct{}), map[string]bool{}
	cases := map[string]struct {
		fails    failure
		says     string
		complete bool
	}{
		"an error": {func(_ *tracking, n int, w http.ResponseWriter, _ *http.Request) bool {
			if n <= 3 {
				w.WriteHeader(http.StatusBadGateway)
			}
			return n <= 3
		}, "502", true},
		"lost answers": {func(s *tracking, _ int, w http.ResponseWriter, r *http.Request) bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			call := path.Base(r.URL.Path)
			if lost[call] || call != "create" && call != "log-batch" || len(s.experiments) == 0 {
				return false
			}
			lost[call] = true
			_, _, err := s.answer(r)
			conn, _, wrong := w.(http.Hijacker).Hijack()
			return errors.Join(err, wrong) != nil || conn.Close() == nil
		}, "EOF", true},
		"no answer": {func(*tracking, int, http.ResponseWriter, *http.Request) bool {
			<-hung
			return true
		}, "context deadline exceeded", false},
		"another server": {func(_ *tracking, _ int, w http.ResponseWriter, _ *http.Request) bool {
			fmt.Fprint(w, "welcome")
			return true
		}, "invalid character", false},
	}
	servers, took := map[string]*tracking{}, make(chan time.Duration, len(cases)+1)
	kept, late := t.TempDir(), newTracking(t)
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
			s := newTracking(t)
			s.fails, servers[name] = c.fails, s
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
		all.Wait()
	})
	close(hung)
	close(took)
	for d := range took {
		require.Check(t, d < 10*time.Second, "a training takes %v", d)
	}
	require.Equal(t, "epochs of a server that comes late",
		len(late.runs[0].curves(t)["epoch/loss"]), 3)
	for name, c := range cases {
		s := servers[name]
		complete := map[bool]int{true: 1}[c.complete]
		require.Check(t, strings.Count(lines, s.URL+" is sent") <= 1 && strings.Count(lines, s.URL+
			" is not complete") == 1-complete, "%s: it says\n%s", name, lines)
		require.Check(t, strings.Contains(lines, c.says), "%s: it says\n%s", name, lines)
		require.Equal(t, name+": runs", len(s.runs), complete)
		if c.complete {
			require.Equal(t, name+": steps", len(s.runs[0].curves(t)["step/loss"]), 12)
			require.Equal(t, name, s.runs[0].status, "FINISHED")
		}
	}
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
