package shm

import (
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestDiscardedPagesAreZeroForEveryone(t *testing.T) {
	a, err := New("/dev/shm", 8192)
	require.NoError(t, err)
	defer a.Unmap()
	offer, err := a.Offer()
	require.NoError(t, err)
	b, err := offer.Open(8192)
	require.NoError(t, err)
	defer b.Unmap()
	b.Mem[0], b.Mem[4096] = 1, 2
	require.NoError(t, Discard(a.Mem[:4096]))
	require.Check(t, b.Mem[0] == 0 && b.Mem[4096] == 2, "got %d and %d, want 0 and 2", b.Mem[0],
		b.Mem[4096])
}
