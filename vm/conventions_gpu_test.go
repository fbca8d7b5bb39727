//go:build gpu

package vm_test

import (
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

// TestNumbersThatAreNotFiniteAreAsInPyTorchOnGPU is TestNumbersThatAreNotFiniteAreAsInPyTorch on a
// GPU.
func TestNumbersThatAreNotFiniteAreAsInPyTorchOnGPU(t *testing.T) {
	d := gpu(t)
	asInPyTorch(t, map[string]func(testing.TB) backend.Device{
		"gpu": func(testing.TB) backend.Device { return d }})
}

// TestIntegersPoisonOnGPU is TestIntegersThatTheGraphComputesPoisonWhatTheyWouldHaveChanged on a
// GPU, and TestFloatsThatAreNoLabelsAreErrors.
func TestIntegersPoisonOnGPU(t *testing.T) {
	d := gpu(t)
	on := map[string]func(testing.TB) backend.Device{
		"gpu": func(testing.TB) backend.Device { return d }}
	integersPoison(t, on)
	noLabels(t, on)
}

// TestNaNWinsReductionsOnGPU is TestNaNWinsReductions on a GPU.
func TestNaNWinsReductionsOnGPU(t *testing.T) {
	d := gpu(t)
	nanWins(t, map[string]func(testing.TB) backend.Device{"gpu": func(testing.TB) backend.Device {
		return d
	}})
}
