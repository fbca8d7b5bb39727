package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestVerdictsNameTheTest(t *testing.T) {
	wrong := errors.New("exit status 1")
	for _, test := range []struct {
		out  string
		err  error
		want string
		ok   bool
	}{
		{"ok  \tp\t0.1s", nil, "NOT NOTICED", false},
		{"--- FAIL: TestA (0.1s)\n    --- FAIL: TestA/b (0.1s)\nFAIL", wrong, "noticed by TestA/b",
			true},
		{"x.go:3: undefined: y\nFAIL\tp [build failed]", wrong, "does not compile", false},
		{"panic: test timed out after 5m0s", wrong, "did not end", true},
		{"fatal error: all goroutines are asleep", wrong, "the end of the test program", true},
	} {
		got, ok := judge([]byte(test.out), test.err)
		require.Check(t, strings.Contains(got, test.want) && ok == test.ok, "%q: %q, %v", test.out,
			got, ok)
	}
}

// A mutation whose line is gone shows nothing: list another one like it.
func TestLinesOfMutationsAreThere(t *testing.T) {
	for _, m := range mutations {
		text, err := os.ReadFile(filepath.Join("..", "..", "..", m.file))
		if n := strings.Count(string(text), m.old); err != nil || n != 1 {
			t.Errorf("%s: %q is there %d times, want 1: %v", m.file, m.old, n, err)
		}
	}
}

func TestOverlayHoldsTheMutation(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "x.go")
	require.NoError(t, os.WriteFile(file, []byte("package x\n\nconst a = 1\n"), 0o600))
	list := require.Value(mutation{file: file, old: "a = 1", new: "a = 2"}.overlay(dir))(t)
	mutated, err := os.ReadFile(filepath.Join(dir, "mutated.go"))
	require.Check(t, err == nil && string(mutated) == "package x\n\nconst a = 2\n",
		"the file is %q, %v", mutated, err)
	if text, err := os.ReadFile(list); err != nil || !strings.Contains(string(text), `"Replace"`) {
		t.Errorf("the list is %q, %v", text, err)
	}
	require.Fails(t, "a line that is gone",
		require.Err((mutation{file: file, old: "b = 1"}).overlay(dir)), "GONE")
}
