package gpu

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// cards returns devices without any connection.
func cards(n int) []wiring {
	all := make([]wiring, n)
	for i := range all {
		all[i].Bus = fmt.Sprintf("0000:%02X:00.0", i+1)
	}
	return all
}

// join adds NVLinks between two devices, both ways.
func join(all []wiring, i, j, links int) {
	for range links {
		all[i].Direct = append(all[i].Direct, all[j].Bus)
		all[j].Direct = append(all[j].Direct, all[i].Bus)
	}
}

func pairwise(n, links int) []wiring {
	all := cards(n)
	for i := range n {
		for j := range i {
			join(all, i, j, links)
		}
	}
	return all
}

func switched(links ...int) []wiring {
	all := cards(len(links))
	for i, n := range links {
		all[i].Switches = n
	}
	return all
}

func reachable(wires []wiring) []wiring {
	all := slices.Clone(wires)
	for i := range all {
		for j := range all {
			if i != j {
				all[i].Reach = append(all[i].Reach, all[j].Bus)
			}
		}
	}
	return all
}

// dgx1 is the machine of eight V100s as nvidia-smi topo -m shows it: a link or
// two to each of four.
func dgx1() []wiring {
	all := cards(8)
	for _, l := range [][3]int{
		{0, 1, 1}, {0, 2, 1}, {0, 3, 2}, {0, 4, 2}, {1, 2, 2}, {1, 3, 1}, {1, 5, 2}, {2, 3, 2},
		{2, 6, 1}, {3, 7, 1},
		{4, 5, 1}, {4, 6, 1}, {4, 7, 2}, {5, 6, 2}, {5, 7, 1}, {6, 7, 2},
	} {
		join(all, l[0], l[1], l[2])
	}
	return all
}

func ringOf(n int) []wiring {
	all := cards(n)
	for i := range n {
		join(all, i, (i+1)%n, 2)
	}
	return all
}

func islands() []wiring {
	all := cards(8)
	for i := range 8 {
		for j := range i {
			if i/4 == j/4 {
				join(all, i, j, 1)
			}
		}
	}
	return all
}

// crossed is a cube mesh with two of its relays led to one device.
func crossed() []wiring {
	all := islands()
	for _, l := range [][2]int{{0, 4}, {1, 4}, {2, 6}, {3, 7}} {
		join(all, l[0], l[1], 1)
	}
	return all
}

func TestMatricesHaveTheirClass(t *testing.T) {
	oneWay := pairwise(4, 1)
	oneWay[1].Direct = slices.DeleteFunc(oneWay[1].Direct, func(bus string) bool {
		return bus == oneWay[2].Bus
	})
	deadLink := pairwise(4, 2)
	deadLink[0].Direct = deadLink[0].Direct[1:]
	oneWayMesh := dgx1()
	oneWayMesh[5].Direct = nil
	type test struct {
		name string
		all  []wiring
		want Link
	}
	tests := []test{
		{"a ring of 8", ringOf(8), Unknown}, {"a ring of 3 is complete", ringOf(3), FullyConnected},
		{"a ring that also reaches by PCIe", reachable(ringOf(8)), PCIe},
		{"two islands", islands(), Unknown}, {"two islands with PCIe between", reachable(islands()),
			PCIe},
		{"DGX-1V", dgx1(), CubeMesh}, {"DGX-1V with PCIe", reachable(dgx1()), CubeMesh},
		{"seven of a DGX-1V", dgx1()[:7], Unknown}, {"a clique of a DGX-1V", dgx1()[:4],
			FullyConnected},
		{"two relays meet", crossed(), Unknown},
		{"a link that only one end reports", oneWay, Unknown}, {"that, with PCIe",
			reachable(oneWay), PCIe},
		{"a mesh with a silent device", oneWayMesh, Unknown},
		{"link 0 is dead, the next one works", deadLink, FullyConnected},
		{"no NVML, no peer access", cards(4), Unknown}, {"no NVML", reachable(cards(4)), PCIe},
		{"switches of different width", switched(18, 18, 17, 4), FullyConnected},
		{"one device has no link to a switch", switched(18, 18, 0, 18), Unknown},
		{"that, with PCIe", reachable(switched(18, 18, 0, 18)), PCIe},
	}
	for n := 2; n <= 8; n++ {
		tests = append(tests, test{fmt.Sprintf("%d pairwise", n), pairwise(n, 1), FullyConnected},
			test{fmt.Sprintf("%d at switches", n), switched(slices.Repeat([]int{18}, n)...),
				FullyConnected}, test{fmt.Sprintf("%d on PCIe", n), reachable(cards(n)), PCIe})
	}
	for _, test := range tests {
		got := classify(test.all).Link
		require.Equal(t, test.name, got, test.want)
	}
}

