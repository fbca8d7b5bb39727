//go:build !portable

package shm

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

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
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		runtime.GC()
		grown := addressSpace(t) - before
		if grown < times*nbytes/4 {
			return
		}
		require.That(t, !time.Now().After(deadline),
			"%d times %d bytes were retired, and %d bytes of addresses are still mapped", times,
			nbytes, grown)
	}
}
