package fuse

import (
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// Kernel is a program as PTX, with its launches.
type Kernel struct {
	Text     string   // a module
	Launches []Launch // in order
	Scratch  int      // bytes
}

// Launch is one launch of an entry of a Kernel. An entry takes the addresses of the outputs, of
// the inputs, and of the scratch, in 64 bits each: all of them, or those whose numbers are in
// Params.
type Launch struct {
	Entry           string
	Blocks, Threads int // one-dimensional
	Params          []int
}

// threads is the number of threads of each block.
const threads = 256

// maxBlocks is the largest grid; threads go round if that is too few.
const maxBlocks = 1 << 16

// How many neighbouring elements a thread computes at once, at most: 16 bytes of F32, or of 16-bit
// floats where nothing wider is read or written. Four is also how many numbers Philox draws.
const (
	widest     = 4
	widestHalf = 8
)

// Alignment is what addresses of operands must be multiples of, in bytes, for kernels with vectors.
const Alignment = 16

// PTX writes a program as a CUDA kernel for devices of a compute capability, such as 80 for 8.0,
// and newer: from [Ampere] on it has instructions that round to BF16. With vectors, a thread loads
// and stores up to 16 bytes at once, and the address of every operand must be a multiple of
// [Alignment]; without, of the size of its elements.
//
// Threads go over the loop in a stride of the grid, or, where operands are transposed to each
// other, blocks go over tiles of it. To fold, a block has 256 threads: if the innermost axis is
// folded, up to 256 of them share the elements of one output, else up to 32 stand side by side and
// the others share the folded elements. Each thread folds its elements in order, vectors lane by
// lane and then the lanes by halves, and the threads' results are folded by halves in shared
// memory. A long fold with few outputs is cut into segments, whose results a second launch folds in
// the same way. All of this depends only on the program and vectors.
//
// To fold rows, a power of two of threads has each row: a warp or fewer if the row is short, a
// block of up to 1,024 if it is long. They fold like the threads of other folds, and all get the
// result. What a thread has loaded and computed stays in registers, at most [rowElements] elements
// of an operand. Longer rows, for F32 of more than 16,384 elements of one or two operands, are
// loaded again for each fold that needs the one before, most often from a cache, since a block
// works on one row at a time. If outputs are also folded across rows, there are up to 396 blocks: a
// thread folds its elements of its rows in order, then the threads of a column follow in their
// order, and a second launch folds the blocks' results. On an H100, a softmax of rows of 512 or
// 4,096 elements of F32 and a layer norm of 1,024, or its gradient, move 2.9 to 3.0 TB/s, as a copy
// does; a softmax of 4,096 elements of BF16 moves 2.0, bound by its arithmetic.
func PTX(p *Program, vectors bool, capability int) (Kernel, error) {
	if err := p.Check(); err != nil {
		return Kernel{}, err
	}
	l := layoutOf(p)
	folds := false
	for _, out := range p.Outputs {
		folds = folds || out.Folded
	}
	m := &module{ampere: capability >= Ampere}
	if l.rows {
		m.rowLoop(p, l, vectors)
	} else if folds {
		m.fold(p, l, vectors)
	} else {
		m.loop(p, l, vectors)
	}
	return m.kernel()
}

func (m *module) kernel() (Kernel, error) {
	return Kernel{Text: m.header() + strings.Join(m.entries, ""), Launches: m.launches,
		Scratch: m.scratch}, m.err
}

// Ampere is the first compute capability with instructions that round to BF16, and whose minimum of
// a NaN is a NaN.
const Ampere = 80

// header is for drivers since CUDA 9 and devices since Volta, or since CUDA 11 and Ampere.
func (m *module) header() string {
	version, target := "6.0", "sm_70"
	if m.ampere {
		version, target = "7.0", "sm_80"
	}
	return ".version " + version + "\n.target " + target + "\n.address_size 64\n"
}

// module is a kernel in the making.
type module struct {
	ampere   bool
	entries  []string
	launches []Launch
	scratch  int
	err      error
}

// add adds an entry and its launch.
func (m *module) add(w *writer, blocks int) {
	m.entries = append(m.entries, w.entry())
	m.launches = append(m.launches, Launch{Entry: w.name, Blocks: min(max(blocks, 1), maxBlocks),
		Threads: w.threads})
	if m.err == nil {
		m.err = w.err
	}
}

// loop adds a kernel without folds.
func (m *module) loop(p *Program, l *layout, vectors bool) {
	w := newWriter("loop", p, l, m.ampere)
	if vectors {
		w.lanes = w.lanesOf(len(l.shape) == 1)
	}
	if k := w.crossing(); k >= 0 {
		m.add(w, w.tiles(k))
		return
	}
	all, _ := l.size()
	turns := all / w.lanes
	axes := make([]int, len(l.shape))
	for k := range axes {
		axes[k] = k
	}
	w.each(turns, func(i string) { w.element(w.place(nil, axes, i)) })
	if whole := turns * w.lanes; whole < all { // only loops of one axis have a rest
		w.lanes = 1
		w.each(all-whole, func(i string) {
			w.element(w.place(nil, axes, w.get(w.word, w.op("add.u"), i, strconv.Itoa(whole))))
		})
	}
	m.add(w, (turns+threads-1)/threads)
}

// each writes a loop over 0 to n by the threads of the grid.
func (w *writer) each(n int, body func(i string)) {
	first := w.get(b32, "mov.u32", "%ctaid.x")
	first = w.get(b32, "mad.lo.u32", first, strconv.Itoa(threads), w.get(b32, "mov.u32", "%tid.x"))
	step := w.get(b32, "mul.lo.u32", w.get(b32, "mov.u32", "%nctaid.x"), strconv.Itoa(threads))
	w.count(w.toWord(first), strconv.Itoa(n), w.toWord(step), body)
}

// count writes: for i := first; i < end; i += step { body(i) }
func (w *writer) count(first, end, step string, body func(i string)) {
	i := w.get(w.word, w.op("mov.u"), first)
	top, out := w.label(), w.label()
	w.line("%s:", top)
	w.line("@%s bra %s;", w.get(pred, w.op("setp.ge.u"), i, end), out)
	body(i)
	w.line("%s %s, %s, %s;", w.op("add.u"), i, i, step)
	w.line("bra.uni %s;", top)
	w.line("%s:", out)
}

// element writes the values of the elements at a place, and stores them.
func (w *writer) element(at *coordinates) {
	values := w.values(at)
	for k, out := range w.p.Outputs {
		if !out.Folded {
			w.store(w.outputs[k], out.DType, w.l.outputs[k], values[out.Value], at)
		}
	}
}

// values writes the instructions: for each value the registers of its lanes, or one if all
// are the same.
func (w *writer) values(at *coordinates) [][]string {
	values := make([][]string, len(w.p.Code))
	for k, c := range w.p.Code {
		switch c.Op {
		case Load:
			values[k] = w.load(w.inputs[c.Args[0]], w.p.Inputs[c.Args[0]].DType,
				w.l.inputs[c.Args[0]], at)
		case Const:
			values[k] = []string{w.constant(c)}
		case Index:
			values[k] = w.indexValue(w.l.indices[c.Args[0]], at)
		default:
			values[k] = w.compute(c, values)
		}
	}
	return values
}

// compute writes an instruction for each lane.
func (w *writer) compute(c Instr, values [][]string) []string {
	lanes := 1
	for _, x := range c.Args[:c.Op.Operands()] {
		lanes = max(lanes, len(values[x]))
	}
	if c.Op == Uniform && w.quad(c, values) {
		return w.uniform(c.Type, []string{values[c.Args[0]][0], values[c.Args[1]][0],
			values[c.Args[2]][0], values[c.Args[3]][0]}, widest)
	}
	result := make([]string, lanes)
	for v := range result {
		var args []string
		for _, x := range c.Args[:c.Op.Operands()] {
			args = append(args, values[x][min(v, len(values[x])-1)])
		}
		result[v] = w.operation(c, args)
	}
	return result
}

// quad reports whether the lanes of a Uniform are the four words of one counter.
func (w *writer) quad(c Instr, values [][]string) bool {
	for _, x := range c.Args[:3] {
		if len(values[x]) > 1 {
			return false
		}
	}
	element := w.p.Code[c.Args[3]]
	if element.Op != Index || w.lanes != widest {
		return false
	}
	strides := w.l.indices[element.Args[0]]
	last := len(strides) - 1
	for _, s := range strides[:last] {
		if s%widest != 0 {
			return false
		}
	}
	return strides[last] == 1
}

// lanesOf returns how many neighbouring elements a thread computes at once, with a rest of the
// innermost axis or without.
func (w *writer) lanesOf(rest bool) int {
	lines := 0
	for _, c := range w.p.Code {
		lines += functionLines(c)
	}
	inner := w.l.shape[len(w.l.shape)-1]
	for lanes := w.most(); lanes > 1; lanes /= 2 {
		if (inner%lanes == 0 || rest && inner >= lanes) && lines*lanes <= maxFunctionLines {
			return lanes
		}
	}
	return 1
}

// most returns the largest number of lanes. Operands that repeat, such as a bias, and folded ones
// do not count: they are moved only once.
func (w *writer) most() int {
	halves := false
	wide := func(o Operand, strides []int) bool {
		halves = halves || o.DType.Size() == 2
		return o.DType.Size() > 2 && !slices.Contains(strides, 0)
	}
	for k, in := range w.p.Inputs {
		if wide(in, w.l.inputs[k]) {
			return widest
		}
	}
	for k, out := range w.p.Outputs {
		if wide(out.Operand, w.l.outputs[k]) {
			return widest
		}
	}
	for _, c := range w.p.Code {
		if c.Op == Uniform {
			return widest
		}
	}
	if halves {
		return widestHalf
	}
	return widest
}

// maxFunctionLines is how much of a kernel may be elementary functions: the driver takes too long
// to compile more.
const maxFunctionLines = 1200

// typeName is what PTX calls the types of values.
func typeName(t backend.DType) string {
	return map[backend.DType]string{backend.F32: "f32", backend.F64: "f64", backend.I32: "s32",
		backend.I64: "s64"}[t]
}
