package main

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-9 }

// script is a measurement whose new version takes the next of some factors in each round.
func script(factors ...float64) (measure func(int, group) (times, error), order *[]int) {
	order = new([]int)
	runs := [2]int{}
	return func(version int, _ group) (times, error) {
		*order = append(*order, version)
		drift := float64(1 + runs[version]) // the machine becomes slower
		factor := 1.0
		if version == 1 {
			factor = factors[runs[1]%len(factors)]
		}
		runs[version]++
		return times{1024: 10 * drift * factor, 4096: 20 * drift}, nil
	}, order
}

func TestVersionsRunInTurnAndRatiosArePaired(t *testing.T) {
	measure, order := script(1.05, 0.9, 1.06)
	cells := require.Value(group{"host", 2, "allreduce"}.compare(3, measure))(t)
	if want := []int{0, 1, 1, 0, 0, 1}; !slices.Equal(*order, want) {
		t.Errorf("the order is %v, want %v", *order, want)
	}
	require.Check(t, len(cells) == 2 && near(cells[0].ratio(), 1.05) && near(cells[1].ratio(), 1) &&
		cells[0].bytes == 1024, "the cells are %v", cells)
	g := geomean(cells)
	require.Check(t, near(g, math.Sqrt(1.05)), "the geometric mean is %v", g)
	if err := judge(cells); err == nil || !strings.Contains(err.Error(), "1.025, above 1.02") {
		t.Errorf("the judgement is %v", err)
	}
	if got, want := summary(cells), "cells=2 geomean=1.025 worst=1.050 (host, 2 ranks, allreduce "+
		"of 1024 bytes)"; got != want {
		t.Errorf("the summary is %q, want %q", got, want)
	}
}

func TestACellIsSlowIfNoRepeatClearsIt(t *testing.T) {
	for _, test := range []struct {
		factors []float64
		runs    int
		slow    bool
	}{
		{[]float64{1.09}, 2, false},
		{[]float64{1.2, 1.09}, 4, false},
		{[]float64{1.2, 1.3, 1}, 6, false},
		{[]float64{1.2, 1.11, 1.3}, 6, true},
	} {
		measure, order := script(test.factors...)
		cells, err := group{"host", 2, "allreduce"}.compare(1, measure)
		require.NoError(t, err)
		if len(*order) != test.runs {
			t.Errorf("%v: %d runs, want %d", test.factors, len(*order), test.runs)
		}
		err = judge(cells)
		slow := err != nil && strings.Contains(err.Error(), "repeats")
		require.Check(t, slow == test.slow, "%v: slow is %v: %v", test.factors, slow, err)
		if c := worst(cells); test.slow && (!near(c.lowest(), 1.11) || !near(c.ratio(), 1.2)) {
			t.Errorf("the worst is %v", c)
		}
	}
}

func TestSizesMustBeMeasuredByBothVersions(t *testing.T) {
	_, err := group{"host", 2, "allreduce"}.compare(1, func(version int, _ group) (times, error) {
		return times{1024 << version: 1}, nil
	})
	require.Check(t, err != nil && strings.Contains(err.Error(), "not measured by both"),
		"the error is %v", err)
}

// written writes a file, which can be run.
func written(t *testing.T, dir, name, text string) (path string) {
	t.Helper()
	path = filepath.Join(dir, name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o700))
	return path
}

// compared runs the command, and returns what it writes.
func compared(args ...string) (string, error) {
	var out strings.Builder
	err := run(context.Background(), &out, args)
	return out.String(), err
}

func TestFilesAreCompared(t *testing.T) {
	dir := t.TempDir()
	of := func(name, times string) string {
		return written(t, dir, name, strings.ReplaceAll(
			`{"collective":"allreduce","dtype":"f32","ranks":4,"bytes":1024,TIMES,"wrong":0}`,
			"TIMES", times))
	}
	host, device := of("host.jsonl", `"p50_us":2`), of("device.jsonl", `"p50_us":9,"stream_us":2`)
	for want, files := range map[string][2]string{"geomean=1.000": {host, device},
		"geomean=1.500": {host, of("slow.jsonl", `"p50_us":3`)}} {
		out, err := compared("--old", files[0], "--new", files[1])
		require.Check(t, strings.Contains(out, want) && (err == nil) == strings.Contains(want,
			"=1.000"), "%v and\n%s, want %s", err, out, want)
	}
	for text, want := range map[string]string{"# no line": "no results", "{": "unexpected end",
		`{"ranks":2,"bytes":1024,"p50_us":1}`: "not measured by both",
		`{"bytes":1024,"p50_us":1,"wrong":3}`: "3 wrong elements"} {
		if _, err := compared("--old", host, "--new", written(t, dir, "wrong.jsonl", text)); err ==
			nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: the error is %v, want %q", text, err, want)
		}
	}
}

