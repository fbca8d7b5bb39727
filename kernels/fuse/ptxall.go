package fuse

import (
	"fmt"
	"math/bits"
	"slices"
	"strconv"

	"github.com/euryale-ml/euryale/backend"
)

// Joiner is a Queue that runs many programs at once, each on its own operands: the updates of a
// model's parameters, or the sums of the squares of their gradients, many of which take less time
// than a launch.
type Joiner interface {
	Queue
	// FuseAll makes programs that are [Program.Alike] ready to run. Run takes the outputs of all,
	// one program after the other, and likewise the inputs. Numbers, which are inputs whose strides
	// are 0, must be the same for all.
	FuseAll(all []*Program) (Loop, error)
}

// Alike reports whether two programs are the same loop along one axis, of any lengths, without
// indices. They store what they compute element by element, or fold it to one number, which is not
// a mean.
func (p *Program) Alike(q *Program) bool {
	one := func(p *Program) bool {
		return len(p.Shape) == 1 && p.Indices == nil && rowsOf(p) == nil &&
			(p.Reduced == nil || p.folds())
	}
	operand := func(a, b Operand) bool {
		return a.DType == b.DType && slices.Equal(a.Strides, b.Strides)
	}
	return one(p) && one(q) && slices.Equal(p.Reduced, q.Reduced) && slices.Equal(p.Code, q.Code) &&
		slices.EqualFunc(p.Inputs, q.Inputs, operand) &&
		slices.EqualFunc(p.Outputs, q.Outputs, func(a, b Output) bool {
			return a.Value == b.Value && a.Folded == p.folds() && b.Folded == a.Folded &&
				a.Op == b.Op && operand(a.Operand, b.Operand)
		})
}

// folds reports whether a program along one axis gives one number, which is not a mean.
func (p *Program) folds() bool {
	return p.reduces(0) && len(p.Outputs) == 1 && p.Outputs[0].Folded &&
		p.Outputs[0].Op != backend.Avg
}

// maxParams is how many addresses the parameters of a kernel hold, in drivers before CUDA 12.
const maxParams = 4096 / 8

// blockTurns is how many elements, or vectors, a thread of a block computes for one program. For
// folds it is [leastTurns].
const blockTurns = 4

// PTXAll writes kernels for programs that are [Program.Alike]: see [Joiner]. A block finds its
// program by the block's number, in code that branches, so a launch gets only the operands'
// addresses. A launch has as many programs as its parameters can name.
//
// To fold, a block folds its part of a program as a block of [PTX] folds rows. Another launch has a
// block for each program, which folds these results. The order depends only on the length of the
// program, the type and vectors.
func PTXAll(all []*Program, vectors bool, capability int) (Kernel, error) {
	if len(all) == 1 {
		return PTX(all[0], vectors, capability)
	}
	m := &module{ampere: capability >= Ampere}
	if len(all) == 0 {
		return Kernel{}, fmt.Errorf("%w: no programs", backend.ErrArgument)
	}
	longest := all[0]
	for _, p := range all {
		if err := p.Check(); err != nil {
			return Kernel{}, err
		}
		if !p.Alike(all[0]) {
			return Kernel{}, fmt.Errorf("%w: programs that run at once differ in more than their "+
				"length:\n%v%v", backend.ErrArgument, all[0], p)
		}
		if p.Shape[0] > longest.Shape[0] {
			longest = p
		}
	}
	numbers := 0
	for _, in := range longest.Inputs {
		if in.Strides[0] == 0 {
			numbers++
		}
	}
	most := (maxParams - numbers - 1) / max(len(longest.Outputs)+len(longest.Inputs)-numbers, 1)
	for from := 0; from < len(all); from += most {
		m.several(all, longest, from, min(from+most, len(all)), vectors)
	}
	return m.kernel()
}

