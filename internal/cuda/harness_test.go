package cuda

import (
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// must fails the test on an error, and returns the value otherwise.
func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		require.NoError(t, err)
		return v
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	require.NoError(t, err)
}
