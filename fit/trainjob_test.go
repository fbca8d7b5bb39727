package fit_test

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// TestATrainJobHasTheProgressOfItsTraining: with the token of the pod, in what the server takes;
// and the training ends as ever where the server refuses it.
func TestATrainJobHasTheProgressOfItsTraining(t *testing.T) {
	for _, answer := range []int{http.StatusOK, http.StatusForbidden} {
		var mu sync.Mutex
		var bodies []string
		s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			body, _ := io.ReadAll(r.Body)
			require.Check(t, r.Method == http.MethodPost && r.URL.Path == "/job/status" &&
				r.Header.Get("Authorization") == "Bearer of-the-pod" &&
				r.Header.Get("Content-Type") == "application/json", "it gets %v %v", r, r.Header)
			bodies = append(bodies, string(body))
			w.WriteHeader(answer)
		}))
		dir := t.TempDir()
		ca, token := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "token")
		require.NoError(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE",
			Bytes: s.Certificate().Raw}), 0o600))
		require.NoError(t, os.WriteFile(token, []byte("of-the-pod\n"), 0o600))
		t.Setenv("KUBEFLOW_TRAINER_SERVER_URL", s.URL+"/job/status")
		t.Setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", ca)
		t.Setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", token)
		says := said(t, func() { tracked(t, 2, 0, t.TempDir(), "") })
		s.Close()
		require.Equal(t, "what is said of the server", strings.Contains(says, "403 Forbidden"),
			answer != http.StatusOK)
		require.That(t, len(bodies) > 0, "the server was told nothing: %s", says)
		var last map[string]struct {
			ProgressPercentage, EstimatedRemainingSeconds int
			Metrics                                       []struct{ Name, Value string }
			LastUpdatedTime                               string
		}
		require.NoError(t, json.Unmarshal([]byte(bodies[len(bodies)-1]), &last))
		of := last["trainerStatus"]
		require.Check(t, len(last) == 1 && of.ProgressPercentage == 100 &&
			of.EstimatedRemainingSeconds == 0 && strings.HasSuffix(of.LastUpdatedTime, "Z") &&
			len(of.Metrics) > 1 && of.Metrics[0].Name == "epoch/loss" && of.Metrics[0].Value != "",
			"it is told at the end: %s", bodies[len(bodies)-1])
	}
}

// TestARankWithoutTheVariablesOfATrainJobTrains: mpirun starts ranks by sshd, which has not those
// of its pod.
func TestARankWithoutTheVariablesOfATrainJobTrains(t *testing.T) {
	t.Setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://127.0.0.1:1")
	var begun sync.Once
	first := make(chan struct{})
	says := said(t, func() {
		require.NoError(t, euryale.Run(t.Context(), 2, func(comm backend.Communicator,
			build sync.Locker) error {
			build.Lock()
			m := newLinear(2, true, 1)
			build.Unlock()
			training, err := vm.New(m.x.Graph(), nil, vm.WithDataParallel(comm),
				vm.WithSolver(&solver.SGD{Rate: 1. / 64}, m.w))
			if err != nil {
				return err
			}
			samples := points(24)
			if comm.Rank() == 0 { // it has read its variables when it asks for the length
				samples = lengthTold{samples, func() {
					begun.Do(func() {
						_ = os.Unsetenv("KUBEFLOW_TRAINER_SERVER_URL")
						close(first)
					})
				}}
			} else {
				<-first
			}
			_, err = fit.Run(t.Context(), training, m.data(samples))
			return errors.Join(err, training.Close())
		}))
	})
	require.Check(t, strings.Contains(says, "the status of the TrainJob"), "it says %q", says)
}

// lengthTold is a set that tells when it is asked how long it is.
type lengthTold struct {
	fit.Set
	told func()
}

func (s lengthTold) Len() int {
	s.told()
	return s.Set.Len()
}
