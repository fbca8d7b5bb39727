package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

type vec = reg.VecVirtual

// vectors writes operations on vectors of one type and width. Operands are vectors; where a method
// takes an Op, the operand may be a constant, too.
type vectors struct {
	double bool // of f64
	wide   bool // of 512 bits
	*constants
}

// constants are vectors of 32 bytes with the same element over and over: vectors of 256 bits read
// all of one, those of 512 bits broadcast its first element.
type constants struct {
	offsets map[uint64]int // by the bits of a vector's first 8 bytes
	order   []uint64
	tables  []uint64 // 32 bytes each
	known   map[string]int
}

const (
	constantsName  = "functionConstants"
	constantsBytes = 32
)

func (c *constants) symbol() Symbol { return NewStaticSymbol(constantsName) }

// of returns the place of a vector of these 8 bytes.
func (c *constants) of(bits uint64) Mem {
	offset, known := c.offsets[bits]
	if !known {
		offset = len(c.order) * constantsBytes
		c.offsets[bits] = offset
		c.order = append(c.order, bits)
	}
	return NewDataAddr(c.symbol(), offset)
}

// write writes all constants, and the masks of tails: ones, and then as many zeros.
func (c *constants) write() {
	GLOBL(constantsName, RODATA|NOPTR)
	at := 0
	put := func(bits uint64) {
		for range constantsBytes / 8 {
			DATA(at, U64(bits))
			at += 8
		}
	}
	for _, bits := range c.order {
		put(bits)
	}
	GLOBL(tablesName, RODATA|NOPTR)
	for i, bits := range c.tables {
		DATA(8*i, U64(bits))
	}
	GLOBL(masksName, RODATA|NOPTR)
	at = 0
	for range masksBytes / constantsBytes {
		put(math.MaxUint64)
	}
	for range masksBytes / constantsBytes {
		put(0)
	}
}

const tablesName = "functionTables"

// pick returns number k of the line of a table that the low bits of each element of i name.
func (v *vectors) pick(table [8][]float32, k int, i vec) vec {
	d, m := v.new(), v.column(table, k)
	if v.wide {
		VBROADCASTF32X8(m, d)
		VPERMPS(d, i, d)
	} else {
		VPERMPS(m, i, d)
	}
	return d
}

// column returns the place of number k of each line of a table.
func (c *constants) column(table [8][]float32, k int) Mem {
	var words [4]uint64
	for i, line := range table {
		words[i/2] |= uint64(math.Float32bits(line[k])) << (i % 2 * 32)
	}
	return c.words(words[:]...)
}

// words returns the place of some words.
func (c *constants) words(words ...uint64) Mem {
	name := fmt.Sprint(words)
	if _, known := c.known[name]; !known {
		c.known[name] = 8 * len(c.tables)
		c.tables = append(c.tables, words...)
	}
	return NewDataAddr(NewStaticSymbol(tablesName), c.known[name])
}

const (
	masksName  = "functionMasks"
	masksBytes = 8 * sums // a mask for each element of a step
)

func (v *vectors) size() int {
	if v.double {
		return 8
	}
	return 4
}

func (v *vectors) bytes() int { return 1 << v.log2() }

func (v *vectors) log2() int {
	if v.wide {
		return 6
	}
	return 5
}

func (v *vectors) lanes() int { return v.bytes() / v.size() }

func (v *vectors) goType() string {
	if v.double {
		return "float64"
	}
	return "float32"
}

func (v *vectors) suffix() string {
	suffix := map[bool]string{false: "F32", true: "F64"}[v.double]
	return suffix + map[bool]string{false: "AVX2", true: "AVX512"}[v.wide]
}

func (v *vectors) new() vec {
	if v.wide {
		return ZMM()
	}
	return YMM()
}

// number returns a constant of the type.
func (v *vectors) number(x float64) Mem {
	if v.double {
		return v.of(math.Float64bits(x))
	}
	return v.bits32(math.Float32bits(float32(x)))
}

func (v *vectors) bits32(x uint32) Mem { return v.of(uint64(x)<<32 | uint64(x)) }

// integer returns a constant of the bits of an element.
func (v *vectors) integer(x uint64) Mem {
	if v.double {
		return v.of(x)
	}
	return v.bits32(uint32(x))
}

