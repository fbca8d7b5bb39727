package kernels

import (
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/workers"
)

// Multiply computes a product by tiles that stay in registers. It packs operands into caches where
// this pays (Goto and van de Geijn, ACM TOMS 34(3), 2008). Blocks of C are the parts that workers
// run. K is never divided among them, so the bits do not depend on their number; they do depend on
// the processor's vector instructions.
func (h Host) Multiply(p Product) error { return h.multiply(p, simd.Best()) }

func (h Host) multiply(p Product, l simd.Level) error {
	if err := (Check{}).Multiply(p); err != nil || p.Empty() {
		return err
	}
	switch in, out := p.A.Buffer.DType(), p.C.Buffer.DType(); {
	case in == backend.F64:
		multiply[float64, float64, float64](h.Workers, p, l)
	case in == backend.F32:
		multiply[float32, float32, float32](h.Workers, p, l)
	case in == backend.F16 && out == backend.F32:
		multiply[float32, backend.Float16, float32](h.Workers, p, l)
	case in == backend.F16:
		multiply[float32, backend.Float16, backend.Float16](h.Workers, p, l)
	case out == backend.F32:
		multiply[float32, backend.BFloat16, float32](h.Workers, p, l)
	default:
		multiply[float32, backend.BFloat16, backend.BFloat16](h.Workers, p, l)
	}
	return nil
}

// multiply computes a product of S into D with sums of T.
func multiply[T float, S, D backend.Element](pool *workers.Pool, p Product, l simd.Level) {
	m := multiplication[T, S, D]{
		Product: p, a: backend.View[S](p.A.Buffer), b: backend.View[S](p.B.Buffer),
		c:     backend.View[D](p.C.Buffer),
		level: l, pool: pool, blocks: blocksOf[T, S](&p, l),
	}
	dense := p.C.Pitch == p.N && (p.batch() == 1 || p.C.Stride == p.M*p.N)
	after := p.Epilogue != nil && !(dense && m.columnParts == 1 && p.Epilogue.Divides(m.parts, p.N))
	if after {
		m.Epilogue = nil
	}
	workers.Run(pool, m.parts, m)
	if after {
		p.Epilogue.All()
	}
}

// multiplication is a product whose blocks are the parts of a task.
type multiplication[T float, S, D backend.Element] struct {
	Product
	a, b  []S
	c     []D
	level simd.Level
	pool  *workers.Pool
	blocks
}

// blocks says how a product is divided, which depends only on the product and the vector
// instructions.
type blocks struct {
	together, rows, columns int // of a part: products, and what of C is computed at a time
	rowBlocks, columnParts  int // of one product
	parts                   int
	depth                   int  // steps of K that are packed at a time
	height, width           int  // of a strip of A and of a panel of B
	aInPlace, bInPlace      bool // an operand is read where it lies
	dots                    bool // so are both, as rows of A and columns of B
}

// What fits into the caches of a core: a block of B takes half of a second-level cache of 1 MiB,
// and a strip of A three quarters of a first-level cache of 32 KiB.
const (
	blockBytes = 512 << 10
	stripBytes = 24 << 10

	// conflictBytes divides the distance of rows that compete for few lines of a first-level cache,
	// whose 64 sets are found by the bits below 4096 of an address.
	conflictBytes = 2 << 10
)

// blocksOf chooses the blocks. Parts become smaller until there are enough for many cores, or until
// one has little to compute.
func blocksOf[T float, S backend.Element](p *Product, l simd.Level) blocks {
	size := sizeOf[T]()
	same := sizeOf[S]() == size // else it must be widened
	b := blocks{together: 1, height: simd.TileRows(l), width: simd.PanelWidth[T](l)}
	few := p.M <= simd.FewRows && (same || l > simd.Go)
	steps := 1
	if b.dots = few && p.B.Transposed && !p.A.Transposed && p.K >= b.width; b.dots {
		b.height, steps = max(p.M, 1), b.width // whole vectors: the rest is a loop in Go
	}
	b.depth = evenly(p.K, stripBytes/size/b.height, steps)
	b.rows = evenly(p.M, 480, b.height)
	b.columns = evenly(p.N, blockBytes/size/max(b.depth, 1), b.width)
	for b.count(p) < enoughParts && b.work(p) > 2*leastWork {
		if b.rows > b.columns && b.rows > 2*b.height {
			b.rows = evenly(p.M, b.rows/2, b.height)
		} else if b.columns > b.width {
			b.columns = evenly(p.N, b.columns/2, b.width)
		} else {
			break
		}
	}
	b.rowBlocks, b.columnParts = ceil(p.M, b.rows), ceil(p.N, b.columns)
	if b.rowBlocks*b.columnParts == 1 {
		b.together = evenly(p.batch(), max(leastWork/max(b.work(p), 1), 1), 1)
	}
	b.parts = ceil(p.batch(), b.together) * b.rowBlocks * b.columnParts
	b.aInPlace = b.dots || same && (p.M <= simd.FewRows ||
		readable(p.A, min(p.M, b.height), p.K, size))
	b.bInPlace = b.dots || !p.B.Transposed &&
		(few && (same || p.N >= b.width) || same && p.K*p.B.Pitch*size <= stripBytes)
	return b
}

// Below leastWork, in multiply-adds of vectors of 16, a part costs more to give to a worker than to
// compute; leastWork takes about 30 us. enoughParts keep many cores equally busy.
const (
	leastWork   = 100_000
	enoughParts = 16
)

// count returns how many parts a batch of one product has.
func (b *blocks) count(p *Product) int {
	return ceil(p.M, b.rows) * ceil(p.N, b.columns) * p.batch()
}

// work estimates how long a part takes, including the time to read the operands.
func (b *blocks) work(p *Product) int {
	const lanes, read = 16, 4
	return p.K * (b.rows*b.columns/lanes + (b.rows+b.columns)/read)
}

// readable reports whether the first-level cache keeps a strip of rows of A where it lies.
func readable(a Matrix, rows, depth, size int) bool {
	if a.Transposed {
		return depth*a.Pitch*size <= stripBytes
	}
	return rows <= 4 || a.Pitch*size%conflictBytes != 0
}

// evenly divides n into as few blocks of at most `most` as possible, and returns the size of one: a
// multiple of unit.
func evenly(n, most, unit int) int {
	most = max(most/unit, 1) * unit
	return ceil(ceil(n, max(ceil(n, most), 1)), unit) * unit
}

func ceil(n, by int) int { return (n + by - 1) / by }

func sizeOf[T any]() int { return int(unsafe.Sizeof(*new(T))) }
