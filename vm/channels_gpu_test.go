//go:build gpu

package vm_test

import "testing"

// TestConvolutionsWithChannelsLastOnGPU is TestConvolutionsWithChannelsLast on a GPU, which rounds
// each operand to 11 bits in TF32.
func TestConvolutionsWithChannelsLastOnGPU(t *testing.T) {
	convolutionsWithChannelsLast(t, gpu(t), 4./(1<<11))
}
