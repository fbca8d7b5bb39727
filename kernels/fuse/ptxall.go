package fuse

import (
	"fmt"
	"math/bits"
	"slices"
	"strconv"

	"github.com/euryale-ml/euryale/backend"
)

// Joiner is a Queue that runs programs at once, each on its own operands: the updates of a model's parameters,
// many of which take less time than a launch.
type Joiner interface {
	Queue
	// FuseAll makes programs that are [Program.Alike] ready to run. Run takes the outputs of all, one program behind
	// the other, and so the inputs. Numbers, which are inputs whose strides are 0, are those of the first program for all.
	FuseAll(all []*Program) (Loop, error)
}

// Alike reports whether two programs are the same loop along one axis, of any lengths, without folds and indices.
func (p *Program) Alike(q *Program) bool {
	one := func(p *Program) bool {
		return len(p.Shape) == 1 && p.Reduced == nil && p.Indices == nil && rowsOf(p) == nil
	}
	operand := func(a, b Operand) bool { return a.DType == b.DType && slices.Equal(a.Strides, b.Strides) }
	return one(p) && one(q) && slices.Equal(p.Code, q.Code) && slices.EqualFunc(p.Inputs, q.Inputs, operand) &&
		slices.EqualFunc(p.Outputs, q.Outputs, func(a, b Output) bool {
			return a.Value == b.Value && !a.Folded && !b.Folded && operand(a.Operand, b.Operand)
		})
}

// maxParams is how many addresses the parameters of a kernel hold, in drivers before CUDA 12.
const maxParams = 4096 / 8

// blockTurns is how many elements, or vectors, a thread of a block computes for one program.
const blockTurns = 4

// PTXAll writes a kernel for programs that are [Program.Alike]: see [Joiner]. A block finds its program by its number, in
// code that branches, so that nothing but the operands' addresses is given to a launch. A launch has as many programs as
// its parameters can name.
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
			return Kernel{}, fmt.Errorf("%w: programs that run at once differ in more than their length:\n%v%v", backend.ErrArgument, all[0], p)
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
	most := (maxParams - numbers) / max(len(longest.Outputs)+len(longest.Inputs)-numbers, 1)
	for from := 0; from < len(all); from += most {
		m.several(all, longest, from, min(from+most, len(all)), vectors)
	}
	return m.kernel()
}

// joined writes the entry of several programs.
type joined struct {
	*writer
	params []int    // of the entry, by their numbers among all operands
	first  []int    // the first block of each program
	n      []int    // the length of each
	own    [][]int  // parameters of each: addresses of what is not a number
	bases  []string // registers for these addresses
	length string   // the program's, in the thread
	block  string   // the number of the block among the program's
}

// several adds the entry of programs from to end.
func (m *module) several(all []*Program, longest *Program, from, end int, vectors bool) {
	j := &joined{writer: newWriter(fmt.Sprint("all", len(m.entries)), longest, layoutOf(longest), m.ampere)}
	if vectors {
		j.lanes = j.lanesOf(true)
	}
	blocks := 0
	for _, p := range all[from:end] {
		j.first, j.n = append(j.first, blocks), append(j.n, p.Shape[0])
		blocks += max((p.Shape[0]/j.lanes+threads*blockTurns-1)/(threads*blockTurns), 1)
	}
	j.operands(len(all), from, end)
	j.writer.params = len(j.params)
	j.length, j.block = j.reg(j.word), j.reg(b32)
	j.line("mov.u32 %s, %%ctaid.x;", j.block)
	found := j.label()
	j.find(0, end-from, found)
	j.line("%s:", found)
	j.elements()
	m.entries = append(m.entries, j.entry())
	m.launches = append(m.launches, Launch{Entry: j.name, Blocks: blocks, Threads: threads, Params: j.params})
	if m.err == nil {
		m.err = j.err
	}
}

// operands numbers the parameters: numbers first, then those of each program.
func (j *joined) operands(programs, from, end int) {
	param := func(number int) int {
		j.params = append(j.params, number)
		return len(j.params) - 1
	}
	outputs, inputs := len(j.p.Outputs), len(j.p.Inputs)
	for k, in := range j.p.Inputs {
		if in.Strides[0] == 0 {
			j.inputs[k] = memory{param: param(programs*outputs + k)}
		} else {
			j.inputs[k] = memory{base: j.base()}
		}
	}
	for k := range j.p.Outputs {
		j.outputs[k] = memory{base: j.base()}
	}
	for i := from; i < end; i++ {
		var own []int
		for k, in := range j.p.Inputs {
			if in.Strides[0] != 0 {
				own = append(own, param(programs*outputs+i*inputs+k))
			}
		}
		for k := range j.p.Outputs {
			own = append(own, param(i*outputs+k))
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
		j.line("@%s bra %s;", j.get(pred, "setp.ge.u32", j.block, strconv.Itoa(j.first[middle])), right)
		j.find(lo, middle, found)
		j.line("%s:", right)
		j.find(middle, hi, found)
		return
	}
	j.line("%s %s, %d;", j.op("mov.u"), j.length, j.n[lo])
	j.line("sub.u32 %s, %s, %d;", j.block, j.block, j.first[lo])
	for k, param := range j.own[lo] {
		j.line("ld.param.u64 %s, [%s];", j.bases[k], j.param(param))
		j.line("cvta.to.global.u64 %s, %s;", j.bases[k], j.bases[k])
	}
	j.line("bra.uni %s;", found)
}

// elements writes the loop of a block over its part of the program's elements, and the rest of these, which the first
// block has.
func (j *joined) elements() {
	thread := j.toWord(j.get(b32, "mov.u32", "%tid.x"))
	share, width := threads*blockTurns, bits.TrailingZeros(uint(j.lanes))
	turns := j.get(j.word, j.op("shr.u"), j.length, strconv.Itoa(width))
	begin := j.get(j.word, j.op("mul.lo.u"), j.toWord(j.block), strconv.Itoa(share))
	end := j.get(j.word, j.op("min.u"), turns, j.get(j.word, j.op("add.u"), begin, strconv.Itoa(share)))
	j.count(j.get(j.word, j.op("add.u"), begin, thread), end, strconv.Itoa(threads), func(i string) { j.element(j.place(nil, []int{0}, i)) })
	if j.lanes == 1 {
		return
	}
	i := j.get(j.word, j.op("mad.lo.u"), turns, strconv.Itoa(j.lanes), thread)
	rest := j.get(pred, "and.pred", j.get(pred, j.op("setp.lt.u"), i, j.length), j.get(pred, "setp.eq.u32", j.block, "0"))
	skip := j.label()
	j.line("@!%s bra %s;", rest, skip)
	j.lanes = 1
	j.element(j.place(nil, []int{0}, i))
	j.line("%s:", skip)
}
