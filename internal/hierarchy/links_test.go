package hierarchy

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestMeasurementsAreKeptByMachines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tuning.json")
	t.Setenv(string(env.Tuning), path)
	of := func(M, D int, declared bool, step time.Duration) Measurement {
		links := DefaultLinks()
		links.Step = step
		return Measurement{"NVIDIA H200", M, D, declared, links, "test"}
	}
	first, second := of(2, 4, false, 1), of(2, 4, true, 2)
	for _, m := range []Measurement{of(2, 4, false, 7), second, first} {
		require.Equal(t, "Keep", require.Got(m.Keep())(t), path)
	}
	for _, want := range []Measurement{first, second} {
		got, found, err := Measured(want.Model, gridOf(2, 4, machineMinor), want.Declared)
		require.Check(t, err == nil && found && reflect.DeepEqual(got, want),
			"%+v, %v, %v, want %+v", got, found, err, want)
	}
	for _, l := range []Layout{Grid(4, 2), layoutOf([][]int{{0, 1}, {2}})} {
		_, found, err := Measured("NVIDIA H200", l, true)
		require.Check(t, err == nil && !found, "%v: %v, %v", l, found, err)
	}
	require.Fails(t, "a negative time is kept", require.Err(of(2, 4, false, -1).Keep()),
		backend.ErrArgument)
}

func TestBrokenMeasurementNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tuning.json")
	t.Setenv(string(env.Tuning), path)
	for _, text := range []string{"{",
		`{"hierarchy": [{"model": "m", "machines": 2, "devices": 2}]}`} {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		_, _, err := Measured("m", Grid(2, 2), false)
		require.Fails(t, text, err, path, "delete it")
	}
}

func TestFitFindsTheLink(t *testing.T) {
	calls := func(l Link, off time.Duration) (all []Timed) {
		for n := 1 << 10; n <= 64<<20; n *= 4 {
			took := time.Duration(l.time(3, float64(n))) + off
			all, off = append(all, Timed{3, float64(n), took}), -off
		}
		return all
	}
	link := Link{4 * time.Microsecond, 100e9}
	for _, off := range []time.Duration{0, 200 * time.Nanosecond} {
		got, err := Fit(calls(link, off))
		require.Check(t, err == nil && got.Latency.Round(time.Microsecond) == link.Latency &&
			!(got.Bandwidth < 98e9) && !(got.Bandwidth > 102e9), "%v, %v, want %v", got, err, link)
	}
	got, err := Fit([]Timed{{1, 1e6, time.Microsecond}, {1, 2e6, 3 * time.Microsecond}})
	require.Check(t, err == nil && got.Latency == 0 && got.Bandwidth > 0, "without latency: %v, %v",
		got, err)
	for _, few := range [][]Timed{nil, {{1, 1e6, time.Millisecond}}, {{1, 1e3, time.Millisecond},
		{1, 1e6, time.Microsecond}}} {
		require.Fails(t, few, require.Err(Fit(few)))
	}
}

func TestLinksAreParsed(t *testing.T) {
	for text, want := range map[string]Link{
		"3us+200GB/s":                   {3 * time.Microsecond, 200e9},
		"10µs + 200 Gbit/s":             {10 * time.Microsecond, 25e9},
		"1.5ms+2e3kB/s":                 {1500 * time.Microsecond, 2e6},
		DefaultLinks().Between.String(): DefaultLinks().Between,
	} {
		require.Equal(t, text, require.Got(ParseLink(text))(t), want)
	}
	for _, wrong := range []string{"", "3us", "200GB/s", "3us+fast", "3us+0GB/s", "-3us+1GB/s",
		"3us+1GB", "3us+-1GB/s"} {
		require.Fails(t, wrong, require.Err(ParseLink(wrong)), backend.ErrArgument)
	}
}

func TestPartsAreThoseOfThePhasesThatCommunicate(t *testing.T) {
	ranks(t, Grid(2, 1), always(), func(c *Communicator) error {
		if c.Between().Size() != 2 || c.Inside() != nil {
			return fmt.Errorf("between %v, inside %v", c.Between(), c.Inside())
		}
		for p, size := range map[phase]int{reducePhase: 0, exchangePhase: 2, addPhase: 0,
			broadcastPhase: 2, gatherPhase: 0, remainderPhase: 2} {
			part := c.parts[p]
			if (part == nil) != (size == 0) || part != nil && part.Size() != size {
				return fmt.Errorf("%v: %v", p, part)
			}
		}
		return nil
	})
}
