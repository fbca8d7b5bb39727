// Package sim moves simulated processes, the links between their hosts and their clock, one move at
// a time, by a seed. What a process is, the test says: most often a pure state machine and a few
// lines that carry out what it asks for.
//
// [Seeds] runs a simulation of each of many seeds, and replays one that fails. [Scenarios] runs
// those of text files, and compares what they say.
package sim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Never is when what is sent over a link that is cut arrives.
const Never = time.Duration(math.MaxInt64)

// Link is a way from a host to another one.
type Link struct {
	Cut   bool
	Since time.Duration // when it was cut or mended last
	Delay time.Duration
	Lossy bool // some of what is sent comes after a time or two
}

// Arrives returns when what is sent at a time comes to the other end.
func (l *Link) Arrives(sent time.Duration) time.Duration {
	switch {
	case l.Cut:
		return Never
	case l.Lossy:
		return sent + l.Delay*(sent/time.Microsecond%4)
	}
	return sent + l.Delay
}

// Move is what may happen from a time on.
type Move struct {
	At time.Duration
	Do func() error
}

// Sim is a clock and a network.
type Sim struct {
	Rand      *rand.Rand
	Now       time.Duration
	Disturbed time.Duration    // when the last thing happened that may hold up progress
	Links     [][]Link         // from a host to another one
	Log       *strings.Builder // of all that happens
	Tale      *strings.Builder // what a scenario expects
	later     []Move
}

// New returns a simulation of a number of hosts.
func New(rng *rand.Rand, hosts int, log *strings.Builder) *Sim {
	s := &Sim{Rand: rng, Log: log}
	for range hosts {
		s.Links = append(s.Links, make([]Link, hosts))
	}
	return s
}

// Logf notes what happens.
func (s *Sim) Logf(format string, args ...any) {
	if s.Log != nil {
		fmt.Fprintf(s.Log, "%8v "+format+"\n", append([]any{s.Now.Round(time.Millisecond)},
			args...)...)
	}
}

// Say tells what a scenario expects.
func (s *Sim) Say(format string, args ...any) {
	s.Logf(format, args...)
	if s.Tale != nil {
		fmt.Fprintf(s.Tale, "%4.1fs "+format+"\n", append([]any{s.Now.Seconds()}, args...)...)
	}
}

// After does something in a while.
func (s *Sim) After(d time.Duration, what func()) {
	s.later = append(s.later, Move{s.Now + d, func() error { what(); return nil }})
}

// Between returns a random time.
func (s *Sim) Between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.Rand.Int64N(int64(most-least)+1))
}

// Open reports whether hosts reach each other.
func (s *Sim) Open(a, b int) bool { return !s.Links[a][b].Cut && !s.Links[b][a].Cut }

// Sever cuts ways for a while, 0 for good.
func (s *Sim) Sever(d time.Duration, ways ...*Link) {
	for _, l := range ways {
		l.Cut, l.Since = true, s.Now
		if d > 0 {
			s.After(d, func() { l.Cut, l.Since, s.Disturbed = false, s.Now, s.Now })
		}
	}
}

// Step makes one of the moves that may happen first, of these and of those that After holds. It
// reports whether there was one.
func (s *Sim) Step(moves []Move) (bool, error) {
	held := make([]Move, len(s.later), len(s.later)+len(moves))
	for i, m := range s.later {
		held[i] = Move{m.At, func() error {
			s.later = slices.Delete(s.later, i, i+1)
			return m.Do()
		}}
	}
	moves = append(held, moves...)
	slices.SortStableFunc(moves, func(a, b Move) int { return int(a.At - b.At) })
	if len(moves) == 0 || moves[0].At == Never {
		return false, nil
	}
	s.Now = max(s.Now, moves[0].At)
	n := slices.IndexFunc(moves, func(m Move) bool { return m.At > s.Now })
	if n < 0 {
		n = len(moves)
	}
	err := moves[s.Rand.IntN(n)].Do()
	s.Now += s.Between(0, 100*time.Microsecond)
	return true, err
}

// Ways returns the ways between hosts that a word of a scenario names: 1-2 are both, 1>2 is one.
func (s *Sim) Ways(t *testing.T, word string) []*Link {
	t.Helper()
	var a, b int
	if strings.Contains(word, ">") {
		Scan(t, word, "%d>%d", &a, &b)
		return []*Link{&s.Links[a-1][b-1]}
	}
	Scan(t, word, "%d-%d", &a, &b)
	return []*Link{&s.Links[a-1][b-1], &s.Links[b-1][a-1]}
}

// Disturb lets something happen to the ways between hosts, and reports whether it is one of these:
//
//	cut WAYS [for TIME]  for a while, or for good
//	delay WAYS TIME      all that is sent comes later
//	lose WAYS TIME       some of what is sent comes later
func (s *Sim) Disturb(t *testing.T, what string, args []string) bool {
	t.Helper()
	if what != "cut" && what != "delay" && what != "lose" {
		return false
	}
	s.Say("%s %s", what, strings.Join(args, " "))
	d := time.Duration(0)
	if len(args) > 1 { // "for TIME", or TIME
		d = Lasts(t, args[len(args)-1])
	}
	ways := s.Ways(t, args[0])
	if what == "cut" {
		s.Sever(d, ways...)
		return true
	}
	for _, l := range ways {
		l.Delay, l.Lossy = d, what == "lose"
	}
	return true
}

// Scan reads the numbers of a text.
func Scan(t *testing.T, text, format string, into ...any) {
	t.Helper()
	_, err := fmt.Sscanf(text, format, into...)
	require.That(t, err == nil, "%q: %v", text, err)
}

// Lasts reads a time.
func Lasts(t *testing.T, text string) time.Duration {
	t.Helper()
	d := require.Value(time.ParseDuration(text))(t)
	return d
}

// Seeds runs a simulation of each of 300 seeds, 10,000 with EURYALE_FULL=1, or of the one that an
// environment variable names. One that fails runs again with a log.
func Seeds(t *testing.T, variable string, run func(seed uint64, log *strings.Builder) error) {
	t.Helper()
	first, seeds := uint64(0), uint64(300)
	if env.Full.Set(os.Getenv) {
		seeds = 10_000
	}
	if one := os.Getenv(variable); one != "" {
		Scan(t, one, "%d", &first)
		seeds = 1
	}
	for seed := first; seed < first+seeds; seed++ {
		if run(seed, nil) != nil {
			var log strings.Builder
			err := run(seed, &log)
			lines := strings.Split(log.String(), "\n")
			t.Fatalf("%s=%d: %v; the last lines of its log:\n%s", variable, seed, err,
				strings.Join(lines[max(0, len(lines)-100):], "\n"))
		}
	}
}

// Scenarios runs each file of testdata: above a line of dashes is what happens, below what is said
// then. EURYALE_TEST_UPDATE=1 writes what is said.
func Scenarios(t *testing.T, tell func(t *testing.T, script string) string) {
	t.Helper()
	files, err := filepath.Glob("testdata/*.txt")
	require.That(t, err == nil && len(files) != 0, "%v %v", files, err)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			script, want, _ := strings.Cut(string(text), "---\n")
			got := tell(t, script)
			if os.Getenv("EURYALE_TEST_UPDATE") == "1" {
				err = os.WriteFile(file, []byte(script+"---\n"+got), 0o644)
			}
			require.Check(t, err == nil && got == want, "%v: it says\n%s", err, got)
		})
	}
}
