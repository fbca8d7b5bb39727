package wire

import (
	"errors"

	"github.com/euryale-ml/euryale/backend"
)

// Calls of f32 and of f64, sums and averages, are all averages of 16 bits on the
// wire. So that ranks which call different ones are still found out, what was
// called is kept in the slot: marks are the slots from firstMark downwards,
// which no caller uses.
const (
	firstMark = -1 << 24
	markF64   = 1
	markAvg   = 2
	marks     = 4 // per slot
)

// mark returns what travels for a call.
func mark(what backend.Collective, d backend.DType) backend.Collective {
	m := what.Slot * marks
	if d == backend.F64 {
		m |= markF64
	}
	if what.Op == backend.Avg {
		m |= markAvg
	}
	what.Op, what.Slot = backend.Avg, firstMark-m
	return what
}

// unmark returns the header of the call that one on the wire stands for.
func unmark(h backend.Header) backend.Header {
	if h.Slot > firstMark {
		return h
	}
	m := firstMark - h.Slot
	h.Slot, h.DType, h.Op = m/marks, backend.F32, backend.Sum
	if m&markF64 != 0 {
		h.DType = backend.F64
	}
	if m&markAvg != 0 {
		h.Op = backend.Avg
	}
	return h
}

// restate returns an error of inner in terms of what was called: call, if that
// is not empty.
func (c *Communicator) restate(err error, call string) error {
	var e *backend.Error
	if err == nil || !errors.As(err, &e) {
		return err
	}
	said := *e
	if call != "" {
		said.Call = call
	}
	var m *backend.MismatchError
	if errors.As(e.Cause, &m) {
		both := *m
		both.Mine, both.Theirs = unmark(m.Mine), unmark(m.Theirs)
		said.Cause = &both
	}
	return &said
}
