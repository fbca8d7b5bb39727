//go:build !linux || portable

package shm

import (
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestMemoryIsOfferedWithinTheProcess(t *testing.T) {
	s := require.Value(New("", 8192))(t)
	offer := require.Value(s.Offer())(t)
	require.Fails(t, "memory of another process",
		require.Err(Offer("of another process").Open(8192)), ErrProcesses)
	s.Release()
	require.Fails(t, "memory that is not offered any more", require.Err(offer.Open(8192)),
		ErrProcesses)
	require.Fails(t, "more memory than the machine has", require.Err(New("", 1<<50)))
}
