package fuse

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/workers"
)

// extent says how many elements of a value a block has.
type extent struct {
	kind  kind
	fixed bool // it is the same in all blocks: it is computed when a part begins
}

type kind uint8

// The kinds. A value of a later kind can be the operand of one of an earlier kind.
const (
	perElement kind = iota
	perRow          // one element for each row of the block
	single          // one element, which fills simd.Repeat places
)

// classify says of what extent values are.
func (h *host) classify() {
	for _, c := range h.p.Code {
		v := extent{single, true}
		switch {
		case c.Op == Load:
			v = h.extentOf(h.layout.inputs[c.Args[0]])
		case c.Op == Index:
			v = h.extentOf(h.layout.indices[c.Args[0]])
		case c.Op.FoldsRows() && h.cut:
			v.fixed = false
		case c.Op.FoldsRows():
			v = extent{perRow, false}
		}
		if c.Op.computes() && !c.Op.FoldsRows() {
			for _, x := range c.Args[:c.Op.Operands()] {
				v.kind, v.fixed = min(v.kind, h.values[x].kind), v.fixed && h.values[x].fixed
			}
		}
		h.values = append(h.values, v)
	}
}

// extentOf returns the extent of what moves by these strides.
func (h *host) extentOf(strides []int) extent {
	last := len(strides) - 1
	outer := false // whether it moves along an axis but the last
	for _, s := range strides[:last] {
		outer = outer || s != 0
	}
	switch {
	case !outer && strides[last] == 0:
		return extent{single, true}
	case strides[last] == 0 && h.cut:
		return extent{single, false}
	case strides[last] == 0 && h.rows != nil:
		return extent{perRow, false}
	}
	return extent{perElement, !outer && last > 0 && !h.cut}
}

// count returns how many elements of value k are computed in a block of n.
func (h *host) count(k Value, n int) int {
	switch h.values[k].kind {
	case single:
		return simd.Repeat
	case perRow:
		return n / h.inner
	}
	return n
}

// most is count of a whole block.
func (h *host) most(k Value) int { return h.count(k, h.block) }

// typeOf returns the type of a value, or of the copies of one.
func (h *host) typeOf(k Value) backend.DType { return h.p.Code[k%len(h.p.Code)].Type }

// lastUses returns for each value the number of the last instruction that reads it: the value's own
// number if none does, and more than any for values of outputs.
func (h *host) lastUses() []int {
	last := make([]int, len(h.p.Code))
	for k, c := range h.p.Code {
		last[k] = k
		for _, x := range c.Args[:c.Op.Operands()] {
			last[x] = k
		}
	}
	for _, out := range h.p.Outputs {
		last[out.Value] = len(h.p.Code)
	}
	return last
}

// blocks are the elements of values, each in the slice of its type, and nil in the others. Behind
// the values are copies of them: value k with an element for each of the block is number
// len(Code)+k.
type blocks struct {
	f32 [][]float32
	f64 [][]float64
	i32 [][]int32
	i64 [][]int64

	own    []backend.Buffer // blocks of values, and behind them those of other things
	places []region         // of what is in own
	size   int              // bytes of all places
	memory []float64        // where they are
	copied []bool           // values that have copies
}

// region is a block in the memory of a worker.
type region struct {
	k     int // of own
	d     backend.DType
	at, n int // in bytes, and in elements
}

func makeBlocks(n int) blocks {
	return blocks{
		f32: make([][]float32, 2*n), f64: make([][]float64, 2*n), i32: make([][]int32, 2*n),
		i64: make([][]int64, 2*n),
		own: make([]backend.Buffer, 2*n), copied: make([]bool, n),
	}
}

// set makes value k the elements of memory.
func (b *blocks) set(k int, memory backend.Buffer) {
	switch memory.DType() {
	case backend.F32:
		b.f32[k] = backend.View[float32](memory)
	case backend.F64:
		b.f64[k] = backend.View[float64](memory)
	case backend.I32:
		b.i32[k] = backend.View[int32](memory)
	case backend.I64:
		b.i64[k] = backend.View[int64](memory)
	}
}

// get returns the first n elements of value k.
func (b *blocks) get(k int, d backend.DType, n int) backend.Buffer {
	switch d {
	case backend.F32:
		return backend.Of(b.f32[k][:n])
	case backend.F64:
		return backend.Of(b.f64[k][:n])
	case backend.I32:
		return backend.Of(b.i32[k][:n])
	}
	return backend.Of(b.i64[k][:n])
}

// apart is the least number of bytes between blocks: blocks at the same place of a page would slow
// each other down, since processors look for earlier stores by that place.
const apart = 64

// reserve returns where a new block of n elements lies. Each begins with a cache line.
func (b *blocks) reserve(k int, d backend.DType, n int) region {
	p := region{k, d, b.size, n}
	b.size += (n*d.Size()+63)/64*64 + apart
	b.places = append(b.places, p)
	return p
}

// extra returns the number of a block that no value has.
func (b *blocks) extra(d backend.DType, n int) int {
	k := len(b.own)
	b.own = append(b.own, backend.Buffer{})
	b.reserve(k, d, n)
	return k
}

// place gives every value a block. Blocks of values that are no longer needed are used again. A
// value that is loaded, or computed when a part begins, takes no block that was used before.
func (m *evaluator) place() {
	last := m.lastUses()
	at := make([]region, len(m.p.Code))
	var idle []region
	for k, c := range m.p.Code {
		n := m.most(k)
		found := -1
		for i, p := range idle {
			if c.Op.computes() && !m.values[k].fixed && p.n*p.d.Size() == n*c.Type.Size() {
				found = i
			}
		}
		if found >= 0 {
			at[k] = region{k, c.Type, idle[found].at, n}
			m.places = append(m.places, at[k])
			idle = append(idle[:found], idle[found+1:]...)
		} else if c.Op != Load || !m.borrowed(k) {
			at[k] = m.reserve(k, c.Type, n)
		}
		for x := range k + 1 {
			if last[x] == k && at[x].n > 0 && !m.values[x].fixed {
				idle = append(idle, at[x])
			}
		}
	}
}

// bind binds the values to blocks of the worker's memory, where the pool has it.
func (m *evaluator) bind() {
	if m.size == 0 || m.memory != nil && m.pool == nil {
		return
	}
	memory := workers.Scratch[float64](m.pool, m.worker, (m.size+7)/8)
	if m.memory != nil && &memory[0] == &m.memory[0] {
		return
	}
	m.memory = memory
	all := backend.Of(memory).As(backend.U8)
	for _, p := range m.places {
		m.own[p.k] = all.Slice(p.at, p.at+p.n*p.d.Size()).As(p.d)
		if p.k < len(m.f32) {
			m.set(p.k, m.own[p.k])
		}
	}
}
