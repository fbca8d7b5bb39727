package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// operation is what a reduction does with vectors: step is acc = acc op x, and may change x; begin
// prepares the first vector for it, end makes the result.
type operation struct {
	begin func(acc reg.VecVirtual)
	step  func(x, acc reg.VecVirtual)
	end   func(acc reg.VecVirtual)
}

// newOperation prepares the constants of an operation.
func newOperation(l level, t element, name string, sources reg.Register) operation {
	nothing := func(reg.VecVirtual) {}
	o := operation{nothing, nil, nothing}
	switch t {
	case f64:
		return ofFloats(l, 8, name, sources, VCVTSI2SDQ, VADDPD, VDIVPD, VMULPD, VMINPD)
	case i32:
		o.step = map[string]func(x, acc reg.VecVirtual){
			"Sum":  func(x, acc reg.VecVirtual) { VPADDD(x, acc, acc) },
			"Prod": func(x, acc reg.VecVirtual) { VPMULLD(x, acc, acc) },
			"Min":  func(x, acc reg.VecVirtual) { VPMINSD(x, acc, acc) },
			"Max":  func(x, acc reg.VecVirtual) { VPMAXSD(x, acc, acc) },
		}[name]
	case i64:
		o.step = map[string]func(x, acc reg.VecVirtual){
			"Sum":  func(x, acc reg.VecVirtual) { VPADDQ(x, acc, acc) },
			"Prod": func(x, acc reg.VecVirtual) { multiply64(l, x, acc) },
			"Min":  func(x, acc reg.VecVirtual) { lesser64(l, x, acc) },
			"Max":  func(x, acc reg.VecVirtual) { greater64(l, x, acc) },
		}[name]
	case u8:
		var even reg.VecVirtual
		if name == "Prod" {
			even = constant(l, 0x00ff00ff)
		}
		o.step = map[string]func(x, acc reg.VecVirtual){
			"Sum":  func(x, acc reg.VecVirtual) { VPADDB(x, acc, acc) },
			"Prod": func(x, acc reg.VecVirtual) { multiply8(l, even, x, acc) },
			"Min":  func(x, acc reg.VecVirtual) { VPMINUB(x, acc, acc) },
			"Max":  func(x, acc reg.VecVirtual) { VPMAXUB(x, acc, acc) },
		}[name]
	default: // f32, and what is computed with in 32 bits
		return ofFloats(l, 4, name, sources, VCVTSI2SSQ, VADDPS, VDIVPS, VMULPS, VMINPS)
	}
	return o
}

// ofFloats is newOperation of floats of a width, by their instructions.
func ofFloats(l level, width int, name string, sources reg.Register, convert func(n, x, to Op),
	add, divide, multiply, lesser func(...Op)) operation {
	nothing := func(reg.VecVirtual) {}
	sum := func(x, acc reg.VecVirtual) { add(x, acc, acc) }
	smaller := func(x, acc reg.VecVirtual) { least(l, lesser, x, acc) }
	switch name {
	case "Avg":
		x, divisor := XMM(), l.vector()
		VXORPS(x, x, x)
		convert(sources, x, x)
		broadcast(width, x, divisor)
		return operation{nothing, sum, func(acc reg.VecVirtual) { divide(divisor, acc, acc) }}
	case "Prod":
		return operation{nothing, func(x, acc reg.VecVirtual) { multiply(x, acc, acc) }, nothing}
	case "Min":
		return operation{nothing, smaller, nothing}
	case "Max":
		return negated(l, width, smaller)
	}
	return operation{nothing, sum, nothing}
}

// least is Go's min: NaN wins, and -0 is less than +0. The instruction returns its second operand,
// x, where one of them is NaN or both are zero. So of min(acc, x) and min(min(acc, x), acc), one
// has the NaN, or the sign of -0, and the other can be added to it bit by bit.
func least(l level, minimum func(...Op), x, acc reg.VecVirtual) {
	minimum(x, acc, x)
	once := l.vector()
	minimum(acc, x, once)
	VORPS(x, once, acc)
}

// negated is the greatest as the least of what is negated.
func negated(l level, width int, step func(x, acc reg.VecVirtual)) operation {
	sign := l.vector()
	word, x := GP64(), XMM()
	if width == 8 {
		MOVQ(U64(1<<63), word)
	} else {
		MOVQ(U64(1<<63|1<<31), word)
	}
	VMOVQ(word, x)
	VPBROADCASTQ(x, sign)
	negate := func(x reg.VecVirtual) { VXORPS(sign, x, x) }
	return operation{negate, func(x, acc reg.VecVirtual) { negate(x); step(x, acc) }, negate}
}

// multiply64 puts products together from those of halves.
func multiply64(l level, x, acc reg.VecVirtual) {
	if l.bits == 512 {
		VPMULLQ(x, acc, acc)
		return
	}
	upper, crossed := l.vector(), l.vector()
	VPSRLQ(Imm(32), acc, upper)
	VPMULUDQ(x, upper, crossed)
	VPSRLQ(Imm(32), x, upper)
	VPMULUDQ(acc, upper, upper)
	VPADDQ(upper, crossed, crossed)
	VPSLLQ(Imm(32), crossed, crossed)
	VPMULUDQ(x, acc, acc)
	VPADDQ(crossed, acc, acc)
}

func lesser64(l level, x, acc reg.VecVirtual) {
	if l.bits == 512 {
		VPMINSQ(x, acc, acc)
		return
	}
	greater := l.vector()
	VPCMPGTQ(x, acc, greater)
	VBLENDVPD(greater, x, acc, acc)
}

func greater64(l level, x, acc reg.VecVirtual) {
	if l.bits == 512 {
		VPMAXSQ(x, acc, acc)
		return
	}
	greater := l.vector()
	VPCMPGTQ(x, acc, greater)
	VBLENDVPD(greater, acc, x, acc)
}

// multiply8 multiplies even and odd bytes in words. even is a mask.
func multiply8(l level, even, x, acc reg.VecVirtual) {
	odd := l.vector()
	VPSRLW(Imm(8), acc, odd)
	VPMULLW(x, acc, acc)
	VANDPS(even, acc, acc)
	VPSRLW(Imm(8), x, x)
	VPMULLW(x, odd, odd)
	VPSLLW(Imm(8), odd, odd)
	VORPS(odd, acc, acc)
}
