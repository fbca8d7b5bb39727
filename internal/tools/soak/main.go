//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
)

// config is the command line.
type config struct {
	minutes  float64
	seed     uint64
	job      int // the only one to run, -1 for all
	jobs     int // how many to run, 0 for as many as there is time for
	parallel int // how many at a time
}

func main() {
	if role := os.Getenv(envRole); role != "" {
		os.Exit(play(role))
	}
	var c config
	flag.Float64Var(&c.minutes, "minutes", 5, "how long to start jobs")
	flag.Uint64Var(&c.seed, "seed", 1, "what the jobs follow from")
	flag.IntVar(&c.job, "job", -1, "run only this job of the seed, and print its output")
	flag.IntVar(&c.jobs, "jobs", 0, "how many jobs to run at most; 0 for as many as there is "+
		"time for")
	flag.IntVar(&c.parallel, "parallel", runtime.NumCPU(), "how many jobs to run at a time")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	sum, err := soak(ctx, c, os.Stdout)
	fmt.Println(sum)
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
	if sum.found() {
		os.Exit(1)
	}
}

// totals is the result of a soak.
type totals struct {
	jobs   int
	kinds  map[string]int // of jobs, by kind
	counts map[string]int // of anomalies, by kind
}

func (t totals) found() bool { return len(t.counts) > 0 }

// String is the last two lines: the jobs by kind, and what was found.
func (t totals) String() string {
	var b strings.Builder
	b.WriteString("jobs by kind:")
	for _, kind := range slices.Sorted(maps.Keys(t.kinds)) {
		fmt.Fprintf(&b, " %s=%d", kind, t.kinds[kind])
	}
	fmt.Fprintf(&b, "\njobs=%d", t.jobs)
	for _, a := range []string{hang, unnamed, wrong, late, left} {
		fmt.Fprintf(&b, " %s=%d", a, t.counts[a])
	}
	return b.String()
}

// soaking is a running soak.
type soaking struct {
	config
	site
	out io.Writer
	end time.Time

	mu      sync.Mutex // guards what follows, and what is written to out
	next    int
	totals  totals
	err     error     // the first of the soak itself
	lacking sync.Once // it says that there are no machines
}

// soak runs jobs and writes what it finds to out.
func soak(ctx context.Context, c config, out io.Writer) (t totals, err error) {
	s := &soaking{config: c, out: out, next: max(c.job, 0)}
	s.totals = totals{kinds: map[string]int{}, counts: map[string]int{}}
	s.end = time.Now().Add(time.Duration(c.minutes * float64(time.Minute)))
	if s.tmp, err = os.MkdirTemp("", "soak-"); err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(s.tmp)) }()
	if s.shm, err = sharedMemory(c.parallel); err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(s.shm)) }()
	s.pulse = &pulse{}
	feeling, stop := context.WithCancel(ctx)
	defer stop()
	go s.pulse.feel(feeling)
	var all sync.WaitGroup
	for range c.parallel {
		all.Go(func() { s.work(ctx) })
	}
	all.Wait()
	return s.totals, cmp.Or(s.err, context.Cause(ctx))
}

// work runs jobs one after another, on machines of its own.
func (s *soaking) work(ctx context.Context) {
	runtime.LockOSThread() // the kernel kills what a thread has started when that thread ends
	defer runtime.UnlockOSThread()
	at, g := s.site, &proctest.Ground{}
	var err error
	if at.machines, err = s.makeMachines(g); err == nil {
		for number, ok := s.takeNumber(ctx); ok; number, ok = s.takeNumber(ctx) {
			s.run(ctx, newJob(s.seed, number), at)
		}
	}
	if err = errors.Join(err, g.Leave()); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.err = cmp.Or(s.err, err)
	}
}

// takeNumber returns the number of the next job.
func (s *soaking) takeNumber(ctx context.Context) (number int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case ctx.Err() != nil || s.err != nil:
		return 0, false
	case s.job >= 0 && s.next > s.job, s.jobs > 0 && s.next >= s.jobs, time.Now().After(s.end):
		return 0, false
	}
	s.next++
	return s.next - 1, true
}

// run runs a job and counts what is found.
func (s *soaking) run(ctx context.Context, j job, at site) {
	if j.mode == machines && at.machines == nil {
		j = j.onOneMachine()
	}
	o, err := j.execute(ctx, at)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil || ctx.Err() != nil { // an interrupted job has no result
		s.err = cmp.Or(s.err, err)
		return
	}
	found := j.judge(o)
	s.totals.jobs++
	s.totals.kinds[string(j.mode)]++
	s.totals.kinds["failure:"+j.failure.name]++
	for _, a := range found {
		s.totals.counts[a.kind]++
		fmt.Fprintf(s.out, "%s: make soak SEED=%d JOB=%d: %s\n", a.kind, j.seed, j.number, a.text)
	}
	if len(found) > 0 || s.job >= 0 {
		fmt.Fprintf(s.out, "  %v, after %v and %d visits, cores waited for up to %v\n",
			j, o.took.Round(time.Millisecond), o.visits, o.stall.Round(time.Millisecond))
		for _, e := range o.ends {
			fmt.Fprintf(s.out, "  %v ended with %d and said:\n%s", e.whose(), e.code, e.output)
		}
	}
}
