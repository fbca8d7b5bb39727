package autograd

import (
	"syscall"
	"testing"
)

// mounted returns the mount point of a file system of the test's own, which takes root.
func mounted(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("euryale", dir, "tmpfs", 0, options); err != nil {
		t.Skipf("the test mounts a file system, which takes root: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}
