package ops

import (
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// The sentinels that errors of graph construction wrap, beside
// [backend.ErrArgument] for ranks, roots, reductions and scales that are out of
// range. Running a graph can also give them, when a value was bound that does
// not fit its node.
var (
	// ErrShape: a shape, an axis or a list of lengths does not fit the operation.
	ErrShape = errors.New("bad shape")
	// ErrDType: collectives do not exist for values of this dtype.
	ErrDType = errors.New("bad dtype")
	// ErrGradient: the operation has no gradient.
	ErrGradient = errors.New("no gradient")
)

// failure is the error of an op that was run.
type failure struct {
	op         fmt.Stringer
	rank, size int
	err        error
}

func (f *failure) Error() string {
	return fmt.Sprintf("ops: %v, rank %d of %d: %v", f.op, f.rank, f.size, f.err)
}

func (f *failure) Unwrap() error { return f.err }

// fail returns err with the op and the rank that it happened in.
func fail(op fmt.Stringer, comm backend.Communicator, err error) error {
	return &failure{op, comm.Rank(), comm.Size(), err}
}

// Cause returns the error of the op of this package that made a run of a
// Gorgonia machine fail. The machines wrap it in a type that [errors.Is] and
// [errors.As] do not see through; with Cause they find, say, the
// [*backend.Error] that names a lost rank. An error that is of no op of this
// package is returned as it is.
func Cause(err error) error {
	for e := err; e != nil; {
		if f := (*failure)(nil); errors.As(e, &f) {
			return f
		}
		var inner interface{ Err() error } // the machines' wrapping
		if !errors.As(e, &inner) {
			break
		}
		e = inner.Err()
	}
	return err
}
