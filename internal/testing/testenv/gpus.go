//go:build !gpu

package testenv

import (
	"errors"
	"testing"
)

// gpuKinds lists none: this build has no GPUs.
func gpuKinds() []Kind { return nil }

var errNoGPUs = errors.New("this build has no GPUs")

func connectGPUs(t testing.TB, _ int) Connect {
	t.Helper()
	t.Fatal(errNoGPUs)
	return nil
}

// OwnGPU fails: this build has no GPUs.
func OwnGPU(int) (Connect, error) { return nil, errNoGPUs }

// Lacking skips a test.
func Lacking(t testing.TB, why string) {
	t.Helper()
	t.Skip(why)
}
