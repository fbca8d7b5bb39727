package cuda

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// FewRows are how many rows the kernels of [Kernels.FewRows] have at most.
const FewRows = 16

// What fewrows.cu has: threads of a block, columns of C in a tile at most, and elements of a chunk.
const (
	fewRowsThreads = 128
	fewRowsColumns = 64
	fewRowsChunk   = 8
	fewRowsDepth   = 32
)

// fewRowsBlocks is how many blocks run at a time: four on each multiprocessor of an H200.
const fewRowsBlocks = 4 * 132

// FewRowsWorkspace is how many bytes of memory FewRows takes for sums of parts: zeros, at first.
const FewRowsWorkspace = 4*fewRowsBlocks + 4*fewRowsBlocks*(128+2)*FewRows

// FitsFewRows reports whether [Kernels.FewRows] computes a product: of one transposed matrix of
// bf16, that is read in vectors, by up to [FewRows] rows. Matrices that are not transposed gain
// nothing over cuBLAS (bench/results/2026-11/2026-11-30-decode.md).
func FitsFewRows(p *kernels.Product) bool {
	a, b := p.A, p.B
	return p.M > 0 && p.M <= FewRows && p.N > 0 && p.K > 0 && max(p.Batch, 1) == 1 &&
		a.Buffer.DType() == backend.BF16 && (!a.Transposed || p.M == 1 && a.Pitch == 1) &&
		(p.K|b.Pitch)%fewRowsChunk == 0 && (p.M == 1 || a.Pitch%fewRowsChunk == 0) &&
		b.Transposed && a.Buffer.Addr()%vector == 0 &&
		b.Buffer.Addr()%vector == 0
}

// Up to these many elements of the matrix, tiles of 16 columns win; and up to the fewer
// ones half of the blocks, which begin before the kernels before them have ended
// (bench/results/2026-11/2026-11-30-decode.md).
const (
	fewRowsNarrow = 32 << 20
	fewRowsSmall  = 4 << 20
)

// PrefersFewRows reports whether FewRows is faster than cuBLAS for a product that fits, between
// other kernels: for matrices that are not large, and for rows of C that are not aligned.
func PrefersFewRows(p *kernels.Product) bool {
	return p.N%fewRowsChunk != 0 ||
		p.M <= FewRows/2 && p.N*p.K <= fewRowsNarrow
}

// FewRows computes a product that fits, at the speed at which its matrix comes from memory. The
// workspace is for calls in one order.
//
// Errors: those of [kernels.Check].
func (k Kernels) FewRows(p kernels.Product, workspace backend.Buffer) error {
	columns, blocks, early := fewRowsColumns, fewRowsBlocks, uint64(1)
	if p.N*p.K <= fewRowsNarrow {
		columns = 16
	}
	if p.N*p.K <= fewRowsSmall {
		blocks, early = fewRowsBlocks/2, 3
	}
	return k.FewRowsAs(p, workspace, columns, blocks, early)
}

// FewRowsAs is FewRows in tiles of some columns, divided among blocks of which so many run at a
// time. Early tells the kernel to let the next one start (1) and to ask for its part of the matrix
// before the kernels before it have ended (2).
func (k Kernels) FewRowsAs(p kernels.Product, workspace backend.Buffer, columns, blocks int,
	early uint64) error {
	if err := check.Multiply(p); err != nil || p.Empty() {
		return err
	}
	tiles, steps := over(p.N, columns), over(p.K, fewRowsDepth*fewRowsColumns/columns)
	parts := max(min(blocks/tiles, over(steps, fewRowsThreads/32)), 1)
	c := Launch{Entry: Entry{Verb: "fewrows", Op: fmt.Sprint(columns),
		Type: p.C.Buffer.DType().String()},
		Grid: Size{uint32(tiles), uint32(parts)}, Block: Size{fewRowsThreads, 1}}
	if p.M > FewRows/2 {
		c.Entry.Verb = "fewrowsmore"
	}
	c.pass(word(p.C.Buffer), word(p.A.Buffer), word(p.B.Buffer), word(workspace)+4*fewRowsBlocks,
		word(workspace), uint64(p.M), uint64(p.N), uint64(p.K), uint64(p.A.Pitch),
		uint64(p.B.Pitch), uint64(p.C.Pitch), math.Float64bits(p.Alpha), math.Float64bits(p.Beta),
		early)
	return k.launcher.Launch(c)
}
