//go:build !portable

package shm

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// addressSpace returns the bytes of addresses that the process has mapped.
func addressSpace(t *testing.T) int {
	t.Helper()
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Skip(err)
	}
	pages := require.Value(strconv.Atoi(strings.Fields(string(statm))[0]))(t)
	return pages * os.Getpagesize()
}

func TestRetiredMemoryIsReadAndWrittenAndThenForgotten(t *testing.T) {
	// Far more than what the runtime of C reserves for the threads of two processors.
	const nbytes, times = 1 << 20, 4000
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	before := addressSpace(t)
	for range times {
		s := require.Value(New("/dev/shm", nbytes))(t)
		s.Mem[0] = 1
		require.NoError(t, s.Retire())
		if s.Mem[0] != 0 {
			t.Fatal("retired memory is not zero")
		}
		s.Mem[nbytes-1] = 1
		runtime.KeepAlive(s)
	}
	// Cleanups run some time after a collection.
	what := fmt.Sprintf("fewer than a quarter of %d times %d retired bytes have addresses", times,
		nbytes)
	require.Soon(t, what, func() bool {
		runtime.GC()
		return addressSpace(t)-before < times*nbytes/4
	})
}
