package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// writeFolds writes the folds of a vector into one element, and of vectors into one.
func (v *vectors) writeFolds() {
	v.writeSum()
	v.writeExtreme("max", (*vectors).max, (*vectors).and)
	v.writeExtreme("min", (*vectors).min, (*vectors).or)
	v.writeAccumulate()
	v.writeSpread()
}

// sums is how many sums of f64 a fold has: element i is added to sum i%sums.
const sums = 16

// wider returns the vectors of f64, in which sums are.
func (v *vectors) wider() *vectors {
	return &vectors{double: true, wide: v.wide, constants: v.constants}
}

// widened loads a vector of elements as f64.
func (v *vectors) widened(m Mem) vec {
	d := v.wider()
	if v.double {
		return d.load(m)
	}
	x := d.new()
	VCVTPS2PD(m, x)
	return x
}

func (v *vectors) writeSum() {
	d := v.wider()
	TEXT("sum"+v.suffix(), NOSPLIT, "func(x *"+v.goType()+", n int) float64")
	Pragma("noescape")
	Doc("sum" + v.suffix() + " adds n elements, as Sum says.")
	x, n := Load(Param("x"), GP64()), Load(Param("n"), GP64())
	acc := make([]vec, sums/d.lanes())
	for i := range acc {
		acc[i] = d.set(d.sign()) // -0 + x is x
	}
	CMPQ(n, I32(sums))
	JL(LabelRef("tail"))
	Label("loop")
	for i, a := range acc {
		VADDPD(v.widened(Mem{Base: x, Disp: i * d.lanes() * v.size()}), a, a)
	}
	ADDQ(I32(sums*v.size()), x)
	SUBQ(I32(sums), n)
	CMPQ(n, I32(sums))
	JGE(LabelRef("loop"))
	Label("tail")
	TESTQ(n, n)
	JZ(LabelRef("done"))
	v.addTail(acc, x, n)
	Label("done")
	for len(acc) > 1 {
		half := len(acc) / 2
		for i := range half {
			VADDPD(acc[half+i], acc[i], acc[i])
		}
		acc = acc[:half]
	}
	y := acc[0].AsY()
	if v.wide {
		high := YMM()
		VEXTRACTF64X4(U8(1), acc[0], high)
		VADDPD(high, y, y)
	}
	high, low := XMM(), acc[0].AsX()
	VEXTRACTF128(U8(1), y, high)
	VADDPD(high, low, low)
	VUNPCKHPD(low, low, high)
	VADDSD(high, low, low)
	Store(low, ReturnIndex(0))
	VZEROUPPER()
	RET()
}

// addTail adds fewer elements than there are sums.
func (v *vectors) addTail(acc []vec, x, n reg.Register) {
	d := v.wider()
	if v.wide {
		k := d.tail(n)
		for i, a := range acc {
			e, m := d.new(), Mem{Base: x, Disp: i * d.lanes() * v.size()}
			if v.double {
				VMOVUPD_Z(m, k, e)
			} else {
				VCVTPS2PD_Z(m, k, e)
			}
			VADDPD(e, a, k, a)
			if i+1 < len(acc) {
				KSHIFTRW(U8(d.lanes()), k, k)
			}
		}
		return
	}
	masks := v.tailMasks(n)
	for i, a := range acc {
		e, mask := d.new(), YMM()
		m, at := Mem{Base: x, Disp: i * d.lanes() * v.size()},
			Mem{Base: masks, Disp: i * d.lanes() * v.size()}
		if v.double {
			VMOVUPD(at, mask)
			VMASKMOVPD(m, mask, e)
		} else {
			VMOVUPS(at, mask.AsX())
			VMASKMOVPS(m, mask.AsX(), e.AsX())
			VCVTPS2PD(e.AsX(), e)
			VPMOVSXDQ(mask.AsX(), mask)
		}
		VADDPD(e, a, e)
		VBLENDVPD(mask, e, a, a)
	}
}

// choice is an operation on two vectors.
type choice func(v *vectors, a vec, b Op) vec

// writeExtreme writes a maximum or minimum. better compares numbers. If it is a zero, no element is
// beyond it, and combine makes its sign of the signs of all. Whether there is a NaN is noted apart.
func (v *vectors) writeExtreme(name string, better, combine choice) {
	TEXT(name+v.suffix(), NOSPLIT, "func(x *"+v.goType()+", n int) "+v.goType())
	Pragma("noescape")
	Doc(name + v.suffix() + " returns that of n > 0 elements.")
	x, n := Load(Param("x"), GP64()), Load(Param("n"), GP64())
	first := v.one(VBROADCASTSS, VBROADCASTSD, Mem{Base: x})
	best, signs, strange := v.copy(first), v.copy(first), v.compare(unordered, first, first)
	take := func(e vec) {
		VMOVAPS(better(v, best, e), best)
		VMOVAPS(combine(v, signs, e), signs)
		v.either(strange, v.compare(unordered, e, e))
	}
	CMPQ(n, I32(v.lanes()))
	JL(LabelRef("tail"))
	Label("loop")
	take(v.load(Mem{Base: x}))
	ADDQ(I32(v.bytes()), x)
	SUBQ(I32(v.lanes()), n)
	CMPQ(n, I32(v.lanes()))
	JGE(LabelRef("loop"))
	Label("tail")
	TESTQ(n, n)
	JZ(LabelRef("done"))
	k := v.tail(n)
	take(v.choose(k, v.loadMasked(Mem{Base: x}, k), first))
	Label("done")
	best, signs = v.across(best, better), v.across(signs, combine)
	half := &vectors{double: v.double, constants: v.constants}
	best = half.choose(half.compare(equal, best, half.number(0)), half.and(signs, half.sign()),
		best)
	v.jumpIfNone(strange, "ordered")
	VMOVUPS(half.number(math.NaN()), best)
	Label("ordered")
	Store(best.AsX(), ReturnIndex(0))
	VZEROUPPER()
	RET()
}

