package plan

import (
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestPlanningIsNearlyLinear: four times the values take far less than sixteen times the CPU's
// time.
func TestPlanningIsNearlyLinear(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	took := func(steps int) time.Duration {
		best := time.Hour
		for range 5 {
			p := recurrence(steps)
			began := threadTime(t)
			require.NoError(t, require.Err(New(&p.Program)))
			best = min(best, threadTime(t)-began)
		}
		return best
	}
	short, long := took(250), took(1000)
	if ratio := float64(long) / float64(short); ratio > 10 {
		t.Errorf("%v for 250 steps, %v for 1000: %.1f times as long", short, long, ratio)
	}
}

// threadTime is how long this thread has run, whatever else the machine does.
func threadTime(t *testing.T) time.Duration {
	var ts unix.Timespec
	require.NoError(t, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts))
	return time.Duration(ts.Nano())
}
