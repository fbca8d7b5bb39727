package ir

import (
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// ID is the place of a value in its Program.
type ID int

// Value is the result of an operation.
type Value struct {
	Op    Op
	Args  []ID
	Shape Dims
	DType backend.DType
	Name  string // of the graph's node, for plans and messages
}

// Program is what a graph computes: values in an order in which operands come before their
// users.
type Program struct {
	Values []Value
	// Results are the values that are wanted after a run.
	Results []ID
	// Assigns are what the run changes, once all else has read it.
	Assigns []Assign
	// Precision of the products of F32, which planning puts into them.
	Precision Precision
	// Frozen are the leaves that stay as they are from run to run.
	Frozen []Op
	// Stacks says that the device multiplies faster by one large matrix than by several small ones.
	Stacks bool
	// ChannelsLast says that the device convolves faster of tensors with their channels last.
	ChannelsLast bool
}

// Assign makes a value what an Input, a State or a PartialSum is in the next run, or what a view
// says of it, in some runs.
type Assign struct {
	To, Value ID
	Runs      Runs
}

const (
	// MaxKinds is how many kinds of runs a step can have beside Idle and Apply.
	MaxKinds = 62
	// Idle is the kind of a run that takes part in gathers alone, which other ranks need.
	Idle = MaxKinds
	// Apply is the kind of a run that has updates alone.
	Apply = MaxKinds + 1
)

// Runs is a set of kinds of runs: bit k is for kind k. The zero value is the set of all but Idle
// and Apply.
type Runs uint64

// WithIdle is the set of all but Apply.
const WithIdle Runs = 1<<Apply - 1

// Has reports whether a kind is in the set.
func (r Runs) Has(kind int) bool { return r == 0 && kind < MaxKinds || r>>kind&1 == 1 }

// Precision says what products of F32 may round their operands to.
type Precision uint8

// The precisions.
const (
	F32  Precision = iota // nothing
	TF32                  // 10 bits of mantissa, where the device is faster so
	BF16                  // BF16
)

// Add appends a value and returns its place.
func (p *Program) Add(v Value) ID {
	p.Values = append(p.Values, v)
	return ID(len(p.Values) - 1)
}

// Users returns the users of each value, and the value itself as one of them if it is a result.
func (p *Program) Users() [][]ID {
	users := make([][]ID, len(p.Values))
	for i, v := range p.Values {
		for _, a := range v.Args {
			users[a] = append(users[a], ID(i))
		}
	}
	for _, r := range p.Results {
		users[r] = append(users[r], r)
	}
	return users
}

// Escapes reports whether something outside of a set of values reads x, directly or as a view, or a
// result does, given what [Program.Users] returns.
func (p *Program) Escapes(users [][]ID, x ID, inside func(ID) bool) bool {
	return slices.ContainsFunc(users[x], func(u ID) bool {
		switch {
		case u == x:
			return true
		case View(p.Values[u].Op):
			return p.Escapes(users, u, inside)
		}
		return !inside(u)
	})
}

// ScalarOf returns the operation of the constant x.
func ScalarOf(x float64) Scalar { return Scalar{math.Float64bits(x)} }

// Float returns the constant.
func (o Scalar) Float() float64 { return math.Float64frombits(o.Bits) }

// Compute adds an element of an element-wise value to a program, given those of its operands: what
// [Elementwise] operations, copies and numbers mean.
func (v Value) Compute(p *fuse.Program, args []fuse.Value) fuse.Value {
	switch op := v.Op.(type) {
	case Scalar:
		return p.Const(fuse.Type(v.DType), op.Float())
	case Unary:
		return p.Do(op.Op, args...)
	case Binary:
		return p.Cast(fuse.Type(v.DType), p.Do(op.Op, args...))
	case Cast:
		return p.Cast(fuse.Type(v.DType), args[0])
	case Locate:
		return p.Locate(op.Axis, args[0])
	case Select:
		return p.Select(op.Axis, args[0], args[1], args[2])
	case Where:
		return p.Do(fuse.Where, args...)
	case Dropout:
		return p.Dropout(op.P, op.Seed, op.Op, args[0], args[1], args[2])
	}
	return args[0] // Copy
}

// Effect reports whether an operation does more than give its result, so that it must run
// exactly once, in order with the others that do.
func Effect(op Op) bool {
	_, opaque := op.(Opaque)
	return opaque
}

// View reports whether an operation has no step of its own: its result shares the memory of its
// operand, or is written beside it.
func View(op Op) bool {
	switch op.(type) {
	case Reshape, Permute, Slice, Broadcast, Result:
		return true
	}
	return false
}

// Zero reports whether a value is the number 0, repeated.
func (p *Program) Zero(x ID) bool {
	for View(p.Values[x].Op) {
		x = p.Values[x].Args[0]
	}
	return p.Values[x].Op == ScalarOf(0)
}

// Leaf reports whether a value comes from outside of the program.
func Leaf(op Op) bool {
	switch op.(type) {
	case Input, Constant, Scalar, State, Setting, PartialSum:
		return true
	}
	return false
}

// Elementwise reports whether an operation computes each element of its result from the same
// elements of its operands.
func Elementwise(op Op) bool {
	switch op.(type) {
	case Unary, Binary, Copy, Cast, Locate, Select, Where, Dropout:
		return true
	}
	return false
}

// ReadsPlace reports whether an element-wise operation depends on the place of an element.
func ReadsPlace(op Op) bool {
	switch op.(type) {
	case Locate, Select, Dropout:
		return true
	}
	return false
}

// Check returns an error if the program is not well formed: an operand after its user, or
// shapes and dtypes that do not fit the operation.
func (p *Program) Check() error {
	for i, v := range p.Values {
		for _, a := range v.Args {
			if a < 0 || int(a) >= i {
				return fmt.Errorf("ir: value %d (%v) has the operand %d, which does not come "+
					"before it", i, v.Op, a)
			}
		}
		if err := p.check(v); err != nil {
			return fmt.Errorf("ir: value %d, %v of %s: %w", i, v.Op, v.Name, err)
		}
	}
	for _, r := range p.Results {
		if r < 0 || int(r) >= len(p.Values) {
			return fmt.Errorf("ir: result %d of %d values", r, len(p.Values))
		}
	}
	for _, a := range p.Assigns {
		to, v := p.Values[a.To], p.Values[a.Value]
		if to.Shape != v.Shape || to.DType != v.DType {
			return fmt.Errorf("ir: %v of %s, %v %v, is assigned %v, %v %v", to.Op, to.Name,
				to.DType, to.Shape, v.Op, v.DType, v.Shape)
		}
	}
	return nil
}
