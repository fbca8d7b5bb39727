package cuda

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// Tiles of C that one block computes: see gemm.cu.
const (
	smallTile    = 64
	largeTile    = 128
	smallF64Tile = 32
	largeF64Tile = 64
)

// enoughTiles is how many large tiles keep a device busy: about one for each multiprocessor of an
// A100 or an H200.
const enoughTiles = 108

// Multiply computes a product: of 16-bit floats on tensor cores from compute capability 8.0 on, of
// others on the ordinary ones. cuBLAS is faster; this is for machines without it.
//
// Errors: those of [kernels.Check].
func (k Kernels) Multiply(p kernels.Product) error {
	if err := check.Multiply(p); err != nil || p.Empty() {
		return err
	}
	in, out := p.A.Buffer.DType(), p.C.Buffer.DType()
	side, small := largeTile, smallTile
	if in == backend.F64 {
		side, small = largeF64Tile, smallF64Tile
	}
	batch := max(p.Batch, 1)
	c := Launch{Entry: Entry{Verb: "gemm", Op: in.String(), Type: out.String()},
		Block: Size{threads, 1}}
	if over(p.M, side)*over(p.N, side)*batch < enoughTiles {
		side, c.Entry.Verb = small, "gemmsmall"
	}
	c.Grid = Size{uint32(over(p.M, side) * over(p.N, side)), uint32(min(batch, 1<<15))}
	c.pass(word(p.C.Buffer), word(p.A.Buffer), word(p.B.Buffer),
		uint64(p.M), uint64(p.N), uint64(p.K), uint64(batch), uint64(p.C.Pitch), uint64(p.C.Stride))
	aRow, aColumn := p.A.Steps()
	bRow, bColumn := p.B.Steps()
	c.pass(uint64(aRow), uint64(aColumn), uint64(p.A.Stride), uint64(bColumn), uint64(bRow),
		uint64(p.B.Stride),
		math.Float64bits(p.Alpha), math.Float64bits(p.Beta))
	return k.launcher.Launch(c)
}
