// Command gemm writes the tiles of matrix multiplications, and what packs their operands. A tile is
// C = alpha*A*B + beta*C for a few rows and columns of C, whose sums stay in registers.
//
// A step of the loop over k loads a row of B as vectors, and broadcasts an element of each row of
// A. Rows and columns of A are as far apart as the caller says, so that A and its transpose run
// alike. The largest tile of each version has 24 sums in 32 registers, or 12 in 16: more than the
// additions that are under way at a time, and few loads for each of them, as in BLIS (Van Zee and
// van de Geijn, ACM TOMS 41(3), 2015).
package main

import (
	"fmt"
	"slices"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// shape is a tile: rows by vectors.
type shape struct{ rows, vectors int }

// packed is how many vectors a row of a packed panel of B has.
const packed = 2

// The shapes of a version, the narrower ones of a height first. Of few rows there is one of more
// vectors than packed, for a B that is read once and where it lies: it reads more of a row of B at
// a time.
var (
	shapes512 = []shape{
		{12, 1}, {12, 2}, {8, 1}, {8, 2}, {4, 1}, {4, 2}, {4, 6}, {3, 1}, {3, 2}, {3, 6}, {2, 1},
		{2, 2}, {2, 8}, {1, 1}, {1, 2}, {1, 8},
	}
	shapes256 = []shape{{6, 1}, {6, 2}, {4, 1}, {4, 2}, {3, 1}, {3, 2}, {2, 1}, {2, 2}, {1, 1},
		{1, 2}, {1, 6}}
)

// line is the size of a cache line, in bytes.
const line = 64

// rowsAhead is how many rows of a B that is read once are on their way from memory.
const rowsAhead = 8

func main() {
	for _, p := range precisions {
		writeFloats(avx512{p}, shapes512)
	}
	for _, p := range precisions {
		v := avx2{p, maskTable(p)}
		writeFloats(v, shapes256)
		writeCopy(v)
		writeTranspose(p)
	}
	Generate()
}

// writeFloats writes the products of one type of floats, and of what is widened to it.
func writeFloats(in instructions, shapes []shape) {
	p := in.floats()
	writeTile(in, shapes)
	writeDots(in, source{p.name, p.size, 1, func(from Mem, to []reg.Physical) {
		p.move(from, to[0])
	}})
	if p.size != 4 {
		return
	}
	for _, h := range halves {
		writeWidened(in, h, shapes)
		writeDots(in, h.source(in))
		if in.level() == "AVX2" {
			writeWiden(in, h)
		}
	}
}

// tile is the function that is being written, and the registers with its arguments.
type tile struct {
	instructions
	a, b reg.Register // go from k to k+1
	// bytes from a row of A to the next one and over three, and from k to k+1
	aRow, aRow3, aStep reg.Register
	bStep, ahead       reg.Register
	k                  reg.Register // steps left

	half *half // the type of B, or nil if that is as wide as the sums
}

// writeTile writes a function that has all shapes of a version.
func writeTile(in instructions, shapes []shape) {
	p := in.floats()
	name := "tile" + p.name + in.level()
	TEXT(name, attr.NOSPLIT, fmt.Sprintf("func(a, b, c *%[1]s, aRow, aStep, bStep, cPitch, k, "+
		"rows, columns int, alpha, beta %[1]s)", p.goType))
	Pragma("noescape")
	Doc(name + " is a tile of a product, see tile. It has the height of one of the shapes and at " +
		"most the width.")
	columns := load("columns")
	in.prepareMask(columns)
	tile{instructions: in}.writeShapes(columns, shapes)
}

// writeShapes writes the choice among shapes, and the shapes.
func (t tile) writeShapes(columns reg.Register, shapes []shape) {
	t.a, t.b, t.aRow, t.aRow3, t.aStep = load("a"), load("b"), load("aRow"), GP64(), load("aStep")
	t.bStep, t.ahead, t.k = load("bStep"), GP64(), load("k")
	rows := load("rows")
	LEAQ(Mem{Base: t.aRow, Index: t.aRow, Scale: 2}, t.aRow3)
	IMUL3Q(U32(rowsAhead), t.bStep, t.ahead)
	for i, s := range shapes {
		next := s.label("after")
		rest := i == len(shapes)-1
		if !rest {
			CMPQ(rows, U32(s.rows))
			JNE(LabelRef(next))
			CMPQ(columns, U32(s.vectors*t.width()/t.floats().size))
			JG(LabelRef(next))
		}
		t.write(s)
		if !rest {
			Label(next)
		}
	}
}

func load(name string) reg.Register { return Load(Param(name), GP64()) }

func (s shape) label(what string) string { return fmt.Sprintf("%s%dx%d", what, s.rows, s.vectors) }

// write writes one shape. Registers are the sums, the row of B, and the element of A.
func (t tile) write(s shape) {
	sums := make([][]reg.Physical, s.rows)
	for i := range sums {
		for j := range s.vectors {
			sums[i] = append(sums[i], t.vector(i*s.vectors+j))
			t.zero(sums[i][j])
		}
	}
	right := make([]reg.Physical, s.vectors)
	for j := range right {
		right[j] = t.vector(s.rows*s.vectors + j)
	}
	left := t.vector((s.rows + 1) * s.vectors)

	rows, moved := rowsFrom(t.a, t.aRow, t.aRow3, s.rows)
	TESTQ(t.k, t.k)
	JZ(LabelRef(s.label("finish")))
	Label(s.label("step"))
	t.loadB(s, right)
	for i, row := range rows {
		t.floats().broadcast(row, left)
		for j := range right {
			t.floats().fma(left, right[j], sums[i][j])
		}
	}
	for _, a := range moved {
		ADDQ(t.aStep, a)
	}
	ADDQ(t.bStep, t.b)
	DECQ(t.k)
	JNZ(LabelRef(s.label("step")))
	Label(s.label("finish"))
	if t.split(s) {
		for _, row := range sums {
			t.mergeAll(row, right)
		}
	}
	t.finish(s, sums, left, right[0])
	VZEROUPPER()
	RET()
}

// loadB loads a row of B.
func (t tile) loadB(s shape, to []reg.Physical) {
	size := t.floats().size
	if t.half != nil {
		size = 2
	}
	for j := range to {
		from := Mem{Base: t.b, Disp: j * t.width() / t.floats().size * size}
		switch {
		case t.half == nil:
			t.loadColumns(from, to[j], j == s.vectors-1)
		case !t.split(s):
			t.half.widen(from, to[j])
		case j%2 == 0:
			t.half.source(t).load(from, to[j:])
		}
		if s.vectors > packed && from.Disp%line == 0 {
			PREFETCHT0(from.Idx(t.ahead, 1))
		}
	}
}

// rowsFrom returns where n rows begin, of which the first is at base and the others are a distance
// from each other, and the pointers that this is said by. A pointer serves five rows: it, and those
// one, two, three and four distances from it.
func rowsFrom(base, distance, distance3 reg.Register, n int) (rows []Mem, pointers []reg.Register) {
	for i := range n {
		if i%5 == 0 {
			if i > 0 {
				before := base
				base = GP64()
				LEAQ(Mem{Base: before, Index: distance, Scale: 4}, base)
				ADDQ(distance, base)
			}
			pointers = append(pointers, base)
		}
		rows = append(rows, [...]Mem{
			{Base: base},
			{Base: base, Index: distance, Scale: 1},
			{Base: base, Index: distance, Scale: 2},
			{Base: base, Index: distance3, Scale: 1},
			{Base: base, Index: distance, Scale: 4},
		}[i%5])
	}
	return rows, pointers
}

// finish scales the sums, adds what C holds unless beta is 0, and writes them. It uses two more
// registers.
func (t tile) finish(s shape, sums [][]reg.Physical, factor, before reg.Physical) {
	p := t.floats()
	p.broadcast(paramMem("alpha"), factor)
	for _, sum := range slices.Concat(sums...) {
		p.mul(factor, sum, sum)
	}
	pitch, last := load("cPitch"), s.vectors-1
	bits := p.bits(paramMem("beta"))
	ADDQ(bits, bits) // without its sign
	JZ(LabelRef(s.label("store")))
	p.broadcast(paramMem("beta"), factor)
	c := load("c")
	for i := range sums {
		for j, sum := range sums[i] {
			t.loadColumns(Mem{Base: c, Disp: j * t.width()}, before, j == last)
			p.fma(before, factor, sum)
		}
		ADDQ(pitch, c)
	}
	Label(s.label("store"))
	c = load("c")
	for i := range sums {
		for j, sum := range sums[i] {
			t.storeColumns(sum, Mem{Base: c, Disp: j * t.width()}, j == last)
		}
		ADDQ(pitch, c)
	}
}

// paramMem is where an argument lies.
func paramMem(name string) Mem {
	at, err := Param(name).Resolve()
	if err != nil {
		panic(err)
	}
	return at.Addr
}
