package group

import (
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// The ring of a Memory loses what is far behind, and never compares what may be lost.
func TestRingComparesNothingThatMayBeLost(t *testing.T) {
	share := require.Value(shm.New("/dev/shm", MemoryBytes(2)))(t)
	defer share.Unmap()
	b := []*Memory{NewMemory(share, 0, 2), NewMemory(share, 1, 2)}
	post := func(r int, seq uint64, count int64) {
		b[r].Post(&backend.Header{Seq: seq, Count: count}, true)
	}
	post(0, 1, 1)
	post(1, 1, 1)
	post(0, 2, 2)
	post(1, 2, 3)
	if b[0].differs(1) != nil || b[0].differs(2) == nil {
		t.Errorf("call 1 is %v, call 2 is %v", b[0].differs(1), b[0].differs(2))
	}
	const last = ringSlots - 1 // before what is cleared
	for seq := uint64(3); seq <= last; seq++ {
		post(1, seq, 4)
	}
	require.Check(t, b[0].differs(1) == nil && b[0].differs(2) == nil,
		"a header that may be lost was compared")
	_, lost := b[0].header(1, last-ringSlots+2*ahead+1)
	require.Check(t, !lost, "a header is lost before it may be cleared")
	for seq := uint64(last + 1); seq <= 2+ringSlots; seq++ {
		post(1, seq, 4)
	}
	require.Check(t, b[0].differs(2) == nil, "a header that is lost was compared")
	none := &backend.Header{Seq: 3 + ringSlots, Count: 5}
	b[1].Post(none, false)
	if h, lost := b[0].header(1, none.Seq); lost || h != [backend.HeaderSize]byte{} {
		t.Errorf("a call that is not compared has the header %v", h)
	}
	n, d := b[0].Compare(2 + ringSlots)
	require.Check(t, n == 2 && d == nil, "compared up to %d, %v: rank 0 has posted 2", n, d)
}
