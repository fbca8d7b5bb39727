//go:build linux

package main

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The kinds of anomaly.
const (
	hang    = "hangs"
	unnamed = "unnamed"
	left    = "left"
	wrong   = "wrong"
	late    = "late"
)

// anomaly is something wrong about a job.
type anomaly struct{ kind, text string }

// ending is how a process ended.
type ending struct {
	rank   int // -1 where it is not one rank
	code   int // 128 + the signal for those that a signal ended
	output string
}

// whose names the ranks of the process.
func (e ending) whose() string {
	if e.rank < 0 {
		return "the process of all ranks"
	}
	return fmt.Sprintf("rank %d", e.rank)
}

// outcome describes a job that has ended.
type outcome struct {
	took   time.Duration
	hung   bool
	ends   []ending
	stays  []string // what is left of it: processes and files
	visits int      // of unauthenticated clients
	struck int64    // when the failure happened, in microseconds, if that was seen
	stall  time.Duration
	parts  []outcome // of jobs that are several
}

// said is what all processes have said.
func (o outcome) said() string {
	var all strings.Builder
	for _, e := range o.ends {
		all.WriteString(e.output)
	}
	return all.String()
}

// said is a rank's report of its end.
type said struct {
	word, text string
	at         int64 // in microseconds
}

var (
	rankSaid     = regexp.MustCompile(`(?m)soak: rank=(\d+) (\w+)(?: at=(\d+))? (".*")$`)
	runSaid      = regexp.MustCompile(`(?m)soak: run error (".*")$`)
	launcherSaid = regexp.MustCompile(
		`(?m)soak: launcher rank=(\d+) code=(\d+)(?: at=(\d+))? (".*")$`)
	// blames matches how errors blame a rank: the one that caused the others comes first.
	blames = regexp.MustCompile(
		`\brank (\d+) is down\b|because of rank (\d+)\b|` +
			`\brank (\d+) did not (?:join|call|take part)|` +
			`\brank (0) is missing|\brank (\d+) failed`)
)

// zeroed is a wrong result that is zero.
var zeroed = regexp.MustCompile(`^[^\n]*\belement \d+ of (shared memory|parameter \d+) is 0\b`)

// blamed returns the rank that an error blames, -1 if it blames none.
func blamed(text string) int {
	found := blames.FindStringSubmatch(text)
	for _, number := range found[min(1, len(found)):] {
		if n, err := strconv.Atoi(number); err == nil {
			return n
		}
	}
	return -1
}

// absentees is how errors list the ranks that did not join, or did not call, in time.
var absentees = regexp.MustCompile(
	`no sign of ranks? ([\d, ]*\d)|\branks ([\d, ]*\d) did not (?:join|call|take part)`)

// missed reports whether an error lists a rank among them.
func missed(text string, rank int) bool {
	found := absentees.FindStringSubmatch(text)
	return found != nil && slices.Contains(strings.Split(found[1]+found[2], ", "),
		strconv.Itoa(rank))
}

// unquote is the inverse of %q, for what this program has printed itself.
func unquote(text string) string {
	plain, err := strconv.Unquote(text)
	if err != nil {
		return text
	}
	return plain
}

// judge compares an outcome with the expected one.
func (j job) judge(o outcome) (found []anomaly) {
	if o.parts != nil {
		return j.judgeSaves(o)
	}
	if len(o.stays) > 0 {
		found = append(found, anomaly{left, strings.Join(o.stays, ", ")})
	}
	if o.hung {
		return append(found, anomaly{hang, fmt.Sprintf("it had not ended after %v", o.took)})
	}
	ranks := map[int]said{}
	output := o.said()
	for _, line := range rankSaid.FindAllStringSubmatch(output, -1) {
		rank, _ := strconv.Atoi(line[1])
		at, _ := strconv.ParseInt(line[3], 10, 64)
		ranks[rank] = said{line[2], unquote(line[4]), at}
	}
	for rank := range j.ranks {
		found = append(found, j.judgeRank(rank, ranks)...)
	}
	found = append(found, j.judgeLauncher(output)...)
	found = append(found, j.judgeLate(o, ranks)...)
	return append(found, j.judgeEnds(o.ends, output)...)
}

// judgeRank judges the report of one rank.
func (j job) judgeRank(rank int, ranks map[int]said) []anomaly {
	s, spoke := ranks[rank]
	switch {
	case s.word == wordWrong && j.failure.name == closed && rank == j.failure.rank &&
		zeroed.MatchString(s.text):
		return nil // Close replaces memory from Alloc by zeros, also while it is read
	case s.word == wordWrong:
		return []anomaly{{wrong, fmt.Sprintf("rank %d: %s", rank, s.text)}}
	case s.word == wordLocked && j.mode == saves && j.part != resumes:
		return nil // by the other part
	case j.failure.name == cut:
		return j.judgeCut(rank, s)
	case rank == j.failure.rank && j.failure.name != none:
		return j.judgeVictim(s)
	case s.word == wordDone && j.mayEndWell(rank):
		return nil
	case s.word == wordDone:
		return []anomaly{{wrong, fmt.Sprintf("rank %d ended well in spite of the failure", rank)}}
	case !spoke && j.mayBeSilent():
		return nil
	case !spoke:
		return []anomaly{{wrong, fmt.Sprintf("rank %d has not said how it ended", rank)}}
	case j.failure.name == none:
		return []anomaly{{wrong, fmt.Sprintf("rank %d failed without a reason: %s", rank, s.text)}}
	case j.failure.name == killed && strings.Contains(s.text, "rank 0 is missing"):
		return nil // it came after the job had ended, and found nobody
	case j.failure.name == stop && missed(s.text, j.failure.rank):
		return nil // with others, which waited for it elsewhere
	case blamed(s.text) != j.failure.rank:
		return []anomaly{{unnamed, fmt.Sprintf("rank %d: %s", rank, s.text)}}
	}
	return nil
}

