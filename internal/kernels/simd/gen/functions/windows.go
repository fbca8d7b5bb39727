package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// writeLargest writes Largest of windows whose places are stride apart, 1 or 2: an element of a
// vector for each place of a row.
func (v *vectors) writeLargest(stride int) {
	name := fmt.Sprintf("largest%d%s", stride, v.suffix())
	TEXT(name, NOSPLIT, fmt.Sprintf("func(most, at, x *%[1]s, pixels *int, count, rows, columns, "+
		"pitch int, least %[1]s)", v.goType()))
	Pragma("noescape")
	Doc(name + " finds the largest pixel of each window. The pitch is in bytes.")
	most, at, row := Load(Param("most"), GP64()), Load(Param("at"), GP64()),
		Load(Param("x"), GP64())
	pixels, count := Load(Param("pixels"), GP64()), Load(Param("count"), GP64())
	least := v.one(VBROADCASTSS, VBROADCASTSD, param("least"))
	one := v.set(v.number(1))
	Label("row")
	x, left := GP64(), Load(Param("columns"), GP64())
	MOVQ(row, x)
	Label("vector")
	n := GP64()
	MOVQ(I32(v.lanes()), n)
	CMPQ(left, n)
	CMOVQLT(left, n)
	read := v.placesOf(stride, n)
	best, number, k := v.set(v.number(math.Inf(-1))), v.zero(), GP64()
	found := v.zero()
	XORQ(k, k)
	Label("pixel")
	pixel := GP64()
	MOVQ(Mem{Base: pixels, Index: k, Scale: 8}, pixel)
	seen := read(Mem{Base: x, Index: pixel, Scale: uint8(v.size())})
	seen = v.max(least, seen) // its second operand, where one is NaN or both are zeros
	larger := v.either(v.compare(less, best, seen), v.compare(unordered, seen, seen))
	VMOVAPS(v.choose(larger, seen, best), best)
	VMOVAPS(v.choose(larger, number, found), found)
	VMOVAPS(v.add(number, one), number)
	INCQ(k)
	CMPQ(k, count)
	JL(LabelRef("pixel"))
	written := v.tail(n)
	v.storeMasked(best, Mem{Base: most}, written)
	v.storeMasked(found, Mem{Base: at}, written)
	for range v.size() {
		ADDQ(n, most)
		ADDQ(n, at)
	}
	ADDQ(I32(stride*v.bytes()), x)
	SUBQ(n, left)
	JNZ(LabelRef("vector"))
	ADDQ(param("pitch"), row)
	DECQ(param("rows"))
	JNZ(LabelRef("row"))
	VZEROUPPER()
	RET()
}

// placesOf returns a function that reads the elements at the first n places of a vector's.
func (v *vectors) placesOf(stride int, n reg.Register) func(Mem) vec {
	if stride == 1 {
		mask := v.tail(n)
		return func(m Mem) vec { return v.loadMasked(m, mask) }
	}
	reach := GP64() // 2n-1 elements
	LEAQ(Mem{Base: n, Index: n, Scale: 1, Disp: -1}, reach)
	low, high := v.tailOfTwo(reach)
	even := v.even()
	return func(m Mem) vec {
		return even(v.loadMasked(m, low), v.loadMasked(m.Offset(v.bytes()), high))
	}
}

// tailOfTwo returns the masks of the first n elements of two vectors.
func (v *vectors) tailOfTwo(n reg.Register) (low, high mask) {
	if v.wide {
		rest, none := GP64(), GP64()
		XORQ(none, none)
		MOVQ(n, rest)
		SUBQ(I32(v.lanes()), rest)
		CMOVQLT(none, rest)
		return v.tail(n), v.tail(rest)
	}
	low, high = v.newMask(), v.newMask()
	masks := v.tailMasks(n)
	VMOVUPS(Mem{Base: masks}, low)
	VMOVUPS(Mem{Base: masks, Disp: v.bytes()}, high)
	return low, high
}

// even returns a function that takes the elements of two vectors with even numbers.
func (v *vectors) even() func(low, high vec) vec {
	if !v.wide { // first within halves, then by pairs of f32, or f64
		return func(low, high vec) vec {
			d := v.one(VSHUFPS, VUNPCKLPD, v.within(high, low)...)
			VPERMQ(U8(0xd8), d, d)
			return d
		}
	}
	numbers := v.load(v.evenNumbers())
	return func(low, high vec) vec {
		if v.double {
			VPERMT2PD(high, numbers, low)
		} else {
			VPERMT2PS(high, numbers, low)
		}
		return low
	}
}

