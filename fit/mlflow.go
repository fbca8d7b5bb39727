package fit

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// MLflow logs the training as a run of an experiment on an MLflow server, such as
// "http://localhost:5000": params, to which the training adds its own, the numbers that
// [TensorBoard] shows, and whether the run is FINISHED, KILLED (by a signal or a time limit) or
// FAILED. Passwords are given in the URL, a token by MLFLOW_TRACKING_TOKEN, and an experiment of ""
// is "Default". An empty server logs nothing.
//
// The training neither fails nor waits because the server is away, slow or refuses something: rank
// 0 says so once on standard error, and sends what it has in the background when the server
// answers. Of a server that is away for long it gets every other step, or fewer. At its end Run
// waits for at most 5 seconds.
//
// A training that resumes from a [Checkpoint] continues its run, which has each step once, but for
// those of the last second before a checkpoint if rank 0 is killed then. One that had ended sends
// the epochs that the server lacks, and that it is FINISHED. In an elastic job the next rank 0
// sends these. Its run is RUNNING until it is finished, fails on all ranks, or all are told to
// stop.
func MLflow(server, experiment string, params map[string]string) Option {
	return func(t *trainer) {
		t.once("MLflow")
		if server == "" {
			return
		}
		u, err := url.Parse(server)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			t.missing = errors.Join(t.missing, refused("fit.MLflow: the server is no URL such as "+
				"http://localhost:5000"))
			return
		}
		t.trackers = append(t.trackers, &mlflow{server: u, params: maps.Clone(params),
			experiment: cmp.Or(experiment, "Default"), sent: map[string]int{}})
	}
}

// Limits of the server, in a request, and what this end allows it.
const (
	mostMetrics, mostParams = 1000, 100
	mostWaiting             = 1 << 16 // points, some 10 MB
	requestTime             = 10 * time.Second
	endTime, endTries       = 5 * time.Second, 3
	between                 = time.Second      // requests
	longest                 = 30 * time.Second // between them while the server is away
)

// mlflow sends a training to a server, from a goroutine.
type mlflow struct {
	server     *url.URL
	experiment string
	params     map[string]string
	training   string // the tag of its run
	label      string // of a new run
	quit       context.CancelFunc
	end, ended chan struct{} // of the training, and of the goroutine

	mu      sync.Mutex
	waiting []point

	// of the goroutine
	run   string         // as the server calls it, "" where it must be found out
	sent  map[string]int // the last step that the server has, by metric
	lacks []text         // params that it does not have, and never changes
	said  bool
}

func (m *mlflow) open(t *trainer, step int) error {
	m.training, m.label = t.past.Name, filepath.Base(t.dir)
	own := map[string]string{"epochs": fmt.Sprint(t.epochs), "batch": fmt.Sprint(t.global()),
		"samples": fmt.Sprint(t.n), "seed": fmt.Sprint(t.seed),
		"ranks":  fmt.Sprint(t.comm.Size()),
		"solver": strings.TrimPrefix(fmt.Sprintf("%T", t.machine.Solver()), "*solver.")}
	maps.Copy(own, m.params)
	m.params = own
	metrics := []string{"loss", "seconds"}
	if t.validation != nil {
		for _, one := range t.validation.metrics {
			metrics = append(metrics, column(one.Name))
		}
	}
	err := errors.Join(alike("the metrics", metrics), alike("the params",
		slices.Sorted(maps.Keys(m.params))))
	if err != nil {
		return err
	}
	for _, e := range t.past.Epochs {
		if e.Steps < step { // an earlier try may have kept it to itself
			m.waiting = append(m.waiting, e.point())
		}
	}
	ctx, quit := context.WithCancel(context.Background())
	m.quit, m.end, m.ended = quit, make(chan struct{}), make(chan struct{})
	go m.deliver(ctx)
	return nil
}

// tell keeps a point until it is sent. Where too many wait it keeps every other step.
func (m *mlflow) tell(p point) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.waiting = append(m.waiting, p); len(m.waiting) > mostWaiting {
		odd := false
		m.waiting = slices.DeleteFunc(m.waiting, func(p point) bool {
			odd = !odd
			return odd && p.of == "step"
		})
	}
	return nil
}

