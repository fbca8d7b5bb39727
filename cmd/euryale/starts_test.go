//go:build linux

package main

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// startsWithin runs a job of an all-reduce twice, since the first one may copy the program, and
// wants the second one within a time on a machine of two cores that does nothing else.
func startsWithin(t *testing.T, most time.Duration, ranks int, start func() *proctest.Program) {
	t.Helper()
	for run := range 2 {
		began := time.Now()
		job := start()
		err := job.Ends(t, 2*long)
		took := time.Since(began)
		require.That(t, err == nil, "%v:\n%s", err, job.Output())
		all := strings.Count(job.Output(), fmt.Sprintf("of %d: my vector", ranks))
		require.Check(t, all == ranks, "%d of %d ranks have added:\n%s", all, ranks, job.Output())
		t.Logf("run %d of %d ranks took %v on %d cores, load %s", run, ranks, took,
			runtime.NumCPU(), require.Value(os.ReadFile("/proc/loadavg"))(t))
		if quiet := atStart(t) < long; run == 1 && quiet && took > most {
			t.Errorf("%d ranks took %v from the command to the end, want %v", ranks, took, most)
		}
	}
}

func TestManyRanksOfAMachineStartInTime(t *testing.T) {
	if !full() {
		t.Skip("set EURYALE_FULL=1")
	}
	program := built(t, "examples/allreduce")
	startsWithin(t, 8*time.Second, 200, func() *proctest.Program {
		return proctest.Launch(t, command(t, "run", "-n", "200", program))
	})
}

// TestManyMachinesStartInTime: 16 with four ranks each, by ssh.
func TestManyMachinesStartInTime(t *testing.T) {
	s := newSite(t, 16, proctest.Wire{}, nil)
	program := built(t, "examples/allreduce")
	hosts := strings.ReplaceAll(s.list(), ":2", ":4")
	startsWithin(t, 5*time.Second, 64, func() *proctest.Program {
		return s.start(t, "", "authorized", "run", "-H", hosts, program)
	})
}