// joined writes the entry of several programs.
type joined struct {
	*writer
	params []int      // of the entry, by their numbers among all operands and the scratch
	n      []int      // the length of each program
	share  int        // elements, or vectors, of a block
	first  []int      // the first block of each program, and behind them the number of blocks
	own    [][]memory // where what is not a number begins, for each
	bases  []string   // registers for these addresses
	length string     // the program's, in the thread
	block  string     // the number of the block among the program's
}

// several adds the entries of programs from to end.
func (m *module) several(all []*Program, longest *Program, from, end int, vectors bool) {
	var n []int
	var in, out [][]memory
	outputs, inputs := len(longest.Outputs), len(longest.Inputs)
	for i := from; i < end; i++ {
		n = append(n, all[i].Shape[0])
		in, out = append(in, params(len(all)*outputs+i*inputs, inputs)),
			append(out, params(i*outputs, outputs))
	}
	if !longest.folds() {
		m.join(longest, n, threads*blockTurns, vectors).write(m, in, out)
		return
	}
	part, fold := *longest, longest.Outputs[0]
	t := Type(fold.DType)
	part.Outputs = []Output{{Operand: Operand{t, []int{0}}, Value: fold.Value, Folded: true,
		Op: fold.Op}}
	parts := m.join(&part, n, threads*leastTurns, vectors)
	var held [][]memory
	for i := range n { // the lengths of what is left
		n[i] = parts.first[i+1] - parts.first[i]
		held = append(held, []memory{{param: len(all) * (outputs + inputs), offset: parts.first[i] *
			t.Size()}})
	}
	parts.write(m, in, held)
	m.scratch = max(m.scratch, parts.first[len(n)]*t.Size())
	whole := &Program{Shape: []int{slices.Max(n)}, Reduced: []bool{true}}
	whole.Fold(fold.Op, whole.Load(t, 1), fold.DType, 0)
	m.join(whole, n, whole.Shape[0], false).write(m, held, out)
}

// params returns where n operands begin, the first of which has a number among all.
func params(first, n int) []memory {
	list := make([]memory, n)
	for k := range list {
		list[k].param = first + k
	}
	return list
}

// join returns the entry of programs of lengths n, of which p is the longest.
func (m *module) join(p *Program, n []int, share int, vectors bool) *joined {
	j := &joined{writer: newWriter(fmt.Sprint("all", len(m.entries)), p, layoutOf(p), m.ampere),
		n: slices.Clone(n), share: share, first: []int{0}}
	if vectors {
		j.lanes = j.lanesOf(true)
	}
	for i, n := range n {
		j.first = append(j.first, j.first[i]+max((n/j.lanes+share-1)/share, 1))
	}
	return j
}

// write adds the entry to a module. The operands of each program begin at in and out.
func (j *joined) write(m *module, in, out [][]memory) {
	j.operands(in, out)
	j.writer.params = len(j.params)
	j.length, j.block = j.reg(j.word), j.reg(b32)
	j.line("mov.u32 %s, %%ctaid.x;", j.block)
	found := j.label()
	j.find(0, len(j.n), found)
	j.line("%s:", found)
	if j.p.folds() {
		j.fold()
	} else {
		j.elements(j.element)
	}
	m.entries = append(m.entries, j.entry())
	m.launches = append(m.launches, Launch{Entry: j.name, Blocks: j.first[len(j.n)],
		Threads: threads, Params: j.params})
	if m.err == nil {
		m.err = j.err
	}
}

// operands numbers the parameters: numbers first, then those of each program.
func (j *joined) operands(in, out [][]memory) {
	param := func(m memory) memory {
		at := slices.Index(j.params, m.param)
		if at < 0 {
			at, j.params = len(j.params), append(j.params, m.param)
		}
		return memory{param: at, offset: m.offset}
	}
	for k, of := range j.p.Inputs {
		if of.Strides[0] == 0 {
			j.inputs[k] = param(in[0][k])
		} else {
			j.inputs[k] = memory{base: j.base()}
		}
	}
	for k := range j.p.Outputs {
		j.outputs[k] = memory{base: j.base()}
	}
	for i := range j.n {
		var own []memory
		for k, of := range j.p.Inputs {
			if of.Strides[0] != 0 {
				own = append(own, param(in[i][k]))
			}
		}
		for k := range j.p.Outputs {
			own = append(own, param(out[i][k]))
		}
		j.own = append(j.own, own)
	}
}

