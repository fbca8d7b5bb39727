package autograd

import (
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestAPartHasRanksOnTwoMachinesIfItCan: it cannot where most ranks are on one machine.
func TestAPartHasRanksOnTwoMachinesIfItCan(t *testing.T) {
	for _, nodes := range [][]int{{0, 1}, {0, 0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {1, 0, 0, 2, 1},
		{0, 0, 0, 1, 1}, {2, 0, 1, 2, 0, 1, 2}, {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2},
		{0, 0, 0, 1}, {0}} {
		on := map[fraction][]int{}
		for r, p := range partsOf(nodes) {
			require.Equal(t, "parts", p.Of, max(1, len(nodes)/2))
			on[p] = append(on[p], nodes[r])
		}
		most := 0
		for _, n := range nodes {
			of := len(slices.DeleteFunc(slices.Clone(nodes), func(m int) bool { return m != n }))
			most = max(most, of)
		}
		for p, machines := range on {
			all := len(machines)
			apart := len(slices.Compact(slices.Sorted(slices.Values(machines)))) > 1
			require.Check(t, (all > 1 || len(nodes) == 1) && all <= 3 &&
				(apart || most > len(nodes)/2), "%v: %v is on machines %v", nodes, p, machines)
		}
	}
}

// TestWhatNoRankHasIsLost: ranks may have parts of different generations.
func TestWhatNoRankHasIsLost(t *testing.T) {
	const n = 80 // chunks of 40 and 32 elements
	have := func(parts ...fraction) []fraction { return parts }
	for want, parts := range map[int][]fraction{
		n:     have(fraction{1, 2}, fraction{0, 2}),
		n + 1: have(fraction{}, fraction{0, 1}),
		64:    have(fraction{0, 3}, fraction{}, fraction{1, 3}),
		40:    have(fraction{0, 2}, fraction{0, 2}, fraction{2, 3}),
		0:     have(fraction{1, 2}, fraction{}),
		79:    have(fraction{0, 2}, fraction{2, 3}, fraction{1, 3}),
	} {
		all, err := sourcesOf(parts, n)
		at := 0
		for _, s := range all {
			has := parts[s.root].in(n)
			require.Check(t, s.from == at && has.from <= s.from && s.to <= has.to,
				"%v: a source has %v, at %d", parts, s, at)
			at = s.to
		}
		if want < n-1 {
			require.Fails(t, "sourcesOf", err, "is lost")
		} else {
			require.Check(t, err == nil && at == n, "%v: %v, up to %d", parts, err, at)
		}
	}
}

// TestALostPartIsNotSaved: a Save would write what no rank has.
func TestALostPartIsNotSaved(t *testing.T) {
	g := gorgonia.NewGraph()
	w := gorgonia.NewVector(g, tensor.Float32, gorgonia.WithShape(2), gorgonia.WithName("w"),
		gorgonia.WithInit(gorgonia.Zeroes()))
	d := require.Value(New(Solo(), gorgonia.Nodes{w}))(t)
	require.NoError(t, d.Save(t.TempDir(), &solver.SGD{}, nil))
	d.mirrors = &mirrors{lost: &lostPart{n: 2}}
	require.Fails(t, "Save", d.Save(t.TempDir(), &solver.SGD{}, nil), "is lost")
	require.NoError(t, d.Close())
}