// within returns the operands of an instruction that takes the even elements of each half.
func (v *vectors) within(high, low vec) []Op {
	if v.double {
		return []Op{high, low}
	}
	return []Op{U8(0x88), high, low}
}

// evenNumbers returns the place of the even numbers, as elements of a vector.
func (v *vectors) evenNumbers() Mem {
	return v.elements(func(i int) uint64 { return uint64(2 * i) })
}

// elements returns the place of a vector whose element i has the bits of f.
func (v *vectors) elements(f func(i int) uint64) Mem {
	words := make([]uint64, v.bytes()/8)
	for i := range v.lanes() {
		words[i*v.size()/8] |= f(i) << (i * v.size() % 8 * 8)
	}
	return v.words(words...)
}

// writeGivePairs writes GivePairs: an element of a vector for each pixel of a row.
func (v *vectors) writeGivePairs() {
	name := "givePairs" + v.suffix()
	TEXT(name, NOSPLIT, fmt.Sprintf("func(dx, x, dy, at *%[1]s, rows, columns, pitch, height, "+
		"rowPitch int, least %[1]s)", v.goType()))
	Pragma("noescape")
	Doc(name + " writes the gradients of windows that are apart, two pixels wide. Pitches are in " +
		"bytes.")
	dx, x, dy, at := Load(Param("dx"), GP64()), Load(Param("x"), GP64()), Load(Param("dy"), GP64()),
		Load(Param("at"), GP64())
	rowPitch := Load(Param("rowPitch"), GP64())
	least := v.one(VBROADCASTSS, VBROADCASTSD, param("least"))
	two, zero := v.set(v.number(2)), v.zero()
	first := v.load(v.elements(func(i int) uint64 { // 0 and 1 in turn
		if i%2 == 0 {
			return 0
		} else if v.double {
			return math.Float64bits(1)
		}
		return uint64(math.Float32bits(1))
	}))
	twice := v.twice()
	Label("row")
	offset, left := GP64(), Load(Param("columns"), GP64())
	XORQ(offset, offset)
	Label("vector")
	n, pixels := GP64(), GP64()
	MOVQ(I32(v.lanes()/2), n)
	CMPQ(left, n)
	CMOVQLT(left, n)
	LEAQ(Mem{Base: n, Index: n, Scale: 1}, pixels)
	read, written := v.tail(n), v.tail(pixels)
	gradient := v.add(twice(v.loadMasked(Mem{Base: dy}, read)), zero)
	winner := twice(v.loadMasked(Mem{Base: at}, read))
	number, from, k := v.copy(first), GP64(), Load(Param("height"), GP64())
	MOVQ(offset, from)
	Label("pixels")
	seen := v.loadMasked(Mem{Base: x, Index: from, Scale: 1}, written)
	given := v.choose(v.compare(less, seen, least), zero, gradient)
	v.storeMasked(v.choose(v.compare(equal, winner, number), given, zero),
		Mem{Base: dx, Index: from, Scale: 1}, written)
	VMOVAPS(v.add(number, two), number)
	ADDQ(rowPitch, from)
	DECQ(k)
	JNZ(LabelRef("pixels"))
	for range v.size() {
		ADDQ(n, dy)
		ADDQ(n, at)
	}
	ADDQ(I32(v.bytes()), offset)
	SUBQ(n, left)
	JNZ(LabelRef("vector"))
	ADDQ(param("pitch"), x)
	ADDQ(param("pitch"), dx)
	DECQ(param("rows"))
	JNZ(LabelRef("row"))
	VZEROUPPER()
	RET()
}

// twice returns a function that gives each element of the lower half of a vector two places.
func (v *vectors) twice() func(vec) vec {
	if v.double && !v.wide {
		return func(x vec) vec {
			VPERMPD(U8(0x50), x, x)
			return x
		}
	}
	numbers := v.load(v.elements(func(i int) uint64 { return uint64(i / 2) }))
	return func(x vec) vec {
		if v.double {
			VPERMPD(x, numbers, x)
		} else {
			VPERMPS(x, numbers, x)
		}
		return x
	}
}

func (v *vectors) zero() vec {
	d := v.new()
	VXORPS(d, d, d)
	return d
}

// param returns where an argument lies.
func param(name string) Mem {
	at, err := Param(name).Resolve()
	if err != nil {
		panic(err)
	}
	return at.Addr
}