func TestLinksOfAGroupAreTheFewestOfAPair(t *testing.T) {
	uneven := pairwise(3, 4)
	join(uneven, 0, 2, 2)
	for name, test := range map[string]struct {
		all  []wiring
		want int
	}{
		"switches": {switched(18, 18, 17, 18), 17}, "direct": {pairwise(4, 3), 3},
		"uneven": {uneven, 4}, "a cube mesh": {dgx1(), 1},
		"PCIe": {reachable(switched(18, 18, 0, 18)), 0}, "none": {cards(2), 0},
	} {
		got := classify(test.all).NVLinks
		require.Check(t, got == test.want, "%s: %d links, want %d", name, got, test.want)
	}
}

// The mesh is found however ranks are numbered, and its colouring holds.
// CUDA writes places in one case, NVML perhaps in the other.
func TestPlacesAreTheSameInEitherCase(t *testing.T) {
	linked := cards(10) // the tenth is at 0A
	for j := range linked {
		for i := range j {
			join(linked, i, j, 1)
		}
	}
	for _, all := range [][]wiring{linked, reachable(cards(10))} {
		want := classify(all)
		for i := range all {
			for _, ends := range [][]string{all[i].Direct, all[i].Reach} {
				for j := range ends {
					ends[j] = strings.ToLower(ends[j])
				}
			}
		}
		if got := classify(all); got.Link != want.Link || want.Link == Unknown {
			t.Errorf("%v, want %v", got.Link, want.Link)
		}
	}
}

func TestCubeMeshIsColouredUnderEveryNumbering(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		machine := dgx1()
		all := make([]wiring, len(machine))
		for rank, place := range random.Perm(len(machine)) {
			all[rank] = machine[place]
			random.Shuffle(len(all[rank].Direct), func(i, j int) {
				d := all[rank].Direct
				d[i], d[j] = d[j], d[i]
			})
		}
		got := classify(all)
		require.That(t, got.Link == CubeMesh, "class %v", got.Link)
		checkColouring(t, all, got.Partners)
	}
}

func checkColouring(t *testing.T, all []wiring, partners [][4]int) {
	t.Helper()
	nvlinks, _ := matrices(all)
	for x, row := range partners {
		seen := map[int]bool{x: true}
		for colour, y := range row {
			require.That(t, partners[y][colour] == x && !seen[y] && nvlinks[x][y] != 0,
				"rank %d meets %d in column %d of %v", x, y, colour, partners)
			seen[y] = true
		}
		for _, y := range row[:3] {
			for _, z := range row[:3] {
				require.That(t, y == z || nvlinks[y][z] != 0,
					"rank %d: %d and %d of its clique have no link", x, y, z)
			}
			if nvlinks[y][row[3]] != 0 {
				t.Fatalf("rank %d: its relay %d is also that of %d", x, row[3], y)
			}
		}
	}
}

func TestLinkNamesAreRead(t *testing.T) {
	for l := Unknown; l <= FullyConnected; l++ {
		if got, err := ParseLink(l.String()); got != l || err != nil {
			t.Errorf("%v is read as %v, %v", l, got, err)
		}
	}
	_, err := ParseLink("string")
	require.Check(t, err != nil, "a wrong name is read")
}
