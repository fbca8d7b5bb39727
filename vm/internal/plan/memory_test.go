package plan

import (
	"slices"
	"testing"
)

// TestArenaHasNoGapsAroundWhatStays: a residual stays while what is larger comes and goes beside
// it. Large buffers at the lowest places would leave no place below it for one that lives beside
// two of them, as a norm between an MLP and an attention.
func TestArenaHasNoGapsAroundWhatStays(t *testing.T) {
	p := &Plan{Steps: make([]Step, 12)}
	for _, b := range [][3]int{{2, 0, 11}, {3, 1, 3}, {3, 3, 4}, {4, 5, 6}, {1, 6, 8}, {3, 8, 10},
		{3, 10, 11}} {
		p.Buffers = append(p.Buffers, Buffer{Bytes: 1024 * b[0], First: b[1], Last: b[2]})
	}
	if assignOffsets(p); p.ArenaBytes != 1024*8 {
		t.Errorf("the arena has %d bytes, of which %d are in use at a time: %+v", p.ArenaBytes,
			slices.Max(p.usage()), p.Buffers)
	}
}
