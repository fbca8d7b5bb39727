package fuse

import (
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// Load adds an input and returns its element. The same memory need not be added a second time: use
// the value of the first.
func (p *Program) Load(d backend.DType, strides ...int) Value {
	p.Inputs = append(p.Inputs, Operand{d, slices.Clone(strides)})
	return p.add(Instr{Op: Load, Type: Type(d), Args: [4]Value{len(p.Inputs) - 1}})
}

// Const returns a constant of type F32, F64, I32 or I64: x rounded to a float, or truncated to
// an integer.
func (p *Program) Const(d backend.DType, x float64) Value {
	bits := math.Float64bits(x)
	switch d {
	case backend.F32:
		bits = math.Float64bits(float64(float32(x)))
	case backend.I32, backend.I64:
		bits = uint64(int64(x))
	}
	return p.add(Instr{Op: Const, Type: d, Bits: bits})
}

// Index returns the sum over axes k of i[k]*strides[k], in I64: with the strides of the loop
// itself, the number of the element.
func (p *Program) Index(strides ...int) Value {
	p.Indices = append(p.Indices, slices.Clone(strides))
	return p.add(Instr{Op: Index, Type: backend.I64, Args: [4]Value{len(p.Indices) - 1}})
}

// Do applies an operation to values. The result has the type of the last operand; for Uniform it is
// F32. Check finds operands that do not fit.
func (p *Program) Do(o Op, args ...Value) Value {
	c := Instr{Op: o, Type: backend.F32}
	if n := len(args); n > 0 && o != Uniform {
		c.Type = p.typeOf(args[n-1])
	}
	if copy(c.Args[:], args); len(args) != o.Operands() {
		c.Op = 0 // which Check refuses
	}
	return p.add(c)
}

// Select returns a where a label, of I32 or I64, is the place of the element along an axis of the
// loop, and b elsewhere.
func (p *Program) Select(axis int, label, a, b Value) Value {
	along := make([]int, len(p.Shape))
	along[axis] = 1
	here := p.Cast(backend.I32, p.Index(along...))
	return p.Do(Where, p.Do(Equal, p.place32(label), here), a, b)
}

// Locate returns, in I64, the place of the element along an axis of the loop where x is not 0, and
// the length of the axis elsewhere.
func (p *Program) Locate(axis int, x Value) Value {
	along := make([]int, len(p.Shape))
	along[axis] = 1
	return p.Do(Where, x, p.Index(along...), p.Const(backend.I64, float64(p.Shape[axis])))
}

// place32 returns the place along an axis that a label names, -1 for one beyond 31 bits: devices
// compare 32 bits at once, and axes have no more.
func (p *Program) place32(label Value) Value {
	t := p.typeOf(label)
	low := p.Cast(backend.I32, label)
	if t == backend.I32 {
		return low
	}
	exact := p.Do(Equal, p.Cast(t, low), label)
	return p.Do(Where, exact, low, p.Const(backend.I32, -1))
}

// Dropout returns x / (1-probability) where the random number of the element is at least the
// probability, and 0 elsewhere. The number is Uniform's for the key (seed, op), the step, the
// first sample plus the place along the first axis of the loop, and the element of the sample. step
// and first are I64.
func (p *Program) Dropout(probability float64, seed, op uint32, x, step, first Value) Value {
	t := p.typeOf(x)
	key := p.Const(backend.I64, 0)
	p.Code[key].Bits = uint64(op)<<32 | uint64(seed) // not every key is a float64
	sample, element, n := make([]int, len(p.Shape)), make([]int, len(p.Shape)), 1
	sample[0] = 1
	for axis := len(p.Shape) - 1; axis > 0; axis-- {
		element[axis] = n
		n *= p.Shape[axis]
	}
	u := p.Do(Uniform, key, step, p.Do(Add, first, p.Index(sample...)), p.Index(element...))
	p.Code[u].Type = t
	keep := p.Do(GreaterEqual, u, p.Const(t, probability))
	return p.Do(Where, keep, p.Do(Mul, x, p.Const(t, 1/(1-probability))), p.Const(t, 0))
}

// Cast converts a value to type F32, F64, I32 or I64; a value of the type stays as it is.
func (p *Program) Cast(d backend.DType, x Value) Value {
	if p.typeOf(x) == d {
		return x
	}
	return p.add(Instr{Op: Cast, Type: d, Args: [4]Value{x}})
}

// Store adds an output that is not folded.
func (p *Program) Store(x Value, d backend.DType, strides ...int) {
	p.Outputs = append(p.Outputs, Output{Operand: Operand{d, slices.Clone(strides)}, Value: x})
}

// Fold adds an output that is folded along the axes of Reduced. Strides of other axes must
// give each of their elements its own place.
func (p *Program) Fold(op backend.ReduceOp, x Value, d backend.DType, strides ...int) {
	p.Outputs = append(p.Outputs, Output{Operand: Operand{d, slices.Clone(strides)}, Value: x,
		Folded: true, Op: op})
}

// typeOf returns the type of a value, 0 if there is no such value.
func (p *Program) typeOf(x Value) backend.DType {
	if x < 0 || x >= len(p.Code) {
		return 0
	}
	return p.Code[x].Type
}

func (p *Program) add(c Instr) Value {
	p.Code = append(p.Code, c)
	return len(p.Code) - 1
}
