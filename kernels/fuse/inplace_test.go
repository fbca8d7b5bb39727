package fuse_test

import (
	"math/rand/v2"
	"os"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fusetest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// TestOutputsInPlaceAreTheSame: wherever InPlace lets outputs be the memory of inputs, a program
// computes what it computes with memory for each, to the bit, on the host and by its kernel.
func TestOutputsInPlaceAreTheSame(t *testing.T) {
	placed, n := 0, uint64(150)
	if os.Getenv("EURYALE_FULL") != "" {
		n = 10000
	}
	for seed := range n {
		c := fusetest.Random(rand.New(rand.NewPCG(seed, 31)), 300)
		placed += testPlacements(t, seed, c)
	}
	for seed, p := range []*fuse.Program{fusetest.LayerNormGrads(backend.F32, 5, 40),
		fusetest.LayerNormGrads(backend.F64, 3, 100), fusetest.FoldBeside(5, 40),
		fusetest.FoldBeside(3, 300), fusetest.UnreadFold(3, 200)} {
		placed += testPlacements(t, uint64(seed), fusetest.New(rand.New(rand.NewPCG(1, 32)), p))
	}
	require.Check(t, placed >= 100, "%d placements", placed)
}

// testPlacements returns in how many ways outputs were the memory of inputs.
func testPlacements(t *testing.T, seed uint64, c *fusetest.Case) int {
	t.Helper()
	vectors := seed%4 != 0
	k, err := fuse.PTX(c.Program, vectors, capability(seed/4))
	require.That(t, err == nil, "%v\n%v", err, c.Program)
	loop, err := fuse.Host(c.Program, nil)
	require.That(t, err == nil, "%v\n%v", err, c.Program)
	host, device := c.Placements(), c.Placements()
	for i := range host {
		require.NoError(t, loop.Run(host[i].Dst, host[i].Src, backend.Buffer{}))
		if err := c.Equal(host[0].Dst, host[i].Dst); err != nil {
			t.Fatalf("case %d on the host, placement %d: %v", seed, i, err)
		}
		launch(t, device[i], k, vectors)
		if err := c.Equal(device[0].Dst, device[i].Dst); err != nil {
			t.Fatalf("case %d by its kernel, placement %d: %v\n%s", seed, i, err, k.Text)
		}
	}
	return len(host) - 1
}
