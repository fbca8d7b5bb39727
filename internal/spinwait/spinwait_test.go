package spinwait

import (
	"testing"
	"time"
)

func TestPausesGrowWithTheWait(t *testing.T) {
	for _, test := range []struct{ waited, want time.Duration }{
		{0, 0},
		{eager - 1, 0},
		{eager, eager / share},
		{8 * time.Millisecond, 500 * time.Microsecond},
		{time.Hour, longest},
	} {
		if got := pauseAfter(test.waited); got != test.want {
			t.Errorf("after %v: %v, want %v", test.waited, got, test.want)
		}
	}
}

func TestAWaitEnds(t *testing.T) {
	done := time.Now().Add(5 * time.Millisecond)
	looks := 0
	for w := (Wait{}); time.Now().Before(done); w.Pause() {
		looks++
	}
	if looks < 10 {
		t.Errorf("%d looks in 5 ms", looks)
	}
}