// close sends the rest, and how the training has ended, in a few tries. If other ranks go on it
// sends nothing, since the next rank 0 may send the same.
func (m *mlflow) close(status string) {
	if m.quit == nil { // its open has failed
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	close(m.end)
	if status != "" { // a request that is given up may still make a run, after the next search
		select {
		case <-m.ended:
		case <-ctx.Done():
		}
	}
	m.quit()
	if <-m.ended; status == "" {
		return
	}
	end := func() error {
		if err := m.send(ctx); err != nil {
			return err
		}
		return m.call(ctx, "runs/update", map[string]any{"run_id": m.run, "status": status,
			"end_time": time.Now().UnixMilli()}, nil)
	}
	err := end()
	for tries := 1; tries < endTries && err != nil && ctx.Err() == nil; tries++ {
		time.Sleep(between)
		err = end()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "euryale: fit.MLflow: %v: the run at %s is not complete: "+
			"of a training with fit.Checkpoint, which is started again, it gets the epochs\n", err,
			m.server.Redacted())
	}
}

// deliver sends what waits until the training has ended.
func (m *mlflow) deliver(ctx context.Context) {
	defer close(m.ended)
	for pause := between; ; {
		err := m.send(ctx)
		select {
		case <-m.end:
			return
		default:
		}
		if err == nil {
			pause = between
		} else {
			m.say(err)
			pause = min(2*pause, longest)
		}
		select {
		case <-m.end:
			return
		case <-time.After(pause):
		}
	}
}

// say reports the first error.
func (m *mlflow) say(err error) {
	if !m.said {
		fmt.Fprintf(os.Stderr, "euryale: fit.MLflow: %v: the training goes on, and %s is sent "+
			"what it has when it takes that\n", err, m.server.Redacted())
	}
	m.said = true
}

// metric is a number as the server takes it.
type metric struct {
	Key       string  `json:"key"`
	Value     float64 `json:"value"`
	Timestamp int64   `json:"timestamp"`
	Step      int     `json:"step"`
}

// send sends what waits. After an error the server may have got it nevertheless, so send then finds
// out what it has.
func (m *mlflow) send(ctx context.Context) error {
	if m.run == "" {
		if err := m.find(ctx); err != nil {
			return err
		}
	}
	for {
		params, due, err := m.lacks[:min(len(m.lacks), mostParams)], []metric(nil), error(nil)
		if len(params) > 0 {
			err = logged(ctx, m, "params", params)
		} else if due = m.due(); len(due) > 0 {
			err = logged(ctx, m, "metrics", due)
		} else {
			return nil
		}
		if err != nil {
			m.run = ""
			return err
		}
		m.lacks = m.lacks[len(params):]
		for _, x := range due {
			m.sent[x.Key] = x.Step
		}
	}
}

// logged sends metrics or params. If the server refuses them, which it does for one of them and
// will do for ever, it gets the halves.
func logged[T any](ctx context.Context, m *mlflow, what string, all []T) error {
	err := m.call(ctx, "runs/log-batch", map[string]any{"run_id": m.run, what: all}, nil)
	var answer *answer
	if !errors.As(err, &answer) || answer.status != http.StatusBadRequest {
		return err
	}
	if len(all) == 1 {
		m.say(err)
		return nil
	}
	if err := logged(ctx, m, what, all[:len(all)/2]); err != nil {
		return err
	}
	return logged(ctx, m, what, all[len(all)/2:])
}

// alike returns an error if two names are one to the server.
func alike(what string, names []string) error {
	known := map[string]string{}
	for _, name := range names {
		key := illegal.ReplaceAllString(name, "_")
		if other, ok := known[key]; ok && other != name {
			return refused("fit.MLflow: %s %q and %q are both %q there: rename one", what, other,
				name, key)
		}
		known[key] = name
	}
	return nil
}

// illegal are the characters that names of metrics and params may not have.
var illegal = regexp.MustCompile(`[^\w\-. :/]`)

// due returns the first numbers that the server does not have, and forgets those that it has.
func (m *mlflow) due() (due []metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, p := range m.waiting {
		first := len(due)
		for name, x := range p.all {
			key := illegal.ReplaceAllString(name, "_")
			if m.sent[key] < p.step {
				due = append(due, metric{key, x, p.at.UnixMilli(), p.step})
			}
		}
		if len(due) > mostMetrics {
			due = due[:first]
			break
		}
		if len(due) == 0 {
			m.waiting[i] = point{}
		}
	}
	m.waiting = slices.DeleteFunc(m.waiting, func(p point) bool { return p.numbers == nil })
	return due
}

