//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// The processes of jobs are this test binary.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == roleTrain {
		if err := train(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func TestAJobWhoseProcessesAreKilledEndsAsOneWithout(t *testing.T) {
	root := require.Value(filepath.Abs("../../.."))(t)
	t.Chdir(root)
	c := config{minutes: 0.01, seed: 1, model: "digits", steps: 60, ranks: 2, standby: 1, least: 1,
		mean: 100 * time.Millisecond}
	if os.Getenv("EURYALE_FULL") != "" {
		c.minutes, c.stops, c.steps, c.mean = 1, 5, 1500, 400*time.Millisecond
		for _, c.model = range []string{"convnet", "gpt", "digits"} {
			killed(t, c)
		}
	}
	killed(t, c)
}

// TestAProgramWhoseProcessesAreKilledEndsAsOneWithout: the examples that train elastically, on this
// machine and on three of which hosts leave and return. EURYALE_KILLS says how many kills each
// gets.
func TestAProgramWhoseProcessesAreKilledEndsAsOneWithout(t *testing.T) {
	kills := 10
	if text := os.Getenv("EURYALE_KILLS"); text != "" {
		kills = require.Value(strconv.Atoi(text))(t)
	} else if os.Getenv("EURYALE_FULL") == "" {
		t.Skip("set EURYALE_FULL=1, or EURYALE_KILLS")
	}
	root := require.Value(filepath.Abs("../../.."))(t)
	t.Chdir(root)
	gpt := "-elastic -device cpu -layers 1 -width 32 -heads 4 -context 24 -batch 16 -tree 8 " +
		"-steps 5000 -every 50 -data " + filepath.Join(root, "docs")
	for program, args := range map[string][2]string{ // those on machines have slower steps
		"digits": {"-elastic -device cpu -epochs 1500", " -epochs 200"},
		"gpt":    {gpt, " -steps 600 -every 25"}, "gpt -shards 3 -steps 8000": {gpt, ""},
		"gpt -tp 2 -steps 8000": {gpt, ""},
	} {
		for _, machines := range []int{0, 3} {
			if machines > 0 && args[1] == "" {
				continue
			}
			t.Run(fmt.Sprint(program, " on ", machines), func(t *testing.T) {
				name, more, shards := strings.Cut(program, " ")
				c := config{minutes: 24 * 60, enough: kills, seed: 1, model: name, ranks: 4,
					least: 1, stops: 5, mean: 400 * time.Millisecond, timeout: time.Minute,
					trainer: "./examples/" + name, args: args[0] + " " + more, shards: shards}
				if strings.HasPrefix(more, "-tp 2") {
					c.least = 2
				}
				if machines > 0 {
					c.args += args[1]
					c.machines, c.leaves, c.ranks, c.least = machines, 1, 6, 2
					c.timeout, c.mean = 5*time.Second, time.Second
				}
				v, err := immortal(t.Context(), c)
				if errors.Is(err, proctest.ErrLacking) {
					t.Skip(err)
				}
				t.Log(v)
				require.That(t, err == nil && v.kills >= kills && (v.left > 0) == (machines > 0),
					"%v, want %d kills and, on machines, hosts that leave", err, kills)
			})
		}
	}
}

// TestTheEndOfAProgramIsCompared: a hash of another training is an error, and so is none.
func TestTheEndOfAProgramIsCompared(t *testing.T) {
	for line, right := range map[string]bool{
		"[0] loss=1.2 params=00112233445566778899 seconds=3": true,
		"[0] loss=1.2 params=00112233445566778898 seconds=3": false,
		"[0] step 10/10: loss=1.2":                           false,
	} {
		j := &job{config: config{trainer: "x", logs: t.TempDir()}, ends: map[string]bool{},
			want: []string{"00112233445566778899"}}
		j.hear(line)
		require.Check(t, (j.judge(nil, 1) == nil) == right, "%s: right is %v", line, !right)
	}
}

// TestAJobWhoseLinksAreCutEndsAsOneWithout: with kills and stops beside, on wires that delay and
// lose. EURYALE_CUT_JOBS says in how many jobs.
func TestAJobWhoseLinksAreCutEndsAsOneWithout(t *testing.T) {
	jobs := 2
	if text := os.Getenv("EURYALE_CUT_JOBS"); text != "" {
		var err error
		if jobs, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	} else if os.Getenv("EURYALE_FULL") == "" {
		t.Skip("set EURYALE_FULL=1, or EURYALE_CUT_JOBS")
	}
	root := require.Value(filepath.Abs("../../.."))(t)
	t.Chdir(root)
	c := config{minutes: 24 * 60, enoughJobs: jobs, seed: 1, model: "digits", steps: 200,
		ranks: 6, least: 2, machines: 3, share: 2, stops: 5, mean: 1500 * time.Millisecond,
		timeout: 3 * time.Second}
	c.wire = proctest.Wire{Delay: 2 * time.Millisecond, Loss: 0.01}
	v, err := immortal(t.Context(), c)
	if errors.Is(err, proctest.ErrLacking) {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Log(v)
	slices.Sort(v.cutTimes)
	limit := proctest.Within(2*c.timeout + time.Second)
	if n := len(v.cutTimes); n == 0 || v.cutTimes[(n-1)*99/100] > limit {
		t.Errorf("from a cut to the next step: %v, want at most %v", v.cutTimes, limit)
	}
}

// killed runs jobs.
func killed(t *testing.T, c config) {
	v := require.Value(immortal(t.Context(), c))(t)
	if t.Log(v); v.kills == 0 {
		t.Error("nobody was killed")
	}
}

// TestAStepWithOtherParametersIsAnError: one of any rank, and also where the last step is right.
func TestAStepWithOtherParametersIsAnError(t *testing.T) {
	for line, says := range map[string]string{
		"[1] step 1: pid=7 rank 1 of 2 params=aa": "",
		"[1] step 1: pid=7 rank 1 of 2 params=ab": "step 1 has other parameters",
		"[1] step 2: pid=7 rank 1 of 2 params=ab": "step 2 has other parameters",
	} {
		j := &job{config: config{steps: 2, logs: t.TempDir()}, want: []string{"", "aa", "bb"},
			ends: map[string]bool{}}
		j.hear(line)
		j.hear("[0] step 2: pid=8 rank 0 of 2 params=bb")
		err := j.judge(nil, 1)
		require.Check(t, (err == nil) == (says == "") &&
			(err == nil || strings.Contains(err.Error(), says)), "%s: %v", line, err)
	}
	require.Fails(t, "a job without a last step is right",
		(&job{config: config{logs: t.TempDir()}}).judge(nil, 1))
}
