// Command sums generates the assembly of what collectives compute: reductions of any number of
// sources, casts between 16 and 32 bits, and scaling.
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

func main() {
	for _, l := range []level{avx2, avx512} {
		for _, t := range []element{f32, f64, f16{}, bf16Pairs{}, i32, i64, u8} {
			reduction(l, t)
		}
		for _, t := range []element{f16{}, bf16{}} {
			conversion(l, "widen"+t.name(), t, f32, false)
			conversion(l, "narrow"+t.name(), f32, t, false)
		}
		for _, t := range []element{f32, f64} {
			conversion(l, "scale"+t.name(), t, t, true)
		}
	}
	Generate()
}

// level is a set of instructions.
type level struct {
	name string
	bits int // of a vector
	// vectors is how many of them a turn of the main loop computes: the loads that are under way at
	// a time, since memory of another core takes long to arrive.
	vectors int
}

var (
	avx2   = level{"AVX2", 256, 4}
	avx512 = level{"AVX512", 512, 4}
)

func (l level) vector() reg.VecVirtual {
	if l.bits == 512 {
		return ZMM()
	}
	return YMM()
}

// masks says whether a vector can be loaded and stored in part. Without, what is left at the end is
// computed element by element, by the same instructions.
func (l level) masks() bool { return l.bits == 512 }

// shape is how much of a vector is loaded and stored.
type shape int

const (
	whole  shape = iota
	masked       // the elements in the mask
	single       // the first element
)

// slot is a vector's place in memory.
type slot struct {
	shape
	mask reg.Register
}

// cursor counts elements down, and the bytes that are behind it up.
type cursor struct {
	left reg.Register
	src  reg.Register // offset in the sources
	dst  reg.Register // offset in the destination, the same register if elements have the same size
}

func (c cursor) advance(elements, srcBytes, dstBytes int) {
	ADDQ(I32(int32(elements*srcBytes)), c.src)
	if c.dst != c.src {
		ADDQ(I32(int32(elements*dstBytes)), c.dst)
	}
	SUBQ(I32(int32(elements)), c.left)
}

// loops goes over all elements: several vectors at a time, then one, then what is left. body
// computes count vectors at the cursor.
func (l level) loops(name string, c cursor, lanes, srcBytes, dstBytes int,
	body func(p slot, count int)) {
	many, one, rest, done := name+"Many", name+"One", name+"Rest", name+"Done"
	Label(many)
	CMPQ(c.left, I32(int32(l.vectors*lanes)))
	JLT(LabelRef(one))
	body(slot{shape: whole}, l.vectors)
	c.advance(l.vectors*lanes, srcBytes, dstBytes)
	JMP(LabelRef(many))

	Label(one)
	CMPQ(c.left, I32(int32(lanes)))
	JLT(LabelRef(rest))
	body(slot{shape: whole}, 1)
	c.advance(lanes, srcBytes, dstBytes)
	JMP(LabelRef(one))

	Label(rest)
	TESTQ(c.left, c.left)
	JEQ(LabelRef(done))
	if l.masks() {
		bits, mask := GP64(), K()
		MOVQ(I64(-1), bits)
		BZHIQ(c.left, bits, bits)
		KMOVQ(bits, mask)
		body(slot{masked, mask}, 1)
	} else {
		body(slot{shape: single}, 1)
		c.advance(1, srcBytes, dstBytes)
		JMP(LabelRef(rest))
	}
	Label(done)
	VZEROUPPER()
	RET()
}

// The operations, numbered as in package simd.
var operations = []string{"Sum", "Avg", "Prod", "Min", "Max"}

