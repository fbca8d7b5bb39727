package metrics

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"golang.org/x/net/netutil"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/observe"
)

// Server serves the metrics of a rank. Methods of a nil Server do nothing.
type Server struct {
	rank     int
	elastic  Training // nil if not elastic
	registry *prometheus.Registry
	listener net.Listener
	http     http.Server
	ended    sync.WaitGroup
}

// Option changes what Serve serves. Options may differ between ranks, except for Address.
type Option func(*options)

type options struct {
	address string
	tokens  int
	peak    float64
	elastic Training // nil if not elastic
}

// Address replaces EURYALE_METRICS: ":9090". Give it on all ranks or on none.
func Address(address string) Option { return func(o *options) { o.address = address } }

// Tokens sets how many tokens a sample has, for euryale_tokens_total.
func Tokens(perSample int) Option { return func(o *options) { o.tokens = perSample } }

// Peak sets the maximum number of floating-point operations a second of the rank's device, for
// euryale_mfu_ratio: 989e12 for products in BF16 on an H100.
func Peak(flops float64) Option { return func(o *options) { o.peak = flops } }

// Training is an elastic training, such as an autograd.Elastic.
type Training interface {
	// Comm returns the communicator of the present ranks. Recoveries returns in how many steps a
	// rank was lost, and the time from there to the ends of these steps. Any goroutine may call
	// them.
	Comm() backend.Communicator
	Recoveries() (n int, took time.Duration)
}

// Elastic makes the server follow the ranks of an elastic training when they change, and count its
// recoveries:
//
//	server, err := metrics.Serve(e.Comm(), metrics.Elastic(e))
//
// Its label rank is the present number of the rank. If the rank's port is still taken, by a process
// that had the rank before, the server uses the next free one.
func Elastic(e Training) Option { return func(o *options) { o.elastic = e } }

// Serve serves the metrics of a rank until the Server is closed. It returns nil if neither
// EURYALE_METRICS nor Address gives an address. Call it before the training.
//
// Errors: ErrArgument for an address that cannot be read, and for a communicator that is not from
// euryale.Init, Connect or Run; errors of the system, such as a port that is taken.
func Serve(comm backend.Communicator, opts ...Option) (*Server, error) {
	if err := backend.Given("metrics.Serve", "comm", comm, "opts", opts); err != nil {
		return nil, err
	}
	o := options{address: env.Metrics.Text(os.Getenv)}
	for _, set := range opts {
		set(&o)
	}
	if o.address == "" {
		return nil, nil
	}
	watch, err := observe.Start(comm)
	if err != nil {
		return nil, err
	}
	w := watch.World()
	at := w.LocalRank
	s, err := listen(o.address, at)
	for ; o.elastic != nil && errors.Is(err, syscall.EADDRINUSE) && at < mostPorts; at++ {
		s, err = listen(o.address, at+1)
	}
	if err != nil {
		return nil, fmt.Errorf("metrics: rank %d: %w", w.Rank, env.Metrics.Wrong(o.address, err))
	}
	watch.Serve()
	restarts, _ := strconv.ParseFloat(env.Restarts.Read(os.Getenv), 64)
	s.rank, s.elastic, s.registry = w.Rank, o.elastic, prometheus.NewRegistry()
	s.registry.MustRegister(&collector{watch, comm, o, restarts}, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s.serve(credential(s.listener.Addr()), turnTime)
	return s, nil
}

// listen listens for a rank of a machine, on loopback if the address has no host.
func listen(address string, localRank int) (*Server, error) {
	at, err := observe.MetricsAddress(address, localRank)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", at)
	if err != nil {
		return nil, fmt.Errorf("%w: choose another port; this rank has the one that is %d after it",
			err, localRank)
	}
	return &Server{listener: netutil.LimitListener(l, mostConnections)}, nil
}

// credential returns what clients must show, "" for nothing.
func credential(at net.Addr) string {
	if a, err := netip.ParseAddrPort(at.String()); err == nil && a.Addr().IsLoopback() {
		return ""
	}
	return env.MetricsCredential(os.Getenv)
}

// Bounds on the cost of clients.
const (
	mostPorts       = 1024 // that processes of an elastic training try
	mostConnections = 16
	mostHeaders     = 8 << 10
	headerTime      = 2 * time.Second
	answerTime      = 5 * time.Second
	turnTime        = 3 * time.Second       // to wait for the previous scrape
	scrapeTime      = 50 * time.Millisecond // between two
)

// serve answers clients that show the credential. They wait up to patience for their turn.
func (s *Server) serve(credential string, patience time.Duration) {
	answer := func(found []*dto.MetricFamily, err error) http.Handler {
		return promhttp.HandlerFor(prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
			return found, err
		}), promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
	}
	turn := make(chan struct{}, 1)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		want := "Bearer " + credential
		if credential != "" && subtle.ConstantTimeCompare([]byte(want),
			[]byte(r.Header.Get("Authorization"))) == 0 {
			http.Error(w, "credential missing or wrong: it is EURYALE_CREDENTIAL, or follows "+
				"from the EURYALE_TOKEN of the job: see docs/observing.md",
				http.StatusUnauthorized)
			return
		}
		select {
		case turn <- struct{}{}:
			next := time.Now().Add(scrapeTime)
			found, err := s.gatherMetrics()
			time.AfterFunc(time.Until(next), func() { <-turn }) // even if the client reads longer
			answer(found, err).ServeHTTP(w, r)
		case <-time.After(patience):
			w.Header().Set("Retry-After", "1")
			http.Error(w, "other scrapes take all the time", http.StatusServiceUnavailable)
		case <-r.Context().Done():
		}
	})
	s.http = http.Server{Handler: mux, ReadHeaderTimeout: headerTime, ReadTimeout: headerTime,
		WriteTimeout: answerTime, IdleTimeout: answerTime, MaxHeaderBytes: mostHeaders,
		ErrorLog: log.New(io.Discard, "", 0)}
	s.ended.Go(func() { _ = s.http.Serve(s.listener) }) // until Close
}

// gatherMetrics returns all metrics with the rank, in an elastic training the present one:
// otherwise two processes would have the same rank after a loss.
func (s *Server) gatherMetrics() ([]*dto.MetricFamily, error) {
	rank := s.rank
	if s.elastic != nil {
		if comm := s.elastic.Comm(); comm != nil {
			rank = comm.Rank()
		}
	}
	name, value := "rank", strconv.Itoa(rank)
	named := func(l *dto.LabelPair) bool { return l.GetName() == name }
	found, err := s.registry.Gather()
	for _, f := range found {
		for _, m := range f.GetMetric() {
			if slices.ContainsFunc(m.Label, named) {
				continue // with one rank for two series, no scrape would be accepted
			}
			m.Label = append(slices.Clone(m.Label), // the registry has this slice, too
				&dto.LabelPair{Name: &name, Value: &value})
			slices.SortFunc(m.Label, func(a, b *dto.LabelPair) int {
				return strings.Compare(a.GetName(), b.GetName())
			})
		}
	}
	return found, err
}

// Registry is where a program registers its metrics. They get the label rank unless they have one.
// A nil Server returns a registry that nobody reads.
func (s *Server) Registry() prometheus.Registerer {
	if s == nil {
		return prometheus.NewRegistry()
	}
	return s.registry
}

// Addr returns where the server listens, nil for a nil Server.
func (s *Server) Addr() net.Addr {
	if s == nil {
		return nil
	}
	return s.listener.Addr()
}

// Close ends the server and its connections.
func (s *Server) Close() error {
	if s == nil {
		return nil
	}
	err := s.http.Close()
	s.ended.Wait()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