// base returns a register for an address that differs from program to program.
func (j *joined) base() string {
	j.bases = append(j.bases, j.reg(b64))
	return j.bases[len(j.bases)-1]
}

// find writes a binary search for the program of the block, among those from lo to hi.
func (j *joined) find(lo, hi int, found string) {
	if hi-lo > 1 {
		middle, right := (lo+hi)/2, j.label()
		j.line("@%s bra %s;", j.get(pred, "setp.ge.u32", j.block, strconv.Itoa(j.first[middle])),
			right)
		j.find(lo, middle, found)
		j.line("%s:", right)
		j.find(middle, hi, found)
		return
	}
	j.line("%s %s, %d;", j.op("mov.u"), j.length, j.n[lo])
	j.line("sub.u32 %s, %s, %d;", j.block, j.block, j.first[lo])
	for k, m := range j.own[lo] {
		j.line("ld.param.u64 %s, [%s];", j.bases[k], j.param(m.param))
		j.line("cvta.to.global.u64 %s, %s;", j.bases[k], j.bases[k])
		if m.offset > 0 {
			j.line("add.s64 %s, %s, %d;", j.bases[k], j.bases[k], m.offset)
		}
	}
	j.line("bra.uni %s;", found)
}

// elements writes the loop of a block over its part of the program's elements, and the rest of
// these, which the first block has.
func (j *joined) elements(element func(at *coordinates)) {
	thread := j.toWord(j.get(b32, "mov.u32", "%tid.x"))
	width := bits.TrailingZeros(uint(j.lanes))
	turns := j.get(j.word, j.op("shr.u"), j.length, strconv.Itoa(width))
	begin := j.get(j.word, j.op("mul.lo.u"), j.toWord(j.block), strconv.Itoa(j.share))
	end := j.get(j.word, j.op("min.u"), turns, j.get(j.word, j.op("add.u"), begin,
		strconv.Itoa(j.share)))
	j.count(j.get(j.word, j.op("add.u"), begin, thread), end, strconv.Itoa(threads),
		func(i string) { element(j.place(nil, []int{0}, i)) })
	if j.lanes == 1 {
		return
	}
	i := j.get(j.word, j.op("mad.lo.u"), turns, strconv.Itoa(j.lanes), thread)
	rest := j.get(pred, "and.pred", j.get(pred, j.op("setp.lt.u"), i, j.length),
		j.get(pred, "setp.eq.u32", j.block, "0"))
	skip := j.label()
	j.line("@!%s bra %s;", rest, skip)
	j.lanes = 1
	element(j.place(nil, []int{0}, i))
	j.line("%s:", skip)
}

// fold writes the fold of a block's part of the program's elements. What it gives is as far in the
// output as the block is in the program.
func (j *joined) fold() {
	f := &folder{writer: j.writer, rows: true, along: threads}
	f.shared = true
	sums, out := f.identities(), j.p.Outputs[0]
	j.elements(func(at *coordinates) { f.turn(at, [][]string{sums[0][:j.lanes]}) })
	thread := j.get(b32, "mov.u32", "%tid.x")
	held := j.get(b32, "mad.lo.u32", thread, "8", j.get(b32, "mov.u32", "held"))
	sum := f.tree(out, f.foldLanes(out, sums[0])[0], held, thread)
	skip := j.label()
	j.line("@%s bra %s;", j.get(pred, "setp.ne.u32", thread, "0"), skip)
	at := &coordinates{axes: []int{0}, coords: []string{j.toWord(j.block)},
		offsets: map[string]string{}}
	j.store(j.outputs[0], out.DType, []int{1}, []string{sum}, at)
	j.line("%s:", skip)
}
