//go:build !linux

package autograd

import "testing"

// mounted skips: file systems of a test's own are Linux's.
func mounted(t *testing.T, options string) string {
	t.Skipf("no tmpfs with %q", options)
	return ""
}
