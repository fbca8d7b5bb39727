package shm

import (
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestDiscardedPagesAreZeroForEveryone(t *testing.T) {
	a := require.Value(New("/dev/shm", 8192))(t)
	defer a.Unmap()
	offer := require.Value(a.Offer())(t)
	b := require.Value(offer.Open(8192))(t)
	defer b.Unmap()
	b.Mem[0], b.Mem[4096] = 1, 2
	require.NoError(t, Discard(a.Mem[:4096]))
	require.Check(t, b.Mem[0] == 0 && b.Mem[4096] == 2, "got %d and %d, want 0 and 2", b.Mem[0],
		b.Mem[4096])
}
