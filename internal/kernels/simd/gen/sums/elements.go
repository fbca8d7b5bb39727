package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// element is a type of elements in memory.
type element interface {
	name() string
	bytes() int // of one in memory
	float() bool
	lanes(l level) int       // how many are loaded and stored at a time
	prepare(l level) element // with its constants in registers
	load(l level, p slot, from Mem) []reg.VecVirtual
	store(l level, p slot, xs []reg.VecVirtual, to Mem) // may change xs
}

// plain is a type that is computed with as it is in memory.
type plain struct {
	title    string
	size     int
	floating bool
}

var (
	f32 = plain{"F32", 4, true}
	f64 = plain{"F64", 8, true}
	i32 = plain{"I32", 4, false}
	i64 = plain{"I64", 8, false}
	u8  = plain{"U8", 1, false}
)

func (e plain) name() string          { return e.title }
func (e plain) bytes() int            { return e.size }
func (e plain) float() bool           { return e.floating }
func (e plain) lanes(l level) int     { return l.bits / 8 / e.size }
func (e plain) prepare(level) element { return e }

func (e plain) load(l level, p slot, from Mem) []reg.VecVirtual {
	x := l.vector()
	move(e.size, p, from, x)
	return []reg.VecVirtual{x}
}

func (e plain) store(_ level, p slot, xs []reg.VecVirtual, to Mem) { put(e.size, p, xs[0], to) }

// move loads a vector of elements of so many bytes. What is not in the part becomes 0.
func move(bytes int, p slot, from Mem, x reg.VecVirtual) {
	if p.shape == whole {
		VMOVUPS(from, x)
		return
	}
	switch {
	case bytes == 8 && p.shape == masked:
		VMOVUPD_Z(from, p.mask, x)
	case bytes == 8:
		VMOVSD(from, x.AsX())
	case bytes == 4 && p.shape == masked:
		VMOVUPS_Z(from, p.mask, x)
	case bytes == 4:
		VMOVSS(from, x.AsX())
	case bytes == 2 && p.shape == masked:
		VMOVDQU16_Z(from, p.mask, x)
	case bytes == 2:
		word := GP32()
		MOVWLZX(from, word)
		VMOVD(word, x.AsX())
	case p.shape == masked:
		VMOVDQU8_Z(from, p.mask, x)
	default:
		word := GP32()
		MOVBLZX(from, word)
		VMOVD(word, x.AsX())
	}
}

// put stores a part of a vector of elements of so many bytes.
func put(bytes int, p slot, x reg.VecVirtual, to Mem) {
	if p.shape == whole {
		VMOVUPS(x, to)
		return
	}
	switch {
	case bytes == 8 && p.shape == masked:
		VMOVUPD(x, p.mask, to)
	case bytes == 8:
		VMOVSD(x.AsX(), to)
	case bytes == 4 && p.shape == masked:
		VMOVUPS(x, p.mask, to)
	case bytes == 4:
		VMOVSS(x.AsX(), to)
	case bytes == 2 && p.shape == masked:
		VMOVDQU16(x, p.mask, to)
	case bytes == 2:
		VPEXTRW(Imm(0), x.AsX(), to)
	case p.shape == masked:
		VMOVDQU8(x, p.mask, to)
	default:
		VPEXTRB(Imm(0), x.AsX(), to)
	}
}

// lower returns the lower half of x, which has as many 16-bit elements as x has of 32 bits.
func lower(l level, x reg.VecVirtual) reg.VecVirtual {
	if l.bits == 512 {
		return x.AsY().(reg.VecVirtual)
	}
	return x.AsX().(reg.VecVirtual)
}

// f16 is computed with in 32 bits.
type f16 struct{}

func (f16) name() string            { return "F16" }
func (f16) bytes() int              { return 2 }
func (f16) float() bool             { return true }
func (f16) lanes(l level) int       { return l.bits / 32 }
func (e f16) prepare(level) element { return e }

func (f16) load(l level, p slot, from Mem) []reg.VecVirtual {
	x := l.vector()
	if p.shape == whole {
		VCVTPH2PS(from, x)
	} else {
		move(2, p, from, lower(l, x))
		VCVTPH2PS(lower(l, x), x)
	}
	return []reg.VecVirtual{x}
}