// judgeCut judges the report of a rank of machines of which one was cut off: it blames one on the
// other side, unless all was over.
func (j job) judgeCut(rank int, s said) []anomaly {
	lost := j.machineOf(j.failure.rank)
	for other := range j.ranks {
		there := (j.machineOf(rank) == lost) != (j.machineOf(other) == lost)
		names := s.word == wordError && (blamed(s.text) == other || missed(s.text, other))
		if s.word == wordDone || there && names {
			return nil
		}
	}
	text := fmt.Sprintf("rank %d, when machine %d was cut off: %s %s", rank, lost, s.word, s.text)
	return []anomaly{{unnamed, text}}
}

// judgeVictim judges the report of the rank that failed.
func (j job) judgeVictim(s said) []anomaly {
	var want []string
	switch j.failure.name {
	case leave:
		want = []string{wordLeft}
	case inside:
		want = []string{"", wordError} // some backends check again
	case inSave:
		want = []string{"", wordDone} // it may have been too late
	case abort, locked:
		want = []string{wordError}
	case closed, killed:
		want = []string{wordError, wordDone, ""} // it may have been too late
	case stop:
		want = []string{"", wordError} // a launcher lets it go on, to end it
	default:
		want = []string{""}
	}
	for _, word := range want {
		if s.word == word {
			return nil
		}
	}
	return []anomaly{{wrong, fmt.Sprintf("rank %d, to which the failure should have happened, "+
		"ended with %q: %s", j.failure.rank, s.word, s.text)}}
}

// certain reports whether the failure happens before the job can end.
func (j job) certain() bool {
	return !slices.Contains([]string{none, killed, closed, cut, inSave}, j.failure.name)
}

// mayEndWell reports whether a survivor may have ended before the failure.
func (j job) mayEndWell(rank int) bool {
	return !j.certain() || rank == 0 && stays(j.steps, 0) < len(j.steps)
}

// mayBeSilent reports whether survivors may end without a word: a launcher ends
// those that have not said one in time, a panic on a goroutine of Gorgonia's machines
// ends the process, and a rank that is still connecting at the failure never gets to
// the program, of which euryale.Run returns the first error only.
func (j job) mayBeSilent() bool {
	switch j.mode {
	case launched:
		return j.failure.name != none
	case goroutines:
		early := j.failure.name != none && j.failure.step == 0 && j.failure.call <= 1
		return early || j.failure.panics()
	}
	return false
}

// codes are the exit codes of a launcher. A rank that is stopped, or ends well too
// early, has none of its own that says so.
var codes = map[string]int{kill: 137, killed: 137, panics: 2, exit: 3, abort: 1, closed: 1, stop: 1,
	leave: 1, absent: 1}

// judgeLauncher judges the report of the launcher, or of euryale.Run.
func (j job) judgeLauncher(output string) []anomaly {
	if line := launcherSaid.FindStringSubmatch(output); line != nil {
		if line[1] != strconv.Itoa(j.failure.rank) {
			return []anomaly{{unnamed, "the launcher: " + unquote(line[4])}}
		}
		if code, ok := codes[j.failure.name]; ok && line[2] != strconv.Itoa(code) {
			return []anomaly{{unnamed, fmt.Sprintf("the launcher ends with %s, not %d: %s", line[2],
				code, unquote(line[4]))}}
		}
		return nil
	}
	if line := runSaid.FindStringSubmatch(output); line != nil {
		text := unquote(line[1])
		if rank := blamed(text); rank != j.failure.rank &&
			!(rank < 0 && strings.Contains(text, fmt.Sprintf("rank %d", j.failure.rank))) {
			return []anomaly{{unnamed, "the error of all: " + text}}
		}
		return nil
	}
	if j.certain() && (j.mode == launched || j.mode == goroutines && !j.failure.panics()) {
		return []anomaly{{unnamed, "the job ended well in spite of the failure"}}
	}
	return nil
}

// judgeEnds judges how processes ended.
func (j job) judgeEnds(ends []ending, output string) (found []anomaly) {
	if strings.Contains(output, "unexpected fault address") ||
		strings.Contains(output, "fatal error:") || strings.Contains(output, "DATA RACE") {
		found = append(found, anomaly{wrong, "a fault of the memory or the runtime"})
	}
	panicked := strings.Contains(output, "panic: ")
	if panicked && !j.failure.panics() {
		found = append(found, anomaly{wrong, "a panic"})
	}
	for _, e := range ends {
		hit := j.failure.name != none && (e.rank < 0 || e.rank == j.failure.rank)
		if j.failure.name == inside && hit && e.code == 2 && !panicked {
			found = append(found, anomaly{wrong, e.whose() + " does not print its panic"})
		}
		if e.code > 1 && !hit || e.code == 1 && j.failure.name == none {
			found = append(found, anomaly{wrong, fmt.Sprintf("%s ended with %d", e.whose(),
				e.code)})
		}
	}
	return found
}
