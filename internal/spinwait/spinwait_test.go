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
		{8 * share * time.Microsecond, 8 * time.Microsecond},
		{time.Hour, longest},
	} {
		if got := pauseAfter(test.waited); got != test.want {
			t.Errorf("after %v: %v, want %v", test.waited, got, test.want)
		}
	}
}

func TestAPauseProlongsAWaitByLittle(t *testing.T) {
	for waited := time.Duration(1); waited < time.Hour; waited += waited/3 + 1 {
		if pause := pauseAfter(waited); pause > waited/share {
			t.Errorf("after %v: a pause of %v", waited, pause)
		}
	}
}

func TestALongWaitSleepsBetweenLooks(t *testing.T) {
	w := Wait{since: time.Now().Add(-time.Hour)}
	slept := time.Duration(0)
	for range 20 { // a signal of the runtime may end one
		start := time.Now()
		w.Pause()
		slept = max(slept, time.Since(start))
	}
	if slept < longest {
		t.Errorf("the longest pause took %v, want %v", slept, longest)
	}
}
