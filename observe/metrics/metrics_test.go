package metrics

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/vm"
)

const loopback = "127.0.0.1:0"

// train trains y = x w on ranks of one process, in batches of 2 of each rank, for 3 steps, and
// calls during after each of them on each rank.
func train(t *testing.T, ranks int, during func(s *Server, step fit.StepLoss) error,
	opts ...Option) {
	t.Helper()
	const local, steps = 2, 3
	require.NoError(t, euryale.Run(t.Context(), ranks, func(comm backend.Communicator,
		build sync.Locker) error {
		s, err := Serve(comm, append(opts, Address(loopback))...)
		if err != nil {
			return err
		}
		defer s.Close()
		build.Lock()
		g := G.NewGraph()
		x := G.NewMatrix(g, G.Float64, G.WithShape(local, 2), G.WithName("x"),
			G.WithInit(G.Zeroes()))
		w := G.NewVector(g, G.Float64, G.WithShape(2), G.WithName("w"),
			G.WithValue(tensor.New(tensor.WithBacking([]float64{1, -2}))))
		loss := G.Must(G.Mean(G.Must(G.Square(G.Must(G.Mul(x, w))))))
		_, err = G.Grad(loss, w)
		build.Unlock()
		if err != nil {
			return err
		}
		momentum := &solver.Momentum{Rate: 1. / 64}
		m, err := vm.New(g, nil, vm.WithSolver(momentum, w), vm.WithDataParallel(comm))
		if err != nil {
			return err
		}
		defer m.Close()
		set := data.Of(ranks*local*steps, func(i int, row []any) error {
			row[0].([]float64)[0] = 2
			return nil
		})
		_, err = fit.Run(t.Context(), m, fit.Data{Set: set, Inputs: G.Nodes{x}, Loss: loss},
			fit.OnStep(func(l fit.StepLoss) error { return during(s, l) }))
		return err
	}))
}

// get returns the answer of a server.
func get(s *Server, credential string) (status int, body string, err error) {
	r, err := http.NewRequest(http.MethodGet, "http://"+s.Addr().String()+"/metrics", nil)
	if err != nil {
		return 0, "", err
	}
	if credential != "" {
		r.Header.Set("Authorization", credential)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(text), err
}

// Each of 2 ranks has 2 samples a step, whose loss is 2² = 4 at first; w of 16 bytes is reduced in
// a bucket.
func TestAScrapeDuringATrainingHasItsNumbers(t *testing.T) {
	t.Setenv("EURYALE_TOKEN", "not-to-be-seen-by-anybody")
	t.Setenv("TORCHELASTIC_RESTART_COUNT", "2")
	train(t, 2, func(s *Server, step fit.StepLoss) error {
		if step.Step == 1 {
			s.Registry().MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "mine",
				Help: "Of the program."}, func() float64 { return 7 }))
		}
		if step.Step != 3 {
			return nil
		}
		wrong, err := testutil.GatherAndLint(s.registry)
		for _, p := range wrong {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
		status, body, getErr := get(s, "")
		if err = errors.Join(err, getErr); err != nil || status != http.StatusOK {
			return fmt.Errorf("status %d: %w", status, err)
		}
		rank := fmt.Sprintf(`rank="%d"`, s.rank)
		for _, line := range []string{
			"euryale_step{R} 3", "euryale_samples_total{R} 6", "euryale_tokens_total{R} 30",
			"euryale_step_seconds_count{R} 3", "euryale_restarts{R} 2", "mine{R} 7",
			`euryale_step_seconds_bucket{R,le="+Inf"} 3`, "euryale_loader_capacity_batches{R} 3",
			fmt.Sprintf("euryale_loss{R} %v\n", step.Loss),
			`euryale_collectives_total{algorithm="one-shot",bucket="0",kind="allreduce",R} 3`,
			`euryale_collective_bytes_total{algorithm="one-shot",bucket="0",kind="allreduce",R} 48`,
			`euryale_exposed_seconds_total{algorithm="one-shot",bucket="0",kind="allreduce",R} `,
			`,bucket="",kind="allgather",R} `,
			`euryale_cause_seconds_total{cause="garbage_collection",R} `,
			`euryale_late_cause{cause="loader",R} `, `euryale_rank_state{R,state="ended"} 0`,
			"euryale_flops_total{R} ", "euryale_mfu_ratio{R} ", "go_gc_duration_seconds_count{R} ",
			`euryale_rank_info{backend="host",device="host",machine=`, `,R,size="2"} 1`,
		} {
			if line = strings.ReplaceAll(line, "R", rank); !strings.Contains(body, line) {
				t.Errorf("there is no %s in\n%s", line, body)
			}
		}
		require.Check(t, !strings.Contains(body, "not-to-be-seen") &&
			!strings.Contains(body, "EURYALE"), "the answer has a part of the environment in it")
		return nil
	}, Tokens(5), Peak(1e12))
}

