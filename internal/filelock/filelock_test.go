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
		f := require.Value(os.OpenFile(path, os.O_CREATE|os.O_RDWR|NoFollow, 0o600))(t)
		t.Cleanup(func() { f.Close() })
		return f
	}
	first, second := open(), open()
	require.NoError(t, TryLock(first))
	require.NoError(t, require.Err(first.WriteString("holder")))
	require.Fails(t, "a second lock", TryLock(second), ErrHeld)
	require.Equal(t, "others read", string(require.Value(os.ReadFile(path))(t)), "holder")
	require.NoError(t, first.Close())
	err := TryLock(second)
	require.Check(t, err == nil, "after the first holder has closed it: %v", err)
	require.Report(t, Remove(second, func() error { return os.Remove(path) }))
	require.Fails(t, "the removed file", require.Err(os.Lstat(path)), os.ErrNotExist)
}
