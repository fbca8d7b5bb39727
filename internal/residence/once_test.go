package residence

import (
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestWhatIsComputedOnceIsShared: by those that compute the same of the same memory, until the host
// has written it or the last of them leaves. After an error the next one tries again.
func TestWhatIsComputedOnceIsShared(t *testing.T) {
	var s Copies
	w, v := backend.Of([]float32{1, 2}), backend.Of([]float32{1, 2})
	runs := 0
	fill := func(o *Once) {
		require.NoError(t, o.Fill(func() (backend.Buffer, error) {
			runs++
			return backend.Of([]float32{float32(runs)}), nil
		}))
	}
	of := func(b backend.Buffer) []Source { return []Source{Read(b)} }
	first := s.Compute("exp", of(w))
	fails := errors.New("fails")
	require.Fails(t, "Fill", first.Fill(func() (backend.Buffer, error) {
		return backend.Of([]float32{-1}), fails // which is freed
	}), fails)
	fill(first)
	second := s.Compute("exp", of(w))
	fill(second)
	require.Check(t, second == first && runs == 1, "%d runs for two users", runs)
	for what, other := range map[string]*Once{"text": s.Compute("tanh", of(w)),
		"memory": s.Compute("exp", of(v))} {
		require.Check(t, other != first, "another %s is the same", what)
	}
	require.Check(t, first.Of(of(w)) && !first.Of(of(v)), "it is not of its leaves")
	Write(w, v)
	third := s.Compute("exp", of(w))
	require.Check(t, third != first && !first.Of(of(w)), "what was written is current")
	require.Check(t, s.LeaveOnce(first).Len() == 0 && s.LeaveOnce(second).Len() == 1,
		"memory is not for the last user")
	require.Check(t, s.Compute("exp", of(w)) == third,
		"who leaves what is stale takes another's place")
}

// TestVersionsGoWithTheirSources: what nobody keeps anything of costs nothing.
func TestVersionsGoWithTheirSources(t *testing.T) {
	w := backend.Of([]float32{1, 2})
	s := Read(w)
	known := func() bool {
		host.mu.RLock()
		defer host.mu.RUnlock()
		_, known := host.versions[w.Addr()]
		return known
	}
	require.Check(t, known() && s.Current(), "a source is not known")
	s = Source{}
	for deadline := time.Now().Add(10 * time.Second); known(); time.Sleep(time.Millisecond) {
		require.That(t, time.Now().Before(deadline), "a version stays")
		runtime.GC()
	}
	require.Check(t, !s.Current(), "nothing is current")
}
