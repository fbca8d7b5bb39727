package host

import (
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestAdaptiveSpin(t *testing.T) {
	p := spinBudget{spin: 64 * time.Microsecond}
	var s adaptiveSpin
	for i := range mostHalvings {
		got, want := s.budget(p), p.spin>>i
		require.Check(t, got == want, "after %d waits without success: %v, want %v", i, got, want)
		s.learn(false)
	}
	for i := range 3 * probe {
		got, want := s.budget(p), time.Duration(0)
		if i%probe == probe-1 {
			want = p.spin // a peer that sleeps needs it
			s.learn(false)
		}
		require.That(t, got == want, "wait %d of those without success: %v, want %v", i, got, want)
	}
	if s.learn(true); s.budget(p) != p.spin {
		t.Errorf("after a probe that succeeded: %v, want %v", s.budget(p), p.spin)
	}
}
