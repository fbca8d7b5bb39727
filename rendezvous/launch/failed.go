package launch

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Failed is the error of a job in which a rank failed.
type Failed struct {
	Rank   int              // the rank that failed first
	State  *os.ProcessState // how it ended
	Lines  []string         // its last lines on standard error, if they were read
	Others []int            // the ranks that failed after it, in that order
}

// Error names the rank, how it ended, its last lines, and who followed.
func (e *Failed) Error() string {
	var b strings.Builder
	if len(e.Others) == 0 {
		fmt.Fprintf(&b, "rank %d failed: %v", e.Rank, e.State)
	} else {
		fmt.Fprintf(&b, "rank %d failed first: %v", e.Rank, e.State)
	}
	if len(e.Lines) > 0 {
		b.WriteString("; its last lines:")
		for _, line := range e.Lines {
			b.WriteString("\n    " + line)
		}
	}
	if len(e.Others) > 0 {
		others := slices.Sorted(slices.Values(e.Others))
		text := make([]string, len(others))
		for i, r := range others {
			text[i] = strconv.Itoa(r)
		}
		fmt.Fprintf(&b, "\nthen failed or were stopped: %s", strings.Join(text, ", "))
	}
	return b.String()
}

// ExitCode is the code of the rank, 128 and the number of the signal that
// killed it.
func (e *Failed) ExitCode() int {
	if status, ok := e.State.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return e.State.ExitCode()
}

// Interrupted is the error of a job that was ended by a signal to the launcher.
type Interrupted struct{ Signal os.Signal }

// Error names the signal.
func (e *Interrupted) Error() string { return fmt.Sprintf("stopped by a signal: %v", e.Signal) }

// ExitCode is 128 and the number of the signal, as shells count.
func (e *Interrupted) ExitCode() int {
	if s, ok := e.Signal.(syscall.Signal); ok {
		return 128 + int(s)
	}
	return 1
}
