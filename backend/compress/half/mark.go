package half

import (
	"errors"

	"github.com/euryale-ml/euryale/backend"
)

// Calls of f32 and of f64, sums and averages, are all averages of 16 bits on the
// wire. So that ranks which call different ones are still found out, the call says what it
// stands for. Where inner rounds on the way, the call is one of f32 there; then it says
// what it is rounded to.

// mark returns what travels for a call.
func mark(what backend.Collective, d backend.DType) backend.Collective {
	what.Original.Op, what.Original.DType = what.Op, d
	what.Op = backend.Avg
	return what
}

// leave returns a call of f32 as inner may round it on the way.
func allowHalf(what backend.Collective, half backend.DType) backend.Collective {
	what.Original = backend.Original{Op: what.Op, DType: backend.F32, Transport: half}
	what.AllowHalf = half
	return what
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
		both.Mine, both.Theirs = m.Mine.Asked(), m.Theirs.Asked()
		said.Cause = &both
	}
	return &said
}
