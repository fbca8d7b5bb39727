//go:build linux

package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// executable makes an executable file.
func executable(t *testing.T, name string, text []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, text, 0o755))
	return path
}

func TestScriptWithoutAnInterpreterRunsInTheShell(t *testing.T) {
	for name, text := range map[string]string{
		"train":    "echo $RANK $1 ${0##*/}\n",
		"train.sh": "\n# a comment\necho $RANK $1 ${0##*/}",
	} {
		out := newOutput()
		program := executable(t, name, []byte(text))
		job := Job{Program: program, Args: []string{"-x"}, Ranks: 2, Stdout: out}
		require.Report(t, Run(t.Context(), job))
		want := "[0] 0 -x " + name + "\n[1] 1 -x " + name + "\n"
		require.Equal(t, "Join", strings.Join(sorted(out.String()), ""), want)
	}
}

func TestProgramsThatTheKernelCannotStartAreExplained(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       []string
	}{
		{"dos", "#!/bin/sh\r\necho hello\r\n", []string{"Windows line ends (CRLF)",
			`sed -i 's/\r$//'`}},
		{"dosenv", "#!/usr/bin/env sh\r\necho hello\r\n", []string{"Windows line ends (CRLF)"}},
		{"dosbare", "echo hello\r\n", []string{"Windows line ends (CRLF)"}},
		{"gone", "#! /no/such/python3 -u\n",
			[]string{"its first line asks for /no/such/python3", "does not exist"}},
		{"nobody", "#!\n", []string{"its first line, #!, names no program"}},
		{"train.py", "import sys\n", []string{"no #! line", "train.py"}},
		{"zeros", "\x00\x01\x02\x03", []string{"exec format error",
			"not a program for this machine"}},
	} {
		path := executable(t, c.name, []byte(c.text))
		err := Run(t.Context(), Job{Program: path, Ranks: 2})
		for _, want := range append(c.want, path) {
			require.Fails(t, fmt.Sprintf("%s: no", c.name), err, want)
		}
	}
}
