//go:build linux

package launch

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// A wrong command line is said once, as the program says it, not by each rank and again at the end.
// Lines that differ, of a crash, or of another exit status are all printed.
func TestAWrongCommandLineIsSaidOnce(t *testing.T) {
	refuses := "the program refuses its command line: exit status 2"
	for script, want := range map[string][2]string{
		`echo "2026/11/30 10:00:0$RANK p: --n=0: use 1" >&2; exit 2`: {
			"2026/11/30 10:00:0? p: --n=0: use 1", refuses},
		`printf 'no flag -n\nUsage:\n' >&2; exit 2`: {"Usage:|no flag -n", refuses},
		`echo why >&2; exit 1`: {"[0] why|[1] why",
			"rank ? failed first: exit status 1; its last lines:\n    why\n"},
		`echo out; echo why >&2; exit 2`: {"[0] why|[1] why",
			"rank ? failed first: exit status 2; its last lines:\n    why\n"},
		`echo "panic: why" >&2; exit 2`: {"[0] panic: why|[1] panic: why",
			"rank ? failed first: exit status 2; its last lines:\n    panic: why\n"},
	} {
		// each rank waits for the other one to have spoken, so that none is ended before
		dir := t.TempDir()
		end := strings.LastIndex(script, "exit ")
		job, _, errs := shell(2, script[:end]+`touch $1/$RANK; until [ -e $1/0 -a -e $1/1 ]; `+
			`do sleep 0.01; done; `+script[end:], "sh", dir)
		job.times.hold = long
		err := Run(t.Context(), job)
		any := strings.NewReplacer("10:00:00", "10:00:0?", "10:00:01", "10:00:0?",
			"rank 0 failed", "rank ? failed", "rank 1 failed", "rank ? failed")
		got := strings.Join(sorted(any.Replace(errs.String())), "")
		require.Equal(t, script, got, strings.ReplaceAll(want[0], "|", "\n")+"\n")
		var f *Failed
		require.Check(t, errors.As(err, &f) && strings.HasPrefix(any.Replace(err.Error()), want[1]),
			"%s: %v", script, err)
	}
}

// What is built is said, and a name that means two programs is an error that names both.
func TestANameMeansOneProgram(t *testing.T) {
	dir := writeFiles(t, map[string]string{"go.mod": goMod,
		"main.go": "package main\n\nfunc main() {}\n"})
	t.Chdir(filepath.Dir(dir))
	name := filepath.Base(dir)
	var said []string
	job := Job{Program: name, Ranks: 1, Notice: func(text string) { said = append(said, text) }}
	require.NoError(t, Run(t.Context(), job))
	require.That(t, len(said) > 0, "nothing was said")
	require.Equal(t, "said", said[0], "building the Go package in "+name)

	bin := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"), 0o755))
	t.Setenv("PATH", bin+string(os.PathListSeparator)+os.Getenv("PATH"))
	for _, part := range []string{"a directory here, and " + filepath.Join(bin, name) + " in PATH",
		"write ./" + name} {
		require.Fails(t, name, Run(t.Context(), job), part)
	}
	job.Program = "./" + name
	require.NoError(t, Run(t.Context(), job))
}
