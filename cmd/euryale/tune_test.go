//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestTuneMeasuresTheLinksOfDeclaredMachines(t *testing.T) {
	noTuning(t)
	for _, test := range []struct {
		topology string
		ranks, D int
	}{{"2x2", 4, 2}, {"0,1,1", 3, 0}} {
		t.Setenv("EURYALE_TOPOLOGY", test.topology)
		b := quickBench(t, "--backend=host", "--tune", "-n", strconv.Itoa(test.ranks), "--time=1ms",
			"--max=1M", "--factor=1024", "--json")
		var out, notes bytes.Buffer
		require.NoError(t, b.Run(context.Background(), &streams{out: &out, err: &notes}))
		var m hierarchy.Measurement
		if err := json.Unmarshal(out.Bytes(), &m); err != nil {
			t.Fatalf("%v in %s", err, out.String())
		}
		layout := require.Value(hierarchy.Parse(test.topology, test.ranks))(t)
		kept, found, err := hierarchy.Measured("host", layout, true)
		require.Check(t, err == nil && found && kept == m && m.Links.Step > 0 &&
			strings.Contains(m.Source, "goroutines"), "%+v, kept %+v, %v, %v", m, kept, found, err)
		require.Check(t, m.Machines == 2 && m.Devices == test.D &&
			m.Links.Inside != m.Links.Between, "%s: %+v", test.topology, m)
		for _, want := range []string{"# euryale bench --tune: 1K to 1M",
			"# backend host has no low-latency kernels", "# kept in "} {
			require.Check(t, strings.Contains(notes.String(), want), "no %q in\n%s", want,
				notes.String())
		}
	}
}

// Each sweep is disturbed at another size: each size counts with its fastest time.
func TestLinksAreFittedToUndisturbedTimes(t *testing.T) {
	// 10 us + 1 GB/s
	const small, large, slow = 11 * time.Microsecond, 1010 * time.Microsecond, time.Second
	type times struct{ small, large time.Duration }
	for _, test := range []struct {
		sweeps []times // the last one goes on
		fits   bool
		want   int
	}{
		{[]times{{small, slow}, {slow, large}}, true, sweeps},
		{[]times{{slow, large}, {slow, large}, {slow, large}, {slow, slow}, {small, slow}}, true,
			sweeps + 2},
		{[]times{{slow, small}}, false, mostSweeps},
	} {
		done := 0
		link, err := fitted(func() ([]hierarchy.Timed, error) {
			took := test.sweeps[min(done, len(test.sweeps)-1)]
			done++
			return []hierarchy.Timed{{Steps: 1, Bytes: 1e3, Took: took.small},
				{Steps: 1, Bytes: 1e6, Took: took.large}}, nil
		})
		near := link.Latency.Round(time.Microsecond) == 10*time.Microsecond &&
			link.Bandwidth > 0.99e9 && link.Bandwidth < 1.01e9
		require.Check(t, (err == nil) == test.fits && near == test.fits && done == test.want,
			"%v: %v, %v after %d sweeps, want %d", test.sweeps, link, err, done, test.want)
	}
}

func TestTuneSaysWhyThereIsNothingToTune(t *testing.T) {
	file := noTuning(t)
	for _, test := range []struct{ topology, mode, say string }{
		{"2x2", "never", "hierarchical is switched off"},
		{"2x2", "auto", "links inside and between machines are equally fast"},
		{"0,0,0,0", "", "there is one machine"},
	} {
		t.Setenv("EURYALE_TOPOLOGY", test.topology)
		t.Setenv("EURYALE_HIERARCHY", test.mode)
		b := quickBench(t, "--backend=host", "--tune", "-n", "4")
		err := b.Run(context.Background(), nowhere())
		require.Fails(t, fmt.Sprintf("topology %q, hierarchy %q", test.topology, test.mode), err,
			"backend host has no low-latency kernels",
			"; and nothing goes machine by machine: "+test.say)
		require.Fails(t, "a file was written", require.Err(os.Stat(file)))
	}
}

func TestFoundTuneWithoutGPUsSaysWhatToDo(t *testing.T) {
	noTuning(t)
	t.Setenv("EURYALE_TOPOLOGY", "")
	code, out, errs := commandLine("bench", "--backend=host", "--tune", "-n", "4")
	require.Check(t, code == 1 && out == "" && strings.Count(errs, "\n") == 1 &&
		strings.Contains(errs,
			"EURYALE_TOPOLOGY=2x2 euryale bench --tune -n 4"), "code %d, %q, %q", code, out, errs)
}

func TestTuneIsRefusedWhereNothingIsKept(t *testing.T) {
	t.Setenv("EURYALE_TUNING", "off")
	t.Setenv("EURYALE_TOPOLOGY", "2x2")
	code, out, errs := commandLine("bench", "--backend=host", "--tune", "-n", "4")
	require.Check(t, code == 1 && out == "" && strings.Contains(errs, "which EURYALE_TUNING=off "+
		"forbids"), "code %d, %q, %q", code, out, errs)
}

func TestTuneWritesForAPerson(t *testing.T) {
	file := noTuning(t)
	t.Setenv("EURYALE_TOPOLOGY", "2x1")
	var out bytes.Buffer
	cmd := command(t, "bench", "-n", "2", "--backend=host", "--tune", "--time=1ms", "--max=1M",
		"--factor=1024")
	cmd.Stdout = &out
	require.NoError(t, cmd.Run())
	for _, want := range []string{"ranks: 2 processes", "2 machines x 1 devices of host: inside ",
		"# kept in " + file} {
		require.Check(t, strings.Contains(out.String(), want), "no %q in\n%s", want, out.String())
	}
	m, found, err := hierarchy.Measured("host", hierarchy.Grid(2, 1), true)
	if err != nil || !found || m.Links.Inside != m.Links.Between { // nothing is inside
		t.Errorf("it keeps %+v, %v", m, err)
	}
}
