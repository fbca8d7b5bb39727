package cuda

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func testFewRows(t *testing.T, m machine) {
	b := newBench(t, m, 16)
	for _, columns := range []int{64, 16} {
		for _, out := range []backend.DType{backend.F32, backend.BF16} {
			for i, shape := range [][3]int{{1, 8, 8}, {1, 64, 32}, {2, 72, 1000}, {8, 200, 40},
				{9, 136, 264}, {16, 64, 1288}, {5, 16, 4096}} {
				for _, parts := range []int{1, 3} {
					b.reset(uint64(i))
					shape[1] -= i // columns lie in rows: there may be any number
					b.fewRows(columns, parts, out, shape, i%3*8, float64(i%2))
				}
			}
		}
	}
}

// fewRows multiplies in tiles of so many columns. Sums of parts are not compared: they lie behind
// what is.
func (b *bench) fewRows(columns, parts int, out backend.DType, shape [3]int, more int,
	beta float64) {
	b.t.Helper()
	p := kernels.Product{M: shape[0], N: shape[1], K: shape[2], Alpha: 0.5, Beta: beta}
	q := p
	var c operand
	p.A, q.A, _ = b.matrix(backend.BF16, 1, p.M, p.K, more, false)
	p.B, q.B, _ = b.matrix(backend.BF16, 1, p.K, p.N, more, true)
	p.C, q.C, c = b.matrix(out, 1, p.M, p.N, more, false)
	require.That(b.t, FitsFewRows(&q), "%v does not fit", shape)
	workspace := b.workspace()
	name := fmt.Sprintf("few rows of %v to %v, %d columns in %d parts, pitch + %d, beta %v", shape,
		out, columns, parts, more, beta)
	b.run(name, c, func() error {
		return b.device.FewRowsAs(q, workspace, columns, parts*over(p.N, columns), 3)
	}, func() error { return b.host.Multiply(p) })
}

// workspace is for kernels of few rows and few queries, at the end of the arena. The first call
// that finds tickets that another one has left is wrong.
func (b *bench) workspace() backend.Buffer {
	addr, n := b.m.Arena()
	workspace := backend.OnDevice(backend.U8, addr+uintptr(n-FewRowsWorkspace), FewRowsWorkspace)
	if !b.zeroed {
		require.NoError(b.t, b.device.Zero(workspace.Slice(0, 4*fewRowsBlocks)))
	}
	b.zeroed = true
	return workspace
}
