package shm

import "testing"

func TestDiscardedPagesAreZeroForEveryone(t *testing.T) {
	a, err := New("/dev/shm", 8192)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Unmap()
	offer, err := a.Offer()
	if err != nil {
		t.Fatal(err)
	}
	b, err := offer.Open(8192)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Unmap()
	b.Mem[0], b.Mem[4096] = 1, 2
	if err := Discard(a.Mem[:4096]); err != nil {
		t.Fatal(err)
	}
	if b.Mem[0] != 0 || b.Mem[4096] != 2 {
		t.Errorf("got %d and %d, want 0 and 2", b.Mem[0], b.Mem[4096])
	}
}
