package observe

import (
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/gpu/nvml"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// driver counts how often it is asked.
type driver struct{ times int64 }

func (d *driver) State(string) (nvml.State, error) {
	d.times++
	return nvml.State{MemoryUsed: d.times}, nil
}

func (d *driver) Close() error { return nil }

func TestTheDriverIsAskedTwiceASecondAtMost(t *testing.T) {
	g := &gpu{nvml: &driver{}}
	for range 3 {
		s, ok := g.state()
		require.Check(t, ok && s.MemoryUsed == 1, "the state is %+v, %v", s, ok)
		g.asked = time.Now() // however long that took
	}
	g.asked = g.asked.Add(-askTime)
	s, ok := g.state()
	require.Check(t, ok && s.MemoryUsed == 2, "after half a second it is %+v, %v", s, ok)
	g.close()
	if _, ok := g.state(); ok {
		t.Error("a library that is closed tells a state")
	}
}