// run is what the server knows of a run.
type run struct {
	Info struct {
		ID string `json:"run_id"`
	}
	Data struct {
		Metrics []struct { // the last ones
			Key  string
			Step int
		}
		Params []text
	}
}

// text is a param or a tag.
type text struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

// tagged is the tag by which the run of a training is found.
const tagged = "euryale.training"

// find makes the run of the training go on, or creates it. It leaves an error that may pass.
func (m *mlflow) find(ctx context.Context) error {
	id, err := m.findExperiment(ctx)
	var found struct{ Runs []run }
	if err == nil {
		filter := fmt.Sprintf("tags.`%s` = '%s'", tagged, m.training)
		err = m.call(ctx, "runs/search", map[string]any{"experiment_ids": []string{id},
			"filter": filter, "max_results": 1}, &found)
	}
	if err != nil {
		return err
	}
	var r run
	if len(found.Runs) > 0 {
		r = found.Runs[0]
		err = m.call(ctx, "runs/update", map[string]any{"run_id": r.Info.ID, "status": "RUNNING"},
			nil)
	} else {
		var created struct{ Run run }
		request := map[string]any{"experiment_id": id, "start_time": time.Now().UnixMilli(),
			"tags": []text{{tagged, m.training}, {"mlflow.source.name", os.Args[0]}}}
		if m.label != "." {
			request["run_name"] = m.label
		}
		err = m.call(ctx, "runs/create", request, &created)
		r = created.Run
	}
	for _, x := range r.Data.Metrics {
		m.sent[x.Key] = max(m.sent[x.Key], x.Step)
	}
	m.lacks = nil
	for _, name := range slices.Sorted(maps.Keys(m.params)) {
		key := illegal.ReplaceAllString(name, "_")
		if !slices.ContainsFunc(r.Data.Params, func(p text) bool { return p.Key == key }) {
			m.lacks = append(m.lacks, text{key, m.params[name]})
		}
	}
	if err == nil && r.Info.ID == "" {
		err = errors.New("the answer has no run: is the server MLflow's?")
	}
	if err == nil {
		m.run = r.Info.ID
	}
	return err
}

// findExperiment returns the server's name of the experiment, which it creates if there is none.
func (m *mlflow) findExperiment(ctx context.Context) (id string, err error) {
	var found struct {
		Experiment struct {
			ID string `json:"experiment_id"`
		}
	}
	err = m.call(ctx, "experiments/get-by-name", url.Values{"experiment_name": {m.experiment}},
		&found)
	var answer *answer
	if !errors.As(err, &answer) || answer.Code != "RESOURCE_DOES_NOT_EXIST" {
		return found.Experiment.ID, err
	}
	var created struct {
		ID string `json:"experiment_id"`
	}
	err = m.call(ctx, "experiments/create", map[string]any{"name": m.experiment}, &created)
	return created.ID, err
}

// answer is the server's error.
type answer struct {
	status  int
	Code    string `json:"error_code"`
	Message string `json:"message"`
}

func (a *answer) Error() string {
	return strings.Join(strings.Fields(fmt.Sprint("the server answers ", a.status, " ", a.Code, " ",
		a.Message)), " ")
}

// call calls a function of the server: by GET with values, else by POST.
func (m *mlflow) call(ctx context.Context, function string, request, reply any) error {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	method, to := http.MethodPost, m.server.JoinPath("api/2.0/mlflow", function)
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	if values, ok := request.(url.Values); ok {
		method, to.RawQuery, body = http.MethodGet, values.Encode(), nil
	}
	r, err := http.NewRequestWithContext(ctx, method, to.String(), bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	if token := os.Getenv("MLFLOW_TRACKING_TOKEN"); token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, 1<<26))
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		a := &answer{status: response.StatusCode}
		_ = json.Unmarshal(text, a) // a proxy's answer is none
		return a
	}
	if reply == nil {
		reply = new(struct{})
	}
	if err := json.Unmarshal(text, reply); err != nil { // it may be a page for logging in
		return fmt.Errorf("the server answers what is no JSON: %w", err)
	}
	return nil
}
