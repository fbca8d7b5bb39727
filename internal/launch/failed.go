package launch

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/euryale-ml/euryale/internal/exit"
)

// cause is the way in which the first rank failed.
type cause int

const (
	// Ended: it ended with an exit status other than 0, or by a signal.
	causeEnded cause = iota
	// Left: it ended with exit status 0 while other ranks still needed it.
	causeLeft
	// Early: it ended with exit status 0 before the last step of an elastic job, as the last one.
	causeEarly
	// Stopped: a signal such as SIGSTOP had stopped it.
	causeStopped
	// Absent: other ranks waited for it until the launcher ended it.
	causeAbsent
	// Stuck: other ranks waited for it, and SIGKILL did not end it.
	causeStuck
)

// Failed is the error of a job in which a rank failed.
type Failed struct {
	Host   string             // the one of Job.Hosts that it ran on, if any
	Rank   int                // the rank that failed first
	Status syscall.WaitStatus // how its process ended
	Lines  []string           // its last lines on standard error, if they were read
	Seen   string             // unless it ended by itself, what another rank said of it
	Others []int              // the ranks that failed later or were ended
	Hang   []string           // where the ranks hang that SIGKILL did not end

	cause     cause  // how the rank failed
	memory    string // see ending.Memory
	elsewhere []int  // the ranks on other machines that its error blames
	why       error  // replaces all this if nothing is known of the rank's end
	usage     bool
	said      bool // its lines are of a wrong command line, and were shown
}

// Error names the rank, how it failed, its last lines, and who followed.
func (e *Failed) Error() string {
	if e.said {
		return "the program refuses its command line: " + e.how()
	}
	var b strings.Builder
	b.WriteString(e.summary())
	if len(e.Lines) > 0 {
		b.WriteString("; its last lines:")
		for _, line := range e.Lines {
			b.WriteString("\n    " + line)
		}
	}
	if e.Seen != "" {
		b.WriteString("\nas seen by " + e.Seen)
	}
	if n := len(e.Others); n == 1 {
		fmt.Fprintf(&b, "\nthen rank %d failed or was stopped", e.Others[0])
	} else if n > 1 {
		text := make([]string, n)
		for i, r := range e.Others {
			text[i] = strconv.Itoa(r)
		}
		fmt.Fprintf(&b, "\nthen ranks %s failed or were stopped", strings.Join(text, ", "))
	}
	for _, text := range e.Hang {
		b.WriteString("\n" + text)
	}
	return b.String()
}

// summary is the line that says which rank failed and how.
func (e *Failed) summary() string {
	why := ""
	switch {
	case len(e.elsewhere) > 0:
		why = fmt.Sprintf(" because of rank %d, on another machine", e.elsewhere[0])
	case len(e.Others) > 0:
		why = " first"
	}
	text := fmt.Sprintf("rank %d failed%s: %s", e.Rank, why, e.how())
	if e.Host != "" {
		text = "host " + e.Host + ": " + text
	}
	return text
}

// how says how the rank failed.
func (e *Failed) how() string {
	switch e.cause {
	case causeLeft:
		return "it ended with exit status 0 while other ranks still needed it"
	case causeEarly:
		return "it ended with exit status 0 before its last step, and nobody is left: a program " +
			"closes its elastic training before it ends, and returns its errors"
	case causeStopped:
		return "it was stopped by a signal such as SIGSTOP, so the launcher ended it"
	case causeAbsent:
		return "it took no part any more, so the launcher ended it"
	case causeStuck:
		return "SIGKILL did not end it, so the launcher ended without it"
	}
	if !e.Status.Signaled() { // also if it was ended, on Windows
		code := e.Status.ExitStatus()
		if by := exit.SignalOf(code); by > 0 {
			return fmt.Sprintf("exit status %d, as of a program that a signal ended or told to "+
				"end (%v)", code, by)
		}
		return fmt.Sprintf("exit status %d", code)
	}
	if e.Status.CoreDump() {
		return fmt.Sprintf("signal: %v (core dumped)", e.Status.Signal())
	}
	if e.memory != "" {
		return fmt.Sprintf("signal: %v, %s", e.Status.Signal(), e.memory)
	}
	return fmt.Sprintf("signal: %v", e.Status.Signal())
}

// ExitCode is the rank's exit code, or 128 plus the number of the signal that killed it; 1 if it
// did not end by itself, or ended with 0.
func (e *Failed) ExitCode() int {
	switch {
	case e.cause != causeEnded:
		return exit.Failed
	case e.Status.Signaled():
		return exit.Signal + int(e.Status.Signal())
	default:
		return e.Status.ExitStatus()
	}
}

// Usage reports whether the rank that failed first ended with exit status 2 without a crash, as
// programs do when their command line is wrong. How others ended because of that does not matter.
func (e *Failed) Usage() bool { return e.usage }

// Interrupted is the error of a job that was ended by a signal to the launcher.
type Interrupted struct{ Signal os.Signal }

// Error names the signal.
func (e *Interrupted) Error() string { return fmt.Sprintf("stopped by a signal: %v", e.Signal) }

// ExitCode is 128 plus the number of the signal, as in shells.
func (e *Interrupted) ExitCode() int {
	if s, ok := e.Signal.(syscall.Signal); ok {
		return exit.Signal + int(s)
	}
	return exit.Failed
}