func (f16) store(l level, p slot, xs []reg.VecVirtual, to Mem) {
	const nearestEven = 0
	if p.shape == whole {
		VCVTPS2PH(Imm(nearestEven), xs[0], to)
		return
	}
	VCVTPS2PH(Imm(nearestEven), xs[0], lower(l, xs[0]))
	put(2, p, lower(l, xs[0]), to)
}

// Conditions of VCMPPS, which no NaN fulfils, or only NaNs.
const (
	unordered = 3
	ordered   = 7
)

// bf16 is computed with in 32 bits, of which it is the upper half. The instructions that some
// processors have for it take subnormal numbers for zero, so it is rounded as in the Go loop.
type bf16 struct{ one, bias, quiet reg.VecVirtual }

func (bf16) name() string      { return "BF16" }
func (bf16) bytes() int        { return 2 }
func (bf16) float() bool       { return true }
func (bf16) lanes(l level) int { return l.bits / 32 }

func (bf16) prepare(l level) element {
	return bf16{one: constant(l, 1), bias: constant(l, 0x7fff), quiet: constant(l, 0x400000)}
}

func (bf16) load(l level, p slot, from Mem) []reg.VecVirtual {
	x := l.vector()
	if p.shape == whole {
		VPMOVZXWD(from, x)
	} else {
		move(2, p, from, lower(l, x))
		VPMOVZXWD(lower(l, x), x)
	}
	VPSLLD(Imm(16), x, x)
	return []reg.VecVirtual{x}
}

func (e bf16) store(l level, p slot, xs []reg.VecVirtual, to Mem) {
	x, nan, rounded := xs[0], l.vector(), l.vector()
	VPSRLD(Imm(16), x, rounded)
	VANDPS(e.one, rounded, rounded) // the last bit that stays
	VPADDD(e.bias, rounded, rounded)
	VPADDD(x, rounded, rounded)
	VORPS(e.quiet, x, nan)
	if l.bits == 512 {
		isNaN := K()
		VCMPPS(Imm(unordered), x, x, isNaN)
		VMOVAPS(nan, isNaN, rounded)
		VPSRLD(Imm(16), rounded, rounded)
		VPMOVDW(rounded, x.AsY())
	} else {
		isNaN := YMM()
		VCMPPS(Imm(unordered), x, x, isNaN)
		VBLENDVPS(isNaN, nan, rounded, rounded)
		VPSRLD(Imm(16), rounded, rounded)
		VPACKUSDW(rounded, rounded, x)
		VPERMQ(Imm(0b1000), x, x)
	}
	put(2, p, lower(l, x), to)
}

// bf16Pairs is bf16 where the order of elements in registers is of no interest: a vector becomes
// one of its even elements and one of its odd ones, without a permutation. A NaN must be quiet, or
// have its payload in the upper half, as a result of arithmetic with bf16 does.
type bf16Pairs struct{ one, bias, upper reg.VecVirtual }

func (bf16Pairs) name() string      { return "BF16" }
func (bf16Pairs) bytes() int        { return 2 }
func (bf16Pairs) float() bool       { return true }
func (bf16Pairs) lanes(l level) int { return l.bits / 16 }

func (bf16Pairs) prepare(l level) element {
	return bf16Pairs{one: constant(l, 1), bias: constant(l, 0x7fff), upper: constant(l, 0xffff0000)}
}

func (e bf16Pairs) load(l level, p slot, from Mem) []reg.VecVirtual {
	even, odd := l.vector(), l.vector()
	move(2, p, from, odd)
	VPSLLD(Imm(16), odd, even)
	VANDPS(e.upper, odd, odd)
	return []reg.VecVirtual{even, odd}
}

func (e bf16Pairs) store(l level, p slot, xs []reg.VecVirtual, to Mem) {
	for _, x := range xs {
		up := l.vector()
		VPSRLD(Imm(16), x, up)
		VANDPS(e.one, up, up) // the last bit that stays
		VPADDD(e.bias, up, up)
		if l.bits == 512 {
			number := K()
			VCMPPS(Imm(ordered), x, x, number)
			VPADDD(up, x, number, x)
		} else {
			number := YMM()
			VCMPPS(Imm(ordered), x, x, number)
			VANDPS(number, up, up)
			VPADDD(up, x, x)
		}
	}
	even, odd := xs[0], xs[1]
	VPSRLD(Imm(16), even, even)
	VANDPS(e.upper, odd, odd)
	VORPS(odd, even, even)
	put(2, p, even, to)
}
