package backend

import (
	"errors"
	"fmt"
)

// The sentinels that errors of this package and of communicators wrap.
var (
	// ErrArgument: the call is wrong (lengths, dtypes, root, splits, overlap).
	// Nothing was communicated; the communicator stays usable.
	ErrArgument = errors.New("bad argument")
	// ErrUnsupported: the call is right, but this implementation does not offer
	// it. Nothing was communicated; the communicator stays usable.
	ErrUnsupported = errors.New("unsupported")
	// ErrTimeout: a rank did not take part in time.
	ErrTimeout = errors.New("timeout")
	// ErrMismatch: ranks started different collectives. Found as [*MismatchError].
	ErrMismatch = errors.New("ranks disagree")
	// ErrAborted: Abort was called, here or on another rank.
	ErrAborted = errors.New("aborted")
	// ErrClosed: the communicator was closed, here or by a rank that is waited for.
	ErrClosed = errors.New("closed")
)

// Error is a communication error. It is sticky: every later call on the
// communicator fails with it.
type Error struct {
	Comm  string // name of the communicator
	Rank  int    // who reports it
	Peer  int    // the rank that caused it, -1 if unknown
	Call  string // the collective under way, "" if none
	Cause error
}

// Error names the rank, the collective, the peer and the cause.
func (e *Error) Error() string {
	s := fmt.Sprintf("rank %d of %s", e.Rank, e.Comm)
	if _, twice := e.Cause.(*MismatchError); e.Call != "" && !twice { // which names the call
		s += ": " + e.Call
	}
	if e.Peer >= 0 && e.Peer != e.Rank {
		s += fmt.Sprintf(": because of rank %d", e.Peer)
	}
	return s + ": " + e.Cause.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// MismatchError says that two ranks started different collectives at the same
// place of their programs. errors.Is(err, ErrMismatch) is true.
type MismatchError struct {
	Rank, Peer   int
	Mine, Theirs Header
}

// Error names both sides, and says what to do.
func (e *MismatchError) Error() string {
	return fmt.Sprintf("%v: rank %d called %v, but rank %d called %v: %s", ErrMismatch, e.Rank, e.Mine, e.Peer, e.Theirs, e.remedy())
}

// remedy says what to do about it.
func (e *MismatchError) remedy() string {
	mine, theirs := e.Mine.Origin.Purpose, e.Theirs.Origin.Purpose
	switch {
	case mine != theirs && mine.everywhere() && theirs.everywhere():
		return fmt.Sprintf("call both %v and %v on every rank, in the same order", mine, theirs)
	case mine != theirs && mine.everywhere():
		return fmt.Sprintf("call %v on every rank, not on some of them", mine)
	case mine != theirs && theirs.everywhere():
		return fmt.Sprintf("call %v on every rank, not on some of them", theirs)
	}
	return "every rank must start the same collectives in the same order"
}

// Is makes the error match ErrMismatch.
func (e *MismatchError) Is(target error) bool { return target == ErrMismatch }
