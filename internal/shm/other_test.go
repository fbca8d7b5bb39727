//go:build !linux || portable

package shm

import (
	"errors"
	"testing"
)

func TestMemoryIsOfferedWithinTheProcess(t *testing.T) {
	s, err := New("", 8192)
	if err != nil {
		t.Fatal(err)
	}
	offer, err := s.Offer()
	if err != nil {
		t.Fatal(err)
	}
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
