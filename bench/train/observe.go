package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/observe/metrics"
	"github.com/euryale-ml/euryale/vm"
)

// watchers are what --observe can turn on.
var watchers = []string{"lateness", "trace", "metrics"}

// checkWatch returns why this cannot be observed.
func (o options) checkWatch() error {
	for _, what := range o.watch {
		if !slices.Contains(append(watchers, "nothing"), what) {
			return fmt.Errorf("--observe wants nothing or some of %v", watchers)
		}
	}
	if o.ranks > 1 && slices.Contains(o.watch, "metrics") && !slices.Contains(o.watch, "lateness") {
		return errors.New("--observe metrics of several ranks wants lateness, too: rank 0 alone " +
			"serves metrics")
	}
	return nil
}

// observed is a training whose steps end as those of package fit do.
type observed struct {
	machine *vm.Machine
	loss    *gorgonia.Node
	comm    backend.Communicator
	steps   int
	metrics string            // the address that is scraped once in a round, "" for none
	others  []chan<- struct{} // of rank 0: has another rank do a round, too
	late    time.Duration     // by which each step begins later
}

// observe takes turns between a training that is observed and one that is not, in one process.
func (o options) observe(w io.Writer, name string, m model, p vm.Precision) error {
	dir, err := os.MkdirTemp("", "observe")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	return o.session(m, p, func(off *observed) (err error) {
		if slices.Contains(o.watch, "lateness") {
			err = os.Setenv(string(env.Lateness), "1")
		}
		if slices.Contains(o.watch, "trace") {
			err = errors.Join(err, os.Setenv(string(env.Trace), filepath.Join(dir, "trace")))
		}
		if err != nil {
			return err
		}
		err = o.session(m, p, func(on *observed) error { return o.turns(w, name, p, off, on) })
		return errors.Join(err, os.Unsetenv(string(env.Lateness)), os.Unsetenv(string(env.Trace)))
	})
}

// session runs f on rank 0 of a job. The other ranks do the rounds that it does.
func (o options) session(m model, p vm.Precision, f func(t *observed) error) error {
	rounds := make([]chan struct{}, o.ranks)
	for r := range rounds {
		rounds[r] = make(chan struct{}, 1)
	}
	return euryale.Run(context.Background(), o.ranks, func(comm backend.Communicator,
		build sync.Locker) (err error) {
		if comm.Rank() == 0 {
			defer func() {
				for _, c := range rounds {
					close(c)
				}
			}()
		}
		on := rank{comm: comm, build: build, memory: o.memory}
		if on.device, err = o.deviceOf(comm); err != nil {
			return err
		}
		t := &observed{comm: comm, steps: o.steps}
		if t.machine, t.loss, err = m.machine(p, on); err != nil {
			return err
		}
		if comm.Rank() > 0 {
			for range rounds[comm.Rank()] {
				_, failed := t.round()
				err = errors.Join(err, failed)
			}
			return errors.Join(err, t.machine.Close())
		}
		for _, c := range rounds[1:] {
			t.others = append(t.others, c)
		}
		return errors.Join(f(t), t.machine.Close())
	}, o.backends()...)
}

// turns measures both, and writes the result.
func (o options) turns(w io.Writer, name string, p vm.Precision, off, on *observed) error {
	if slices.Contains(o.watch, "metrics") {
		s, err := metrics.Serve(on.comm, metrics.Address("127.0.0.1:0"))
		if err != nil {
			return err
		}
		defer s.Close()
		on.metrics = "http://" + s.Addr().String() + "/metrics"
	}
	for range warmUp {
		if _, err := off.round(); err != nil {
			return err
		}
		if _, err := on.round(); err != nil {
			return err
		}
	}
	pairs, err := bench.Turns(o.rounds, func(program int) (map[int]float64, error) {
		t, err := []*observed{off, on}[program].round()
		return map[int]float64{1: t}, err
	})
	if err != nil {
		return err
	}
	times := pairs[0].Micros
	return json.NewEncoder(w).Encode(map[string]any{"model": name, "precision": p.String(),
		"mode": "observe " + strings.Join(o.watch, ","), "step_us": round1(times[1]),
		"off_us": round1(times[0]), "ratio": math.Round(pairs[0].Ratio*1e4) / 1e4,
		"rounds": o.rounds})
}

// round returns the time of a step, in microseconds.
func (t *observed) round() (float64, error) {
	for _, c := range t.others {
		c <- struct{}{}
	}
	scraped := make(chan error, 1)
	begin := time.Now()
	go func() { scraped <- scrape(t.metrics) }()
	watch := observe.WatchOf(t.comm) // nil if it is not observed
	watch.Begin()
	for i := range t.steps {
		time.Sleep(t.late)
		if err := t.machine.RunAll(); err != nil {
			return 0, err
		}
		loss := value(t.loss)
		told, err := autograd.Gather(t.comm, append([]float64{loss, 0, 0}, watch.Sample()...)...)
		if err != nil {
			return 0, err
		}
		watch.Step(observe.StepInfo{Number: i + 1, Loss: loss}, told)
	}
	step := micros(time.Since(begin)) / float64(t.steps)
	return step, <-scraped
}

// scrape reads what is at an address, nothing if that is "".
func scrape(at string) error {
	if at == "" {
		return nil
	}
	answer, err := http.Get(at)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if _, err = io.Copy(io.Discard, answer.Body); err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("metrics: %s", answer.Status)
	}
	return err
}
