package kernels

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/workers"
)

// Run computes a block of C, of one or several products. Blocks that follow each other have the
// same columns of B.
func (m *multiplication[T, S, D]) Run(part, worker int) {
	row := part % m.rowBlocks
	column := part / m.rowBlocks % m.columnParts
	first := part / m.rowBlocks / m.columnParts * m.together
	p := m.packing(worker)
	i, j, end := row*m.rows, column*m.columns, min(first+m.together, m.batch())
	rows := min(m.rows, m.M-i)
	for n := first; n < end; n++ {
		m.block(&p, n, i, rows, j, min(m.columns, m.N-j))
	}
	if m.Epilogue != nil {
		m.Epilogue.Elements((first*m.M+i)*m.N, ((end-1)*m.M+i+rows)*m.N, worker)
	}
}

// packing is a worker's memory.
type packing[T float] struct {
	strip  []T // of A
	panels []T // of B
	wide   []T // a panel of B before it is transposed, where it is widened, too
	sums   []T // of a block, where C has a narrower type
}

// padding keeps the rows of a strip from competing for the same lines of a cache.
const padding = 16

func (m *multiplication[T, S, D]) packing(worker int) packing[T] {
	sizes := [4]int{}
	if !m.aInPlace {
		sizes[0] = m.height * (m.depth + padding)
	}
	if !m.bInPlace {
		sizes[1] = m.depth * ceil(m.columns, m.width) * m.width
	}
	if sizeOf[S]() < sizeOf[T]() && m.B.Transposed && !m.dots {
		sizes[2] = m.width * (m.depth + padding)
	}
	if sizeOf[D]() < sizeOf[T]() {
		sizes[3] = m.rows * m.columns
	}
	all := workers.Scratch[T](m.pool, worker, sizes[0]+sizes[1]+sizes[2]+sizes[3]+4*padding)
	var parts [4][]T
	for i, n := range sizes {
		n = ceil(n, padding) * padding
		parts[i], all = all[:n:n], all[n:]
	}
	return packing[T]{parts[0], parts[1], parts[2], parts[3]}
}

// block computes a block of product n, from row i and column j.
func (m *multiplication[T, S, D]) block(p *packing[T], n, i, rows, j, columns int) {
	t := simd.Product[T]{N: columns, Alpha: T(m.Alpha), Beta: T(m.Beta)}
	c := m.c[n*m.C.Stride+i*m.C.Pitch+j:]
	var same bool
	if t.C, same = any(c).([]T); same {
		t.CPitch = m.C.Pitch
	} else {
		t.C, t.CPitch, t.Beta = p.sums, columns, 0
	}
	for k := 0; k == 0 || k < m.K; k += m.depth {
		t.K = min(m.depth, m.K-k)
		if m.dots {
			m.multiplyDots(&t, n, i, rows, j, k)
		} else if m.K > 0 {
			m.packB(p, &t, m.b[n*m.B.Stride:], k, j)
			m.multiplyStrips(p, t, m.a[n*m.A.Stride:], i, rows, k)
		} else {
			t.M = rows
			simd.Multiply(m.level, &t)
			break
		}
		t.Beta = 1
	}
	if !same {
		for row := range rows {
			finish(p.sums[row*columns:][:columns], c[row*m.C.Pitch:][:columns], T(m.Beta))
		}
	}
}

// multiplyDots multiplies rows of A by columns of B, both where they lie.
func (m *multiplication[T, S, D]) multiplyDots(t *simd.Product[T], n, i, rows, j, k int) {
	d := simd.Dots[T]{M: rows, N: t.N, K: t.K, C: t.C, CPitch: t.CPitch, Alpha: t.Alpha,
		Beta: t.Beta, ARow: m.A.Pitch, BColumn: m.B.Pitch,
		A: backend.Of(m.a[n*m.A.Stride+i*m.A.Pitch+k:]),
		B: backend.Of(m.b[n*m.B.Stride+j*m.B.Pitch+k:])}
	d.Multiply(m.level)
}

