package ops

import (
	"errors"
	"fmt"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// Errors of graph construction wrap these sentinels, or [backend.ErrArgument] for ranks, roots,
// reductions and scales that are out of range. Running a graph can return the same errors, if a
// bound value does not fit its node.
var (
	// ErrShape: a shape, an axis or a list of lengths does not fit the operation.
	ErrShape = errors.New("bad shape")
	// ErrDType: collectives do not exist for values of this dtype.
	ErrDType = errors.New("bad dtype")
	// ErrGradient: the operation has no gradient.
	ErrGradient = errors.New("no gradient")
)

// Error is the error of an operation at run time. [Cause] extracts it from the error of a
// Gorgonia machine.
type Error struct {
	Op      string // the operation: "AllReduce{sum}"
	Operand string // the name of the node that it was applied to, "" if unknown
	Shape   tensor.Shape
	DType   tensor.Dtype // of the operand, like Shape
	Comm    string       // name of the communicator
	Rank    int
	Err     error // what happened
}

// Error names the operation, the operand and the rank:
// "AllReduce{sum} of x (4, 6) f32: rank 1 of run-...: ...".
func (e *Error) Error() string {
	operand := fmt.Sprintf("%v %v", backend.ShapeOf(e.Shape...), e.DType)
	if d, err := bufferDType(e.DType); err == nil {
		operand = fmt.Sprintf("%v %v", backend.ShapeOf(e.Shape...), d) // in backend's words
	}
	if e.Operand != "" {
		operand = e.Operand + " " + operand
	}
	if inner, ok := e.Err.(*backend.Error); ok { // which names the rank
		short := *inner
		short.Call = "" // it is this operation
		return fmt.Sprintf("%s of %s: %v", e.Op, operand, &short)
	}
	return fmt.Sprintf("%s of %s: rank %d of %s: %v", e.Op, operand, e.Rank, e.Comm, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Operation returns the operation, as for all errors that [Cause] finds.
func (e *Error) Operation() string { return e.Op }

// Cause returns the error of the operation that made a Gorgonia machine fail: an [*Error] of this
// package, or another error with a method Operation() string, such as those of package nn. The
// machines wrap it in a type that hides it from [errors.Is] and [errors.As], and add text before
// it. In the result of Cause these find, for example, the [*backend.Error] that names a lost rank.
// Cause returns other errors unchanged.
func Cause(err error) error {
	for e := err; e != nil; {
		var failed interface {
			error
			Operation() string
		}
		if errors.As(e, &failed) {
			return failed
		}
		var inner interface{ Err() error } // the machines' wrapping
		if !errors.As(e, &inner) {
			break
		}
		e = inner.Err()
	}
	return err
}
