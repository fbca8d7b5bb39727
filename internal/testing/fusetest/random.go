package fusetest

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Case is a program with memory for its operands.
type Case struct {
	Program  *fuse.Program
	Dst, Src []backend.Buffer // of the host; an output may be the memory of an input
	want     [][]result       // of each element of Dst; see expect
}

// maker makes one random program.
type maker struct {
	*rand.Rand
	p     *fuse.Program
	rows  bool // the program folds rows
	plain bool // operands are dense and of F32, so that outputs fit over many of them
	types map[backend.DType][]fuse.Value
}

// Random returns a case of up to size elements.
func Random(r *rand.Rand, size int) *Case {
	m := &maker{Rand: r, p: &fuse.Program{}, types: map[backend.DType][]fuse.Value{}}
	m.shape(size)
	m.plain = m.IntN(2) == 0
	for range 1 + m.IntN(4) {
		m.load()
	}
	for range m.IntN(14) {
		m.instruction()
	}
	if m.rows { // whose result other values are computed from
		m.foldRow()
		for range m.IntN(4) {
			m.instruction()
		}
	}
	for range 1 + m.IntN(2) {
		m.output(false)
	}
	if m.p.Reduced != nil {
		m.output(true)
	}
	return New(r, m.p)
}

// New returns a case of a program with random memory.
func New(r *rand.Rand, p *fuse.Program) *Case {
	m := &maker{Rand: r, p: p}
	c := &Case{Program: p}
	for _, in := range p.Inputs {
		c.Src = append(c.Src, m.memory(in))
	}
	for k, out := range p.Outputs {
		if j := c.sameAs(k); j >= 0 && m.IntN(3) == 0 {
			c.Dst = append(c.Dst, c.Src[j].As(out.DType))
			continue
		}
		c.Dst = append(c.Dst, m.memory(out.Operand))
	}
	c.expect()
	return c
}

// sameAs returns an input whose memory output k may be, or -1: no other output has it.
func (c *Case) sameAs(k int) int {
	for j := range c.Src {
		if c.Program.InPlace(k, j) && !slices.ContainsFunc(c.Dst, func(d backend.Buffer) bool {
			return d.Addr() == c.Src[j].Addr()
		}) {
			return j
		}
	}
	return -1
}

// Placements returns the case once for each choice of outputs that are the memory of inputs, where
// [fuse.Program.InPlace] allows it, beginning with none. The cases share no memory.
func (c *Case) Placements() (all []*Case) {
	over := make([]int, len(c.Program.Outputs)) // 1 + the input
	for {
		all = append(all, c.placed(over))
		k := len(over) - 1
		for ; k >= 0; k-- {
			if over[k] = c.next(over, k); over[k] > 0 {
				break
			}
		}
		if k < 0 {
			return all
		}
	}
}

// next returns the input behind over[k] whose memory output k may be, if it is not that of an
// output before; 0 if there is none.
func (c *Case) next(over []int, k int) int {
	for j := over[k] + 1; j <= len(c.Src); j++ {
		if c.Program.InPlace(k, j-1) && !slices.Contains(over[:k], j) {
			return j
		}
	}
	return 0
}

// placed copies the case to new memory, in which outputs lie over inputs.
func (c *Case) placed(over []int) *Case {
	own := func(b backend.Buffer) backend.Buffer {
		copied := backend.Of(make([]float64, b.Len())).As(b.DType()).Slice(0, b.Len())
		copy(copied.Bytes(), b.Bytes())
		return copied
	}
	p := &Case{Program: c.Program, want: c.want}
	for _, b := range c.Src {
		p.Src = append(p.Src, own(b))
	}
	for k, b := range c.Dst {
		if j := over[k] - 1; j >= 0 {
			p.Dst = append(p.Dst, p.Src[j].As(b.DType()))
		} else {
			p.Dst = append(p.Dst, own(b))
		}
	}
	return p
}

// Extents that are and are not multiples of vectors, of warps and of blocks.
var extents = []int{1, 2, 3, 4, 5, 7, 8, 10, 12, 16, 31, 32, 33, 64, 100, 127, 256, 300, 1000, 1023,
	1024, 1025, 4096, 9000}

func (m *maker) shape(size int) {
	for range m.IntN(5) {
		extent := extents[m.IntN(len(extents))]
		if extent > size {
			extent = 1 + m.IntN(size)
		}
		m.p.Shape = append(m.p.Shape, extent)
		size /= extent
	}
	n := len(m.p.Shape)
	m.rows = n > 0 && m.IntN(3) == 0
	if m.rows && m.p.Shape[n-1] > fuse.MaxFoldedRow || m.IntN(2) == 0 {
		return
	}
	m.p.Reduced = make([]bool, n)
	for k := range m.p.Reduced {
		m.p.Reduced[k] = m.IntN(2) == 0
		if m.rows { // outputs are folded across them
			m.p.Reduced[k] = k < n-1
		}
	}
}

// strides returns strides in which each element has its own place, along the axes of which
// own says so: dense, permuted or padded.
func (m *maker) strides(own func(k int) bool) []int {
	order := make([]int, len(m.p.Shape))
	for k := range order {
		order[k] = len(order) - 1 - k
	}
	if !m.plain && m.IntN(4) == 0 {
		m.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	}
	padded, at := !m.plain && m.IntN(4) == 0, 1
	strides := make([]int, len(order))
	for _, k := range order {
		if !own(k) {
			continue
		}
		strides[k] = at
		at *= m.p.Shape[k]
		if padded {
			at += m.IntN(3)
		}
	}
	return strides
}

