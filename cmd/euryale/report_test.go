//go:build unix

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestReportTellsWhatJobsHaveLeft: logs of one in which a rank fails, and traces of another.
func TestReportTellsWhatJobsHaveLeft(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "logs")
	self := require.Value(os.Executable())(t)
	failing := command(t, "run", "-n", "3", "--log-dir", dir, self, brokenRank, "exit 3")
	if out, err := failing.CombinedOutput(); failing.ProcessState.ExitCode() != 3 {
		t.Fatalf("%v\n%s", err, out)
	}
	well := command(t, "run", "-n", "3", self, brokenRank, "not at all")
	well.Env = append(well.Env, "EURYALE_TRACE="+filepath.Join(dir, "trace"))
	if out, err := well.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	merged := filepath.Join(dir, "all.json")
	code, out, errs := commandLine("report", "--trace", merged, dir)
	if page := filepath.Join(dir, "report.html"); code != 0 || errs != "" || out != page+"\n" {
		t.Fatalf("code %d: %q, %s", code, out, errs)
	}
	page := require.Value(os.ReadFile(filepath.Join(dir, "report.html")))(t)
	for _, want := range []string{"<b>3</b> ranks", ">rank 1 failed first: exit status 3",
		"out of data", ">started 3 ranks<", "</b> steps in the traces"} {
		require.Check(t, strings.Contains(string(page), want), "the page has no %q", want)
	}
	trace, err := os.ReadFile(merged)
	n := strings.Count(string(trace), `"name":"allreduce"`)
	require.Check(t, err == nil && n == 3*50, "the trace has %d all-reduces, want 150: %v", n, err)
}

func TestReportOfNothingSaysHowToMakeSome(t *testing.T) {
	for dir, want := range map[string]string{
		t.TempDir():                        "neither logs nor traces: run a job",
		filepath.Join(t.TempDir(), "none"): "no such file",
	} {
		code, _, errs := commandLine("report", dir)
		require.Check(t, code == 1 && strings.Contains(errs, want), "code %d: %s", code, errs)
	}
}

// TestReportReplacesALinkAndNotWhatItLeadsTo: others may have put it into their folder. A link that
// the user names is theirs.
func TestReportReplacesALinkAndNotWhatItLeadsTo(t *testing.T) {
	dir := t.TempDir()
	logs, victim, own := filepath.Join(dir, "logs"), filepath.Join(dir, "victim"),
		filepath.Join(dir, "own")
	page, log := filepath.Join(logs, "report.html"), filepath.Join(logs, "attempt_0", "rank_0.log")
	err := errors.Join(os.MkdirAll(filepath.Dir(log), 0o700), os.WriteFile(log, nil, 0o600),
		os.WriteFile(victim, []byte("old"), 0o600), os.Symlink("../victim", page),
		os.WriteFile(own, nil, 0o600), os.Symlink("own", own+".html"))
	require.NoError(t, err)
	for _, args := range [][]string{{"report", logs}, {"report", "-o", own + ".html", logs}} {
		code, _, errs := commandLine(args...)
		require.That(t, code == 0, "code %d, %s", code, errs)
	}
	text, err := os.ReadFile(victim)
	if info, wrong := os.Lstat(page); errors.Join(err, wrong) != nil || string(text) != "old" ||
		!info.Mode().IsRegular() {
		t.Errorf("the victim has %q, the page is %v: %v", text, info.Mode(), err)
	}
	if text, err := os.ReadFile(own); err != nil || len(text) == 0 {
		t.Errorf("the user's own file has %q, %v", text, err)
	}
}
