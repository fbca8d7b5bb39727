package gpu

import "testing"

func TestGridsLeaveRoomForOtherGroups(t *testing.T) {
	for _, test := range []struct {
		asked int
		rooms []int
		want  int
	}{
		{0, []int{132, 132}, 128},
		{0, []int{132, 108, 114}, 104}, // the least of all ranks: grids are the same
		{8, []int{132, 132}, 8},
		{120, []int{108, 108}, 104},
		{0, []int{0, 0}, 0}, // nobody knows
		{8, []int{0, 0}, 8},
		{0, []int{0, 132}, 128},
		{0, []int{3, 132}, 1},
	} {
		p := plan{settings: settings{Blocks: test.asked}}
		for _, n := range test.rooms {
			p.ranks = append(p.ranks, rankInfo{Room: n})
		}
		if got := p.grid(); got != test.want {
			t.Errorf("%d blocks asked for, devices of %v: %d, want %d", test.asked, test.rooms, got,
				test.want)
		}
	}
}
