package backend

// Wrapper is a Communicator over others: it adds one idea and owns them.
type Wrapper interface {
	Communicator
	Unwrap() []Communicator
}

// Base is what a wrapper of one communicator embeds. It forwards everything to the
// inner communicator and implements Unwrap, so that the wrapper declares only what it
// changes:
//
//	type counted struct {
//		backend.Base
//		calls atomic.Int64
//	}
//
//	func (c *counted) Start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
//		c.calls.Add(1)
//		return c.Base.Start(q, what, dst, src)
//	}
//
// Split returns a part of the inner communicator. A wrapper whose parts are to be
// wrapped, too, declares its own Split.
type Base struct{ Communicator }

// Wrap returns the Base of a wrapper of inner, which owns inner.
func Wrap(inner Communicator) Base { return Base{inner} }

// Unwrap implements [Wrapper].
func (b Base) Unwrap() []Communicator { return []Communicator{b.Communicator} }

// Capabilities returns those of the inner communicator, except StartRounded: a wrapper
// sees every call in Start.
func (b Base) Capabilities() Capabilities {
	c := b.Communicator.Capabilities()
	c.Rounded, c.StartRounded = nil, nil
	return c
}

// As returns the first of comm and the communicators it wraps, outermost
// first, that is a T: a way to reach counters, state or explanations of one
// layer.
func As[T any](comm Communicator) (t T, ok bool) {
	if t, ok = comm.(T); ok {
		return t, true
	}
	if w, isWrapper := comm.(Wrapper); isWrapper {
		for _, inner := range w.Unwrap() {
			if t, ok = As[T](inner); ok {
				return t, true
			}
		}
	}
	return t, false
}
