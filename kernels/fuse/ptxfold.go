package fuse

import (
	"math"
	"math/bits"
	"strconv"

	"github.com/euryale-ml/euryale/backend"
)

// wantedBlocks keep a device busy: a fold with fewer is cut into segments. It is several for each
// multiprocessor of the largest devices, and the same everywhere, since the order of a fold depends
// on it.
const wantedBlocks = 512

// leastTurns is the least number of elements, or vectors, that a thread folds in a segment: a
// second launch takes as long as several.
const leastTurns = 8

// finishAside is how many threads stand side by side where results of segments are folded: 32 bytes
// of F32, the least that memory moves.
const finishAside = 8

// folder writes an entry that folds.
type folder struct {
	*writer
	kept, reduced []int // axes
	outputs       int   // or vectors of them
	turns         int   // elements, or vectors, that are folded into one
	rows          bool  // whether the innermost axis is folded, so that lanes are
	along, aside  int   // threads of a block that share an output, and that have others
	segment       int   // turns of one block
	segments      int
	divisor       int      // of means
	partial       []memory // where the results of segments are, one for each folded output
}

// fold adds the entries of a program with folds.
func (m *module) fold(p *Program, l *layout, vectors bool) {
	f := newFolder(newWriter("fold", p, l, m.ampere), vectors)
	all, kept := l.size()
	f.divisor = all / kept
	f.cut()
	if f.segments == 1 {
		m.add(f.writer, f.write())
		return
	}
	m.segments(f, kept)
	m.add(f.writer, f.write())
	last := f.finisher(vectors)
	m.add(last.writer, last.write())
}

// segments gives memory to the results of segments, kept elements for each.
func (m *module) segments(f *folder, kept int) {
	scratch := memory{param: f.params - 1}
	for _, out := range f.folded() {
		f.partial = append(f.partial, scratch)
		scratch.offset += (kept*f.segments*Type(out.DType).Size() + Alignment - 1) / Alignment *
			Alignment
	}
	m.scratch = scratch.offset
}

func newFolder(w *writer, vectors bool) *folder {
	f := &folder{writer: w, segments: 1}
	w.shared = true
	for k, reduced := range w.l.reduced {
		if reduced {
			f.reduced = append(f.reduced, k)
		} else {
			f.kept = append(f.kept, k)
		}
	}
	all, kept := w.l.size()
	f.rows = w.l.reduced[len(w.l.reduced)-1]
	if vectors {
		w.lanes = w.lanesOf(false)
	}
	f.outputs, f.turns = kept, all/kept
	if f.rows {
		f.turns /= w.lanes
		f.along = powerOfTwo(f.turns, threads)
		f.aside = threads / f.along
	} else {
		f.outputs /= w.lanes
		f.aside = powerOfTwo(f.outputs, warp)
		f.along = threads / f.aside
	}
	f.segment = f.turns
	return f
}

// warp is how many threads read neighbouring memory at once.
const warp = 32

// powerOfTwo returns the smallest power of two from n on, at most limit.
func powerOfTwo(n, limit int) int { return min(1<<bits.Len(uint(n-1)), limit) }

// groups returns how many blocks there are for the outputs, without segments.
func (f *folder) groups() int { return (f.outputs + f.aside - 1) / f.aside }

// cut divides the fold into segments if there would be too few blocks.
func (f *folder) cut() {
	segments := min((wantedBlocks+f.groups()-1)/f.groups(), f.turns/(f.along*leastTurns))
	if segments > 1 {
		f.segment = (f.turns + segments - 1) / segments
		f.segments = (f.turns + f.segment - 1) / f.segment
	}
}

// finisher returns the entry that folds the results of the segments. They are an axis of their
// own: the innermost one after rows, the outermost one after columns.
func (f *folder) finisher(vectors bool) *folder {
	p := &Program{}
	join := func(kept []int, segments int) []int {
		if f.rows {
			return append(kept, segments)
		}
		return append([]int{segments}, kept...)
	}
	keptOf := func(list []int) (kept []int) {
		for _, k := range f.kept {
			kept = append(kept, list[k])
		}
		return kept
	}
	p.Shape = join(keptOf(f.l.shape), f.segments)
	for k := range p.Shape {
		p.Reduced = append(p.Reduced, k == len(f.kept) && f.rows || k == 0 && !f.rows)
	}
	var outputs []memory
	for k, out := range f.p.Outputs {
		if out.Folded {
			strides := rowMajor(p.Shape)
			p.Fold(out.Op, p.Load(Type(out.DType), strides...), out.DType,
				join(keptOf(f.l.outputs[k]), 0)...)
			outputs = append(outputs, f.writer.outputs[k])
		}
	}
	w := newWriter("finish", p, layoutOf(p), f.ampere)
	w.params, w.outputs, w.inputs = f.params, outputs, f.partial
	last := newFolder(w, vectors && f.rows)
	if !f.rows { // which are in caches: more threads share an output, so that each has few turns
		last.aside = powerOfTwo(last.outputs, finishAside)
		last.along = threads / last.aside
	}
	last.divisor = f.divisor
	return last
}

