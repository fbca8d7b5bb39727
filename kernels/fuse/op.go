package fuse

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Op is an operation of an instruction. Those that compute element by element are in ops.go.
type Op uint8

//go:generate go run ./gen

// about is what is known of an operation.
type about struct {
	name     string
	operands int
	traits   uint8
}

// Traits of operations.
const (
	forFloats   = 1 << iota // and no integers
	approximate             // right up to four units in the last place
	compares                // gives 1 or 0
	vectors                 // simd has vector instructions for floats
	vectors32               // for F32 alone
)

// The other operations.
const (
	// Load is element i of input Args[0].
	Load Op = elementwise + 1 + iota
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

var otherNames = [...]string{"load", "const", "index", "sum-row", "max-row", "min-row"}

// about returns what is known of an operation.
func (o Op) about() about {
	switch {
	case o < Load:
		return known[o]
	case o.FoldsRows():
		return about{otherNames[o-Load], 1, 0}
	}
	return about{otherNames[o-Load], 0, 0}
}

// has reports whether an operation that computes element by element has a trait.
func (o Op) has(trait uint8) bool { return o < Load && known[o].traits&trait != 0 }

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
	all := make([]Op, elementwise)
	for i := range all {
		all[i] = Op(i + 1)
	}
	return all
}

// Valid reports whether o is one of the operations.
func (o Op) Valid() bool { return o > 0 && o < opEnd }

// Operands returns how many values o is computed from.
func (o Op) Operands() int {
	if !o.Valid() {
		return 0
	}
	return o.about().operands
}

// Rounded reports whether the result is only right up to four units in the last place.
func (o Op) Rounded() bool { return o.has(approximate) }

// Gives reports whether o can give a result of type d.
func (o Op) Gives(d backend.DType) bool {
	return Type(d) == d && d.Valid() && o.Valid() && (d.Float() || !o.has(forFloats)) &&
		(o != Index || d == backend.I64)
}

// String returns the name: "tanh".
func (o Op) String() string {
	if !o.Valid() {
		return fmt.Sprintf("Op(%d)", uint8(o))
	}
	return o.about().name
}
