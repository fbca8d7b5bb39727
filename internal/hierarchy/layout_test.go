package hierarchy

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestGridsNumberRanksInBothOrders(t *testing.T) {
	for order, rank := range map[numbering]func(m, d int) int{
		machineMajor: func(m, d int) int { return m*3 + d },
		machineMinor: func(m, d int) int { return d*2 + m },
	} {
		l := gridOf(2, 3, order)
		for m := range 2 {
			for d := range 3 {
				r := l.Rank(m, d)
				if gotM, gotD := l.Place(r); r != rank(m, d) || gotM != m || gotD != d {
					t.Errorf("order %d: rank %d is at (%d, %d) and (%d, %d) is rank %d", order, r,
						gotM, gotD, m, d, rank(m, d))
				}
			}
		}
	}
}

func TestTopologiesAreParsed(t *testing.T) {
	for text, want := range map[string]Layout{
		"2x2": Grid(2, 2), " 2x2:major ": Grid(2, 2),
		"2x2:minor": gridOf(2, 2, machineMinor),
		"1x4":       Grid(1, 4), "4x1": Grid(4, 1),
		"0,1,1,0": layoutOf([][]int{{0, 3}, {1, 2}}), "7, 7, 7, 2": layoutOf(
			[][]int{{0, 1, 2}, {3}}),
	} {
		l, err := Parse(text, 4)
		require.Check(t, err == nil && l.equal(want), "%q is %v, want %v: %v", text, l, want, err)
		again, err := Parse(l.String(), 4)
		require.Check(t, err == nil && again.equal(l), "%q is printed as %q: %v", text, l, err)
	}
}

func TestWrongTopologiesSayWhatToDo(t *testing.T) {
	for text, say := range map[string]string{
		"":        "write machines x devices",
		"2":       "write machines x devices",
		"axb":     "write machines x devices",
		"0x4":     "write machines x devices",
		"-2x-2":   "write machines x devices",
		"2x3":     "are 6 ranks, but there are 4",
		"2x2:odd": `"odd" is no order of the ranks: write :major`,
		"0,1":     "names the machines of 2 ranks, but there are 4",
		"0,1,x,0": `the machine of rank 2 is "x"`,
		"0,1,-1,": "the machine of rank 2",
		"9223372036854775807x9223372036854775807": "but there are 4",
	} {
		_, err := Parse(text, 4)
		require.Fails(t, text, err, say, fmt.Sprintf("%q", text))
	}
}

func TestMachinesAreDiscovered(t *testing.T) {
	for _, test := range []struct {
		name string
		ids  []Identity
		want [][]int
	}{
		{"one machine", []Identity{{"0", ""}, {"0", ""}}, [][]int{{0, 1}}},
		{"two machines, interleaved", []Identity{{"0", ""}, {"1", ""}, {"0", ""}, {"1", ""}},
			[][]int{{0, 2}, {1, 3}}},
		{"places follow the bus", []Identity{{"0", "0000:81"}, {"0", "0000:41"}, {"1", "0000:41"},
			{"1", "0000:81"}}, [][]int{{1, 0}, {2, 3}}},
		{"machines differ", []Identity{{"0", ""}, {"1", ""}, {"0", ""}}, [][]int{{0, 2}, {1}}},
	} {
		if l := Discover(test.ids); !l.equal(layoutOf(test.want)) {
			t.Errorf("%s: %v, want %v", test.name, l.machines, test.want)
		}
	}
}

func TestPartsKeepTheirMachines(t *testing.T) {
	l := shuffled(3, 2)
	for _, members := range [][]int{{0, 1, 2, 3, 4, 5}, {5, 3, 1, 0}, {2}, {4, 0}} {
		sub := l.of(members)
		for i, a := range members {
			for j, b := range members {
				ma, da := l.Place(a)
				mb, db := l.Place(b)
				si, di := sub.Place(i)
				sj, dj := sub.Place(j)
				if (ma == mb) != (si == sj) || ma == mb && (da < db) != (di < dj) {
					t.Errorf("part %v: members %d and %d are at (%d, %d) and (%d, %d)", members, a,
						b, si, di, sj, dj)
				}
			}
		}
	}
}

func TestRunsCoverEveryRankOnce(t *testing.T) {
	for _, l := range []Layout{Grid(3, 2), gridOf(3, 2, machineMinor), shuffled(3, 2),
		shuffled(2, 4), Grid(1, 1)} {
		var ranks []int
		for _, r := range l.runs {
			require.Equal(t, fmt.Sprintf("%v: a run begins at row", l), r.row, len(ranks))
			for k := range r.rows {
				ranks = append(ranks, r.first+k*r.stride)
			}
		}
		var want []int
		for d := range l.Devices() {
			for m := range l.Machines() {
				want = append(want, l.Rank(m, d))
			}
		}
		require.Slices(t, fmt.Sprintf("%v: rows are of ranks", l), ranks, want)
	}
	n := len(Grid(4, 8).runs)
	require.Check(t, n == 8, "%d runs in a grid of 8 devices", n)
}
