//go:build unix

package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/sim"
)

// simAttempts are the attempts of a job on hosts, which are not reached, are lost, or have ranks
// that fail, by a seed or by a scenario.
type simAttempts struct {
	c       *cluster
	rng     *rand.Rand // nil in a scenario
	happens []string   // in a scenario: in each connecting or running
	tale    strings.Builder
	signals chan os.Signal

	runs  int
	last  error           // of a run
	lost  map[string]bool // hosts, in a run before
	gone  map[string]bool // hosts, when they were to be reached again
	wrong error
}

func newSimAttempts(j Job) *simAttempts {
	s := &simAttempts{lost: map[string]bool{}, gone: map[string]bool{},
		signals: make(chan os.Signal, 1)}
	j.Signals = s.signals
	j.Notice = func(text string) { fmt.Fprintln(&s.tale, text) }
	s.c = newCluster(j, nil)
	s.c.connects, s.c.runs = s.connects, s.run
	return s
}

func (s *simAttempts) fail(format string, args ...any) {
	s.wrong = cmp.Or(s.wrong, fmt.Errorf(format, args...))
}

// next is what happens next to a host that is used, "" for nothing.
func (s *simAttempts) next(used []*remote, what ...string) (string, *remote) {
	if s.rng != nil {
		if s.rng.IntN(2) == 0 {
			return "", nil
		}
		return what[s.rng.IntN(len(what))], used[s.rng.IntN(len(used))]
	}
	if len(s.happens) == 0 {
		return "", nil
	}
	words := strings.Fields(s.happens[0])
	if !slices.Contains(what, words[0]) {
		return "", nil
	}
	s.happens = s.happens[1:]
	i := slices.IndexFunc(used, func(h *remote) bool { return h.Name == words[len(words)-1] })
	return words[0], used[max(i, 0)]
}

// connects stands for the hosts of a job.
func (s *simAttempts) connects(_ context.Context, used []*remote) error {
	for {
		what, h := s.next(used, "unreached")
		if what == "" {
			return nil
		}
		h.down, s.gone[h.Name] = h.about(errors.New("no answer")), true
	}
}

// run stands for a run of the ranks, and checks where they are.
func (s *simAttempts) run(_ context.Context, used []*remote, ranks, n int) error {
	var names []string
	placed, free := 0, 0
	for _, h := range used {
		names = append(names, fmt.Sprint(h.Name, ":", h.ranks))
		placed += h.ranks
		if h.ranks < 1 || h.ranks > h.Slots || s.gone[h.Name] {
			s.fail("host %s, gone %t, has %d ranks of %d", h.Name, s.gone[h.Name], h.ranks, h.Slots)
		}
		if s.lost[h.Name] {
			for _, o := range s.c.job.Hosts {
				if used := slices.ContainsFunc(used, func(h *remote) bool {
					return h.Name == o.Name && h.ranks == h.Slots
				}); !used && !s.lost[o.Name] && !s.gone[o.Name] {
					s.fail("host %s was lost, and %s takes more", h.Name, o.Name)
				}
			}
		}
	}
	for _, h := range s.c.job.Hosts {
		if !s.gone[h.Name] {
			free += h.Slots
		}
	}
	if placed != ranks || ranks != min(s.c.job.Ranks, free) || n != s.runs {
		s.fail("attempt %d, run %d: %d ranks, %d placed, of %d, the hosts take %d", n, s.runs,
			ranks, placed, s.c.job.Ranks, free)
	}
	var f *Failed
	if errors.As(s.last, &f) && (f.usage || f.Hang != nil) || s.runs == 0 && len(s.gone) > 0 {
		s.fail("run %d after %v, hosts that are gone: %v", s.runs, s.last, s.gone)
	}
	s.runs++
	fmt.Fprintf(&s.tale, "run %v\n", names)
	what, h := s.next(used, "lost", "fails", "usage", "hangs", "signal")
	switch s.last = nil; what {
	case "lost":
		h.down, s.lost[h.Name] = &HostLost{Host: h.Name, ranks: []int{0}, why: errors.New("cut")},
			true
		s.last = fmt.Errorf("the attempt: %w", h.down)
	case "fails":
		s.last = &Failed{Host: h.Name, Status: exits(1)}
	case "usage":
		s.last = &Failed{Host: h.Name, Status: exits(2), usage: true}
	case "hangs":
		s.last = &Failed{Host: h.Name, Status: exits(1), Hang: []string{"rank 0 has not ended"}}
	case "signal":
		s.signals <- os.Interrupt
		s.last = &Failed{Host: h.Name, Status: exits(1)}
	}
	return s.last
}

// job runs the job to its end, and checks that.
func (s *simAttempts) job() error {
	j := s.c.job
	err := j.repeat(func(n int) error { return s.c.attempt(context.Background(), n) })
	fmt.Fprintf(&s.tale, "the job ends: %v\n", err)
	var f *Failed
	failed := errors.As(err, &f)
	again := errors.As(err, new(*HostLost)) || failed && !f.usage && f.Hang == nil
	switch {
	case s.wrong != nil:
		return s.wrong
	case s.runs > j.MaxRestarts+1:
		return fmt.Errorf("%d runs, with %d restarts", s.runs, j.MaxRestarts)
	case s.runs == 0 && (err == nil || len(s.gone) == 0):
		return fmt.Errorf("no run: %v", err)
	case s.runs > 0 && (err == nil) != (s.last == nil):
		return fmt.Errorf("the last run ended with %v, the job with %v", s.last, err)
	case again && s.runs < j.MaxRestarts+1 && len(s.gone) < len(j.Hosts):
		return fmt.Errorf("%d runs of %d: %v", s.runs, j.MaxRestarts+1, err)
	}
	return nil
}

// TestAttemptsUseTheHostsThatAreLeft: EURYALE_ATTEMPTS_SEED=seed runs one alone.
func TestAttemptsUseTheHostsThatAreLeft(t *testing.T) {
	sim.Seeds(t, "EURYALE_ATTEMPTS_SEED", func(seed uint64, log *strings.Builder) error {
		rng := rand.New(rand.NewPCG(seed, 58))
		j := Job{MaxRestarts: rng.IntN(5)}
		for h := range 1 + rng.IntN(5) {
			j.Hosts = append(j.Hosts, Host{fmt.Sprint("h", h+2), 1 + rng.IntN(3)})
		}
		j.Ranks = 1 + rng.IntN(Slots(j.Hosts))
		s := newSimAttempts(j)
		s.rng = rng
		err := s.job()
		if log != nil {
			log.WriteString(s.tale.String())
		}
		return err
	})
}

// playAttempts runs a scenario: after the line of a job, a line for each thing that happens in the
// order in which hosts are reached and run.
func playAttempts(t *testing.T, job string, happens []string) string {
	words := strings.Fields(job) // restarts N, then as of other jobs
	var restarts int
	sim.Scan(t, words[1], "%d", &restarts)
	j, _ := parse(t, words[2:])
	j.MaxRestarts = restarts
	s := newSimAttempts(j)
	s.happens = happens
	if err := s.job(); err != nil {
		fmt.Fprintln(&s.tale, err)
	}
	return s.tale.String()
}
