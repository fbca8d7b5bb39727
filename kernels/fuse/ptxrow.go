package fuse

import (
	"math/bits"
	"slices"
	"strconv"

	"github.com/euryale-ml/euryale/backend"
)

// How a row is divided among threads.
const (
	// mostThreads is the size of the largest block, and longThreads the size of a block for rows
	// that it cannot keep: two such blocks are under way on a multiprocessor, so that one computes
	// while the other waits.
	mostThreads, longThreads = 1024, 512
	// heldElements is how many elements a thread keeps of all operands together: a block of 1,024
	// threads has 64 registers for each, and the values in between need some.
	heldElements = 32
	// rowElements is how many of them belong to one operand: more make kernels long.
	rowElements = 16
	// columnsBeside is how many blocks a multiprocessor has at once where outputs are folded across
	// rows: the gradients of a layer norm then take 80 registers, and 20 more bytes. columnBlocks
	// is the most blocks, as many as an H100 or H200 has at once: fewer blocks leave fewer results
	// to a second launch.
	columnsBeside, columnBlocks = 3, 3 * 132
)

// rower writes the entry of a program that folds rows. The threads of a row go round over its
// elements, a slot at a time. Rows that are not too long are one turn: threads keep what they have
// loaded and computed in registers from fold to fold. For longer rows everything is loaded and
// recomputed, in turns for each fold.
type rower struct {
	*folder
	known   *rows
	live    []bool // values that outputs depend on
	late    []bool // loads that only what follows a fold needs
	vectors int    // of a row
	slots   int    // of a turn
	several bool   // turns

	at    *coordinates // of the row
	alike [][]string   // values that are alike along the row
	only  []*slot      // of the only turn
	own   string       // the number of the thread among those of its row
	here  string       // what the thread has in shared memory
	first string       // what the first thread of the row has there

	// of outputs that are folded across rows, whose segments belong to blocks
	across *folder
	turn   string // the number of the row among those of the block
	// what is folded across rows: registers for each slot, folded output and lane
	columns [][][]string
}

// slot is a vector of a row, or an element.
type slot struct {
	at     *coordinates
	exists string // a predicate, "" for always
	values [][]string
}

// rowLoop adds the entry of a program that folds rows.
func (m *module) rowLoop(p *Program, l *layout, vectors bool) {
	r := &rower{folder: &folder{writer: newWriter("rows", p, l, m.ampere), segments: 1, rows: true,
		outputs: 1}, known: rowsOf(p)}
	r.shared = true
	last := len(l.shape) - 1
	for k, extent := range l.shape[:last] {
		r.kept = append(r.kept, k)
		r.outputs *= extent
	}
	if vectors {
		r.lanes = r.lanesOf(false)
	}
	r.findLive()
	r.findLate()
	r.vectors = l.shape[last] / r.lanes
	r.share()
	if r.folded() == nil {
		m.add(r.writer, r.write())
		return
	}
	r.across = &folder{writer: r.writer, kept: []int{last}, outputs: r.vectors,
		segments: min(r.groups(), columnBlocks), divisor: r.outputs}
	m.segments(r.across, l.shape[last])
	r.write()
	m.add(r.writer, r.across.segments)
	end := r.across.finisher(vectors)
	m.add(end.writer, end.write())
}

// findLive finds the values that outputs depend on.
func (r *rower) findLive() {
	r.live = make([]bool, len(r.p.Code))
	for _, out := range r.p.Outputs {
		r.live[out.Value] = true
	}
	for k := len(r.p.Code) - 1; k >= 0; k-- {
		for _, x := range r.p.Code[k].Args[:r.p.Code[k].Op.Operands()] {
			r.live[x] = r.live[x] || r.live[k]
		}
	}
}

// findLate finds the loads that no first fold needs, of operands that differ from row to row.
func (r *rower) findLate() {
	r.late = make([]bool, len(r.p.Code))
	early := make([]bool, len(r.p.Code))
	for k := len(r.p.Code) - 1; k >= 0; k-- {
		c := r.p.Code[k]
		if c.Op == Load {
			strides := r.l.inputs[c.Args[0]]
			along := len(strides) - 1
			r.late[k] = r.live[k] && !early[k] && strides[along] != 0 &&
				slices.ContainsFunc(strides[:along], func(s int) bool { return s != 0 })
			continue
		}
		early[k] = early[k] || r.live[k] && c.Op.FoldsRows() && r.known.depth[k] == 1
		for _, x := range c.Args[:c.Op.Operands()] {
			early[x] = early[x] || early[k]
		}
	}
}

