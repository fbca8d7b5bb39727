package session

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestProcessesKeepTheirSeats(t *testing.T) {
	for _, c := range []struct{ had, nodes, want []int }{
		{[]int{0, 0, 0}, []int{0, 0, 0}, []int{1, 2, 3}},
		{[]int{2}, []int{0}, []int{2}},
		{[]int{2, 0}, []int{0, 0}, []int{2, 1}},
		{[]int{0, 3, 1, 0}, []int{0, 0, 0, 0}, []int{2, 3, 1, 4}},
		{[]int{2, 0, 0, 1, 0}, []int{0, 0, 1, 1, 1}, []int{2, 1, 2, 1, 3}},
		{[]int{2, 1, 2}, []int{0, 0, 0}, []int{2, 1, 3}}, // the launcher was wrong
		{[]int{1, 0, 3}, []int{0, 0, 0}, []int{1, 2, 3}},
	} {
		infos := make([]rankInfo, len(c.had))
		for r, seat := range c.had {
			infos[r].Seat = seat
		}
		require.Slices(t, fmt.Sprintf("%v on machines %v", c.had, c.nodes), seats(infos, c.nodes),
			c.want)
	}
}
