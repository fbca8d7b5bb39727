package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestShellsCompleteCommandsFlagsAndValues(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("digits", nil, 0o755))
	for line, want := range map[string]string{
		"euryale ru":                     "run",
		"euryale tok":                    "token",
		"euryale run --max":              "--max-restarts",
		"euryale run -n 4 --gr":          "--grace",
		"euryale run -n 4 ./di":          "./digits",
		"euryale bench --dtype b":        "bf16",
		"euryale bench --collective all": "allgather allreduce alltoall",
		"euryale bench --op m":           "max min",
		"euryale explain all":            "allgather allreduce alltoall",
		"euryale explain --backend ho":   "host",
		"euryale explain --link pc":      "pcie",
		"euryale help ex":                "explain",
		"euryale completion b":           "bash",
		"euryale fly":                    "",
	} {
		t.Setenv("COMP_LINE", line)
		_, out, stderr := commandLine("anything")
		got := strings.Fields(out)
		slices.Sort(got)
		require.Check(t, strings.Join(got, " ") == want && stderr == "", "%s: %q, %q, want %q",
			line, got, stderr, want)
	}
}

func TestCompletionPrintsWhatAShellReads(t *testing.T) {
	for shell, want := range map[string]string{
		"bash": " euryale\n", "zsh": "bashcompinit", "fish": "complete -f -c euryale",
	} {
		_, out, err := commandLine("completion", shell)
		require.Check(t, strings.Contains(out, want) && err == "", "%s: %q, %q", shell, out, err)
	}
	code, _, err := commandLine("completion", "csh")
	require.Check(t, code == exit.Usage && strings.Contains(err, "bash"), "csh: %d, %q", code, err)
}
