package fuse

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
)

// cursor walks through an operand in row-major order of the loop, in runs along the
// innermost axis.
type cursor struct {
	shape, strides []int
	index          [backend.MaxAxes]int
	at             int // of the operand, in elements
}

// cursor returns a cursor along the loop, or along its rows.
func (h *host) cursor(strides []int, rows bool) *cursor {
	shape := h.layout.shape
	if rows {
		shape, strides = shape[:len(shape)-1], strides[:len(strides)-1]
	}
	if len(shape) == 0 { // a loop has an inner axis
		shape, strides = []int{1}, []int{0}
	}
	return &cursor{shape: shape, strides: strides}
}

// seek goes to element lo of the loop, and returns where it is.
func (c *cursor) seek(lo int) int {
	c.at = 0
	for k := len(c.shape) - 1; k >= 0; k-- {
		c.index[k] = lo % c.shape[k]
		c.at += c.index[k] * c.strides[k]
		lo /= c.shape[k]
	}
	return c.at
}

// next returns where the next run of up to n elements begins, and its length, and goes behind it.
func (c *cursor) next(n int) (at, count int) {
	k := len(c.shape) - 1
	at, count = c.at, min(n, c.shape[k]-c.index[k])
	c.move(k, count)
	return at, count
}

// move goes on along axis k.
func (c *cursor) move(k, count int) {
	c.index[k] += count
	c.at += count * c.strides[k]
	for ; k > 0 && c.index[k] == c.shape[k]; k-- {
		c.at += c.strides[k-1] - c.shape[k]*c.strides[k]
		c.index[k] = 0
		c.index[k-1]++
	}
}

// rows returns where the next whole runs of up to n elements begin, how many there are along the
// axis before the innermost one, and goes behind them; none if the cursor is within a run.
func (c *cursor) rows(n int) (at, count int) {
	k := len(c.shape) - 1
	if k == 0 || c.index[k] > 0 {
		return 0, 0
	}
	at, count = c.at, min(n/c.shape[k], c.shape[k-1]-c.index[k-1])
	if count > 0 {
		c.move(k-1, count)
	}
	return at, count
}

// dense reports whether the operand is one run of memory.
func (c *cursor) dense() bool {
	at := 1
	for k := len(c.shape) - 1; k >= 0; k-- {
		if c.shape[k] > 1 && c.strides[k] != at {
			return false
		}
		at *= c.shape[k]
	}
	return true
}

// run is the innermost stride.
func (c *cursor) run() int { return c.strides[len(c.strides)-1] }

// located returns a function that finds the memory of a block of an operand, or nil if it is not
// one run of memory.
func (h *host) located(c *cursor) func(lo int) int {
	switch {
	case c.dense():
		return func(lo int) int { return lo }
	case h.cut && len(c.shape) == len(h.layout.shape) && c.run() == 1:
		return c.seek
	}
	return nil
}

// along returns the cursor of value k, whose operand has these strides: along the loop, or its
// rows.
func (h *host) along(k Value, strides []int) *cursor {
	return h.cursor(strides, h.values[k].kind == perRow)
}

// borrowed reports whether the value of an input is its memory: a run whose elements are
// computed in their own type.
func (h *host) borrowed(k Value) bool {
	c := h.p.Code[k]
	v := h.values[k]
	return v.kind != single && !v.fixed && h.p.Inputs[c.Args[0]].DType == c.Type &&
		h.located(h.along(k, h.layout.inputs[c.Args[0]])) != nil && !h.kept(k)
}

// kept reports whether a value that is stored needs separate memory, or is loaded into the memory
// of its output: its input may be the memory of another output, which is stored first.
func (h *host) kept(k Value) bool {
	stored := func(o Output) bool { return o.Value == k }
	if len(h.p.Outputs) > 1 {
		return slices.ContainsFunc(h.p.Outputs, stored)
	}
	only := h.p.Outputs[0]
	return stored(only) && !only.Folded && h.located(h.cursor(h.layout.outputs[0], false)) != nil
}