// The page and the dashboard have the metrics that there are.
func TestMetricsAreDocumented(t *testing.T) {
	emitted := map[string]bool{"euryale_gpu_memory_used_bytes": true, // with a GPU
		"euryale_gpu_memory_total_bytes": true, "euryale_gpu_clock_hertz": true,
		"euryale_gpu_clock_max_hertz": true, "euryale_gpu_throttled_seconds_total": true}
	var mu sync.Mutex
	train(t, 2, func(s *Server, step fit.StepLoss) error {
		all, err := s.registry.Gather()
		mu.Lock()
		defer mu.Unlock()
		for _, f := range all {
			emitted[f.GetName()] = true
		}
		return err
	}, Tokens(5), Peak(1e12), Elastic(&generations{}))
	names := regexp.MustCompile("euryale_[a-z_]+[a-z]")
	documented := map[string]bool{}
	for _, file := range []string{"observing.md", "grafana.json"} {
		text := require.Value(os.ReadFile(filepath.Join("..", "..", "docs", file)))(t)
		require.Check(t, !strings.HasSuffix(file, "json") || json.Valid(text), "%s is no JSON",
			file)
		for _, name := range names.FindAllString(string(text), -1) {
			name = strings.TrimSuffix(name, "_bucket") // of a histogram
			if documented[name] = true; !emitted[name] {
				t.Errorf("%s has %s, which there is not", file, name)
			}
		}
	}
	for name := range emitted {
		require.Check(t, !strings.HasPrefix(name, "euryale_") || documented[name],
			"%s is not documented", name)
	}
}

// generations is an elastic training, whose ranks a test changes.
type generations struct{ comm backend.Communicator }

func (g *generations) Comm() backend.Communicator { return g.comm }

// third is a communicator of rank 3.
type third struct{ backend.Communicator }

func (third) Rank() int { return 3 }

func (g *generations) Recoveries() (int, time.Duration) { return 2, 1500 * time.Millisecond }

