package proof

import (
	"math/rand/v2"
	"testing"
)

// TestNumbersAreThoseOfAMap: in the order in which keys come, also if many have one hash.
func TestNumbersAreThoseOfAMap(t *testing.T) {
	for _, bits := range []int{0, 4, 64} {
		r, table, want := rand.New(rand.NewPCG(1, uint64(bits))), newNumbers[int](1),
			map[int]int32{}
		for range 2000 {
			key := r.IntN(500)
			n, ok := want[key]
			if !ok {
				n = int32(len(want))
				want[key] = n
			}
			if got := table.of(&key, hash(0).and(uint64(key))<<(64-bits)); got != n {
				t.Fatalf("%d bits: key %d has the number %d, want %d", bits, key, got, n)
			}
		}
	}
}