// form is an instruction: for f32 and f64, and for an operand in memory that is broadcast.
type form struct{ single, double, singleBroadcast, doubleBroadcast func(...Op) }

// of chooses the version whose first operand is x.
func (f form) of(v *vectors, x Op) func(...Op) {
	broadcast := IsM64(x) && v.wide
	switch {
	case broadcast && v.double:
		return f.doubleBroadcast
	case broadcast:
		return f.singleBroadcast
	case v.double:
		return f.double
	}
	return f.single
}

// do writes an instruction of two operands, of which the second may be a constant.
func (v *vectors) do(f form, a vec, b Op) vec {
	d := v.new()
	f.of(v, b)(b, a, d)
	return d
}

func (v *vectors) add(a vec, b Op) vec {
	return v.do(form{VADDPS, VADDPD, VADDPS_BCST, VADDPD_BCST}, a, b)
}
func (v *vectors) sub(a vec, b Op) vec {
	return v.do(form{VSUBPS, VSUBPD, VSUBPS_BCST, VSUBPD_BCST}, a, b)
}
func (v *vectors) mul(a vec, b Op) vec {
	return v.do(form{VMULPS, VMULPD, VMULPS_BCST, VMULPD_BCST}, a, b)
}
func (v *vectors) div(a vec, b Op) vec {
	return v.do(form{VDIVPS, VDIVPD, VDIVPS_BCST, VDIVPD_BCST}, a, b)
}

// min and max return b if any operand is NaN, or if both are 0.
func (v *vectors) min(a vec, b Op) vec {
	return v.do(form{VMINPS, VMINPD, VMINPS_BCST, VMINPD_BCST}, a, b)
}
func (v *vectors) max(a vec, b Op) vec {
	return v.do(form{VMAXPS, VMAXPD, VMAXPS_BCST, VMAXPD_BCST}, a, b)
}

func (v *vectors) and(a vec, b Op) vec {
	return v.do(form{VANDPS, VANDPD, VANDPS_BCST, VANDPD_BCST}, a, b)
}
func (v *vectors) or(a vec, b Op) vec {
	return v.do(form{VORPS, VORPD, VORPS_BCST, VORPD_BCST}, a, b)
}
func (v *vectors) xor(a vec, b Op) vec {
	return v.do(form{VXORPS, VXORPD, VXORPS_BCST, VXORPD_BCST}, a, b)
}

// addBits and subBits are of integers.
func (v *vectors) addBits(a vec, b Op) vec {
	return v.do(form{VPADDD, VPADDQ, VPADDD_BCST, VPADDQ_BCST}, a, b)
}

func (v *vectors) subBits(a vec, b Op) vec {
	return v.do(form{VPSUBD, VPSUBQ, VPSUBD_BCST, VPSUBQ_BCST}, a, b)
}

func (v *vectors) shiftLeft(a vec, n int) vec  { return v.one(VPSLLD, VPSLLQ, U8(n), a) }
func (v *vectors) shiftRight(a vec, n int) vec { return v.one(VPSRLD, VPSRLQ, U8(n), a) }

// one writes an instruction that has no version with a constant in memory.
func (v *vectors) one(single, double func(...Op), operands ...Op) vec {
	d := v.new()
	if v.double {
		single = double
	}
	single(append(operands, d)...)
	return d
}

func (v *vectors) sqrt(a vec) vec { return v.one(VSQRTPS, VSQRTPD, a) }

// Rounding modes of round, without an exception for inexact results.
const (
	down = 9
	up   = 10
)

func (v *vectors) round(a vec, mode int) vec {
	if v.wide {
		return v.one(VRNDSCALEPS, VRNDSCALEPD, U8(mode), a)
	}
	d := v.new()
	if v.double {
		VROUNDPD(U8(mode), a, d)
	} else {
		VROUNDPS(U8(mode), a, d)
	}
	return d
}

// set returns a constant in a register.
func (v *vectors) set(x Mem) vec {
	if v.wide {
		return v.one(VBROADCASTSS, VBROADCASTSD, x)
	}
	return v.load(x)
}

func (v *vectors) load(m Mem) vec { return v.one(VMOVUPS, VMOVUPD, m) }

