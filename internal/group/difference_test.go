package group_test

import (
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// compared compares the digests of ranks whose headers are not looked at.
func compared(digests []uint64) (peer int, sides [2]int) {
	d := group.Differ(digests, func(int) *[backend.HeaderSize]byte {
		return new([backend.HeaderSize]byte)
	})
	if d == nil {
		return -1, [2]int{-1, -1}
	}
	return d.Peer, d.Sides
}

func TestTheMinorityIsToBlame(t *testing.T) {
	const A, B, C, un = 1, 3, 5, group.Unseen
	for _, c := range []struct {
		digests []uint64
		peer    int
		sides   [2]int
	}{
		{[]uint64{A, A, A}, -1, [2]int{-1, -1}},
		{[]uint64{A, un, A}, -1, [2]int{-1, -1}},
		{[]uint64{un, un, un}, -1, [2]int{-1, -1}},
		{[]uint64{B, A, A}, 0, [2]int{1, 0}},
		{[]uint64{A, B, A}, 1, [2]int{0, 1}},
		{[]uint64{A, B, B, A, A}, 1, [2]int{0, 1}},
		{[]uint64{B, A, C, A}, 0, [2]int{1, 0}},
		{[]uint64{A, B}, -1, [2]int{0, 1}},
		{[]uint64{A, A, B, B}, -1, [2]int{0, 2}},
		{[]uint64{C, A, B}, -1, [2]int{0, 1}},
		{[]uint64{C, A, A, B, B}, -1, [2]int{1, 0}},
		{[]uint64{un, A, B, A, A}, 2, [2]int{1, 2}},
		{[]uint64{A, B, un}, -1, [2]int{0, 1}},
		{[]uint64{un, B, A, A}, -1, [2]int{2, 1}},
	} {
		peer, sides := compared(c.digests)
		require.Check(t, peer == c.peer && sides == c.sides, "%v: blames %d of %v, want %d of %v",
			c.digests, peer, sides, c.peer, c.sides)
	}
}

// TestWhoHasSeenLessBlamesNobodyElse draws calls of 3 to 8 ranks, the order of the ranks, and which
// calls a rank has seen.
func TestWhoHasSeenLessBlamesNobodyElse(t *testing.T) {
	for seed := range uint64(20000) {
		draw := rand.New(rand.NewPCG(seed, 58))
		size := 3 + draw.IntN(6)
		digests := make([]uint64, size)
		count := map[uint64]int{}
		for r := range digests {
			digests[r] = 1 + 2*uint64(max(0, draw.IntN(8)-5))
			count[digests[r]]++
		}
		most, next := uint64(0), 0
		for d, n := range count {
			if n > count[most] {
				most = d
			}
		}
		for d, n := range count {
			if d != most {
				next = max(next, n)
			}
		}
		peer, sides := compared(digests)
		innocent := func(r int) bool { return digests[r] == most }
		if known := count[most] > next && len(count) > 1; known != (peer >= 0) ||
			known && (innocent(peer) || !innocent(sides[0])) {
			t.Fatalf("seed %d: %v: blames %d", seed, digests, peer)
		}
		for r := range digests {
			require.That(t, r >= peer || innocent(r), "seed %d: %v: blames %d, and %d is before it",
				seed, digests, peer, r)
			if draw.IntN(3) == 0 {
				digests[r] = group.Unseen
			}
		}
		if less, _ := compared(digests); less >= 0 && (peer < 0 || digests[less] == most) {
			t.Fatalf("seed %d: who has seen %v alone blames %d, all blame %d", seed, digests, less,
				peer)
		}
	}
}
