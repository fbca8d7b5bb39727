package elastic

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestScenarios: each file of testdata has a job, what happens to it, and below what is said then.
// Process i runs on host i, and those that replace it, too. EURYALE_UPDATE=1 writes what is said.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			script, want, _ := strings.Cut(string(text), "---\n")
			got := told(t, script)
			if os.Getenv("EURYALE_UPDATE") == "1" {
				err = os.WriteFile(file, []byte(script+"---\n"+got), 0o644)
			}
			if err != nil || got != want {
				t.Errorf("%v: it says\n%s", err, got)
			}
		})
	}
}

// told runs a scenario.
func told(t *testing.T, script string) string {
	var s *simulation
	for line := range strings.Lines(script) {
		words := strings.Fields(line)
		switch {
		case line[0] == '#' || len(words) == 0:
		case words[0] == "hosts":
			var hosts, least, steps int
			scan(t, line, "hosts %d min-ranks %d steps %d", &hosts, &least, &steps)
			s = newSimulation(rand.New(rand.NewPCG(1, 1)), Limits{least, hosts}, steps, nil)
			s.tale = &strings.Builder{}
		default:
			s.after(lasts(t, words[1]), func() { s.happens(t, words[2], words[3:]) })
		}
	}
	if err := s.run(); err != nil {
		fmt.Fprintln(s.tale, err)
	}
	return s.tale.String()
}

// happens lets something happen to processes, or to the ways between hosts: 1-2 are both ways, 1>2
// is one.
func (s *simulation) happens(t *testing.T, what string, args []string) {
	s.disturbed = s.now
	var id, a, b int
	var d time.Duration
	if len(args) > 1 {
		d = lasts(t, args[len(args)-1])
	}
	var ways []*link
	if strings.Contains(args[0], ">") {
		scan(t, args[0], "%d>%d", &a, &b)
		ways = []*link{&s.links[a-1][b-1]}
	} else if strings.Contains(args[0], "-") {
		scan(t, args[0], "%d-%d", &a, &b)
		ways = []*link{&s.links[a-1][b-1], &s.links[b-1][a-1]}
	} else {
		scan(t, args[0], "%d", &id)
	}
	switch what {
	case "cut":
		s.say("cut %s", strings.Join(args, " "))
		s.sever(d, ways...)
	case "delay", "lose":
		s.say("%s %s", what, strings.Join(args, " "))
		for _, l := range ways {
			l.delay, l.lossy = d, what == "lose"
		}
	case "kill":
		s.kill(s.procs[id-1])
	case "stop":
		s.pause(s.procs[id-1], d)
	case "close":
		s.close(s.procs[id-1])
	case "fail":
		s.say("process %d fails from now on", id)
		s.procs[id-1].fails = true
	default:
		t.Fatalf("%s is no event", what)
	}
}

func scan(t *testing.T, text, format string, into ...any) {
	t.Helper()
	if _, err := fmt.Sscanf(text, format, into...); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
}

func lasts(t *testing.T, text string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}
