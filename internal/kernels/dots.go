package kernels

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/workers"
)

// dots is the product of a row with the transpose of a matrix: as many dot products as the matrix
// has rows, which are read once, as they lie. Packing them for tiles takes longer than multiplying.
// Products are rounded to T, and added up in float64.
type dots[T float] struct {
	Product
	x, b, c []T
	level   simd.Level
	pool    *workers.Pool
	rows    int // of a part
}

// dotted reports whether a product is dots, and if so computes it.
func dotted[T float](pool *workers.Pool, p *Product, l simd.Level) bool {
	if p.M != 1 || !p.B.Transposed || p.A.Transposed || p.Epilogue != nil || p.K <= simd.Repeat ||
		p.A.Buffer.DType() != p.C.Buffer.DType() || p.batch() > 1 {
		return false
	}
	t := dots[T]{*p, backend.View[T](p.A.Buffer)[:p.K], backend.View[T](p.B.Buffer),
		backend.View[T](p.C.Buffer), l, pool, max(leastWork/p.K, 1)}
	workers.Run(pool, ceil(p.N, t.rows), t)
	return true
}

// Run implements [workers.Task].
func (t *dots[T]) Run(part, worker int) {
	products := workers.Scratch[T](t.pool, worker, t.K)
	for i := part * t.rows; i < min((part+1)*t.rows, t.N); i++ {
		row := t.b[i*t.B.Pitch:][:t.K]
		if !simd.Binary(t.level, simd.Mul, products, row, t.x) {
			simd.BinaryLoop(simd.Mul, products, row, t.x)
		}
		y := t.Alpha * simd.Sum(t.level, products)
		if t.Beta != 0 {
			y += t.Beta * float64(t.c[i])
		}
		t.c[i] = T(y)
	}
}