// The peer is a script in place of mpirun, which measures 8 us.
func TestPeersAreCompared(t *testing.T) {
	dir := t.TempDir()
	written(t, dir, "mpicc", "#!/bin/sh\n"+`[ -s "$4" ] && : >"$3"`)
	written(t, dir, "mpirun", "#!/bin/sh\ncase \"$*\" in *'-n 2'*tcp,self*' 1024 1024 4 0.001 '*) "+
		`echo '{"bytes":1024,"p50_us":8}' ;; *) exit 3 ;; esac`)
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	ours := written(t, dir, "ours", "#!/bin/sh\ncase \"$*\" in *--backend=tcp*) "+
		`echo '{"bytes":1024,"p50_us":4,"mean_us":9}' ;; *) exit 3 ;; esac`)
	out, err := compared("--peer", "openmpi", "--new", ours, "--ranks", "2", "--backend", "tcp",
		"--max", "1K", "--time", "1ms", "--collectives", "allreduce,reduce,broadcast", "--rounds",
		"2")
	require.Check(t, err == nil && strings.Contains(out, "cells=2 geomean=0.500"), "%v and\n%s",
		err, out)
	if _, err := compared("--peer", "mvapich", "--ranks", "2", "--new", ours); err == nil ||
		!strings.Contains(err.Error(), "openmpi runs [allreduce") {
		t.Errorf("another peer: %v", err)
	}
}

func TestRanksHaveACPUEach(t *testing.T) {
	for cpus, want := range map[int]string{1: "", 2: "2", 7: "2,4", 8: "2,4,8", 64: "2,4,8"} {
		got := hostRanks(cpus)
		require.Check(t, got == want, "%d CPUs: %q, want %q", cpus, got, want)
	}
	groups, err := options{ranks: "2,4", gpus: 2, collectives: "allreduce,gather"}.groups()
	require.Check(t, err == nil && len(groups) == 6 && groups[5] == (group{"gpu", 2, "gather"}),
		"the groups are %v, %v", groups, err)
	if _, err := (options{}).groups(); err == nil {
		t.Error("nothing to measure is no error")
	}
}

// The programs are scripts here.
func TestProgramsAreRunAndCompared(t *testing.T) {
	dir := t.TempDir()
	program := func(name, line string) string {
		return written(t, dir, name, "#!/bin/sh\n"+
			`[ "$1 $2 $3 $4" = "bench --n=2 --collective=gather --min=8" ] || exit 3`+"\necho '"+
			line+"'\n")
	}
	old := program("old", `{"collective":"gather","bytes":8,"mean_us":10,"wrong":0}`)
	for line, want := range map[string]string{
		`{"collective":"gather","bytes":8,"mean_us":10.1,"wrong":0}`: "cells=1 geomean=1.010 " +
			"worst=1.010 (host, 2 ranks, gather of 8 bytes)\n",
		`{"collective":"gather","bytes":8,"mean_us":12,"wrong":0}`: "again: [1.200 1.200]",
	} {
		out, err := compared("--old", old, "--new", program("new", line), "--rounds", "2",
			"--ranks", "2", "--gpus", "0", "--collectives", "gather", "--min", "8")
		require.Check(t, strings.Contains(out, want) && (err != nil) == strings.Contains(want,
			"again"), "the error is %v, the output\n%s", err, out)
	}
	failing := written(t, dir, "failing", "#!/bin/sh\necho no memory >&2\nexit 1\n")
	_, err := compared("--old", failing, "--new", old, "--ranks", "2", "--gpus", "0")
	require.Check(t, err != nil && strings.Contains(err.Error(), "no memory"), "the error is %v",
		err)
	if _, err := compared(); err == nil ||
		errors.Is(err, os.ErrNotExist) {
		t.Errorf("no arguments: %v", err)
	}
}
