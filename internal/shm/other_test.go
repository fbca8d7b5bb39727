//go:build !linux || portable

package shm

import (
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestMemoryIsOfferedWithinTheProcess(t *testing.T) {
	s, err := New("", 8192)
	require.NoError(t, err)
	offer, err := s.Offer()
	require.NoError(t, err)
	require.Fails(t, "memory of another process",
		require.Err(Offer("of another process").Open(8192)), ErrProcesses)
	s.Release()
	require.Fails(t, "memory that is not offered any more", require.Err(offer.Open(8192)),
		ErrProcesses)
	require.Fails(t, "more memory than the machine has", require.Err(New("", 1<<50)))
}
