package main

import (
	"fmt"
	"slices"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// few is the most rows of A for which B is read where it lies: what reads it waits for memory.
const few = 4

// half is a type of 16 bits.
type half struct {
	name  string
	widen func(from Mem, to reg.Physical)
	// split loads two vectors at a time, of even elements and of odd ones, by fewer instructions.
	// The last register has the bits of an odd one, and a 0 for each bit of an even one.
	split bool
}

var halves = []half{
	{"F16", func(from Mem, to reg.Physical) { VCVTPH2PS(from, to) }, false},
	{"BF16", func(from Mem, to reg.Physical) {
		VPMOVZXWD(from, to)
		VPSLLD(Imm(16), to, to)
	}, true},
}

// source is how elements are loaded, some vectors at a time, in an order that the source chooses.
type source struct {
	name          string
	size, vectors int // of an element, in bytes, and of a load
	load          func(from Mem, to []reg.Physical)
}

func (h half) source(in instructions) source {
	if !h.split {
		return source{h.name, 2, 1, func(from Mem, to []reg.Physical) { h.widen(from, to[0]) }}
	}
	return source{h.name, 2, 2, func(from Mem, to []reg.Physical) {
		VMOVUPS(from, to[1])
		VPSLLD(Imm(16), to[1], to[0])
		VANDPS(in.last(), to[1], to[1])
	}}
}

// prepare writes the last register.
func (h half) prepare(in instructions) {
	if h.split {
		mask, x := GP32(), in.last().(reg.VecPhysical)
		MOVL(U32(0xffff0000), mask)
		VMOVD(mask, in.vector(0).(reg.VecPhysical).AsX())
		VPBROADCASTD(in.vector(0).(reg.VecPhysical).AsX(), x)
	}
}

// writeWidened writes tiles of few rows and a B of 16 bits.
func writeWidened(in instructions, h half, shapes []shape) {
	name := "widened" + h.name + in.level()
	TEXT(name, attr.NOSPLIT, "func(a *float32, b *byte, c *float32, aRow, aStep, bStep, cPitch, "+
		"k, rows, columns int, alpha, beta float32)")
	Pragma("noescape")
	Doc(name + " is a tile of few rows and whole vectors of columns.")
	h.prepare(in)
	t := tile{instructions: wholeVectors{in}, half: &h}
	t.writeShapes(load("columns"), slices.DeleteFunc(slices.Clone(shapes), func(s shape) bool {
		return s.rows > few
	}))
}

// split reports whether B is loaded as even and odd elements.
func (t tile) split(s shape) bool { return t.half != nil && t.half.split && s.vectors%2 == 0 }

// mergeAll brings the columns of sums into order.
func (t tile) mergeAll(sums, free []reg.Physical) {
	for j := 0; j < len(sums); j += 2 {
		t.merge(sums[j], sums[j+1], free[0], free[1])
	}
}

// wholeVectors has no vector of fewer columns than it has elements.
type wholeVectors struct{ instructions }

func (v wholeVectors) loadColumns(from Mem, to reg.Physical, _ bool) {
	v.instructions.loadColumns(from, to, false)
}

func (v wholeVectors) storeColumns(from reg.Physical, to Mem, _ bool) {
	v.instructions.storeColumns(from, to, false)
}

// writeDots writes the dot products of few rows of A and some columns of B, both of one type, in
// which neighbours are next to each other.
func writeDots(in instructions, of source) {
	name := "dots" + of.name + in.level()
	TEXT(name, attr.NOSPLIT, "func(a, b, sums *byte, aRow, bColumn, k, rows, columns int)")
	Pragma("noescape")
	Doc(fmt.Sprintf("%s sums products of k elements, a multiple of %d and not 0.", name,
		of.vectors*in.width()/in.floats().size))
	for _, h := range halves {
		if h.name == of.name {
			h.prepare(in)
		}
	}
	d := dots{
		instructions: in, source: of, a: load("a"), b: load("b"), aRow: load("aRow"), aRow3: GP64(),
		bColumn: load("bColumn"), bColumn3: GP64(), k: load("k"),
	}
	LEAQ(Mem{Base: d.aRow, Index: d.aRow, Scale: 2}, d.aRow3)
	LEAQ(Mem{Base: d.bColumn, Index: d.bColumn, Scale: 2}, d.bColumn3)
	rows, columns := load("rows"), load("columns")
	for n := few; n > 0; n-- {
		for _, most := range []int{in.dotColumns(n), 1} {
			next := fmt.Sprintf("after%dx%d", n, most)
			CMPQ(rows, U32(n))
			JNE(LabelRef(next))
			CMPQ(columns, U32(most))
			JNE(LabelRef(next))
			d.write(n, most)
			Label(next)
		}
	}
	RET()
}

// dots is the function that is being written, and the registers with its arguments.
type dots struct {
	instructions
	source
	a, aRow, aRow3       reg.Register
	b, bColumn, bColumn3 reg.Register
	k                    reg.Register
}

// write writes the products of some rows and columns. The first registers have what is loaded of a
// row, the next ones what is loaded of each column, and the others the sums.
func (d dots) write(rows, columns int) {
	all := make([]reg.Physical, d.vectors*(1+columns)+rows*columns)
	for i := range all {
		all[i] = d.vector(i)
	}
	left, right, sums := all[:d.vectors], all[d.vectors:], all[d.vectors*(1+columns):]
	for _, sum := range sums {
		d.zero(sum)
	}
	as, aMoved := rowsFrom(d.a, d.aRow, d.aRow3, rows)
	bs, bMoved := rowsFrom(d.b, d.bColumn, d.bColumn3, columns)
	loop, elements := fmt.Sprintf("step%dx%d", rows, columns), d.vectors*d.width()/d.floats().size
	Label(loop)
	for j, b := range bs {
		d.load(b, right[j*d.vectors:])
	}
	for i, a := range as {
		d.load(a, left)
		for j := range d.vectors * columns {
			d.floats().fma(left[j%d.vectors], right[j], sums[i*columns+j/d.vectors])
		}
	}
	for _, moved := range slices.Concat(aMoved, bMoved) {
		ADDQ(U32(elements*d.size), moved)
	}
	SUBQ(U32(elements), d.k)
	JNZ(LabelRef(loop))
	to := load("sums")
	for i, sum := range sums {
		d.storeSum(sum.(reg.VecPhysical), Mem{Base: to, Disp: i * d.floats().size})
	}
	VZEROUPPER()
	RET()
}

// storeSum writes the sum of a vector's elements. It uses the first two registers, since half of
// the instructions know no register behind the 16th.
func (d dots) storeSum(x reg.VecPhysical, to Mem) {
	add, pairs, store := VADDPS, VHADDPS, VMOVSS
	if d.floats().size == 8 {
		add, pairs, store = VADDPD, VHADDPD, VMOVSD
	}
	if half := d.vector(1).(reg.VecPhysical); d.width() == 64 {
		VEXTRACTF64X4(U8(1), x, half.AsY())
		add(x.AsY(), half.AsY(), half.AsY())
		x = half
	}
	sum := d.vector(0).(reg.VecPhysical).AsX()
	VEXTRACTF128(U8(1), x.AsY(), sum)
	add(x.AsX(), sum, sum)
	for n := 16 / d.floats().size; n > 1; n /= 2 {
		pairs(sum, sum, sum)
	}
	store(sum, to)
}
