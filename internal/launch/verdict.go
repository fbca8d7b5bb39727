package launch

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/internal/exit"
)

// sameTime is how close two ends must be for their order to mean nothing. The kernel closes the
// connections of a process before it reports the process's end, and other ranks may fail in
// between.
const sameTime = 100 * time.Millisecond

// ending is what is known of the end of one rank. A host sends the exported fields.
type ending struct {
	Status  syscall.WaitStatus
	Asked   bool          // the launcher had already signalled it
	Stopped bool          // a signal such as SIGSTOP had stopped it when the launcher looked
	Memory  string        // why it was killed, if for lack of memory
	Hang    string        // where it hangs, if SIGKILL did not end it
	Late    time.Duration // from its end until the host reported it

	rank    int
	at      time.Time
	host    string   // that it ran on
	why     error    // why nothing is known of its end: its host is lost, or cannot start it
	lines   []string // its last lines on standard error
	blames  []int    // the ranks that its last error names, see blamed
	blaming string   // that error
	said    bool     // its wrong command line is all that it said, and was shown
}

// usage reports whether the exit status is the one for a wrong command line.
func (e ending) usage() bool { return !wasEnded(e.Status) && e.Status.ExitStatus() == exit.Usage }

// failed reports whether the rank did not end well.
func (e ending) failed() bool { return !e.well() || e.Stopped || e.Hang != "" || e.why != nil }

// lost reports whether the rank ran on a host that is lost.
func (e ending) lost() bool { return errors.As(e.why, new(*HostLost)) }

// how says how the process ended.
func (e ending) how() string {
	switch {
	case e.lost():
		return fmt.Sprintf("host %s is lost", e.host)
	case e.why != nil:
		return e.why.Error()
	}
	return (&Failed{Status: e.Status, memory: e.Memory}).how()
}

// well reports whether the rank's process ended with exit status 0.
func (e ending) well() bool { return e.Status.ExitStatus() == 0 && !wasEnded(e.Status) }

// told reports whether a signal ended the process, or told it to end, as its status says then.
func (e ending) told() bool {
	return wasEnded(e.Status) || exit.SignalOf(e.Status.ExitStatus()) > 0
}

// crashed reports whether its last lines come from a Go program that crashed.
func (e ending) crashed() bool { return len(e.lines) > 0 && isCrash(e.lines[0]) }

// crashText matches the beginning of a Go program's crash report.
var crashText = regexp.MustCompile(`^(panic|fatal error|SIG[A-Z]+): `)

// isCrash reports whether a line begins the report of a crash.
func isCrash(line string) bool { return crashText.MatchString(line) }

// cause says how the rank failed, assuming that it failed first.
func (e ending) cause() cause {
	switch {
	case e.Hang != "":
		return causeStuck
	case e.Stopped:
		return causeStopped
	case e.Asked && (wasEnded(e.Status) || e.well()):
		return causeAbsent
	case e.well():
		return causeLeft
	default:
		return causeEnded
	}
}

// verdict says which rank failed first, given how all ranks have ended; nil if
// none failed.
func verdict(ends []ending) *Failed {
	var failed []ending
	for _, e := range ends {
		if e.failed() {
			failed = append(failed, e)
		}
	}
	if len(failed) == 0 {
		return nil
	}
	first := origin(ends, failed)
	v := &Failed{Host: first.host, Rank: first.rank, Status: first.Status, Lines: first.lines,
		cause: first.cause(), memory: first.Memory, why: first.why}
	for _, r := range first.blames {
		if !slices.ContainsFunc(ends, func(e ending) bool { return e.rank == r }) {
			v.elsewhere = append(v.elsewhere, r)
		}
	}
	var same []int // that ended for the same reason
	for _, e := range failed {
		if e.why == first.why {
			same = append(same, e.rank)
		}
		if e.Hang != "" {
			v.Hang = append(v.Hang, e.Hang)
		}
		if e.rank == first.rank {
			continue
		}
		v.Others = append(v.Others, e.rank)
		if v.cause != causeEnded && v.Seen == "" && slices.Contains(e.blames, first.rank) {
			v.Seen = fmt.Sprintf("rank %d: %s", e.rank, e.blaming)
		}
	}
	slices.Sort(v.Others)
	if lost, ok := first.why.(*HostLost); ok {
		slices.Sort(same)
		v.why = &HostLost{lost.Host, same, lost.why}
	}
	v.usage = v.cause == causeEnded && first.usage() && !first.crashed()
	v.said = v.usage && first.said
	return v
}

