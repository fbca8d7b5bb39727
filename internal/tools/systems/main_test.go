package main

import (
	"os"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// A mistake in what one system alone compiles is named, with the system: of types, a function that
// is nowhere, and assembly.
func TestMistakesForOneSystemAreNamed(t *testing.T) {
	for _, test := range []struct{ file, text, name, want string }{
		{"p_windows.go", "package p\n\nvar x int = `1`\n", "windows/amd64", "p_windows.go:3:13"},
		{"p_windows_test.go", "package p\n\nvar x = y\n", "windows/amd64",
			"undefined: y"},
		{"p_arm64.go", "package p\n\nfunc f()\n", "darwin/arm64", "f has no body"},
		{"p_arm64.s", "TEXT ·f(SB), 4, $0-0\n\tRETT\n", "linux/arm64", "RETT"},
	} {
		t.Chdir(t.TempDir())
		for name, text := range map[string]string{
			"go.mod": "module p\n\ngo 1.26.0\n", "p.go": "package p\n", test.file: test.text} {
			require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
		}
		err := check([]string{"freebsd/amd64", test.name})
		require.Check(t, err != nil && !strings.Contains(err.Error(), "freebsd") &&
			strings.Contains(err.Error(), test.name+": ") && strings.Contains(err.Error(),
			test.want), "%s: %v, want %s", test.file, err, test.want)
	}
}