func TestTheServerGoesOnWithTheRanksOfAnElasticTraining(t *testing.T) {
	taken := require.Value(net.Listen("tcp", loopback))(t)
	defer taken.Close()
	var s *Server
	var training generations
	for generation := range 3 {
		if err := euryale.Run(t.Context(), 1, func(comm backend.Communicator,
			_ sync.Locker) (err error) {
			if training.comm = comm; s != nil {
				if _, _, err = get(s, ""); err != nil || observe.WatchOf(comm) != nil {
					t.Errorf("a scrape has started the watch of one rank, or %v", err)
				}
			} else {
				if s, err = Serve(comm, Address(taken.Addr().String()),
					Elastic(&training)); err != nil {
					return err
				}
			}
			w, err := observe.Start(comm)
			if err != nil {
				return err
			}
			told, err := autograd.Gather(comm, w.Sample()...)
			if err != nil {
				return err
			}
			w.Step(observe.StepInfo{Number: 5 + generation}, told)
			_, body, err := get(s, "")
			for _, line := range []string{fmt.Sprintf("euryale_step{R} %d", 5+generation),
				"euryale_recoveries_total{R} 2", "euryale_recovery_seconds_total{R} 1.5",
				`euryale_rank_state{R,state="ended"} 0`} {
				line = strings.ReplaceAll(line, "R", `rank="0"`)
				require.Check(t, strings.Contains(body, line),
					"in generation %d there is no %s in\n%s", generation, line, body)
			}
			training.comm = third{comm} // after a loss
			if _, body, wrong := get(s, ""); wrong != nil || strings.Contains(body, `rank="0"`) ||
				!strings.Contains(body, `go_goroutines{rank="3"}`) {
				t.Errorf("%v: rank 3 is not named in\n%s", wrong, body)
			}
			training.comm = comm
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if _, body, err := get(s, ""); err != nil || !strings.Contains(body, "recoveries_total") {
			t.Errorf("after generation %d: %v\n%s", generation, err, body)
		}
	}
	require.NoError(t, s.Close())
}

func TestAMachineThatIsNotElasticHasNoRecoveries(t *testing.T) {
	var training *autograd.Elastic // of such a machine
	require.NoError(t, euryale.Run(t.Context(), 1, func(comm backend.Communicator,
		_ sync.Locker) error {
		s, err := Serve(comm, Address(loopback), Elastic(training))
		if err != nil {
			return err
		}
		_, body, err := get(s, "")
		for _, line := range []string{`euryale_recoveries_total{rank="0"} 0`,
			`euryale_rank_state{rank="0",state="ended"} 0`} {
			require.Check(t, strings.Contains(body, line), "there is no %s in\n%s", line, body)
		}
		return errors.Join(err, s.Close())
	}))
}

// Clients that send garbage, nothing, and too much do not keep a training from its steps, nor a
// scrape from its answer.
func TestClientsHaveNoEffectOnATraining(t *testing.T) {
	before := runtime.NumGoroutine()
	var steps, answers atomic.Int32
	train(t, 1, func(s *Server, step fit.StepLoss) error {
		steps.Add(1)
		if step.Step != 1 {
			return nil
		}
		for _, text := range []string{"", "\x16\x03\x01garbage\r\n\r\n",
			"POST /metrics HTTP/1.1\r\n",
			"GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 64<<10)} {
			c, err := net.Dial("tcp", s.Addr().String())
			if err != nil {
				return err
			}
			defer c.Close()
			if _, err := io.WriteString(c, text); err != nil {
				t.Log(err) // it has given up already
			}
		}
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for range 3 {
					if status, _, err := get(s, ""); err == nil && status == http.StatusOK {
						answers.Add(1)
					}
				}
			})
		}
		all.Wait()
		return nil
	})
	if steps.Load() != 3 || answers.Load() == 0 {
		t.Errorf("%d steps, %d answers", steps.Load(), answers.Load())
	}
	for range 500 { // connections end a moment later
		if runtime.NumGoroutine() <= before+2 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d goroutines, %d before", runtime.NumGoroutine(), before)
}

// serveNothing serves a registry whose only metric takes some time.
func serveNothing(t *testing.T, credential string, takes, patience time.Duration) *Server {
	t.Helper()
	s := require.Value(listen(loopback, 0))(t)
	s.registry = prometheus.NewRegistry()
	s.Registry().MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "x", Help: "X."},
		func() float64 { time.Sleep(takes); return 1 }))
	s.serve(credential, patience)
	t.Cleanup(func() { s.Close() })
	return s
}

func TestOneScrapeRunsAtATime(t *testing.T) {
	s := serveNothing(t, "", 500*time.Millisecond, 100*time.Millisecond)
	var all sync.WaitGroup
	var served, refused atomic.Int32
	for range 3 {
		all.Go(func() {
			switch status, _, err := get(s, ""); {
			case err != nil:
				t.Error(err)
			case status == http.StatusOK:
				served.Add(1)
			case status == http.StatusServiceUnavailable:
				refused.Add(1)
			}
		})
	}
	all.Wait()
	if served.Load() != 1 || refused.Load() != 2 {
		t.Errorf("%d scrapes were served, %d refused", served.Load(), refused.Load())
	}
}

