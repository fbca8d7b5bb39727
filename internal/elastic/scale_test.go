package elastic

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// recovery is what the death of a process takes until its replacement trains with all others.
type recovery struct {
	written, probes, generations int
	step, full                   time.Duration // until the next step, and the first one of all
}

func recovered(t *testing.T, n int) recovery {
	t.Helper()
	s := newSimulation(rand.New(rand.NewPCG(1, uint64(n))), Limits{1, n}, 1000, nil)
	until := func(holds func() bool) {
		for !holds() {
			moved, err := s.Step(s.moves())
			require.That(t, err == nil && moved, "%d processes: %v, or nothing moves", n, err)
		}
	}
	until(func() bool { return s.done == 2 })
	written, probes, generations := len(s.news), s.probes, len(s.generations)
	began, done := s.Now, s.done
	s.kill(s.procs[n/2])
	until(func() bool { return s.done > done })
	r := recovery{step: s.Now - began}
	until(func() bool {
		return len(s.generations[len(s.generations)-1].view.Members) == n &&
			len(s.generations) > generations
	})
	done = s.done
	until(func() bool { return s.done > done })
	r.written, r.probes = len(s.news)-written, s.probes-probes
	r.generations, r.full = len(s.generations)-generations, s.Now-began
	return r
}

// TestARecoveryTakesSoManyMessages: two generations, without the one that died and with its
// replacement, in which each member reaches each other and posts; docs/elastic.md has the table.
func TestARecoveryTakesSoManyMessages(t *testing.T) {
	page := string(require.Value(os.ReadFile("../../docs/elastic.md"))(t))
	sizes := []int{8, 16, 32}
	if os.Getenv("EURYALE_FULL") == "1" {
		sizes = append(sizes, 64) // 3 s, and ten times that under the race detector
	}
	for _, n := range sizes {
		r := recovered(t, n)
		require.Check(t, r.generations == 2 && r.written <= 4*n && r.probes <= 2*n*n,
			"%d processes: %+v", n, r)
		row := fmt.Sprintf("| %d | %d | %d | %d |", n, r.written, n*r.written, r.probes)
		require.Check(t, strings.Contains(page, row), "docs/elastic.md does not say %s", row)
	}
}