func (v *vectors) store(x vec, m Mem) { VMOVUPS(x, m) }

// mulAdd returns a*b + c, rounded once.
func (v *vectors) mulAdd(a, b vec, c Op) vec {
	d := v.copy(a)
	form{VFMADD213PS, VFMADD213PD, VFMADD213PS_BCST, VFMADD213PD_BCST}.of(v, c)(c, b, d)
	return d
}

// scaleAdd is mulAdd with a constant b.
func (v *vectors) scaleAdd(a vec, b Mem, c vec) vec {
	d := v.copy(a)
	form{VFMADD132PS, VFMADD132PD, VFMADD132PS_BCST, VFMADD132PD_BCST}.of(v, b)(b, c, d)
	return d
}

func (v *vectors) copy(a vec) vec { return v.one(VMOVAPS, VMOVAPD, a) }

// polynomial returns c[0] + x*(c[1] + x*(...)).
func (v *vectors) polynomial(x vec, c ...float64) vec {
	p := v.set(v.number(c[len(c)-1]))
	for k := len(c) - 2; k >= 0; k-- {
		form{VFMADD213PS, VFMADD213PD, VFMADD213PS_BCST, VFMADD213PD_BCST}.of(v, v.number(c[k]))(
			v.number(c[k]), x, p)
	}
	return p
}

// Predicates of compare. With a NaN, notEqual and unordered are true.
const (
	equal        = 0
	less         = 1
	lessEqual    = 2
	unordered    = 3
	notEqual     = 4
	greaterEqual = 13
)

// mask is a vector of 256 bits, or a mask register.
type mask = reg.Register

func (v *vectors) compare(predicate int, a vec, b Op) mask {
	var m mask = v.newMask()
	form{VCMPPS, VCMPPD, VCMPPS_BCST, VCMPPD_BCST}.of(v, b)(U8(predicate), b, a, m)
	return m
}

func (v *vectors) newMask() mask {
	if v.wide {
		return K()
	}
	return YMM()
}

// choose returns a where the mask is set, else b.
func (v *vectors) choose(m mask, a Op, b vec) vec {
	d := v.new()
	switch {
	case v.wide:
		form{VBLENDMPS, VBLENDMPD, VBLENDMPS_BCST, VBLENDMPD_BCST}.of(v, a)(a, b, m, d)
	case v.double:
		VBLENDVPD(m, a, b, d)
	default:
		VBLENDVPS(m, a, b, d)
	}
	return d
}

// either sets a where b is set, and returns a.
func (v *vectors) either(a, b mask) mask {
	if v.wide {
		KORW(a, b, a)
	} else {
		VORPS(b, a, a)
	}
	return a
}

// tail returns the mask of the first n elements of a vector.
func (v *vectors) tail(n reg.Register) mask {
	m := v.newMask()
	if v.wide {
		ones := GP64()
		MOVQ(I32(-1), ones)
		BZHIQ(n, ones, ones)
		KMOVW(ones.As32(), m)
		return m
	}
	VMOVUPS(Mem{Base: v.tailMasks(n)}, m)
	return m
}

// tailMasks returns the address of masks, one behind the other, in which the first n elements are
// set.
func (v *vectors) tailMasks(n reg.Register) reg.Register {
	masks := GP64()
	LEAQ(NewDataAddr(NewStaticSymbol(masksName), masksBytes), masks)
	for range v.size() {
		SUBQ(n, masks)
	}
	return masks
}

// loadMasked reads the elements of a mask; others are 0, and not touched.
func (v *vectors) loadMasked(m Mem, k mask) vec {
	d := v.new()
	switch {
	case v.wide && v.double:
		VMOVUPD_Z(m, k, d)
	case v.wide:
		VMOVUPS_Z(m, k, d)
	case v.double:
		VMASKMOVPD(m, k, d)
	default:
		VMASKMOVPS(m, k, d)
	}
	return d
}

func (v *vectors) storeMasked(x vec, m Mem, k mask) {
	switch {
	case v.wide && v.double:
		VMOVUPD(x, k, m)
	case v.wide:
		VMOVUPS(x, k, m)
	case v.double:
		VMASKMOVPD(x, k, m)
	default:
		VMASKMOVPS(x, k, m)
	}
}
