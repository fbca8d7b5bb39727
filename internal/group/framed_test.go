package group_test

import (
	"bytes"
	"math"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestFramedNotesOfAnyLengthArrive: notes of other lengths than those of other ranks arrive whole,
// in pieces of any size.
func TestFramedNotesOfAnyLengthArrive(t *testing.T) {
	for _, most := range []int{group.NoteBytes, 2*group.NoteBytes + 1, math.MaxInt} {
		for _, n := range []int{0, 1, group.NoteBytes - 4, group.NoteBytes,
			10*group.NoteBytes + 3} {
			note := bytes.Repeat([]byte{1, 2, 3}, n)[:n]
			// The other rank says the same, framed alike.
			twice := func(frame []byte) ([][]byte, error) {
				require.Check(t, len(frame) <= most, "a piece of %d bytes, at most %d", len(frame),
					most)
				return [][]byte{frame, frame}, nil
			}
			notes, err := group.Framed(most, twice)(note)
			require.Check(t, err == nil && slices.EqualFunc(notes, [][]byte{note, note},
				bytes.Equal), "of %d bytes in pieces of %d arrive %v, %v", n, most, notes, err)
		}
	}
}
