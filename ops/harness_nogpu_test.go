//go:build !gpu

package ops

import "testing"

// gpuKinds lists none: this build has no GPUs.
func gpuKinds() []kind { return nil }

func connectGPUs(t testing.TB, _ int) connect {
	t.Helper()
	t.Fatal("this build has no GPUs")
	return nil
}