// load returns the step that loads an input.
func (m *evaluator) load(k int, c Instr) blockFunc {
	input := c.Args[0]
	d, strides := m.p.Inputs[input].DType, m.layout.inputs[input]
	if m.values[k].kind == single {
		return m.loadOne(k, input)
	}
	from := m.along(k, strides)
	located := m.located(from)
	if located != nil {
		if m.borrowed(k) {
			return func(lo, n int) error {
				lo, n = m.span(k, lo, n)
				at := located(lo)
				m.set(k, m.src[input].Slice(at, at+n))
				return nil
			}
		}
		return func(lo, n int) error {
			lo, n = m.span(k, lo, n)
			at := located(lo)
			return widen(m.get(k, c.Type, n), m.src[input].Slice(at, at+n))
		}
	}
	if d == c.Type {
		return func(lo, n int) error {
			lo, n = m.span(k, lo, n)
			from.seek(lo)
			gatherBlock(m.get(k, d, n), m.src[input], from)
			return nil
		}
	}
	raw := m.extra(d, m.most(k))
	return func(lo, n int) error {
		lo, n = m.span(k, lo, n)
		from.seek(lo)
		gatherBlock(m.own[raw].Slice(0, n), m.src[input], from)
		return widen(m.get(k, c.Type, n), m.own[raw].Slice(0, n))
	}
}

// span returns where a block of value k begins, and how many elements it has: of the loop, or of
// its rows.
func (m *evaluator) span(k Value, lo, n int) (int, int) {
	if m.values[k].kind == perRow {
		return lo / m.inner, n / m.inner
	}
	return lo, n
}

// loadOne returns the step that loads one element for all of a block.
func (m *evaluator) loadOne(k Value, input int) blockFunc {
	from := m.cursor(m.layout.inputs[input], false)
	return func(lo, _ int) error {
		at := from.seek(lo)
		own := m.own[k]
		if err := widen(own.Slice(0, 1), m.src[input].Slice(at, at+1)); err != nil {
			return err
		}
		repeat(own)
		return nil
	}
}

// repeat copies the first element of a block to all others.
func repeat(block backend.Buffer) {
	switch block.DType().Size() { // elements are only moved
	case 4:
		b := backend.View[float32](block)
		fill(b, b[0])
	case 8:
		b := backend.View[float64](block)
		fill(b, b[0])
	}
}

func fill[T any](block []T, x T) {
	for i := range block {
		block[i] = x
	}
}

// constant returns the step that sets a constant.
func (m *evaluator) constant(k int, c Instr) blockFunc {
	return func(int, int) error {
		switch c.Type {
		case backend.F32:
			m.f32[k][0] = float32(c.float())
		case backend.F64:
			m.f64[k][0] = c.float()
		case backend.I32:
			m.i32[k][0] = int32(c.Bits)
		case backend.I64:
			m.i64[k][0] = int64(c.Bits)
		}
		repeat(m.own[k])
		return nil
	}
}

// each returns the number of a value that has an element for each of the loop: k, or copies of it.
func (m *evaluator) each(k Value) Value {
	if m.values[k].kind == perElement {
		return k
	}
	copies, t := len(m.p.Code)+k, m.typeOf(k)
	if m.copied[k] {
		return copies
	}
	m.copied[k] = true
	m.reserve(copies, t, m.block)
	var do blockFunc
	switch t {
	case backend.F32:
		do = spreadFloat(m, m.f32, copies, k)
	case backend.F64:
		do = spreadFloat(m, m.f64, copies, k)
	case backend.I32:
		do = spread(m, m.i32, copies, k)
	default:
		do = spread(m, m.i64, copies, k)
	}
	m.add(k, &m.computes, do)
	return copies
}

