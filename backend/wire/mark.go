package wire

import (
	"errors"

	"github.com/euryale-ml/euryale/backend"
)

// Calls of f32 and of f64, sums and averages, are all averages of 16 bits on the
// wire. So that ranks which call different ones are still found out, what was
// called is kept in the slot: marks are the slots from firstMark downwards,
// which no caller uses. Where inner rounds on the way, the call is one of f32 there;
// then the mark says what it is rounded to.
const (
	firstMark = -1 << 24
	markF64   = 1 // of 16 bits
	markBF16  = 1 // of f32
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

// leave returns a call of f32 as inner may round it on the way.
func leave(what backend.Collective, half backend.DType) backend.Collective {
	m := mark(what, backend.F32)
	if half == backend.BF16 {
		m.Slot -= markBF16
	}
	m.Op, m.Wire = what.Op, half
	return m
}

// unmark returns the header of the call that one on the wire stands for.
func unmark(h backend.Header) backend.Header {
	if h.Slot > firstMark {
		return h
	}
	m := firstMark - h.Slot
	if h.DType != backend.F32 && m&markF64 != 0 {
		h.DType = backend.F64
	} else {
		h.DType = backend.F32
	}
	h.Slot, h.Op = m/marks, backend.Sum
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
