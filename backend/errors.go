package backend

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// The sentinels that errors of this package and of communicators wrap.
var (
	// ErrArgument: the call is wrong (lengths, dtypes, root, splits, overlap).
	// Nothing was communicated; the communicator stays usable.
	ErrArgument = errors.New("bad argument")
	// ErrUnsupported: the call is right, but this implementation does not offer
	// it. Nothing was communicated; the communicator stays usable.
	ErrUnsupported = errors.New("unsupported")
	// ErrTimeout: a rank did not call a collective, or did not connect, in time.
	ErrTimeout = errors.New("timeout")
	// ErrMismatch: ranks started different collectives. Found as [*MismatchError].
	ErrMismatch = errors.New("ranks disagree")
	// ErrAborted: Abort was called, here or on another rank.
	ErrAborted = errors.New("aborted")
	// ErrClosed: the communicator was closed, by this rank or by a rank that it waits for.
	ErrClosed = errors.New("closed")
)

// Members lists the job's ranks that a group consists of, indexed by rank of the group. nil is a
// group whose ranks have the job's numbers. Messages use it to name ranks, because users know a
// rank by its number in the job.
type Members []int

// Rank names rank r of the group: "rank 3", or "rank 3 (2 of the group)" if its number in the group
// differs from its number in the job.
func (m Members) Rank(r int) string { return m.Ranks(r) }

// Ranks is Rank of one rank or several: "ranks 3, 5 (2, 4 of the group)".
func (m Members) Ranks(ranks ...int) string {
	var inJob, inGroup []string
	same := true
	for _, r := range ranks {
		job := r
		if r >= 0 && r < len(m) {
			job = m[r]
		}
		same = same && job == r
		inJob, inGroup = append(inJob, strconv.Itoa(job)), append(inGroup, strconv.Itoa(r))
	}
	s := "rank " + strings.Join(inJob, ", ")
	if len(ranks) != 1 {
		s = "ranks " + strings.Join(inJob, ", ")
	}
	if !same {
		s += " (" + strings.Join(inGroup, ", ") + " of the group)"
	}
	return s
}

// Error is a communication error. It is sticky: every later call on the communicator fails with it.
// Its fields hold ranks of the group; its text names ranks of the job.
type Error struct {
	Comm    string  // name of the communicator
	Members Members // of the group
	Rank    int     // who reports it
	Peer    int     // the rank that caused it, -1 if unknown
	Call    string  // the collective under way, "" if none
	Cause   error
}

// Error names the rank, the collective, the peer and the cause. It leaves out a collective that the
// cause already names.
func (e *Error) Error() string {
	s := e.Members.Rank(e.Rank) + " of " + e.Comm
	// If an error of a call was given to Abort, the cause names the rank, too.
	cause := strings.Replace(e.Cause.Error(), s+": ", "", 1)
	if e.Call != "" && !strings.Contains(cause, e.Call) {
		s += ": " + e.Call
	}
	if e.Peer >= 0 && e.Peer != e.Rank {
		s += ": because of " + e.Members.Rank(e.Peer)
	}
	return s + ": " + cause
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Blames returns the job's rank that the error began with, -1 if it is unknown.
// rendezvous.World.Fail declares that rank failed.
func (e *Error) Blames() int {
	var deeper interface{ Blames() int }
	switch {
	case e.Peer >= 0 && e.Peer < len(e.Members):
		return e.Members[e.Peer]
	case e.Peer < 0 && errors.As(e.Cause, &deeper):
		return deeper.Blames()
	}
	return e.Peer
}

// MismatchError says that two ranks started different collectives at the same place of their
// programs. errors.Is(err, ErrMismatch) is true. Its fields hold ranks of the group; its text names
// ranks of the job. If more ranks started the same collective as Rank than any other, Peer is to
// blame, and the [Error] around it names Peer; otherwise the Error's Peer is -1.
type MismatchError struct {
	Members      Members // of the group
	Rank, Peer   int
	Mine, Theirs Header // what they started
}

// Error names both sides, and says what to do.
func (e *MismatchError) Error() string {
	return fmt.Sprintf("%v: %s called %v, but %s called %v: %s",
		ErrMismatch, e.Members.Rank(e.Rank), e.Mine, e.Members.Rank(e.Peer), e.Theirs, e.remedy())
}

// remedy says what to do about the mismatch.
func (e *MismatchError) remedy() string {
	mine, theirs := e.Mine.origin().Purpose, e.Theirs.origin().Purpose
	switch {
	case mine == ForReplay && theirs == ForReplay:
		return "every rank must record the same collectives in a graph, and launch the same " +
			"graphs in the same order"
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
