//go:build linux

package launch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// trap is a victim's file and the command that links logs/attempt_1/rank_0.log to it, as another
// user can in a directory that he may write.
func trap(t *testing.T) (logs, victim, script string) {
	t.Helper()
	dir := t.TempDir()
	logs, victim = filepath.Join(dir, "logs"), filepath.Join(dir, "victim")
	require.NoError(t, os.WriteFile(victim, []byte("secret"), 0o600))
	attempt := filepath.Join(logs, "attempt_1")
	return logs, victim, fmt.Sprintf("mkdir -p %[1]s; ln -sf %[2]s %[1]s/rank_0.log; "+
		"ln -sf %[2]s %[1]s/rank_1.log", attempt, victim)
}

func untouched(t *testing.T, victim string) {
	t.Helper()
	require.Equal(t, "the victim's file holds", string(require.Got(os.ReadFile(victim))(t)),
		"secret")
}

func TestLogsOfAnyAttemptAreRefusedBeforeAnyRankStarts(t *testing.T) {
	logs, victim, script := trap(t)
	job, _, _ := shell(1, script)
	require.NoError(t, Run(t.Context(), job))
	job, out, _ := shell(2, `echo started; exit 3`)
	job.LogDir, job.MaxRestarts = logs, 1
	err := Run(t.Context(), job)
	var f *Failed
	const want = "attempt_1, the logs of an earlier job"
	require.Check(t, err != nil && !errors.As(err, &f) && strings.Contains(err.Error(), want) &&
		out.String() == "", "%v; output %q", err, out)
	untouched(t, victim)
}

func TestLogsFollowNoLinkMadeBetweenAttempts(t *testing.T) {
	logs, victim, script := trap(t)
	job, _, _ := shell(2, script+`; exit 3`)
	job.LogDir, job.MaxRestarts = logs, 1
	require.Fails(t, "attempt 1 wrote its logs over what was there", Run(t.Context(), job),
		fs.ErrExist)
	untouched(t, victim)
}

func TestLogsDoNotLeaveTheirDirectory(t *testing.T) {
	logs, elsewhere := t.TempDir(), t.TempDir()
	require.NoError(t, os.Symlink(elsewhere, filepath.Join(logs, "attempt_0")))
	for _, m := range []*Machines{nil, {Count: 1, Rendezvous: "127.0.0.1:1", Token: "t"}} {
		job, _, _ := shell(1, `echo started`)
		job.LogDir, job.Machines = logs, m
		require.Fails(t, "no error", Run(t.Context(), job))
	}
	files, _ := os.ReadDir(elsewhere)
	require.Check(t, len(files) == 0, "%v", files)
}

func TestMachinesShareADirectoryForLogs(t *testing.T) {
	logs := filepath.Join(t.TempDir(), "logs")
	for n := range 2 {
		job, _, _ := shell(2, `echo rank $RANK`)
		job.LogDir, job.Machines = logs, &Machines{Count: 2, Number: n,
			Rendezvous: "127.0.0.1:1", Token: "0123456789abcdef"}
		require.NoError(t, Run(t.Context(), job))
		require.Fails(t, fmt.Sprintf("machine %d wrote over its earlier logs", n),
			Run(t.Context(), job), fs.ErrExist)
	}
	for r := range 4 {
		text, err := os.ReadFile(filepath.Join(logs, "attempt_0", fmt.Sprintf("rank_%d.log", r)))
		want := fmt.Sprintf("rank %d\n", r)
		require.Check(t, err == nil && string(text) == want, "rank %d: %q, %v", r, text, err)
	}
}

// TestLauncherLogsWhenAnAttemptBeganAndHowItEnded: a line with the time for each.
func TestLauncherLogsWhenAnAttemptBeganAndHowItEnded(t *testing.T) {
	began := time.Now().Add(-time.Millisecond)
	job, _, _ := shell(2, `if [ $RANK$TORCHELASTIC_RESTART_COUNT = 10 ]; then exit 3; fi`)
	job.LogDir, job.MaxRestarts = filepath.Join(t.TempDir(), "logs"), 1
	require.NoError(t, Run(t.Context(), job))
	for attempt, want := range []string{"rank 1 failed", "all ranks have ended"} {
		text, err := os.ReadFile(filepath.Join(job.LogDir, attemptDir(attempt), "launcher_0.log"))
		lines := strings.Split(string(text), "\n")
		require.That(t, err == nil && len(lines) >= 3, "attempt %d: %q, %v", attempt, text, err)
		for i, what := range []string{"started 2 ranks", want} {
			at, said, _ := strings.Cut(lines[i], " ")
			when, err := time.Parse(time.RFC3339Nano, at)
			require.Check(t, err == nil && !when.Before(began) && strings.HasPrefix(said, what),
				"attempt %d: line %d is %q (%v), want %q", attempt, i, lines[i], err, what)
			began = when
		}
	}
}