// across combines the elements of a vector, of which the first one is the result.
func (v *vectors) across(x vec, combine choice) vec {
	half := &vectors{double: v.double, constants: v.constants}
	y := x
	if v.wide {
		high, low := YMM(), YMM()
		VEXTRACTF64X4(U8(1), x, high)
		VMOVAPS(x.AsY(), low)
		y = combine(half, low, high)
	}
	swapped := YMM()
	VPERM2F128(U8(1), y, y, swapped)
	y = combine(half, y, swapped)
	swapped = YMM()
	VPERMILPD(U8(5), y, swapped)
	y = combine(half, y, swapped)
	if !v.double {
		swapped = YMM()
		VPERMILPS(U8(0xb1), y, swapped)
		y = combine(half, y, swapped)
	}
	return y
}

// jumpIfNone jumps if no element is in the mask.
func (v *vectors) jumpIfNone(m mask, label string) {
	if v.wide {
		KORTESTW(m, m)
	} else {
		bits := GP32()
		VMOVMSKPS(m, bits)
		TESTL(bits, bits)
	}
	JZ(LabelRef(label))
}

// writeAccumulate writes sums[i] += x[i], of sums of f64.
func (v *vectors) writeAccumulate() {
	d := v.wider()
	TEXT("accumulate"+v.suffix(), NOSPLIT, "func(sums *float64, x *"+v.goType()+", n int)")
	Pragma("noescape")
	Doc("accumulate" + v.suffix() + " adds n elements to their sums.")
	to, x, n := Load(Param("sums"), GP64()), Load(Param("x"), GP64()), Load(Param("n"), GP64())
	for _, part := range []struct {
		label   string
		vectors int
	}{{"unrolled", unrolled}, {"vector", 1}} {
		count := part.vectors * d.lanes()
		CMPQ(n, I32(count))
		JL(LabelRef(part.label + "End"))
		Label(part.label)
		for i := range part.vectors {
			m := Mem{Base: to, Disp: i * d.bytes()}
			e := v.widened(Mem{Base: x, Disp: i * d.lanes() * v.size()})
			VADDPD(m, e, e)
			d.store(e, m)
		}
		ADDQ(I32(part.vectors*d.bytes()), to)
		ADDQ(I32(count*v.size()), x)
		SUBQ(I32(count), n)
		CMPQ(n, I32(count))
		JGE(LabelRef(part.label))
		Label(part.label + "End")
	}
	TESTQ(n, n)
	JZ(LabelRef("done"))
	Label("element")
	e := XMM()
	if v.double {
		VMOVSD(Mem{Base: x}, e)
	} else {
		VMOVSS(Mem{Base: x}, e)
		VCVTSS2SD(e, e, e)
	}
	VADDSD(Mem{Base: to}, e, e)
	VMOVSD(e, Mem{Base: to})
	ADDQ(I32(8), to)
	ADDQ(I32(v.size()), x)
	DECQ(n)
	JNZ(LabelRef("element"))
	Label("done")
	VZEROUPPER()
	RET()
}

// writeSpread writes each of some elements to a row of n > 0.
func (v *vectors) writeSpread() {
	TEXT("spread"+v.suffix(), NOSPLIT, "func(dst, x *"+v.goType()+", rows, n int)")
	Pragma("noescape")
	Doc("spread" + v.suffix() + " fills rows of n > 0 elements.")
	dst, x, rows, n := Load(Param("dst"), GP64()), Load(Param("x"), GP64()),
		Load(Param("rows"), GP64()), Load(Param("n"), GP64())
	whole, rest := GP64(), GP64()
	MOVQ(n, whole)
	SUBQ(I32(v.lanes()), whole)
	MOVQ(n, rest)
	ANDQ(I32(v.lanes()-1), rest)
	mask := v.tail(rest)
	Label("row")
	e := v.one(VBROADCASTSS, VBROADCASTSD, Mem{Base: x})
	ADDQ(I32(v.size()), x)
	left := GP64()
	MOVQ(whole, left)
	JMP(LabelRef("check"))
	Label("vector")
	v.store(e, Mem{Base: dst})
	ADDQ(I32(v.bytes()), dst)
	SUBQ(I32(v.lanes()), left)
	Label("check")
	TESTQ(left, left)
	JGE(LabelRef("vector"))
	TESTQ(rest, rest)
	JZ(LabelRef("end"))
	v.storeMasked(e, Mem{Base: dst}, mask)
	for range v.size() {
		ADDQ(rest, dst)
	}
	Label("end")
	DECQ(rows)
	JNZ(LabelRef("row"))
	VZEROUPPER()
	RET()
}
