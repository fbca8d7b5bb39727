//go:build gpu

package vm_test

import "testing"

// TestConvolutionsWithChannelsLastOnGPU is TestConvolutionsWithChannelsLast on a GPU.
func TestConvolutionsWithChannelsLastOnGPU(t *testing.T) { convolutionsWithChannelsLast(t, gpu(t)) }
