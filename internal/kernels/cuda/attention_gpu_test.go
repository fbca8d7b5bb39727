//go:build gpu

package cuda

import "testing"

// TestAttentionUnemulatedOnGPU compares attention and its gradient with the host's, and two runs
// bit for bit.
func TestAttentionUnemulatedOnGPU(t *testing.T) { testAttention(t, openGPU(t, 128<<20)) }