func TestOtherMachinesNeedTheCredential(t *testing.T) {
	const token = "0123456789abcdef"
	at := func(ip string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: 1} }
	t.Setenv("EURYALE_TOKEN", token)
	// HMAC-SHA256 of the key and "euryale metrics", by openssl
	const derived = "1e85c05da9c1b308672075fd9711441b03100bdb2571c8a024bdccea00869132"
	for ip, want := range map[string]string{"127.0.0.1": "", "::1": "",
		"0.0.0.0": derived, "10.1.2.3": derived,
		"::": derived} {
		require.Equal(t, fmt.Sprintf("at %s", ip), credential(at(ip)), want)
	}
	t.Setenv("EURYALE_CREDENTIAL", "of a launcher, or chosen")
	require.Equal(t, "with a credential", credential(at("10.1.2.3")), "of a launcher, or chosen")
	t.Setenv("EURYALE_CREDENTIAL", "")
	t.Setenv("EURYALE_TOKEN", "")
	require.Equal(t, "without a token", credential(at("10.1.2.3")), "")
	s := serveNothing(t, derived, 0, turnTime)
	for show, want := range map[string]int{"": http.StatusUnauthorized,
		"Bearer " + token: http.StatusUnauthorized, "Bearer ": http.StatusUnauthorized,
		"Bearer " + derived: http.StatusOK} {
		if status, _, err := get(s, show); err != nil || status != want {
			t.Errorf("with %q the status is %d, %v", show, status, err)
		}
	}
}

func TestNothingListensUnlessAsked(t *testing.T) {
	require.NoError(t, euryale.Run(t.Context(), 1, func(comm backend.Communicator,
		_ sync.Locker) error {
		s, err := Serve(comm)
		if s != nil || observe.WatchOf(comm) != nil {
			t.Errorf("it serves at %v", s.Addr())
		}
		s.Registry().MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "x"}))
		return errors.Join(err, s.Close())
	}))
}

func TestRanksOfAMachineHaveTheNextPorts(t *testing.T) {
	taken, err := net.Listen("tcp", loopback)
	require.NoError(t, err)
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port
	for _, test := range []struct {
		address string
		rank    int
		want    string // in the error
	}{
		{fmt.Sprintf("127.0.0.1:%d", port), 0, "choose another port"},
		{fmt.Sprintf(":%d", port-1), 1, "choose another port; this rank has the one that is 1"},
		{"9090", 0, "use :PORT or ADDRESS:PORT"}, {":http", 0, "use :PORT"},
		{":-1", 0, "use :PORT"}, {":65535", 1, "use :PORT"},
	} {
		s, err := listen(test.address, test.rank)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			s.Close()
			t.Errorf("%s, rank %d: %v, want %q", test.address, test.rank, err, test.want)
		}
	}
	t.Setenv("EURYALE_METRICS", taken.Addr().String())
	err = euryale.Run(t.Context(), 1, func(comm backend.Communicator, _ sync.Locker) error {
		_, err := Serve(comm)
		return err
	})
	require.Fails(t, "Serve", err, "EURYALE_METRICS="+fmt.Sprintf("%q", taken.Addr()), "rank 0")
}

func TestNilArgumentsAreErrors(t *testing.T) {
	comm := reference.New("test", 1, time.Minute)[0]
	nilargs.Check(t, map[string]nilargs.Use{
		"Serve": {F: Serve, Args: []any{comm, Tokens(1)}},
	}, map[string]string{"Elastic": "nil is no elastic training"})
	require.Fails(t, "a communicator without a watch", require.Err(Serve(comm, Address(loopback))),
		backend.ErrArgument)
}

// TestMetricsWithALabelRankKeepIt: a program may tell of several ranks.
func TestMetricsWithALabelRankKeepIt(t *testing.T) {
	s := &Server{rank: 3, registry: prometheus.NewRegistry()}
	sent := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "sent", Help: "to"}, []string{"rank"})
	own := prometheus.NewGauge(prometheus.GaugeOpts{Name: "own", Help: "of the rank"})
	sent.WithLabelValues("0").Set(5)
	sent.WithLabelValues("1").Set(7)
	s.Registry().MustRegister(sent, own)
	var text strings.Builder
	for range 2 { // the labels of a registry stay as they are
		text.Reset()
		found := require.Value(s.gatherMetrics())(t)
		for _, f := range found {
			for _, m := range f.GetMetric() {
				for _, l := range m.GetLabel() {
					fmt.Fprintf(&text, "%s %s=%s\n", f.GetName(), l.GetName(), l.GetValue())
				}
			}
		}
	}
	require.Equal(t, "String", text.String(), "own rank=3\nsent rank=0\nsent rank=1\n")
}
