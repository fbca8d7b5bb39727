//go:build !linux || portable

package shm

import (
	"errors"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestMemoryIsOfferedWithinTheProcess(t *testing.T) {
	s, err := New("", 8192)
	require.NoError(t, err)
	offer, err := s.Offer()
	require.NoError(t, err)
	if _, err := Offer("of another process").Open(8192); !errors.Is(err, ErrProcesses) {
		t.Errorf("memory of another process: %v", err)
	}
	s.Release()
	if _, err := offer.Open(8192); !errors.Is(err, ErrProcesses) {
		t.Errorf("memory that is not offered any more: %v", err)
	}
	if _, err := New("", 1<<50); err == nil {
		t.Error("more memory than the machine has")
	}
}
