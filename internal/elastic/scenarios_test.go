package elastic

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/sim"
)

// TestScenarios: each file of testdata has a job and what happens to it. Process i runs on host i,
// and those that replace it, too.
func TestScenarios(t *testing.T) { sim.Scenarios(t, told) }

// told runs a scenario.
func told(t *testing.T, script string) string {
	var s *simulation
	for line := range strings.Lines(script) {
		words := strings.Fields(line)
		switch {
		case line[0] == '#' || len(words) == 0:
		case words[0] == "hosts":
			var hosts, least, steps int
			sim.Scan(t, line, "hosts %d min-ranks %d steps %d", &hosts, &least, &steps)
			s = newSimulation(rand.New(rand.NewPCG(1, 1)), Limits{least, hosts}, steps, nil)
			s.Tale = &strings.Builder{}
		default:
			s.After(sim.Lasts(t, words[1]), func() { s.happens(t, words[2], words[3:]) })
		}
	}
	if err := s.run(); err != nil {
		fmt.Fprintln(s.Tale, err)
	}
	return s.Tale.String()
}

// happens lets something happen to processes, or to the ways between hosts.
func (s *simulation) happens(t *testing.T, what string, args []string) {
	s.Disturbed = s.Now
	if s.Disturb(t, what, args) {
		return
	}
	var id int
	sim.Scan(t, args[0], "%d", &id)
	switch what {
	case "kill":
		s.kill(s.procs[id-1])
	case "stop":
		s.pause(s.procs[id-1], sim.Lasts(t, args[len(args)-1]))
	case "close":
		s.close(s.procs[id-1])
	case "fail":
		s.Say("process %d fails from now on", id)
		s.procs[id-1].fails = true
	default:
		t.Fatalf("%s is no event", what)
	}
}