func rowMajor(shape []int) []int {
	strides, at := make([]int, len(shape)), 1
	for k := len(shape) - 1; k >= 0; k-- {
		strides[k] = at
		at *= shape[k]
	}
	return strides
}

// write writes the entry, and returns how many blocks it wants.
func (f *folder) write() (blocks int) {
	w := f.writer
	thread := w.get(b32, "mov.u32", "%tid.x")
	minor := f.along
	if !f.rows {
		minor = f.aside
	}
	low := w.get(b32, "and.b32", thread, strconv.Itoa(minor-1))
	high := w.get(b32, "shr.u32", thread, strconv.Itoa(bits.TrailingZeros(uint(minor))))
	along, aside := low, high
	if !f.rows {
		along, aside = high, low
	}
	held := w.get(b32, "mad.lo.u32", thread, "8", w.get(b32, "mov.u32", "held"))
	first, step := w.get(b32, "mov.u32", "%ctaid.x"), w.get(b32, "mov.u32", "%nctaid.x")
	blocks = f.groups() * f.segments
	w.count(w.toWord(first), strconv.Itoa(blocks), w.toWord(step), func(b string) {
		f.block(b, held, along, aside)
	})
	return blocks
}

// block writes what a block does of one segment of some outputs.
func (f *folder) block(b, held, along, aside string) {
	w := f.writer
	group, lo, hi, segment := b, "0", strconv.Itoa(f.turns), ""
	if f.segments > 1 {
		group = w.divide(b, f.segments)
		segment = w.get(w.word, w.op("sub.u"), b, w.get(w.word, w.op("mul.lo.u"), group,
			strconv.Itoa(f.segments)))
		lo = w.get(w.word, w.op("mul.lo.u"), segment, strconv.Itoa(f.segment))
		hi = w.get(w.word, w.op("add.u"), lo, strconv.Itoa(f.segment))
		hi = w.get(w.word, w.op("min.u"), hi, strconv.Itoa(f.turns))
	}
	output := w.get(w.word, w.op("mad.lo.u"), group, strconv.Itoa(f.aside), w.toWord(aside))
	exists := w.get(pred, w.op("setp.lt.u"), output, strconv.Itoa(f.outputs))
	first := w.get(w.word, w.op("add.u"), w.toWord(along), lo)
	// those without an output have no turns
	first = w.get(w.word, w.op("selp.u"), first, hi, exists)
	at := w.place(nil, f.kept, output)
	for _, strides := range w.l.all() {
		w.offset(strides, at) // once, not in every turn
	}
	sums := f.identities()
	w.count(first, hi, strconv.Itoa(f.along), func(turn string) {
		f.turn(w.place(at, f.reduced, turn), sums)
	})
	for k, out := range f.folded() {
		if f.rows {
			sums[k] = f.foldLanes(out, sums[k])
		}
		for v := range sums[k] {
			sums[k][v] = f.tree(out, sums[k][v], held, along)
		}
	}
	skip := w.label()
	w.line("@!%s bra %s;", w.get(pred, "and.pred", exists, w.get(pred, "setp.eq.u32", along, "0")),
		skip)
	for k, out := range f.folded() {
		f.storeFolded(k, out, sums[k], at, output, segment)
	}
	w.line("%s:", skip)
}

// folded returns the folded outputs.
func (f *folder) folded() (list []Output) {
	for _, out := range f.p.Outputs {
		if out.Folded {
			list = append(list, out)
		}
	}
	return list
}

// identities writes what folds begin with: registers for each folded output and lane.
func (f *folder) identities() (sums [][]string) {
	for _, out := range f.folded() {
		t := Type(out.DType)
		var lanes []string
		for range f.lanes {
			lanes = append(lanes, f.get(classOf(t), "mov."+typeName(t), identity(out.Op, t)))
		}
		sums = append(sums, lanes)
	}
	return sums
}

