//go:build !portable

package host

import (
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// A rank leaves a core that has too many, and may use all its cores afterwards.
func TestStepAside(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, after unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil || before.Count() < 2 {
		t.Skipf("it takes two cores: %v", err)
	}
	c := connect(t, 2, time.Minute)[0]
	c.spin.perCore = 1
	moved := false
	for range 100 { // the system may move a thread back at any time
		here := core()
		c.region.rankPage(1).core.Store(uint32(here) + 1)
		c.stepAside()
		moved = moved || core() != here
	}
	if err := unix.SchedGetaffinity(0, &after); err != nil || before != after {
		t.Errorf("the thread may use %v now, %v before: %v", after, before, err)
	}
	require.Check(t, moved, "the thread stays on its core")
	here := core()
	c.spin.perCore = 2
	c.region.rankPage(1).core.Store(uint32(here) + 1)
	c.stepAside() // there is room for both
}
