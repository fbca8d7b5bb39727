// Package mlflow is a server that speaks as much of MLflow's REST API as trainings use.
package mlflow

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/tensorboard"
)

// Server is a server that speaks the REST API of mlflow.org/docs/latest/rest-api.html, as far as
// trainings use it, and refuses what the page does not have.
type Server struct {
	*httptest.Server
	Fails Failure // nil for none

	sync.Mutex  // of what follows
	requests    int
	Experiments []string
	Runs        []*Run
	Wrong       []string // what it has refused
}

// Failure may take request n, from 1, from a server.
type Failure func(s *Server, n int, w http.ResponseWriter, r *http.Request) bool

// Run is a run that the server has.
type Run struct {
	Experiment, Status string
	Ends               string // the statuses with which it has ended
	Tags, Params       map[string]string
	Logged             []Metric
}

// Metric is a value that a run has logged.
type Metric struct {
	Key       string  `json:"key"`
	Value     float64 `json:"value"`
	Timestamp int64   `json:"timestamp"`
	Step      int     `json:"step"`
}

type pair struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

// New starts a server.
func New(t testing.TB) *Server {
	s := &Server{}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

// ServeHTTP answers a request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.Lock()
	s.requests++
	n := s.requests
	s.Unlock()
	if s.Fails != nil && s.Fails(s, n, w, r) {
		return
	}
	s.Lock()
	defer s.Unlock()
	reply, code, err := s.Answer(r)
	if err != nil {
		status := http.StatusNotFound
		if code == "INVALID_PARAMETER_VALUE" {
			status = http.StatusBadRequest
			s.Wrong = append(s.Wrong, err.Error())
		}
		w.WriteHeader(status)
		reply = map[string]any{"error_code": code, "message": err.Error()}
	}
	_ = json.NewEncoder(w).Encode(reply)
}

// Answer returns the answer to a request, or a code and an error.
func (s *Server) Answer(r *http.Request) (reply any, code string, err error) {
	const wrong, none = "INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"
	var q struct {
		Name          string   `json:"name"`
		ExperimentID  string   `json:"experiment_id"`
		ExperimentIDs []string `json:"experiment_ids"`
		Filter        string   `json:"filter"`
		MaxResults    int      `json:"max_results"`
		StartTime     int64    `json:"start_time"`
		RunName       string   `json:"run_name"`
		Tags          []pair   `json:"tags"`
		RunID         string   `json:"run_id"`
		Metrics       []Metric `json:"metrics"`
		Params        []pair   `json:"params"`
		Status        string   `json:"status"`
		EndTime       int64    `json:"end_time"`
	}
	if r.Method == http.MethodPost {
		in := json.NewDecoder(r.Body)
		in.DisallowUnknownFields()
		if err := in.Decode(&q); err != nil {
			return nil, wrong, err
		}
	}
	var of *Run
	if q.RunID != "" {
		var k int
		if _, err := fmt.Sscanf(q.RunID, "run%d", &k); err != nil || k >= len(s.Runs) {
			return nil, none, fmt.Errorf("no run %s", q.RunID)
		}
		of = s.Runs[k]
	}
	switch strings.TrimPrefix(r.Method+" "+r.URL.Path, "POST /api/2.0/mlflow/") {
	case "GET /api/2.0/mlflow/experiments/get-by-name":
		name := r.URL.Query().Get("experiment_name")
		if !slices.Contains(s.Experiments, name) {
			return nil, none, fmt.Errorf("no experiment %s", name)
		}
		return map[string]any{"experiment": map[string]any{"experiment_id": "of " + name}}, "", nil
	case "experiments/create":
		s.Experiments = append(s.Experiments, q.Name)
		return map[string]any{"experiment_id": "of " + q.Name}, "", nil
	case "runs/create":
		of = &Run{Experiment: q.ExperimentID, Status: "RUNNING",
			Tags: map[string]string{}, Params: map[string]string{}}
		for _, tag := range q.Tags {
			of.Tags[tag.Key] = tag.Value
		}
		if q.StartTime == 0 || q.ExperimentID == "" {
			return nil, wrong, errors.New("a run without a start or an experiment")
		}
		s.Runs = append(s.Runs, of)
		return map[string]any{"run": s.show(len(s.Runs) - 1)}, "", nil
	case "runs/search":
		found := []any{}
		for k, run := range s.Runs {
			for key, value := range run.Tags {
				if slices.Contains(q.ExperimentIDs, run.Experiment) && len(found) < q.MaxResults &&
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
		if of.Status = q.Status; q.EndTime > 0 {
			of.Ends += q.Status + " "
		}
		return map[string]any{}, "", nil
	case "runs/log-batch":
		if len(q.Metrics) > 1000 || len(q.Params) > 100 {
			return nil, wrong, fmt.Errorf("%d metrics, %d params", len(q.Metrics), len(q.Params))
		}
		for _, p := range q.Params {
			if old, ok := of.Params[p.Key]; ok && old != p.Value {
				return nil, wrong, fmt.Errorf("param %s is %s", p.Key, old)
			}
			of.Params[p.Key] = p.Value
		}
		for _, m := range q.Metrics {
			if strings.ContainsAny(m.Key, "@#") || m.Timestamp == 0 {
				return nil, wrong, fmt.Errorf("metric %+v", m)
			}
		}
		of.Logged = append(of.Logged, q.Metrics...)
		return map[string]any{}, "", nil
	}
	return nil, wrong, fmt.Errorf("%s %s", r.Method, r.URL.Path)
}

// show returns a run as the server does: with the last value of each metric.
func (s *Server) show(k int) any {
	last := map[string]Metric{}
	for _, m := range s.Runs[k].Logged {
		if old, ok := last[m.Key]; !ok || m.Step >= old.Step {
			last[m.Key] = m
		}
	}
	metrics, params := []Metric{}, []pair{}
	for _, m := range last {
		metrics = append(metrics, m)
	}
	for key, value := range s.Runs[k].Params {
		params = append(params, pair{key, value})
	}
	return map[string]any{"info": map[string]any{"run_id": fmt.Sprint("run", k)},
		"data": map[string]any{"metrics": metrics, "params": params}}
}

// Curves are what a run has, each step once.
func (r *Run) Curves(t testing.TB) tensorboard.Curves {
	t.Helper()
	c := tensorboard.Curves{}
	for _, m := range r.Logged {
		require.NoError(t, c.Add(m.Key, m.Step, float32(m.Value)))
	}
	return c
}