// packB sets B of t to the columns from j, from step k.
func (m *multiplication[T, S, D]) packB(p *packing[T], t *simd.Product[T], b []S, k, j int) {
	row, column := m.B.Steps()
	b = b[k*row+j*column:]
	if m.bInPlace {
		t.B, t.BStep = backend.Of(b), m.B.Pitch
		return
	}
	t.B, t.BStep, t.BPanel = backend.Of(p.panels), m.width, t.K*m.width
	for x := 0; x < t.N; x += m.width {
		m.packPanel(p.panels[x*t.K:], p.wide, b[x*column:], min(m.width, t.N-x), t.K)
	}
}

// packPanel copies some columns of B.
func (m *multiplication[T, S, D]) packPanel(panel, wide []T, b []S, columns, depth int) {
	from, same := any(b).([]T)
	switch {
	case same && m.B.Transposed:
		simd.TransposeRows(m.level, panel, from, m.width, m.B.Pitch, columns, depth)
	case same:
		simd.CopyRows(m.level, panel, from, m.width, m.B.Pitch, depth, columns)
	case m.B.Transposed:
		widenRows(m.level, wide, b, depth+padding, m.B.Pitch, columns, depth)
		simd.TransposeRows(m.level, panel, wide, m.width, depth+padding, columns, depth)
	default:
		widenRows(m.level, panel, b, m.width, m.B.Pitch, depth, columns)
	}
}

// multiplyStrips multiplies rows of A, from i and step k.
func (m *multiplication[T, S, D]) multiplyStrips(p *packing[T], t simd.Product[T], a []S, i, rows,
	k int) {
	row, column := m.A.Steps()
	a = a[i*row+k*column:]
	if m.aInPlace {
		t.A, t.ARow, t.AStep, t.M = of[T](a), row, column, rows
		simd.Multiply(m.level, &t)
		return
	}
	t.A = p.strip
	for c := t.C; rows > 0; rows -= t.M {
		t.M, t.C = min(m.height, rows), c
		m.packStrip(&t, a)
		simd.Multiply(m.level, &t)
		if rows > t.M {
			a, c = a[t.M*row:], c[t.M*t.CPitch:]
		}
	}
}

// packStrip copies some rows of A, which stay rows or columns as they are.
func (m *multiplication[T, S, D]) packStrip(t *simd.Product[T], a []S) {
	rows, columns, pitch := t.M, t.K, t.K+padding
	if t.ARow, t.AStep = pitch, 1; m.A.Transposed {
		rows, columns, pitch = t.K, t.M, t.M // a row covers the zeros behind the one before
		t.ARow, t.AStep = 1, pitch
	}
	if from, same := any(a).([]T); same && m.A.Transposed {
		simd.CopyRows(m.level, t.A, from, pitch, m.A.Pitch, rows, columns)
	} else {
		widenRows(m.level, t.A, a, pitch, m.A.Pitch, rows, columns)
	}
}

// widenRows copies a matrix.
func widenRows[T float, S backend.Element](l simd.Level, dst []T, src []S, dstPitch, srcPitch,
	rows, columns int) {
	wide, _ := any(dst).([]float32)
	switch src := any(src).(type) {
	case []backend.BFloat16:
		simd.WidenRows(l, wide, src, dstPitch, srcPitch, rows, columns)
	case []backend.Float16:
		simd.WidenRows(l, wide, src, dstPitch, srcPitch, rows, columns)
	case []T:
		for i := range rows {
			copy(dst[i*dstPitch:][:columns], src[i*srcPitch:][:columns])
		}
	}
}

// finish adds what c holds to sums, unless beta is 0, and rounds them.
func finish[T float, D backend.Element](sums []T, c []D, beta T) {
	const some = 64
	for ; len(c) > some; sums, c = sums[some:], c[some:] {
		finish(sums[:some], c[:some], beta)
	}
	if beta != 0 {
		var before [some]T
		load(before[:len(c)], c)
		for x := range c {
			sums[x] += beta * before[x]
		}
	}
	save(c, sums)
}

// save writes sums as the type of the result, rounded once.
func save[T float, D backend.Element](out []D, sums []T) {
	switch out := any(out).(type) {
	case []backend.Float16:
		narrowAll(out, any(sums).([]float32))
	case []backend.BFloat16:
		narrowAll(out, any(sums).([]float32))
	case []T:
		copy(out, sums)
	}
}

// of returns x, which has elements T.
func of[T, S any](x []S) []T { return any(x).([]T) }
