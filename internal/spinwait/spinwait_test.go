package spinwait

import (
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestPausesGrowWithTheWait(t *testing.T) {
	for _, test := range []struct {
		waited time.Duration
		cores  int
		want   time.Duration
	}{
		{0, few + 1, 0},
		{eager - 1, few + 1, 0},
		{eager, few + 1, eager / share},
		{8 * share * time.Microsecond, few + 1, 8 * time.Microsecond},
		{time.Hour, few + 1, longest},
		{eagerOfFew - 1, few, 0},
		{eagerOfFew, few, eagerOfFew / shareOfFew},
		{time.Hour, 1, longest},
	} {
		if got := pauseAfter(test.waited, test.cores); got != test.want {
			t.Errorf("after %v on %d cores: %v, want %v", test.waited, test.cores, got, test.want)
		}
	}
}

func TestAPauseProlongsAWaitByLittle(t *testing.T) {
	for waited := time.Duration(1); waited < time.Hour; waited += waited/3 + 1 {
		for cores, share := range map[int]time.Duration{few: shareOfFew, few + 1: share} {
			if pause := pauseAfter(waited, cores); pause > waited/share {
				t.Errorf("after %v on %d cores: a pause of %v", waited, cores, pause)
			}
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
	require.Check(t, slept >= longest, "the longest pause took %v, want %v", slept, longest)
}
