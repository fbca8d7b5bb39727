package backendtest

import (
	"context"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Call runs one collective on c, on host memory and on random integers, and
// compares the result, bit for bit, with the suite's own reference. Every rank of
// the group calls it with the same arguments: the operands of all ranks follow
// from seed, so ranks may be processes. count is the elements of one even chunk,
// or of the whole operand where there are no chunks, and ignored with splits.
// Products are exact up to 14 ranks, for which 16 bits have room.
//
// An error of the communicator is returned as it is, a wrong result is a
// [*WrongError]. Cost: the operands of all ranks, on each.
func Call(c backend.Communicator, q backend.Queue, what backend.Collective, d backend.DType,
	count int, seed uint64) error {
	t := newTrial(what, d, c.Size(), count, integers, seed).expect()
	_, n := lengths(what, c.Rank(), c.Size(), count)
	var dst, src backend.Buffer
	if n >= 0 {
		dst = backend.Of(make([]byte, n*d.Size())).As(d)
	}
	if operand := t.srcs[c.Rank()]; operand != nil {
		src = backend.Of(operand).As(d)
	}
	w, err := c.Start(q, what, dst, src)
	if err != nil {
		return err
	}
	if err := w.Join(context.Background()); err != nil || n < 0 {
		return err
	}
	if err := differ(d, dst.Bytes(), t.wants[c.Rank()]); err != nil {
		return &WrongError{what, err}
	}
	return nil
}

// WrongError says that a collective gave a wrong result.
type WrongError struct {
	What  backend.Collective
	Cause error // the first element that differs
}

// Error names the collective and the first element that differs.
func (e *WrongError) Error() string {
	return fmt.Sprintf("%v gave a wrong result: %v", e.What, e.Cause)
}

// Unwrap returns the cause.
func (e *WrongError) Unwrap() error { return e.Cause }
