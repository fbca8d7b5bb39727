package filelock

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestOneOpenFileHasTheLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	open := func() *os.File {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|NoFollow, 0o600)
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	first, second := open(), open()
	require.NoError(t, TryLock(first))
	if _, err := first.WriteString("holder"); err != nil {
		t.Fatal(err)
	}
	require.Fails(t, "a second lock", TryLock(second), ErrHeld)
	if text, err := os.ReadFile(path); err != nil || string(text) != "holder" {
		t.Errorf("others read %q, %v, from a locked file", text, err)
	}
	require.NoError(t, first.Close())
	if err := TryLock(second); err != nil {
		t.Errorf("after the first holder has closed it: %v", err)
	}
	require.Report(t, Remove(second, func() error { return os.Remove(path) }))
	require.Fails(t, "the removed file", require.Err(os.Lstat(path)), os.ErrNotExist)
}
