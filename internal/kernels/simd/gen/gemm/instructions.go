package main

import (
	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// floats are the instructions of vectors of f32 or f64 of any width.
type floats struct {
	name, goType              string
	size                      int // of an element, in bytes
	fma, mul, broadcast, move func(...Op)
	masked512                 func(...Op)
	zeroed512                 func(m, k, z Op) // loads 0 where the mask has none
	masked256                 func(from, mask, to Op)
}

var precisions = []floats{
	{"F32", "float32", 4, VFMADD231PS, VMULPS, VBROADCASTSS, VMOVUPS, VMOVUPS, VMOVUPS_Z,
		VMASKMOVPS},
	{"F64", "float64", 8, VFMADD231PD, VMULPD, VBROADCASTSD, VMOVUPD, VMOVUPD, VMOVUPD_Z,
		VMASKMOVPD},
}

// bits loads a float as it lies in memory, into the upper bits of a register.
func (f floats) bits(from Mem) reg.Register {
	to := GP64()
	if f.size == 8 {
		MOVQ(from, to)
		return to
	}
	MOVL(from, to.As32())
	SHLQ(U8(32), to)
	return to
}

// instructions has the instructions of one version. The columns of a vector that is the last one of
// its row may be fewer than it has elements.
type instructions interface {
	floats() floats
	level() string
	width() int                // of a vector, in bytes
	vector(i int) reg.Physical // register i
	zero(x reg.Physical)
	prepareMask(columns reg.Register)
	loadColumns(from Mem, to reg.Physical, last bool)
	storeColumns(from reg.Physical, to Mem, last bool)
	dotColumns(rows int) int // of B whose products with so many rows fit into the registers
	last() reg.Physical      // the last register
	// merge makes two vectors of elements in turn of one of the even and one of the odd ones. It
	// uses two more registers.
	merge(even, odd, low, high reg.Physical)
}

// lastColumns returns how many columns the last vector of a row has, less one.
func lastColumns(in instructions, columns reg.Register) reg.Register {
	n := GP64()
	LEAQ(Mem{Base: columns, Disp: -1}, n)
	ANDQ(U32(in.width()/in.floats().size-1), n)
	return n
}

// avx512 has a mask register for the last columns.
type avx512 struct{ f floats }

func (v avx512) floats() floats { return v.f }
func (v avx512) level() string  { return "AVX512" }
func (v avx512) width() int     { return 64 }
func (v avx512) vector(i int) reg.Physical {
	return reg.LookupPhysical(reg.KindVector, reg.Index(i), reg.S512)
}
func (v avx512) zero(x reg.Physical) { VPXORD(x, x, x) }
func (v avx512) last() reg.Physical  { return v.vector(31) }

func (v avx512) merge(even, odd, low, high reg.Physical) {
	VUNPCKLPS(odd, even, low)
	VUNPCKHPS(odd, even, high)
	const lower, upper, inTurn = 0b01000100, 0b11101110, 0b11011000 // quarters of both
	VSHUFF32X4(U8(lower), high, low, even)
	VSHUFF32X4(U8(inTurn), even, even, even)
	VSHUFF32X4(U8(upper), high, low, odd)
	VSHUFF32X4(U8(inTurn), odd, odd, odd)
}

func (v avx512) dotColumns(int) int { return 4 }

func (v avx512) prepareMask(columns reg.Register) {
	MOVQ(lastColumns(v, columns), reg.RCX)
	mask := GP64()
	MOVQ(U32(2), mask)
	SHLQ(reg.CL, mask)
	DECQ(mask)
	KMOVW(mask.As32(), reg.K1)
}

func (v avx512) loadColumns(from Mem, to reg.Physical, last bool) {
	if last {
		v.f.zeroed512(from, reg.K1, to)
	} else {
		v.f.move(from, to)
	}
}

func (v avx512) storeColumns(from reg.Physical, to Mem, last bool) {
	if last {
		v.f.masked512(from, reg.K1, to)
	} else {
		v.f.move(from, to)
	}
}

// avx2 has its mask in the last vector register.
type avx2 struct {
	f    floats
	ones Mem // as many elements with all bits set as a vector has, and then as many zeros
}

func (v avx2) floats() floats { return v.f }
func (v avx2) level() string  { return "AVX2" }
func (v avx2) width() int     { return 32 }
func (v avx2) vector(i int) reg.Physical {
	return reg.LookupPhysical(reg.KindVector, reg.Index(i), reg.S256)
}
func (v avx2) zero(x reg.Physical) { VXORPS(x, x, x) }

func (v avx2) last() reg.Physical { return v.vector(15) }

func (v avx2) merge(even, odd, low, high reg.Physical) {
	VUNPCKLPS(odd, even, low)
	VUNPCKHPS(odd, even, high)
	const lower, upper = 0x20, 0x31 // halves of both
	VPERM2F128(U8(lower), high, low, even)
	VPERM2F128(U8(upper), high, low, odd)
}

func (v avx2) dotColumns(rows int) int {
	if rows == 1 {
		return 4
	}
	return 2
}

// maskTable writes the table of masks, of which one begins at each element.
func maskTable(f floats) Mem {
	const width = 32
	table := GLOBL("masks"+f.name, attr.RODATA|attr.NOPTR)
	for i := 0; i < width; i += 8 {
		DATA(i, U64(1<<64-1))
	}
	for i := width; i < 2*width; i += 8 {
		DATA(i, U64(0))
	}
	return table
}

func (v avx2) prepareMask(columns reg.Register) {
	table, n := GP64(), lastColumns(v, columns)
	LEAQ(v.ones, table)
	NEGQ(n)
	v.f.move(Mem{Base: table, Index: n, Scale: uint8(v.f.size), Disp: v.width() - v.f.size},
		reg.Y15)
}

func (v avx2) loadColumns(from Mem, to reg.Physical, last bool) {
	if last {
		v.f.masked256(from, reg.Y15, to)
	} else {
		v.f.move(from, to)
	}
}

func (v avx2) storeColumns(from reg.Physical, to Mem, last bool) {
	if last {
		v.f.masked256(from, reg.Y15, to)
	} else {
		v.f.move(from, to)
	}
}
