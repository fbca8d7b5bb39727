package files

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestReplaceTouchesNothingElse: a file is replaced as a whole or not at all, a link to it stays
// one, and what is no file is refused.
func TestReplaceTouchesNothingElse(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	require.NoError(t, errors.Join(ReplaceWith(file, []byte("old")), os.Symlink("file", link),
		os.Chmod(file, 0o600), ReplaceWith(link, []byte("new"))))
	info, err := os.Lstat(link)
	require.Check(t, err == nil && info.Mode()&os.ModeSymlink != 0, "the link is %v, %v", info, err)
	full := errors.New("the disk is full")
	if err := Replace(file, func(w io.Writer) error {
		_, err := io.WriteString(w, "half")
		return errors.Join(err, full)
	}); !errors.Is(err, full) {
		t.Errorf("the error is %v", err)
	}
	require.Fails(t, "a directory", ReplaceWith(dir, nil), ErrNoFile, dir)
	text, err := os.ReadFile(file)
	require.Check(t, err == nil && string(text) == "new", "the file has %q, %v", text, err)
	require.Equal(t, "the directory", len(require.Got(os.ReadDir(dir))(t)), 2)
	t.Chdir(dir)
	require.NoError(t, ReplaceWith("file", []byte("here")))
}

func TestReadIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, []byte("12345"), 0o600))
	require.Equal(t, "Read", string(require.Got(Read(path, 5))(t)), "12345")
	require.Fails(t, "Read", require.Err(Read(path, 4)), "more than 4 bytes")
	require.Fails(t, "Read", require.Err(Read(path+".none", 4)), os.ErrNotExist)
}

// TestAPointerOfGitLFSIsCalledOne.
func TestAPointerOfGitLFSIsCalledOne(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for text, want := range map[string]bool{
		"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n": true,
		"version 1": false, "": false,
	} {
		require.NoError(t, ReplaceWith(path, []byte(text)))
		got, err := Read(path, 100)
		require.Check(t, want == (err != nil && strings.Contains(err.Error(), "git lfs pull")) &&
			(want || string(got) == text && err == nil), "%q is %q, %v", text, got, err)
	}
}

// TestEmptyValuesAreNullFalseOrHaveNoElements.
func TestEmptyValuesAreNullFalseOrHaveNoElements(t *testing.T) {
	for text, want := range map[string]bool{"null": true, "false": true, `""`: true, "[ ]": true,
		"{\n}": true, "true": false, "0": false, `" "`: false, "[0]": false, `{"a":0}`: false} {
		require.Check(t, Empty([]byte(text)) == want, "%s is empty: %v", text, !want)
	}
}
