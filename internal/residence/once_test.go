package residence

import (
	"errors"
	"slices"
	"testing"

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
	leaves := []backend.Buffer{w}
	first := s.Compute("exp", leaves)
	fails := errors.New("fails")
	require.Fails(t, "Fill", first.Fill(func() (backend.Buffer, error) {
		return backend.Of([]float32{-1}), fails // which is freed
	}), fails)
	fill(first)
	second := s.Compute("exp", leaves)
	fill(second)
	require.Check(t, second == first && runs == 1, "%d runs for two users", runs)
	for what, other := range map[string]*Once{"text": s.Compute("tanh", leaves),
		"memory": s.Compute("exp", []backend.Buffer{v})} {
		require.Check(t, other != first, "another %s is the same", what)
	}
	leaves[0] = v
	require.Check(t, s.Current(first, []backend.Buffer{w}) && !s.Current(first, leaves),
		"it is not of its leaves")
	s.Outdated(slices.Values([]backend.Buffer{w}))
	third := s.Compute("exp", []backend.Buffer{w})
	require.Check(t, third != first && !s.Current(first, []backend.Buffer{w}),
		"what was written is current")
	require.Check(t, s.LeaveOnce(first).Len() == 0 && s.LeaveOnce(second).Len() == 1,
		"memory is not for the last user")
	require.Check(t, s.Compute("exp", []backend.Buffer{w}) == third,
		"who leaves what is stale takes another's place")
}
