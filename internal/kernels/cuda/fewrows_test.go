package cuda

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// fewRowsLayouts are the columns in a tile of each kernel.
var fewRowsLayouts = map[string]int{"k64": 64, "k32": 32, "k16": 16, "n64": 64, "k64r": 64, "n64r": 64}

func testFewRows(t *testing.T, m machine) {
	b := newBench(t, m, 16)
	for layout, columns := range fewRowsLayouts {
		for _, out := range []backend.DType{backend.F32, backend.BF16} {
			for i, shape := range [][3]int{{1, 8, 8}, {1, 64, 32}, {2, 72, 1000}, {8, 200, 40},
				{9, 136, 264}, {16, 64, 1288}, {5, 16, 4096}} {
				for _, parts := range []int{1, 3} {
					b.reset(uint64(i))
					if layout[0] == 'k' {
						shape[1] -= i
					}
					b.fewRows(layout, columns, parts, out, shape, i%3*8, float64(i%2))
				}
			}
		}
	}
}

func (b *bench) fewRows(layout string, columns, parts int, out backend.DType, shape [3]int, more int,
	beta float64) {
	b.t.Helper()
	p := kernels.Product{M: shape[0], N: shape[1], K: shape[2], Alpha: 0.5, Beta: beta}
	q := p
	var c operand
	p.A, q.A, _ = b.matrix(backend.BF16, 1, p.M, p.K, more, false)
	p.B, q.B, _ = b.matrix(backend.BF16, 1, p.K, p.N, more, layout[0] == 'k')
	p.C, q.C, c = b.matrix(out, 1, p.M, p.N, more, false)
	// Sums of parts are not compared: they lie behind what is. Each call leaves the tickets as
	// they were.
	addr, n := b.m.Arena()
	room := backend.OnDevice(backend.U8, addr+uintptr(n-FewRowsRoom), FewRowsRoom)
	require.NoError(b.t, b.device.Zero(room.Slice(0, 4*fewRowsBlocks)))
	name := fmt.Sprintf("few rows of %v to %v, %s in %d parts, pitch + %d, beta %v", shape, out,
		layout, parts, more, beta)
	b.run(name, c, func() error { return b.device.FewRowsAs(q, room, layout, columns, parts, 0) },
		func() error { return b.host.Multiply(p) })
}
