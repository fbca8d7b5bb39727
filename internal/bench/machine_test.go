package bench_test

import (
	"testing"

	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestListsOfCoresAreCounted(t *testing.T) {
	for list, want := range map[string]int{"0\n": 1, "0-3\n": 4, "0-3,8,10-11": 7, "": 0} {
		require.Equal(t, list, bench.CountList(list), want)
	}
	if bench.Cores() < 1 {
		t.Errorf("this machine has %d cores", bench.Cores())
	}
}
