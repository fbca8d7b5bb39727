//go:build !gpu

package autograd

import (
	"errors"
	"testing"
)

// gpuKinds lists none: this build has no GPUs.
func gpuKinds() []kind { return nil }

func connectGPUs(t testing.TB, _ int) connect {
	t.Helper()
	t.Fatal("this build has no GPUs")
	return nil
}

func connectOwnGPU(int) (connect, error) { return nil, errors.New("this build has no GPUs") }

func skipOrFail(t testing.TB, why string) {
	t.Helper()
	t.Skip(why)
}
