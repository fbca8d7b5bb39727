package fuse

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Op is an operation of an instruction.
type Op uint8

// Where in Op the operations of package backend begin.
const (
	unaryBase  Op = 0
	binaryBase Op = 64
	ownBase    Op = 128
)

// The functions of one operand, with the meaning that package backend gives them.
const (
	Neg      = unaryBase + Op(backend.Neg)
	Abs      = unaryBase + Op(backend.Abs)
	Sign     = unaryBase + Op(backend.Sign)
	Square   = unaryBase + Op(backend.Square)
	Cube     = unaryBase + Op(backend.Cube)
	Relu     = unaryBase + Op(backend.Relu)
	Inv      = unaryBase + Op(backend.Inv)
	Sqrt     = unaryBase + Op(backend.Sqrt)
	InvSqrt  = unaryBase + Op(backend.InvSqrt)
	Ceil     = unaryBase + Op(backend.Ceil)
	Floor    = unaryBase + Op(backend.Floor)
	Exp      = unaryBase + Op(backend.Exp)
	Expm1    = unaryBase + Op(backend.Expm1)
	Log      = unaryBase + Op(backend.Log)
	Log2     = unaryBase + Op(backend.Log2)
	Log1p    = unaryBase + Op(backend.Log1p)
	Tanh     = unaryBase + Op(backend.Tanh)
	Sigmoid  = unaryBase + Op(backend.Sigmoid)
	Softplus = unaryBase + Op(backend.Softplus)
)

// The functions of two operands, with the meaning that package backend gives them.
const (
	Add          = binaryBase + Op(backend.Add)
	Sub          = binaryBase + Op(backend.Sub)
	Mul          = binaryBase + Op(backend.Mul)
	Div          = binaryBase + Op(backend.Div)
	Pow          = binaryBase + Op(backend.Pow)
	Minimum      = binaryBase + Op(backend.Minimum)
	Maximum      = binaryBase + Op(backend.Maximum)
	Less         = binaryBase + Op(backend.Less)
	LessEqual    = binaryBase + Op(backend.LessEqual)
	Greater      = binaryBase + Op(backend.Greater)
	GreaterEqual = binaryBase + Op(backend.GreaterEqual)
	Equal        = binaryBase + Op(backend.Equal)
	NotEqual     = binaryBase + Op(backend.NotEqual)
)

// The operations that only programs have.
const (
	// Sin and Cos are of the number x itself, however large it is, and NaN of infinities.
	Sin Op = ownBase + 1 + iota
	Cos
	// Erf is the error function. GELU is x/2 * (1 + erf(x/sqrt 2)).
	Erf
	// Where is c != 0 ? a : b, of operands c, a, b. c is of any type.
	Where
	// Cast converts the operand to Type. Floats become integers by truncation
	// towards zero; what is out of range becomes the nearest integer of the type, NaN 0.
	// Numbers become floats by rounding to nearest even; integers wrap.
	Cast
	// Uniform is a random number in [0, 1), the same for the same operands on every
	// device and rank: Philox4x32-10, of operands key, step, sample, element, all I64.
	// Key is the low and the high word of its operand. The counter is the low word of element/4,
	// the low word of sample, and the low and the high word of step; word element%4 of the
	// result counts, of which F32 takes the upper 24 bits and F64 all 32.
	Uniform

	// Load is element i of input Args[0].
	Load
	// Const is a constant.
	Const
	// Index is the sum over axes k of i[k]*Indices[Args[0]][k], in I64.
	Index

	// SumRow, MaxRow and MinRow fold the operand along the last axis of the loop, which is a row:
	// they are the same for all elements of one.
	SumRow
	MaxRow
	MinRow
	opEnd
)

var ownNames = [...]string{
	Sin - ownBase: "sin", Cos - ownBase: "cos", Erf - ownBase: "erf", Where - ownBase: "where",
	Cast - ownBase:    "cast",
	Uniform - ownBase: "uniform", Load - ownBase: "load", Const - ownBase: "const", Index -
		ownBase: "index",
	SumRow - ownBase: "sum-row", MaxRow - ownBase: "max-row", MinRow - ownBase: "min-row",
}

// OfUnary returns the operation that is a function of package backend.
func OfUnary(o backend.UnaryOp) Op { return unaryBase + Op(o) }

// OfBinary returns the operation that is a function of package backend.
func OfBinary(o backend.BinaryOp) Op { return binaryBase + Op(o) }

// unary returns the function of one operand, which is invalid if o is another operation.
func (o Op) unary() backend.UnaryOp {
	if o >= binaryBase {
		return 0
	}
	return backend.UnaryOp(o - unaryBase)
}

// binary returns the function of two operands, which is invalid if o is another operation.
func (o Op) binary() backend.BinaryOp {
	if o < binaryBase || o >= ownBase {
		return 0
	}
	return backend.BinaryOp(o - binaryBase)
}

// OfRow returns the operation that folds rows by Sum, Max or Min.
func OfRow(op backend.ReduceOp) (o Op, ok bool) {
	for o := SumRow; o < opEnd; o++ {
		if o.folds() == op {
			return o, true
		}
	}
	return 0, false
}

// FoldsRows reports whether o is SumRow, MaxRow or MinRow.
func (o Op) FoldsRows() bool { return o >= SumRow && o < opEnd }

// folds returns what an operation on rows folds by.
func (o Op) folds() backend.ReduceOp {
	switch o {
	case MaxRow:
		return backend.Max
	case MinRow:
		return backend.Min
	}
	return backend.Sum
}

// computes reports whether o computes a value from others.
func (o Op) computes() bool { return o < Load || o.FoldsRows() }

// Ops lists every Op that computes element by element: all but Load, Const, Index and folds of
// rows.
func Ops() []Op {
	var all []Op
	for _, o := range backend.UnaryOps() {
		all = append(all, OfUnary(o))
	}
	for _, o := range backend.BinaryOps() {
		all = append(all, OfBinary(o))
	}
	for o := Sin; o < Load; o++ {
		all = append(all, o)
	}
	return all
}

// Valid reports whether o is one of the operations.
func (o Op) Valid() bool {
	return o.unary().Valid() || o.binary().Valid() || o > ownBase && o < opEnd
}

// Operands returns how many values o is computed from.
func (o Op) Operands() int {
	switch {
	case !o.computes():
		return 0
	case o == Where:
		return 3
	case o == Uniform:
		return 4
	case o.binary().Valid():
		return 2
	}
	return 1
}

// Rounded reports whether the result is right up to four units in the last place only.
func (o Op) Rounded() bool {
	return o.unary().Rounded() || o.binary().Rounded() || o >= Sin && o <= Erf
}

// Gives reports whether o can give a result of type d.
func (o Op) Gives(d backend.DType) bool {
	if Type(d) != d || !d.Valid() || !o.Valid() {
		return false
	}
	switch {
	case o.unary().Valid():
		return o.unary().Takes(d)
	case o.binary().Valid():
		return o.binary().Takes(d)
	case o <= Erf || o == Uniform:
		return d.Float()
	case o == Index:
		return d == backend.I64
	}
	return true
}

// String returns the name: "tanh".
func (o Op) String() string {
	switch {
	case !o.Valid():
		return fmt.Sprintf("Op(%d)", uint8(o))
	case o.unary().Valid():
		return o.unary().String()
	case o.binary().Valid():
		return o.binary().String()
	}
	return ownNames[o-ownBase]
}