// spread returns the step that copies a value to each element that it belongs to.
func spread[T any](m *evaluator, v [][]T, to, from int) blockFunc {
	if m.values[from].kind == single {
		return func(_, n int) error { fill(v[to][:n], v[from][0]); return nil }
	}
	return func(_, n int) error {
		for i, x := range v[from][:n/m.inner] {
			fill(v[to][i*m.inner:(i+1)*m.inner], x)
		}
		return nil
	}
}

func spreadFloat[T simd.Float](m *evaluator, v [][]T, to, from int) blockFunc {
	if m.values[from].kind == single {
		return func(_, n int) error { simd.Spread(m.level, v[to][:n], v[from][:1], n); return nil }
	}
	return func(_, n int) error {
		simd.Spread(m.level, v[to][:n], v[from][:n/m.inner], m.inner)
		return nil
	}
}

// widen converts elements to the type in which they are computed.
func widen(dst, src backend.Buffer) error {
	if dst.DType() == src.DType() {
		return kernels.Host{}.Copy(dst, src)
	}
	if src.DType() != backend.U8 {
		return kernels.Host{}.Cast(dst, src)
	}
	d, s := backend.View[int32](dst), backend.View[byte](src)
	for i, x := range s {
		d[i] = int32(x)
	}
	return nil
}

// gatherBlock copies elements, from the cursor on, into a block; it only moves them.
func gatherBlock(block, from backend.Buffer, c *cursor) {
	switch block.DType().Size() {
	case 1:
		gatherOf(backend.View[byte](block), backend.View[byte](from), c)
	case 2:
		gatherOf(backend.View[backend.Float16](block), backend.View[backend.Float16](from), c)
	case 4:
		gatherOf(backend.View[float32](block), backend.View[float32](from), c)
	case 8:
		gatherOf(backend.View[float64](block), backend.View[float64](from), c)
	}
}

func gatherOf[T any](block, from []T, c *cursor) {
	last := len(c.shape) - 1
	for stride := c.run(); len(block) > 0; {
		if stride == 1 && last > 0 {
			run := c.shape[last]
			at, count := c.rows(len(block))
			for range count {
				copy(block[:run], from[at:])
				block, at = block[run:], at+c.strides[last-1]
			}
			if count > 0 {
				continue
			}
		}
		at, n := c.next(len(block))
		switch stride {
		case 0:
			fill(block[:n], from[at])
		case 1:
			copy(block[:n], from[at:])
		default:
			for i := range block[:n] {
				block[i] = from[at+i*stride]
			}
		}
		block = block[n:]
	}
}

// scatter copies back from a block to an output.
func scatter(to, block backend.Buffer, c *cursor) {
	switch block.DType().Size() {
	case 1:
		scatterOf(backend.View[byte](to), backend.View[byte](block), c)
	case 2:
		scatterOf(backend.View[backend.Float16](to), backend.View[backend.Float16](block), c)
	case 4:
		scatterOf(backend.View[float32](to), backend.View[float32](block), c)
	case 8:
		scatterOf(backend.View[float64](to), backend.View[float64](block), c)
	}
}

func scatterOf[T any](to, block []T, c *cursor) {
	for stride := c.run(); len(block) > 0; {
		at, n := c.next(len(block))
		if stride == 1 {
			copy(to[at:], block[:n])
		} else {
			for i, x := range block[:n] {
				to[at+i*stride] = x
			}
		}
		block = block[n:]
	}
}

// index returns the step that computes an index expression.
func (m *evaluator) index(k int, c Instr) blockFunc {
	from := m.along(k, m.layout.indices[c.Args[0]])
	return func(lo, n int) error {
		if m.values[k].kind == single {
			n = 1
		}
		lo, n = m.span(k, lo, n)
		from.seek(lo)
		for block := m.i64[k][:n]; len(block) > 0; {
			at, count := from.next(len(block))
			for i := range block[:count] {
				block[i] = int64(at + i*from.run())
			}
			block = block[count:]
		}
		if m.values[k].kind == single {
			repeat(m.own[k])
		}
		return nil
	}
}
