package backend

import (
	"fmt"
	"slices"
	"strings"
)

// Wrapper is a Communicator over others: it adds one idea and owns them.
type Wrapper interface {
	Communicator
	Unwrap() []Communicator
}

// Base is embedded by a wrapper of one communicator. It forwards everything to the inner
// communicator and implements Unwrap, so the wrapper declares only what it changes:
//
//	type counted struct {
//		backend.Base
//		calls atomic.Int64
//	}
//
//	func (c *counted) Start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (
//		backend.Work, error) {
//		c.calls.Add(1)
//		return c.Base.Start(q, what, dst, src)
//	}
//
// Split returns a part of the inner communicator. A wrapper that also wraps the parts declares its
// own Split.
type Base struct {
	Communicator
	checked CheckedStarter // Communicator, as far as it is one
}

// Wrap returns the Base of a wrapper of inner, which owns inner.
func Wrap(inner Communicator) Base {
	checked, ok := inner.(CheckedStarter)
	if !ok {
		checked = checking{inner}
	}
	return Base{inner, checked}
}

// checking is a Communicator whose Start checks every call.
type checking struct{ Communicator }

func (c checking) StartChecked(q Queue, what Collective, count int, dst, src Buffer) (Work, error) {
	// The communicator may predate both Tree and Rows, and ignore them.
	if d := what.DType(dst, src); what.Association == Tree {
		caps := c.Capabilities()
		if !slices.Contains(caps.Tree, d) || what.Kind == AllReduce && what.Splits != nil &&
			!caps.Branches {
			return nil, RefuseTree(c, what, d)
		}
	}
	if what.Rows != nil && !c.Capabilities().RunsRows(what, what.DType(dst, src), count) {
		return nil, RefuseRows(c, what)
	}
	return c.Start(q, what, dst, src)
}

// CheckedStarter is a Communicator that accepts calls that its caller has already checked. The
// communicator that the program calls checks a call; wrappers pass it on by [Base.Pass], so that it
// is checked only once. A communicator that has only Start checks every call, and needs no
// StartChecked. A wrapper that embeds a CheckedStarter, instead of a Base, and declares Start must
// also declare StartChecked.
type CheckedStarter interface {
	Communicator
	// StartChecked is Start of a call for which Check has returned count.
	StartChecked(q Queue, c Collective, count int, dst, src Buffer) (Work, error)
}

// Start checks a call, and starts it: most wrappers' Start is this.
func (c *Collective) Start(on CheckedStarter, q Queue, dst, src Buffer) (Work, error) {
	count, err := c.Check(on.Rank(), on.Size(), dst, src)
	if err != nil {
		return nil, Refuse(on, err)
	}
	return on.StartChecked(q, *c, count, dst, src)
}

// Pass starts a call on the inner communicator, as Start does, once the wrapper has checked it:
// [Collective.Check] has returned count.
func (b *Base) Pass(q Queue, c Collective, count int, dst, src Buffer) (Work, error) {
	return b.checked.StartChecked(q, c, count, dst, src)
}

// Refuse returns the error of comm's Start for an error of Check. It adds the rank's name, unless
// err has it already, as errors of a communicator inside comm do.
func Refuse(comm Communicator, err error) error {
	name := RankOf(comm)
	if strings.Contains(err.Error(), name+": ") {
		return err
	}
	return fmt.Errorf("%s: %w", name, err)
}

// RefuseTree returns the error of comm's Start for a call in the association [Tree] if comm cannot
// add operands of type d that way.
func RefuseTree(comm Communicator, what Collective, d DType) error {
	return Refuse(comm, fmt.Errorf("%w: %v of %v: it cannot add these operands in a tree: use "+
		"backend host or tcp, or f32 on GPUs, and do not compress", ErrUnsupported, what, d))
}

// RefuseRows returns the error of comm's Start for an AllToAll with Rows if comm cannot run it.
func RefuseRows(comm Communicator, what Collective) error {
	return Refuse(comm, fmt.Errorf("%w: %v: it takes pieces that lie one after the other: pack "+
		"and join them, as ops does, or ask its Capabilities", ErrUnsupported, what))
}

// Unwrap implements [Wrapper].
func (b Base) Unwrap() []Communicator { return []Communicator{b.Communicator} }

// As returns the first T among comm and the communicators it wraps, outermost first: a way to reach
// counters, state or explanations of one layer.
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
