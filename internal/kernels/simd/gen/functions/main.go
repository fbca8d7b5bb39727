// Command functions writes the element-wise functions of f32 and f64: for 256 and for 512 bits the
// same operations in the same order, so that both give bitwise identical results.
//
// A body (bodies.go) is written once, with the operations of a [vectors] (vectors.go), and this
// file puts loops around it.
package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// function is an element-wise function of some operands.
type function struct {
	name     string
	operands []string
	long     bool // enough work to hide the loop around it
	body     func(v *vectors, x []reg.VecVirtual) reg.VecVirtual
	only     int // the size of the type that has it, 0 for both
}

func main() {
	pool := &constants{offsets: map[uint64]int{}, known: map[string]int{}}
	for _, double := range []bool{false, true} {
		for _, wide := range []bool{true, false} {
			v := &vectors{double: double, wide: wide, constants: pool}
			for _, f := range functions() {
				if f.only == 0 || f.only == v.size() {
					f.write(v)
				}
			}
			v.writeFolds()
		}
	}
	for _, double := range []bool{false, true} {
		for _, wide := range []bool{true, false} {
			v := &vectors{double: double, wide: wide, constants: pool}
			v.writeLargest(1)
			v.writeLargest(2)
			v.writeGivePairs()
		}
	}
	pool.write()
	Generate()
}

// unrolled is how many vectors the loop of a short function computes at a time.
const unrolled = 4

// write writes
//
//	func name(dst, x, ... *T, xstep, ... , n int)
//
// A function of several operands has a step for each of them: 1, or 0 for an operand that is one
// vector of 64 bytes, over and over.
func (f function) write(v *vectors) {
	TEXT(f.name+v.suffix(), NOSPLIT, f.signature(v))
	Pragma("noescape")
	Doc(fmt.Sprintf("%s%s computes n elements.", f.name, v.suffix()))
	dst := Load(Param("dst"), GP64())
	var from, steps []reg.Register
	for _, name := range f.operands {
		from = append(from, Load(Param(name), GP64()))
		if len(f.operands) > 1 {
			step := Load(Param(name+"step"), GP64())
			SHLQ(U8(v.log2()), step)
			steps = append(steps, step)
		}
	}
	n := Load(Param("n"), GP64())
	if !f.long {
		f.loop(v, "unrolled", unrolled, dst, from, steps, n)
	}
	f.loop(v, "vector", 1, dst, from, steps, n)
	TESTQ(n, n)
	JZ(LabelRef("done"))
	mask := v.tail(n)
	var x []reg.VecVirtual
	for _, p := range from {
		x = append(x, v.loadMasked(Mem{Base: p}, mask))
	}
	v.storeMasked(f.body(v, x), Mem{Base: dst}, mask)
	Label("done")
	VZEROUPPER()
	RET()
}

func (f function) signature(v *vectors) string {
	list, steps := "dst", ""
	for _, name := range f.operands {
		list += ", " + name
		steps += name + "step, "
	}
	if len(f.operands) == 1 {
		steps = ""
	}
	return fmt.Sprintf("func(%s *%s, %sn int)", list, v.goType(), steps)
}

// loop computes whole vectors, several at a time.
func (f function) loop(v *vectors, label string, vectors int, dst reg.Register, from,
	steps []reg.Register, n reg.Register) {
	CMPQ(n, I32(vectors*v.lanes()))
	JL(LabelRef(label + "End"))
	Label(label)
	for i := range vectors {
		var x []reg.VecVirtual
		for k, p := range from {
			if steps == nil {
				x = append(x, v.load(Mem{Base: p, Disp: i * v.bytes()}))
				continue
			}
			x = append(x, v.load(Mem{Base: p}))
			ADDQ(steps[k], p)
		}
		v.store(f.body(v, x), Mem{Base: dst, Disp: i * v.bytes()})
	}
	if steps == nil {
		ADDQ(I32(vectors*v.bytes()), from[0])
	}
	ADDQ(I32(vectors*v.bytes()), dst)
	SUBQ(I32(vectors*v.lanes()), n)
	CMPQ(n, I32(vectors*v.lanes()))
	JGE(LabelRef(label))
	Label(label + "End")
}
