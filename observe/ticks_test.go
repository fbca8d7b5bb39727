package observe

import (
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Stamps are the system's times, whatever clock they are of.
func TestStampsAreTimes(t *testing.T) {
	clocks := map[string]ticks{"system": {epoch: time.Now()}, "chosen": newTicks()}
	if hasCounter { // whether the system trusts it or not
		c := ticks{counter: true}
		c.epoch, c.first = c.both()
		clocks["counter"] = c
	}
	for name, c := range clocks {
		for range 3 {
			time.Sleep(5 * time.Millisecond)
			before := time.Now()
			s := c.now()
			after := time.Now()
			time.Sleep(5 * time.Millisecond)
			const slack = 2 * time.Millisecond // the readings of a pair of clocks may be apart
			at := c.epoch.Add(c.scale().since(s))
			require.Check(t, !at.Before(before.Add(-slack)) && !at.After(after.Add(slack)),
				"%s: the stamp of %v to %v is %v", name, before, after, at)
		}
	}
	require.Equal(t, "a counter that has gone back gives times",
		(&ticks{counter: hasCounter, first: 1 << 62}).scale().since(1000), 0)
}