// share divides rows among threads: as few as can keep a row, but a warp at least if the row is
// that long.
func (r *rower) share() {
	loaded, lines := 0, 0
	for k, c := range r.p.Code {
		if !r.live[k] || r.known.alike[k] {
			continue
		}
		if lines += functionLines(c); c.Op == Load {
			loaded += max(c.Type.Size()/4, 1)
		}
	}
	elements := min(rowElements, heldElements/max(loaded, 1), maxFunctionLines/max(lines, 1))
	slots := max(elements/r.lanes, 1)
	r.along = max(powerOfTwo((r.vectors+slots-1)/slots, mostThreads), powerOfTwo(r.vectors, warp))
	r.slots = (r.vectors + r.along - 1) / r.along
	if r.slots > slots {
		r.several, r.along, r.slots = true, longThreads, max(widest/r.lanes, 1)
	}
	r.writer.threads = max(r.along, threads)
	if r.folded() != nil {
		if r.held = r.lanes; r.writer.threads == threads {
			r.writer.beside = columnsBeside
		}
	}
	r.aside = r.writer.threads / r.along
}

// write writes the entry, and returns how many blocks it wants.
func (r *rower) write() (blocks int) {
	thread := r.get(b32, "mov.u32", "%tid.x")
	r.own = r.get(b32, "and.b32", thread, strconv.Itoa(r.along-1))
	r.turn = r.get(b32, "shr.u32", thread, strconv.Itoa(bits.TrailingZeros(uint(r.along))))
	shared := r.get(b32, "mov.u32", "held")
	r.here = r.get(b32, "mad.lo.u32", thread, "8", shared)
	r.first = r.get(b32, "mad.lo.u32", r.turn, strconv.Itoa(8*r.along), shared)
	if r.folded() != nil {
		for range r.slots {
			r.columns = append(r.columns, r.identities())
		}
	}
	from, step := r.get(b32, "mov.u32", "%ctaid.x"), r.get(b32, "mov.u32", "%nctaid.x")
	blocks = r.groups()
	r.count(r.toWord(from), strconv.Itoa(blocks), r.toWord(step), func(b string) {
		r.block(r.get(r.word, r.op("mad.lo.u"), b, strconv.Itoa(r.aside), r.toWord(r.turn)))
	})
	if r.columns != nil {
		r.storeColumns()
	}
	return blocks
}

// block writes what the threads of a row do. Threads without a row do what the last row's threads
// do, except to store: all threads of a block meet at barriers.
func (r *rower) block(row string) {
	exists := ""
	if r.aside > 1 {
		exists = r.get(pred, r.op("setp.lt.u"), row, strconv.Itoa(r.outputs))
		row = r.get(r.word, r.op("min.u"), row, strconv.Itoa(r.outputs-1))
	}
	r.at = r.place(nil, r.kept, row)
	for _, strides := range r.l.all() {
		r.offset(strides, r.at) // once, not in every slot
	}
	r.alike, r.only = make([][]string, len(r.p.Code)), nil
	r.prefetch()
	for depth := 0; ; depth++ {
		var folds []Value
		for k, c := range r.p.Code {
			switch {
			case !r.live[k] || !r.known.alike[k]:
			case r.known.depth[k] == depth:
				r.value(k, nil) // before slots, which not all threads have
			case c.Op.FoldsRows() && r.known.depth[k] == depth+1:
				folds = append(folds, k)
			}
		}
		if folds == nil && depth == 0 {
			r.line("bar.sync 0;") // nobody stores for a row what others have yet to load
		}
		if folds == nil {
			break
		}
		r.fold(folds)
	}
	r.guarded(exists, r.finish)
}

// prefetch begins to bring late loads of the only turn into the L2 cache: no load passes a barrier,
// and registers are too few to hold them from the beginning.
func (r *rower) prefetch() {
	if r.several {
		return
	}
	r.each(func(s *slot) {
		for k, c := range r.p.Code {
			if c.Op == Load && r.late[k] {
				from := r.inputs[c.Args[0]]
				r.line("prefetch.global.L2 [%s];", r.address(from, r.p.Inputs[c.Args[0]].DType,
					r.l.inputs[c.Args[0]], s.at))
			}
		}
	})
}

