package repolint_test

import (
	"crypto/sha256"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestTwoFoldersBuildTheSamePrograms: with the flags of docs/install.md, programs do not depend on
// where they are built, nor on git.
func TestTwoFoldersBuildTheSamePrograms(t *testing.T) {
	full(t)
	atRoot(t)
	other := filepath.Join(t.TempDir(), "of another name")
	copySources(t, other)
	for _, pkg := range []string{"./cmd/euryale", "./examples/digits"} {
		here, there := buildIn(t, ".", pkg), buildIn(t, other, pkg)
		require.Check(t, sha256.Sum256(here) == sha256.Sum256(there),
			"%s: %d bytes here differ from %d bytes there", pkg, len(here), len(there))
	}
}

// TestDigitsStaysSmall: programs of other systems are copied to them. More than half of digits is
// Gorgonia, with what that imports.
func TestDigitsStaysSmall(t *testing.T) {
	full(t)
	atRoot(t)
	const most = 26_000_000
	for _, system := range []string{"windows/amd64", "darwin/amd64", "darwin/arm64"} {
		goos, goarch, _ := strings.Cut(system, "/")
		program := buildIn(t, ".", "./examples/digits", "GOOS="+goos, "GOARCH="+goarch)
		t.Logf("%s: %d bytes", system, len(program))
		if len(program) > most {
			t.Errorf("%s: digits has %d bytes, more than %d: go tool nm -size -sort size, of one "+
				"that is not stripped, says what brings them", system, len(program), most)
		}
	}
}

// full skips a test that builds for minutes, except in full runs.
func full(t *testing.T) {
	t.Helper()
	if os.Getenv("EURYALE_FULL") != "1" {
		t.Skip("EURYALE_FULL=1 builds programs")
	}
}

// buildIn builds a package in a checkout as docs/install.md says, and returns the program.
func buildIn(t *testing.T, checkout, pkg string, more ...string) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "program")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", out,
		pkg)
	cmd.Dir = checkout
	cmd.Env = append(append(cmd.Environ(), "CGO_ENABLED=0", "GOFLAGS="), more...)
	text, err := cmd.CombinedOutput()
	require.That(t, err == nil, "build %s: %v\n%s", pkg, err, text)
	return require.Value(os.ReadFile(out))(t)
}

// copySources copies what a source archive has.
func copySources(t *testing.T, to string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		name := e.Name()
		switch {
		case err != nil:
			return err
		case e.IsDir() && path != "." && (name == "bin" || name == "out" || name[0] == '.'):
			return fs.SkipDir
		case e.IsDir():
			return os.MkdirAll(filepath.Join(to, path), 0o755)
		case !e.Type().IsRegular() || name == ".git":
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, path), text, 0o644)
	}))
}