// identity returns the number that changes nothing when it is folded in.
func identity(op backend.ReduceOp, t backend.DType) string {
	least, most := map[backend.DType]int64{backend.I32: math.MinInt32,
		backend.I64: math.MinInt64}[t],
		map[backend.DType]int64{backend.I32: math.MaxInt32, backend.I64: math.MaxInt64}[t]
	switch {
	case op == backend.Prod:
		return literal(t, 1)
	case op == backend.Min && t.Float():
		return literal(t, math.Inf(1))
	case op == backend.Max && t.Float():
		return literal(t, math.Inf(-1))
	case op == backend.Min:
		return strconv.FormatInt(most, 10)
	case op == backend.Max:
		return strconv.FormatInt(least, 10)
	}
	return literal(t, math.Copysign(0, -1)) // -0 + x is x, even for zeros
}

// combine writes one step of a fold.
func (f *folder) combine(op backend.ReduceOp, t backend.DType, x, y string) string {
	o := map[backend.ReduceOp]Op{backend.Sum: Add, backend.Avg: Add, backend.Prod: Mul,
		backend.Min: Minimum, backend.Max: Maximum}[op]
	return f.operation(Instr{Op: o, Type: t}, []string{x, y})
}

// turn writes the elements at a place, stores outputs that are not folded, and folds the others.
func (f *folder) turn(at *coordinates, sums [][]string) {
	values := f.values(at)
	folded := 0
	for k, out := range f.p.Outputs {
		if !out.Folded {
			f.store(f.writer.outputs[k], out.DType, f.l.outputs[k], values[out.Value], at)
			continue
		}
		t, x := Type(out.DType), values[out.Value]
		for v, sum := range sums[folded] {
			f.line("mov.%s %s, %s;", typeName(t), sum,
				f.combine(out.Op, t, sum, x[min(v, len(x)-1)]))
		}
		folded++
	}
}

// foldLanes folds the lanes of a thread by halves.
func (f *folder) foldLanes(out Output, lanes []string) []string {
	for n := len(lanes) / 2; n > 0; n /= 2 {
		for v := range n {
			lanes[v] = f.combine(out.Op, Type(out.DType), lanes[v], lanes[v+n])
		}
	}
	return lanes[:1]
}

// tree folds what the threads along hold by halves, in shared memory, and returns the result
// to the first.
func (f *folder) tree(out Output, x, held, along string) string {
	if f.along == 1 {
		return x
	}
	t := Type(out.DType)
	step := 1
	if !f.rows {
		step = f.aside
	}
	at := func(half int) string { return "[" + held + "+" + strconv.Itoa(8*half*step) + "]" }
	f.line("st.shared.%s %s, %s;", typeName(t), at(0), x)
	f.line("bar.sync 0;")
	for half := f.along / 2; half > 0; half /= 2 {
		skip := f.label()
		f.line("@%s bra %s;", f.get(pred, "setp.ge.u32", along, strconv.Itoa(half)), skip)
		a, b := f.get(classOf(t), "ld.shared."+typeName(t), at(0)),
			f.get(classOf(t), "ld.shared."+typeName(t), at(half))
		f.line("st.shared.%s %s, %s;", typeName(t), at(0), f.combine(out.Op, t, a, b))
		f.line("%s:", skip)
		f.line("bar.sync 0;")
	}
	return f.get(classOf(t), "ld.shared."+typeName(t), at(0))
}

// storeFolded writes the store of folded output k among those: of the result, or of a segment's.
func (f *folder) storeFolded(k int, out Output, lanes []string, at *coordinates, output,
	segment string) {
	t := Type(out.DType)
	if f.segments > 1 {
		f.storePartial(f.partial[k], t, lanes, output, segment)
		return
	}
	if out.Op == backend.Avg {
		divisor := f.get(classOf(t), "mov."+typeName(t), literal(t, float64(f.divisor)))
		for v := range lanes {
			lanes[v] = f.operation(Instr{Op: Div, Type: t}, []string{lanes[v], divisor})
		}
	}
	index := 0
	for i, o := range f.p.Outputs {
		if o.Folded && index == k {
			f.store(f.writer.outputs[i], out.DType, f.l.outputs[i], lanes, at)
		}
		if o.Folded {
			index++
		}
	}
}

// storePartial stores the result of a segment: [outputs, segments] of rows, [segments, outputs]
// of columns.
func (f *folder) storePartial(m memory, t backend.DType, lanes []string, output, segment string) {
	at := &coordinates{axes: []int{0, 1}, coords: []string{output, segment},
		offsets: map[string]string{}}
	strides := []int{f.segments, 1}
	if !f.rows {
		strides = []int{len(lanes), f.outputs * len(lanes)}
	}
	address := f.address(m, t, strides, at)
	for v, x := range lanes {
		f.line("st.global.%s [%s+%d], %s;", typeName(t), address, v*t.Size(), x)
	}
}