func (m *maker) load() {
	d := backend.DTypes()[m.IntN(7)]
	if m.plain || m.IntN(2) == 0 {
		d = backend.F32
	}
	broadcast, repeats := m.IntN(2) == 0 && !(m.plain && m.IntN(2) == 0), m.Uint32()
	m.give(m.p.Load(d, m.strides(func(k int) bool { return !broadcast || repeats>>k&1 == 0 })...))
}

// give remembers a value.
func (m *maker) give(v fuse.Value) {
	t := m.p.Code[v].Type
	m.types[t] = append(m.types[t], v)
}

var types = []backend.DType{backend.F32, backend.F64, backend.I32, backend.I64}

// value returns a value of a type, most often a recent one.
func (m *maker) value(t backend.DType) fuse.Value {
	have := m.types[t]
	if len(have) == 0 || m.IntN(12) == 0 {
		v := m.p.Const(t, float64(m.IntN(9)-4))
		if n := len(m.p.Code) - 1; n > 0 && m.IntN(2) == 0 {
			v = m.p.Cast(t, m.IntN(n))
		}
		m.give(v)
		return v
	}
	if m.IntN(2) == 0 {
		return have[len(have)-1]
	}
	return have[m.IntN(len(have))]
}

// anyType returns the type of some value.
func (m *maker) anyType() backend.DType { return m.p.Code[m.IntN(len(m.p.Code))].Type }

// foldRow adds a fold of rows.
func (m *maker) foldRow() {
	folds := []fuse.Op{fuse.SumRow, fuse.MaxRow, fuse.MinRow}
	m.give(m.p.Do(folds[m.IntN(len(folds))], m.value(m.anyType())))
}

// alike reports whether a value is the same for all elements of a row.
func (m *maker) alike(v fuse.Value) bool {
	last := len(m.p.Shape) - 1
	switch c := m.p.Code[v]; {
	case c.Op == fuse.Load:
		return m.p.Inputs[c.Args[0]].Strides[last] == 0
	case c.Op == fuse.Index:
		return m.p.Indices[c.Args[0]][last] == 0
	case c.Op.FoldsRows():
		return true
	default:
		return !slices.ContainsFunc(c.Args[:c.Op.Operands()], func(x fuse.Value) bool {
			return !m.alike(x)
		})
	}
}

func (m *maker) instruction() {
	if m.rows && m.IntN(5) == 0 {
		m.foldRow()
		return
	}
	if m.IntN(16) == 0 {
		strides := m.strides(func(int) bool { return true })
		if m.IntN(3) == 0 { // offsets of 64 bits
			for k := range strides {
				strides[k] <<= 30
			}
		}
		m.give(m.p.Index(strides...))
		return
	}
	ops := fuse.Ops()
	o, t := ops[m.IntN(len(ops))], m.anyType()
	for !o.Gives(t) {
		o = ops[m.IntN(len(ops))]
	}
	switch o {
	case fuse.Cast:
		m.give(m.p.Cast(types[m.IntN(len(types))], m.value(t)))
	case fuse.Where:
		c := m.value(m.anyType())
		m.give(m.p.Do(o, c, m.value(t), m.value(t)))
	case fuse.Uniform:
		var args [4]fuse.Value
		for i := range args {
			args[i] = m.value(backend.I64)
		}
		m.give(m.p.Do(o, args[:]...))
	default:
		args := make([]fuse.Value, o.Operands())
		for i := range args {
			args[i] = m.value(t)
		}
		m.give(m.p.Do(o, args...))
	}
}

func (m *maker) output(folded bool) {
	v := len(m.p.Code) - 1 - m.IntN(min(3, len(m.p.Code)))
	if m.plain && m.IntN(2) == 0 { // also of one that no other output is computed from
		v = m.IntN(len(m.p.Code))
	}
	var fit []backend.DType
	for _, d := range backend.DTypes() {
		if fuse.Type(d) == m.p.Code[v].Type {
			fit = append(fit, d)
		}
	}
	d := fit[m.IntN(len(fit))]
	if m.plain && d.Size() < 4 {
		d = m.p.Code[v].Type
	}
	if !folded {
		once := m.rows && m.alike(v) && m.IntN(2) == 0
		m.p.Store(v, d, m.strides(func(k int) bool { return !once || k < len(m.p.Shape)-1 })...)
		return
	}
	ops := backend.ReduceOps()
	m.p.Fold(ops[m.IntN(len(ops))], v, d, m.strides(func(k int) bool { return !m.p.Reduced[k] })...)
}

// memory returns random elements for an operand.
func (m *maker) memory(o fuse.Operand) backend.Buffer {
	last := 0
	for k, stride := range o.Strides {
		last += stride * (m.p.Shape[k] - 1)
	}
	b := backend.Of(make([]float64, last+1)).As(o.DType).Slice(0, last+1)
	for i := range b.Len() {
		put(b, i, m.element(o.DType))
	}
	return b
}

// element returns a random element: most often a small number, now and then a special one.
func (m *maker) element(d backend.DType) any {
	if !d.Float() {
		special := []int64{0, -1, 1, math.MaxInt32, math.MinInt32, math.MaxInt64,
			math.MinInt64, 255}
		if m.IntN(40) == 0 {
			return special[m.IntN(len(special))]
		}
		return int64(m.IntN(41) - 20)
	}
	special := []float64{0, math.Copysign(0, -1), math.Inf(1), math.Inf(-1), math.NaN(), 1e-40,
		3e38, 0.5, 1, -1, 65504, 1e-5}
	switch m.IntN(40) {
	case 0:
		return special[m.IntN(len(special))]
	case 1, 2, 3, 4, 5:
		return float64(m.IntN(9) - 4)
	}
	return m.NormFloat64() * 2
}
