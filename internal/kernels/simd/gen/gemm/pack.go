package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// copied is the most vectors that a row to be copied has.
const copied = 4

// writeCopy writes the copy of a narrow matrix, row by row.
func writeCopy(v avx2) {
	name := "copy" + v.f.name + v.level()
	TEXT(name, attr.NOSPLIT,
		fmt.Sprintf("func(dst, src *%s, dstPitch, srcPitch, rows, columns int)", v.f.goType))
	Pragma("noescape")
	Doc(fmt.Sprintf("%s copies rows of at most %d columns, and zeros up to a multiple of %d.", name,
		copied*v.width()/v.f.size, v.width()/v.f.size))
	columns := load("columns")
	v.prepareMask(columns)
	dst, src, dstPitch, srcPitch, rows, ahead := load("dst"), load("src"), load("dstPitch"),
		load("srcPitch"), load("rows"), GP64()
	IMUL3Q(U32(rowsAhead), srcPitch, ahead)
	for vectors := 1; vectors <= copied; vectors++ {
		next, loop := fmt.Sprint("after", vectors), fmt.Sprint("row", vectors)
		if vectors < copied {
			CMPQ(columns, U32(vectors*v.width()/v.f.size))
			JG(LabelRef(next))
		}
		Label(loop)
		for j := range vectors {
			v.loadColumns(Mem{Base: src, Disp: j * v.width()}, v.vector(j), j == vectors-1)
			v.storeColumns(v.vector(j), Mem{Base: dst, Disp: j * v.width()}, false)
		}
		PREFETCHT0(Mem{Base: src, Index: ahead, Scale: 1})
		PREFETCHT0(Mem{Base: src, Index: ahead, Scale: 1, Disp: 64})
		ADDQ(srcPitch, src)
		ADDQ(dstPitch, dst)
		DECQ(rows)
		JNZ(LabelRef(loop))
		VZEROUPPER()
		RET()
		if vectors < copied {
			Label(next)
		}
	}
}

// writeWiden writes the copy of a matrix of 16 bits as f32, in whole vectors.
func writeWiden(in instructions, h half) {
	name := "widenRows" + h.name + in.level()
	TEXT(name, attr.NOSPLIT, "func(dst *float32, src *byte, dstPitch, srcPitch, rows, vectors int)")
	Pragma("noescape")
	Doc(name + " widens some vectors of each row.")
	dst, src, dstPitch, srcPitch, rows, vectors := load("dst"), load("src"), load("dstPitch"),
		load("srcPitch"), load("rows"), load("vectors")
	from, to, left, ahead := GP64(), GP64(), GP64(), GP64()
	IMUL3Q(U32(rowsAhead), srcPitch, ahead)
	Label("row")
	MOVQ(src, from)
	MOVQ(dst, to)
	MOVQ(vectors, left)
	PREFETCHT0(Mem{Base: src, Index: ahead, Scale: 1})
	Label("vector")
	h.widen(Mem{Base: from}, in.vector(0))
	in.floats().move(in.vector(0), Mem{Base: to})
	ADDQ(U32(in.width()/2), from)
	ADDQ(U32(in.width()), to)
	DECQ(left)
	JNZ(LabelRef("vector"))
	ADDQ(srcPitch, src)
	ADDQ(dstPitch, dst)
	DECQ(rows)
	JNZ(LabelRef("row"))
	VZEROUPPER()
	RET()
}

// writeTranspose writes the transposition of as many rows as a vector has elements, for AVX2. A
// square of them is loaded so that the upper halves of vectors have the lower half of the rows;
// what is left is to transpose squares of half the size within halves.
func writeTranspose(f floats) {
	n := 32 / f.size
	name := "transpose" + f.name + "AVX2"
	TEXT(name, attr.NOSPLIT, fmt.Sprintf("func(dst, src *%s, dstPitch, srcPitch, columns int)",
		f.goType))
	Pragma("noescape")
	Doc(fmt.Sprintf("%s transposes %d rows. The number of their columns is a multiple of %[2]d, "+
		"and not 0.", name, n))
	dst, src, dstPitch, srcPitch, columns := load("dst"), load("src"), load("dstPitch"),
		load("srcPitch"), load("columns")
	dstPitch3, srcPitch3 := GP64(), GP64()
	LEAQ(Mem{Base: dstPitch, Index: dstPitch, Scale: 2}, dstPitch3)
	LEAQ(Mem{Base: srcPitch, Index: srcPitch, Scale: 2}, srcPitch3)
	from, sources := rowsFrom(src, srcPitch, srcPitch3, n)
	Label("square")
	to, _ := rowsFrom(dst, dstPitch, dstPitch3, n)
	for half := range 2 {
		square := make([]reg.VecVirtual, n/2)
		for i := range square {
			square[i] = YMM()
			f.move(from[i].Offset(16*half), square[i].AsX())
			VINSERTF128(U8(1), from[i+n/2].Offset(16*half), square[i], square[i])
		}
		for i, column := range transposed(square) {
			f.move(column, to[n/2*half+i])
		}
	}
	for _, s := range sources {
		ADDQ(U32(32), s)
	}
	for range n {
		ADDQ(dstPitch, dst)
	}
	SUBQ(U32(n), columns)
	JNZ(LabelRef("square"))
	VZEROUPPER()
	RET()
}

// transposed transposes a square in each half of vectors, of 2 x 2 f64 or 4 x 4 f32.
func transposed(x []reg.VecVirtual) []reg.VecVirtual {
	if len(x) == 2 {
		return []reg.VecVirtual{each(VUNPCKLPD, x[0], x[1]), each(VUNPCKHPD, x[0], x[1])}
	}
	low, high := each(VUNPCKLPS, x[0], x[1]), each(VUNPCKHPS, x[0], x[1])
	low2, high2 := each(VUNPCKLPS, x[2], x[3]), each(VUNPCKHPS, x[2], x[3])
	return append(transposed([]reg.VecVirtual{low, low2}),
		transposed([]reg.VecVirtual{high, high2})...)
}

// each returns the elements of x and y in turn, as the instruction takes them.
func each(unpack func(...Op), x, y reg.VecVirtual) reg.VecVirtual {
	to := YMM()
	unpack(y, x, to)
	return to
}