// guarded writes code that runs where a predicate holds.
func (r *rower) guarded(exists string, body func()) {
	if exists == "" {
		body()
		return
	}
	skip := r.label()
	r.line("@!%s bra %s;", exists, skip)
	body()
	r.line("%s:", skip)
}

// each writes code for every slot of the thread.
func (r *rower) each(body func(s *slot)) {
	turn := r.along * r.slots
	whole := 0
	if r.several {
		whole = r.vectors / turn
		r.count("0", strconv.Itoa(whole), "1", func(i string) {
			first := r.get(r.word, r.op("mad.lo.u"), i, strconv.Itoa(turn), r.toWord(r.own))
			for k := range r.slots {
				body(r.slot(first, k*r.along, false))
			}
		})
	}
	slots := r.only
	if slots == nil {
		first := r.get(r.word, r.op("add.u"), r.toWord(r.own), strconv.Itoa(whole*turn))
		for k := 0; whole*turn+k*r.along < r.vectors; k++ {
			slots = append(slots, r.slot(first, k*r.along, whole*turn+(k+1)*r.along > r.vectors))
		}
		if !r.several {
			r.only = slots
		}
	}
	for _, s := range slots {
		r.guarded(s.exists, func() { body(s) })
	}
}

// slot writes the place of a vector, which the row may not have.
func (r *rower) slot(first string, behind int, partly bool) *slot {
	s := &slot{values: make([][]string, len(r.p.Code))}
	index := r.get(r.word, r.op("add.u"), first, strconv.Itoa(behind))
	if partly {
		s.exists = r.get(pred, r.op("setp.lt.u"), index, strconv.Itoa(r.vectors))
	}
	s.at = r.place(r.at, []int{len(r.l.shape) - 1}, index)
	return s
}

// value returns the registers of a value in a slot, and writes its computation if that is new.
func (r *rower) value(k Value, s *slot) []string {
	c, at, values := r.p.Code[k], r.at, r.alike
	if !r.known.alike[k] {
		at, values = s.at, s.values
	}
	if values[k] != nil {
		return values[k]
	}
	switch c.Op {
	case Load:
		values[k] = r.load(r.inputs[c.Args[0]], r.p.Inputs[c.Args[0]].DType,
			r.l.inputs[c.Args[0]], at)
	case Const:
		values[k] = []string{r.constant(c)}
	case Index:
		values[k] = r.indexValue(r.l.indices[c.Args[0]], at)
	default:
		for _, x := range c.Args[:c.Op.Operands()] {
			values[x] = r.value(x, s)
		}
		values[k] = r.compute(c, values)
	}
	return values[k]
}

// fold writes folds whose operands are known, and makes their results known to all threads of the
// row.
func (r *rower) fold(folds []Value) {
	var sums [][]string
	for _, k := range folds {
		c := r.p.Code[k]
		lanes := make([]string, r.lanes)
		for v := range lanes {
			lanes[v] = r.get(classOf(c.Type), "mov."+typeName(c.Type),
				identity(c.Op.folds(), c.Type))
		}
		sums = append(sums, lanes)
	}
	r.each(func(s *slot) {
		for i, k := range folds {
			c := r.p.Code[k]
			x := r.value(c.Args[0], s)
			for v, sum := range sums[i] {
				r.line("mov.%s %s, %s;", typeName(c.Type), sum, r.combine(c.Op.folds(), c.Type, sum,
					x[min(v, len(x)-1)]))
			}
		}
	})
	for i, k := range folds {
		c := r.p.Code[k]
		out := Output{Operand: Operand{DType: c.Type}, Op: c.Op.folds()}
		r.alike[k] = []string{r.tree(out, r.foldLanes(out, sums[i])[0])}
	}
}

// tree folds what the threads of a row hold, by halves, and returns the result to all of them.
// Warps meet in shared memory, where each reads the others' elements, and goes on by itself.
func (r *rower) tree(out Output, x string) string {
	t := Type(out.DType)
	if r.along > warp {
		r.line("st.shared.%s [%s+0], %s;", typeName(t), r.here, x)
		r.line("bar.sync 0;")
		lane := r.get(b32, "and.b32", r.own, strconv.Itoa(warp-1))
		from := r.get(b32, "mad.lo.u32", lane, "8", r.first)
		all := make([]string, r.along/warp)
		for k := range all {
			all[k] = r.get(classOf(t), "ld.shared."+typeName(t), "["+from+"+"+strconv.Itoa(
				8*warp*k)+"]")
		}
		x = r.foldLanes(out, all)[0]
		r.line("bar.sync 0;") // shared memory is used again
	}
	width := min(r.along, warp)
	for half := width / 2; half > 0; half /= 2 {
		x = r.combine(out.Op, t, x, r.shuffle(t, "bfly", x, half, width))
	}
	if width > 1 { // zeros of the others may have another sign
		x = r.shuffle(t, "idx", x, 0, width)
	}
	return x
}

