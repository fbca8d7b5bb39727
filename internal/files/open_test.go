//go:build unix

package files

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestOpenRefusesWhatIsNoRegularFile: at once, a pipe to which nobody writes, too.
func TestOpenRefusesWhatIsNoRegularFile(t *testing.T) {
	dir := t.TempDir()
	pipe, link := filepath.Join(dir, "pipe"), filepath.Join(dir, "link")
	require.NoError(t, errors.Join(syscall.Mkfifo(pipe, 0o600), os.Symlink(pipe, link)))
	for _, path := range []string{pipe, link, dir, "/dev/zero", "/dev/null"} {
		began := time.Now()
		require.Fails(t, "Open", require.Err(Open(path)), ErrNoFile, path)
		require.Fails(t, path, require.Err(Read(path, 1)), ErrNoFile)
		took := time.Since(began)
		require.Check(t, took <= 10*time.Second, "%s: after %v", path, took)
	}
}

// TestOpenRefusesALongFileOfHoles: its length is a claim. A short one is what it is.
func TestOpenRefusesALongFileOfHoles(t *testing.T) {
	for _, c := range []struct {
		text string
		long int64
		good bool
	}{{"text", 1 << 40, false}, {"", 1 << 40, false}, {"text", mostHoles + 1, false},
		{"text", mostHoles, true}} {
		path := filepath.Join(t.TempDir(), "file")
		err := errors.Join(os.WriteFile(path, []byte(c.text), 0o600), os.Truncate(path, c.long))
		if err != nil {
			t.Skip(err)
		}
		f, err := Open(path)
		f.Close()
		if c.good != (err == nil) || err != nil && !strings.Contains(err.Error(), "is not whole") {
			t.Errorf("%q and holes, %d bytes: %v", c.text, c.long, err)
		}
	}
}

// TestReplaceRefusesALinkToAPipe: such as /dev/stdout, whose pipe has no name to rename a file to.
func TestReplaceRefusesALinkToAPipe(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	link := filepath.Join(t.TempDir(), "stdout")
	if err := os.Symlink(fmt.Sprintf("/proc/self/fd/%d", w.Fd()), link); err != nil {
		t.Skip(err)
	}
	if _, err := os.Stat(link); err != nil {
		t.Skip(err)
	}
	put := func(w io.Writer) error { return nil }
	require.Fails(t, "Replace", Replace(link, put), ErrNoFile)
	require.Equal(t, "the link", require.Value(os.Lstat(link))(t).Mode().Type(), os.ModeSymlink)
}

// TestOpenInFollowsNoLinkOut of a directory, and no pipe makes it wait.
func TestOpenInFollowsNoLinkOut(t *testing.T) {
	dir := t.TempDir()
	secret, in := filepath.Join(dir, "secret"), filepath.Join(dir, "in")
	require.NoError(t, errors.Join(os.WriteFile(secret, []byte("text"), 0o600), os.Mkdir(in, 0o700),
		os.Symlink("../secret", filepath.Join(in, "link")), os.Symlink("..",
			filepath.Join(in, "up")), syscall.Mkfifo(filepath.Join(in,
			"pipe"), 0o600), os.WriteFile(filepath.Join(in, "file"), []byte("text"), 0o600)))
	root := require.Value(os.OpenRoot(in))(t)
	defer root.Close()
	for name, good := range map[string]bool{"file": true, "link": false, "up/secret": false,
		"../secret": false, "pipe": false} {
		f, err := OpenIn(root, name)
		if f.Close(); good != (err == nil) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestReplaceHereReplacesALink: whatever it leads to stays as it is.
func TestReplaceHereReplacesALink(t *testing.T) {
	dir := t.TempDir()
	victim, name := filepath.Join(dir, "victim"), filepath.Join(dir, "name")
	put := func(w io.Writer) error { _, err := io.WriteString(w, "new"); return err }
	require.NoError(t, errors.Join(os.WriteFile(victim, []byte("old"), 0o600),
		os.Symlink("victim", name), ReplaceHere(name, put)))
	old, err1 := os.ReadFile(victim)
	is, err2 := os.ReadFile(name)
	if info, err3 := os.Lstat(name); errors.Join(err1, err2, err3) != nil || string(old) != "old" ||
		string(is) != "new" || !info.Mode().IsRegular() {
		t.Errorf("%q, %q, %v", old, is, info.Mode())
	}
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, errors.Join(syscall.Mkfifo(pipe, 0o600)))
	require.Fails(t, "a pipe", ReplaceHere(pipe, put), ErrNoFile)
}
