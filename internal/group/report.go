package group

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Reason is why a group ended.
type Reason uint32

// The reasons.
const (
	Aborted Reason = iota + 1
	TimedOut
	Lost // a rank of the job is down
	Mismatch
	Closed
	Failed // a rank of the job was declared failed
)

// Report is why a group ended, as a rank of it tells the others.
type Report struct {
	Reason Reason
	Rank   int // who reports
	// who is to blame, -1 if that is no rank of the group, or unknown
	Peer int
	// the rank of the job that is to blame, where Reason is Lost, TimedOut or Failed, or Peer is -1
	Lost         int
	Sides        [2]int                   // in a mismatch: see Difference
	Mine, Theirs [backend.HeaderSize]byte // what they called
	Text         string
}

// lost returns the rank of the job that the report calls lost, or from which there is no sign; -1
// if none.
func (r Report) lost() int {
	if r.Reason == Lost || r.Reason == TimedOut {
		return r.Lost
	}
	return -1
}

// LostRank reports the failure of a rank of the job, which may be outside the group.
func LostRank(m backend.Members, f *rendezvous.Failure) Report {
	r := Report{Reason: Lost, Peer: slices.Index(m, f.Rank), Lost: f.Rank, Text: f.Cause.Error()}
	if f.Declared {
		r.Reason = Failed
	}
	return r
}

// explains reports whether r says more than the loss of a rank: that rank has published it, and
// ended because of what it had found; or calls differ, after which ranks end. What a rank has
// declared began with a report.
func (r Report) explains(loss Report) bool {
	return loss.Reason == Failed || loss.Reason == Lost &&
		(r.Reason == Mismatch || loss.Peer >= 0 && r.Rank == loss.Peer)
}

// AbortedBy reports that a rank of the group has called Abort. If it did so because of
// another rank of the job, as its cause says, that one is to blame, also from outside the group.
func AbortedBy(m backend.Members, rank int, cause error) Report {
	var f *rendezvous.Failure
	if errors.As(cause, &f) {
		return LostRank(m, f)
	}
	r := Report{Reason: Aborted, Peer: rank, Text: cause.Error()}
	var of interface{ Blames() int }
	if errors.As(cause, &of) && of.Blames() >= 0 {
		r.Lost = of.Blames()
		r.Peer = slices.Index(m, r.Lost)
	}
	return r
}

// ClosedWithout reports that rank p has closed before a call.
func ClosedWithout(m backend.Members, p int) Report {
	return Report{Reason: Closed, Peer: p, Text: m.Rank(p) + " has closed its communicator " +
		"without taking part: every rank must start the same collectives"}
}

// Missing reports that ranks of the job did not call a collective in time, in this group or in one
// that ranks of this group wait in. [Absent] is for ranks of the group, and for processes that are
// stopped.
func Missing(stopped []rendezvous.Process, m backend.Members, ranks []int,
	timeout time.Duration) Report {
	inside := make([]int, len(ranks))
	for i, r := range ranks {
		inside[i] = slices.Index(m, r)
	}
	if len(stopped) > 0 || !slices.Contains(inside, -1) {
		return Absent(stopped, m, inside, timeout)
	}
	return Report{Reason: TimedOut, Peer: inside[0], Lost: ranks[0],
		Text: noSign(backend.Members(nil).Ranks(ranks...), timeout)}
}

// Absent reports that ranks, the first of them above all, did not call a collective in time. Where
// processes of ranks of the job are stopped, the first one is to blame: the others may be
// waiting for it, in their own groups.
func Absent(stopped []rendezvous.Process, m backend.Members, ranks []int,
	timeout time.Duration) Report {
	if len(stopped) > 0 {
		p := stopped[0]
		peer := slices.Index(m, p.Rank)
		name := backend.Members(nil).Rank(p.Rank)
		if peer >= 0 {
			name = m.Rank(peer)
		}
		return Report{Reason: TimedOut, Peer: peer, Lost: p.Rank, Text: fmt.Sprintf(
			"no sign of %s for %v: its process %d is stopped (kill -CONT %d lets it go on)", name,
			timeout, p.PID, p.PID)}
	}
	return Report{Reason: TimedOut, Peer: ranks[0], Lost: jobRank(m, ranks[0]),
		Text: noSign(m.Ranks(ranks...), timeout)}
}

func noSign(of string, timeout time.Duration) string {
	return fmt.Sprintf(
		"no sign of %s for %v: stopped, busy, or at another point in its program "+
			"(EURYALE_TIMEOUT sets how long to wait)",
		of, timeout)
}

// Stuck reports that all ranks take part, and still nothing goes on.
func Stuck(timeout time.Duration) Report {
	return Report{Reason: TimedOut, Peer: -1, Lost: -1, Text: fmt.Sprintf(
		"every rank has started the call, but it has not ended after %v: the device or a link to "+
			"it is stuck, or work before it on the queue is "+
			"(EURYALE_TIMEOUT sets how long to wait)", timeout)}
}

// jobRank returns the job's number of a rank of the group.
func jobRank(m backend.Members, r int) int {
	if r < len(m) {
		return m[r]
	}
	return r
}

// blaming is an error that a rank is to blame for.
type blaming struct {
	error
	rank int // of the job
}

func (b blaming) Unwrap() error { return b.error }

// Blames returns the rank: see [backend.Error.Blames].
func (b blaming) Blames() int { return b.rank }

// before returns the number of the last call before those that differ in a mismatch, 0 if the
// report does not have them.
func (r *Report) before() uint64 {
	seq := backend.GetHeader(&r.Mine).Seq
	return max(seq, 1) - 1
}

// Cause returns the error that the report stands for.
func (r Report) Cause(m backend.Members) error {
	switch r.Reason {
	case TimedOut:
		return blaming{fmt.Errorf("%w: %s", backend.ErrTimeout, r.Text), r.Lost}
	case Lost, Failed:
		return fmt.Errorf("%w: %w", backend.ErrAborted, &rendezvous.Failure{Rank: r.Lost,
			Cause: errors.New(r.Text), Declared: r.Reason == Failed})
	case Mismatch:
		return &backend.MismatchError{Members: m, Rank: r.Sides[0], Peer: r.Sides[1],
			Mine: backend.GetHeader(&r.Mine), Theirs: backend.GetHeader(&r.Theirs)}
	case Closed:
		return fmt.Errorf("%w: %s", backend.ErrClosed, r.Text)
	}
	err := fmt.Errorf("%w: %s", backend.ErrAborted, r.Text)
	if r.Peer < 0 { // from outside the group
		return blaming{err, r.Lost}
	}
	return err
}
