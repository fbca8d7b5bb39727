//go:build !portable

package host

import (
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestAdaptiveSpin(t *testing.T) {
	p := spinBudget{spin: 64 * time.Microsecond}
	var s adaptiveSpin
	for i := range mostHalvings {
		if got, want := s.budget(p), p.spin>>i; got != want {
			t.Errorf("after %d waits without success: %v, want %v", i, got, want)
		}
		s.learn(false)
	}
	for i := range 3 * probe {
		got, want := s.budget(p), time.Duration(0)
		if i%probe == probe-1 {
			want = p.spin // a peer that sleeps needs it
			s.learn(false)
		}
		if got != want {
			t.Fatalf("wait %d of those without success: %v, want %v", i, got, want)
		}
	}
	if s.learn(true); s.budget(p) != p.spin {
		t.Errorf("after a probe that succeeded: %v, want %v", s.budget(p), p.spin)
	}
}

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
	if !moved {
		t.Error("the thread stays on its core")
	}
	here := core()
	c.spin.perCore = 2
	c.region.rankPage(1).core.Store(uint32(here) + 1)
	c.stepAside() // there is room for both
}
