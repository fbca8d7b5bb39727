package fuse

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// Program is one loop over Shape:
//
//	for each index i of Shape, in row-major order {
//		for k, c in Code { v[k] = c.Op(...) }
//		for o in Outputs { o[i . o.Strides] = v[o.Value], or folds it }
//	}
//
// If Code folds rows, each of its lines is computed for a whole row before the next line.
//
// Make one with [Program.Load], [Program.Const], [Program.Index], [Program.Do], [Program.Cast],
// [Program.Store] and [Program.Fold]; [Program.Check] says what is wrong with one. A
// Program is data: two with equal [Program.String] compute the same.
type Program struct {
	// of the loop: up to backend.MaxAxes axes, each of at least 1; none is one element
	Shape   []int
	Reduced []bool    // the axes along which folded outputs are folded; nil for none
	Inputs  []Operand // what Load reads
	Indices [][]int   // strides of the index expressions that Index computes
	Code    []Instr   // each gives the value of its number, from values before it
	Outputs []Output
}

// Operand is how memory is laid out: element i of the loop is at the sum over axes k of
// i[k]*Strides[k]. Strides are in elements and not negative; 0 repeats along an axis.
// A value that changes from run to run, such as a learning rate, is an Operand of one element
// whose strides are all 0.
type Operand struct {
	DType   backend.DType
	Strides []int // one for each axis
}

// Output is where a value is stored. Each element of the loop has its own element there, and shares
// it with others only along axes of a fold, or along a row whose elements all have the same value.
// It must overlap nothing, except where [Program.InPlace] says so.
type Output struct {
	Operand
	Value  int              // its number in Code; its type is Type(DType)
	Folded bool             // along the axes of Reduced, whose strides are 0 here
	Op     backend.ReduceOp // of a folded output
}

// Value is the number of an instruction, whose result it names.
type Value = int

// Instr is one instruction.
type Instr struct {
	Op   Op
	Type backend.DType // of the result: F32, F64, I32 or I64
	Args [4]Value      // the operands; unused ones are 0
	Bits uint64        // of a constant: math.Float64bits of floats, the integer of others
}

// float returns the constant of a float type.
func (c Instr) float() float64 { return math.Float64frombits(c.Bits) }

// Type returns the type in which elements of a DType are computed.
func Type(d backend.DType) backend.DType {
	switch d {
	case backend.F16, backend.BF16:
		return backend.F32
	case backend.U8:
		return backend.I32
	}
	return d
}

// Loop is a program that is ready to run in the order of one queue, or on the calling goroutine if
// it comes from [Host].
type Loop interface {
	// Scratch returns how many bytes of scratch Run needs.
	Scratch() int
	// Run runs the program once. dst are the outputs and src the inputs, in the program's order,
	// each at least as long as its strides reach and of its DType; scratch is U8, aligned to 16
	// bytes, and overlaps nothing. If a buffer does not fit, Run returns ErrArgument before
	// anything is written. Only one Run of a Loop may be under way on the host at a time.
	Run(dst, src []backend.Buffer, scratch backend.Buffer) error
}

// Queue is a backend.Queue that runs programs.
type Queue interface {
	backend.Queue
	// Fuse makes a program ready to run on the queue. Kernels are compiled once for each
	// program and device; this may take tens of milliseconds, so do it before time matters.
	Fuse(p *Program) (Loop, error)
}
