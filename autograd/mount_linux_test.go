package autograd

import (
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// mounted returns the mount point of a file system of the test's own, which takes root.
func mounted(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("euryale", dir, "tmpfs", 0, options); err != nil {
		t.Skipf("the test mounts a file system, which takes root: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, 0)) })
	return dir
}