// reduction is dst[i] = srcs[0][i] op srcs[1][i] op ..., in this order, so that of two NaNs the
// same one is kept everywhere.
func reduction(l level, t element) {
	TEXT("reduce"+t.name()+l.name, NOSPLIT, "func(op int, dst *byte, srcs **byte, sources, n int)")
	Pragma("noescape")
	t = t.prepare(l)
	op := Load(Param("op"), GP64())
	dst, srcs := Load(Param("dst"), GP64()), Load(Param("srcs"), GP64())
	sources := Load(Param("sources"), GP64())
	offset := GP64()
	XORQ(offset, offset)
	c := cursor{Load(Param("n"), GP64()), offset, offset}
	for i, name := range operations[1:] {
		if name != "Avg" || t.float() {
			CMPQ(op, Imm(uint64(i+1)))
			JEQ(LabelRef(name))
		}
	}
	for _, name := range operations {
		if name == "Avg" && !t.float() {
			continue
		}
		Label(name)
		o := newOperation(l, t, name, sources)
		lanes := t.lanes(l)
		l.loops(name, c, lanes, t.bytes(), t.bytes(), func(p slot, count int) {
			acc := make([][]reg.VecVirtual, count)
			source, next := GP64(), GP64()
			at := func(v int) Mem {
				return Mem{Base: source, Index: offset, Scale: 1, Disp: v * lanes * t.bytes()}
			}
			MOVQ(Mem{Base: srcs}, source)
			for v := range acc {
				acc[v] = t.load(l, p, at(v))
				for _, a := range acc[v] {
					o.begin(a)
				}
			}
			turn := fmt.Sprintf("%sSources%d%d", name, p.shape, count)
			MOVQ(U32(1), next)
			Label(turn)
			MOVQ(Mem{Base: srcs, Index: next, Scale: 8}, source)
			for v := range acc {
				for i, x := range t.load(l, p, at(v)) {
					o.step(x, acc[v][i])
				}
			}
			INCQ(next)
			CMPQ(next, sources)
			JLT(LabelRef(turn))
			for v := range acc {
				for _, a := range acc[v] {
					o.end(a)
				}
				t.store(l, p, acc[v], Mem{Base: dst, Index: offset, Scale: 1, Disp: v * lanes *
					t.bytes()})
			}
		})
	}
}

// conversion is dst[i] = src[i], times factor if it has one.
func conversion(l level, name string, from, to element, scaled bool) {
	signature := "func(dst, src *byte, n int)"
	if scaled {
		signature = fmt.Sprintf("func(dst, src *byte, n int, factor float%d)", 8*from.bytes())
	}
	TEXT(name+l.name, NOSPLIT, signature)
	Pragma("noescape")
	from, to = from.prepare(l), to.prepare(l)
	dst, src := Load(Param("dst"), GP64()), Load(Param("src"), GP64())
	c := cursor{Load(Param("n"), GP64()), GP64(), nil}
	XORQ(c.src, c.src)
	if c.dst = c.src; from.bytes() != to.bytes() {
		c.dst = GP64()
		XORQ(c.dst, c.dst)
	}
	var factor reg.VecVirtual
	if scaled {
		factor = l.vector()
		broadcast(from.bytes(), Load(Param("factor"), XMM()).(reg.VecVirtual), factor)
	}
	lanes := from.lanes(l)
	l.loops("", c, lanes, from.bytes(), to.bytes(), func(p slot, count int) {
		xs := make([][]reg.VecVirtual, count)
		for v := range xs {
			xs[v] = from.load(l, p, Mem{Base: src, Index: c.src, Scale: 1, Disp: v * lanes *
				from.bytes()})
			if scaled {
				multiply(from.bytes(), factor, xs[v][0])
			}
		}
		for v := range xs {
			to.store(l, p, xs[v], Mem{Base: dst, Index: c.dst, Scale: 1, Disp: v * lanes *
				to.bytes()})
		}
	})
}

// broadcast fills y with the first float of x.
func broadcast(width int, x, y reg.VecVirtual) {
	if width == 8 {
		VBROADCASTSD(x.AsX(), y)
	} else {
		VBROADCASTSS(x.AsX(), y)
	}
}

func multiply(width int, factor, x reg.VecVirtual) {
	if width == 8 {
		VMULPD(factor, x, x)
	} else {
		VMULPS(factor, x, x)
	}
}

// constant returns a vector that repeats 32 bits.
func constant(l level, bits uint32) reg.VecVirtual {
	word, x, y := GP32(), XMM(), l.vector()
	MOVL(U32(bits), word)
	VMOVD(word, x)
	VPBROADCASTD(x, y)
	return y
}