// origin returns the end that caused the others: the one that most of the others blame, directly or
// through each other. Blame by ranks that the launcher has ended does not count, because they miss
// each other.
func origin(ends, failed []ending) ending {
	roots := make([]ending, len(failed))
	accusers := map[int]int{}
	for i, e := range failed {
		roots[i] = root(ends, e)
		if roots[i].rank != e.rank && !(roots[i].Asked && e.Asked) {
			accusers[roots[i].rank]++
		}
	}
	return slices.MinFunc(roots, func(a, b ending) int {
		return cmp.Or(accusers[b.rank]-accusers[a.rank], likelier(a, b))
	})
}

// root follows the blame from rank to rank, up to a rank that blames none. If the blame is
// circular, the ways in which the ranks ended decide.
func root(ends []ending, e ending) ending {
	for path := []ending{e}; ; {
		var next []ending
		for _, other := range ends {
			if other.rank != e.rank && slices.Contains(e.blames, other.rank) {
				next = append(next, other)
			}
		}
		if len(next) == 0 {
			return e
		}
		e = slices.MinFunc(next, likelier)
		if i := slices.IndexFunc(path, func(p ending) bool { return p.rank == e.rank }); i >= 0 {
			return slices.MinFunc(path[i:], likelier)
		}
		path = append(path, e)
	}
}

// likelier orders ends by how likely each came first. A rank that fails because of another exits;
// it is neither stopped nor killed.
func likelier(a, b ending) int {
	apart := a.at.Sub(b.at).Abs()
	near := apart < sameTime
	switch {
	case a.lost() != b.lost() && apart < silence+sameTime: // a lost host may be noticed this late
		return trueFirst(a.lost())
	case a.Stopped != b.Stopped:
		return trueFirst(a.Stopped)
	case a.Asked != b.Asked:
		return trueFirst(b.Asked)
	case near && a.told() != b.told():
		return trueFirst(a.told())
	case near && a.crashed() != b.crashed():
		return trueFirst(a.crashed())
	}
	return a.at.Compare(b.at)
}

// trueFirst orders two values that differ, given the first.
func trueFirst(a bool) int {
	if a {
		return -1
	}
	return 1
}

// number matches a rank of the job in an error. Its number in a group may follow in brackets.
const number = `\d+(?: \([^)]*\))?`

// blameText matches how errors name the ranks that caused them: see rendezvous.Failure,
// rendezvous.MissingError, backend.Error and the timeouts of backends.
var blameText = regexp.MustCompile(`\brank (` + number + `) (?:is down:|is missing\b|failed:)` +
	`|\bbecause of rank (` + number + `)` +
	`|\bno sign of ranks? (` + number + `(?:, ` + number + `)*)` +
	`|\branks? (` + number + `(?:, ` + number + `)*) did not (?:join|call|take part)\b`)

// launcherText matches what a launcher says of its own ranks: a rank may have started one.
var launcherText = regexp.MustCompile(`^(\[\d+\] )?euryale: (host \S+: )?rank \d+ failed\b`)

// numberText finds the job's ranks in a match of blameText.
var numberText = regexp.MustCompile(`(\d+)(?: \([^)]*\))?`)

// blamed returns the ranks that a line of an error blames. If there are several, the last ones in
// the line are nearest to the cause.
func blamed(line []byte) (ranks []int) {
	if !bytes.Contains(line, []byte("rank")) || launcherText.Match(line) {
		return nil
	}
	found := blameText.FindAllSubmatch(line, -1)
	if len(found) == 0 {
		return nil
	}
	text := bytes.Join(found[len(found)-1][1:], nil) // one of them is not empty
	for _, n := range numberText.FindAllSubmatch(text, -1) {
		if rank, err := strconv.Atoi(string(n[1])); err == nil {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}