// shuffle returns the x of another thread of the warp, among those of a width: with "bfly" other is
// the bit by which its number differs, with "idx" other is its number.
func (r *rower) shuffle(t backend.DType, mode, x string, other, width int) string {
	get := func(word string) string {
		return r.get(b32, "shfl.sync."+mode+".b32", word, strconv.Itoa(other),
			strconv.Itoa((warp-width)<<8|(warp-1)), "-1")
	}
	if t.Size() == 4 {
		return r.get(classOf(t), "mov.b32", get(r.get(b32, "mov.b32", x)))
	}
	words := r.regs(b32, 2)
	r.line("mov.b64 %s, %s;", vectorOf(words), x)
	return r.get(classOf(t), "mov.b64", vectorOf([]string{get(words[0]), get(words[1])}))
}

// finish writes the stores of all outputs.
func (r *rower) finish() {
	var rows, elements []int
	for k, out := range r.p.Outputs {
		if strides := r.l.outputs[k]; out.Folded {
			continue
		} else if r.known.alike[out.Value] && strides[len(strides)-1] == 0 {
			rows = append(rows, k)
		} else {
			elements = append(elements, k)
		}
	}
	if turn := 0; elements != nil || r.columns != nil {
		r.each(func(s *slot) {
			var values [][]string
			// all before the first is stored: it may be the memory of an input, see InPlace
			for _, k := range elements {
				values = append(values, r.value(r.p.Outputs[k].Value, s))
			}
			if r.columns != nil {
				r.foldColumns(r.columns[turn], s)
				turn++
			}
			for i, k := range elements {
				r.writer.store(r.writer.outputs[k], r.p.Outputs[k].DType, r.l.outputs[k], values[i],
					s.at)
			}
		})
	}
	if rows != nil {
		r.guarded(r.get(pred, "setp.eq.u32", r.own, "0"), func() {
			for _, k := range rows {
				out := r.p.Outputs[k]
				r.writer.store(r.writer.outputs[k], out.DType, r.l.outputs[k], r.alike[out.Value],
					r.at)
			}
		})
	}
}

// foldColumns folds the row's elements of a slot into those of the rows before.
func (r *rower) foldColumns(columns [][]string, s *slot) {
	for k, out := range r.folded() {
		t, x := Type(out.DType), r.value(out.Value, s)
		for v, sum := range columns[k] {
			r.line("mov.%s %s, %s;", typeName(t), sum,
				r.combine(out.Op, t, sum, x[min(v, len(x)-1)]))
		}
	}
}

// storeColumns folds what the threads of a column have, in their order, and stores it as a
// segment's result.
func (r *rower) storeColumns() {
	first := r.get(pred, "setp.eq.u32", r.turn, "0")
	segment := r.toWord(r.get(b32, "mov.u32", "%ctaid.x"))
	for i, sums := range r.columns {
		for k, out := range r.folded() {
			name, c := typeName(Type(out.DType)), classOf(Type(out.DType))
			at := func(v, row int) string {
				return "[" + r.here + "+" + strconv.Itoa(8*(v*r.writer.threads+row*r.along)) + "]"
			}
			for v, sum := range sums[k] {
				r.line("st.shared.%s %s, %s;", name, at(v, 0), sum)
			}
			r.line("bar.sync 0;")
			r.guarded(first, func() {
				for v, sum := range sums[k] {
					for row := 1; row < r.aside; row++ {
						other := r.get(c, "ld.shared."+name, at(v, row))
						r.line("mov.%s %s, %s;", name, sum, r.combine(out.Op, Type(out.DType), sum,
							other))
					}
				}
				vector := r.get(r.word, r.op("add.u"), r.toWord(r.own), strconv.Itoa(i*r.along))
				r.guarded(r.get(pred, r.op("setp.lt.u"), vector, strconv.Itoa(r.vectors)), func() {
					r.across.storePartial(r.across.partial[k], Type(out.DType), sums[k], vector,
						segment)
				})
			})
			r.line("bar.sync 0;")
		}
	}
}
