package fit

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/internal/files"
)

// The variables that Kubeflow's Trainer gives the pods of a TrainJob, with its feature
// TrainJobStatus, and how often it may be told: github.com/kubeflow/trainer, proposal 2779.
const (
	trainJobURL   = "KUBEFLOW_TRAINER_SERVER_URL"
	trainJobCA    = "KUBEFLOW_TRAINER_SERVER_CA_CERT" // a file
	trainJobToken = "KUBEFLOW_TRAINER_SERVER_TOKEN"   // a file, whose text changes
	trainJobPace  = 5 * time.Second
)

// trainJob shows a training in the status of the TrainJob that it is. The training neither fails
// nor waits because the server is away.
type trainJob struct {
	url, ca, token string
	all, first     int // steps of the training; the first one here
	began          time.Time
	quit, ended    chan struct{}
	said           bool

	mu      sync.Mutex
	step    int // the last one, -1 if the server has been told of it
	numbers map[string]float64
}

// status is what the server takes.
type status struct {
	Percent   int           `json:"progressPercentage"`
	Remaining *int          `json:"estimatedRemainingSeconds,omitempty"`
	Metrics   []statusValue `json:"metrics,omitempty"`
	Updated   time.Time     `json:"lastUpdatedTime"`
}

type statusValue struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// ofTrainJob returns the tracker of the TrainJob that this process is of; none if it is of none, or
// cannot know: what sshd starts has no variables of its pod.
func ofTrainJob() []tracker {
	if os.Getenv(trainJobURL) == "" {
		return nil
	}
	return []tracker{&trainJob{url: os.Getenv(trainJobURL), ca: os.Getenv(trainJobCA),
		token: os.Getenv(trainJobToken), numbers: map[string]float64{}}}
}

func (j *trainJob) open(t *trainer, step int) error {
	j.all, j.first, j.began, j.step = t.epochs*t.sampler.Steps(), step-1, time.Now(), -1
	j.quit, j.ended = make(chan struct{}), make(chan struct{})
	go func() {
		defer close(j.ended)
		for {
			select {
			case <-j.quit:
				return
			case <-time.After(trainJobPace):
				j.send()
			}
		}
	}()
	return nil
}

func (j *trainJob) tell(p point) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.step = p.step
	maps.Insert(j.numbers, p.all)
	return nil
}

// close tells of the last step. How the training has ended the server knows from its pods.
func (j *trainJob) close(string) {
	close(j.quit)
	<-j.ended
	j.send()
}

// send tells the server what it does not know, and reports its first error. What did not arrive is
// told again.
func (j *trainJob) send() {
	j.mu.Lock()
	step, now := j.step, status{Updated: time.Now().UTC().Truncate(time.Second)}
	for _, name := range slices.Sorted(maps.Keys(j.numbers)) {
		now.Metrics = append(now.Metrics,
			statusValue{name, strconv.FormatFloat(j.numbers[name], 'g', 6, 64)})
	}
	j.step = -1
	j.mu.Unlock()
	if step < 0 {
		return
	}
	now.Percent = min(100, 100*step/max(1, j.all))
	if done := step - j.first; done > 0 {
		each := time.Since(j.began).Seconds() / float64(done)
		left := int(each * float64(max(0, j.all-step)))
		now.Remaining = &left
	}
	err := j.post(now)
	if err == nil {
		return
	}
	j.mu.Lock()
	j.step = max(j.step, step)
	j.mu.Unlock()
	if !j.said {
		j.said = true
		fmt.Fprintf(os.Stderr, "euryale: fit: the status of the TrainJob: %v: the training goes "+
			"on without it\n", err)
	}
}

func (j *trainJob) post(now status) error {
	body, err := json.Marshal(map[string]status{"trainerStatus": now})
	token, noToken := files.Read(j.token, 1<<16)
	authority, noCA := files.Read(j.ca, 1<<20)
	if err := cmp.Or(err, noToken, noCA); err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authority) {
		return fmt.Errorf("%s has no certificate", j.ca)
	}
	ctx, cancel := context.WithTimeout(context.Background(), trainJobPace)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, j.url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer "+string(bytes.TrimSpace(token)))
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{RootCAs: roots}}}
	response, err := client.Do(r)
	if err != nil {
		return err
	}
	if response.StatusCode >= http.StatusMultipleChoices {
		err = errors.New("the server answers " + response.Status)
	}
	return errors.Join(err, response.Body.Close())
}
