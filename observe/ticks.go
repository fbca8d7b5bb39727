package observe

import (
	"math"
	"os"
	"runtime"
	"strings"
	"time"
)

// ticks is the clock of the recorder, which reads it twice a call. If the system's own clock is
// based on the processor's counter, ticks is that counter, which takes a third of the time to read;
// the meaning of a stamp is computed when somebody asks, from a second reading of both. Otherwise
// ticks is the system's clock.
type ticks struct {
	epoch   time.Time
	counter bool
	first   int64 // count at the epoch
}

// hasCounter says that count exists.
const hasCounter = runtime.GOARCH == "amd64" || runtime.GOARCH == "arm64"

// stamp is a point in time, in ticks since the epoch.
type stamp int64

// newTicks trusts the system on whether the counter runs at a constant rate, the same on all cores:
// Linux watches amd64's counter, and stops using it if it does not.
func newTicks() ticks {
	name, err := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	counter := map[string]string{"amd64": "tsc", "arm64": "arch_sys_counter"}[runtime.GOARCH]
	t := ticks{counter: err == nil && hasCounter && strings.TrimSpace(string(name)) == counter}
	t.epoch, t.first = t.both()
	return t
}

func (t *ticks) now() stamp {
	if t.counter {
		return stamp(count() - t.first)
	}
	return stamp(time.Since(t.epoch))
}

// tries is how often both clocks are read to get one simultaneous reading: in between, the system
// may run something else.
const tries = 5

// both reads the system's clock and the counter at the same moment.
func (t *ticks) both() (now time.Time, at int64) {
	if !t.counter {
		return time.Now(), 0
	}
	shortest := int64(math.MaxInt64)
	for range tries {
		before := count()
		read := time.Now()
		if took := count() - before; now.IsZero() || took >= 0 && took < shortest {
			now, at, shortest = read, before+took/2, took
		}
	}
	return now, at
}

// scale returns the length of a tick, averaged from the epoch to now.
func (t *ticks) scale() scale {
	if !t.counter {
		return 1
	}
	now, at := t.both()
	if at <= t.first {
		return 0
	}
	return scale(float64(now.Sub(t.epoch)) / float64(at-t.first))
}

// scale is the number of nanoseconds in a tick.
type scale float64

// stamps returns a length of time in ticks.
func (n scale) stamps(d time.Duration) stamp {
	if n == 0 { // no time has passed since the epoch
		return 0
	}
	return stamp(float64(d) / float64(n))
}

// since returns the time from the epoch to s.
func (n scale) since(s stamp) time.Duration { return time.Duration(float64(s) * float64(n)) }
