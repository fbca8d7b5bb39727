package fault

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/exit"
)

// Kind says what happens to the rank.
type Kind uint8

// The faults.
const (
	Kill  Kind = iota + 1 // the process is killed, as by kill -9
	Stop                  // the process is stopped, as by SIGSTOP: it is alive and silent
	Panic                 // the goroutine that starts the call panics
	Exit                  // the process exits with ExitCode, without closing anything
	Abort                 // Abort is called on the communicator of the call
)

// ExitCode is the exit code of a process that Exit ends.
const ExitCode = exit.Fault

var kinds = [...]string{Kill: "kill", Stop: "stop", Panic: "panic", Exit: "exit", Abort: "abort"}

// String returns the name: "kill".
func (k Kind) String() string {
	if k < Kill || int(k) >= len(kinds) {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return kinds[k]
}

// Plan says which fault happens, and where.
type Plan struct {
	Kind Kind
	Rank int // the rank it happens to
	Call int // the rank's collective that it happens at; 1 is the first
}

// String returns the plan as [Parse] reads it: "kill,rank=1,call=400".
func (p Plan) String() string { return fmt.Sprintf("%v,rank=%d,call=%d", p.Kind, p.Rank, p.Call) }

// Parse reads the text of EURYALE_FAULT:
//
//	kill|stop|panic|exit|abort,rank=R,call=N
//
// R counts from 0, N from 1; their order does not matter. The error wraps
// [backend.ErrArgument] and says what to write.
func Parse(text string) (Plan, error) {
	words := strings.Split(text, ",")
	p := Plan{Kind: Kind(max(0, slices.Index(kinds[:], words[0]))), Rank: -1}
	for _, word := range words[1:] {
		name, value, _ := strings.Cut(word, "=")
		n, err := strconv.Atoi(value)
		switch {
		case name == "rank" && err == nil && n >= 0 && p.Rank < 0:
			p.Rank = n
		case name == "call" && err == nil && n >= 1 && p.Call == 0:
			p.Call = n
		default:
			return Plan{}, usage(text)
		}
	}
	if p.Kind == 0 || p.Rank < 0 || p.Call == 0 { // the kind is unknown, or a number is missing
		return Plan{}, usage(text)
	}
	return p, nil
}

func usage(text string) error {
	return fmt.Errorf("%w: %q is no fault: write kill, stop, panic, exit or abort, then the rank "+
		"(from 0) and the number of its collective (from 1), such as kill,rank=1,call=400",
		backend.ErrArgument, text)
}

// Check returns nil if the plan can happen among size ranks. The error wraps
// [backend.ErrArgument].
func (p Plan) Check(size int) error {
	switch {
	case p.Kind < Kill || p.Kind > Abort || p.Rank < 0 || p.Call < 1:
		return usage(p.String())
	case p.Rank >= size:
		return fmt.Errorf("%w: %v: there is no rank %d among %d ranks: use 0 to %d",
			backend.ErrArgument, p, p.Rank, size, size-1)
	case p.Kind == Stop && !canStop:
		return fmt.Errorf("%w: %v: this system cannot stop a process: use kill or abort",
			backend.ErrArgument, p)
	}
	return nil
}
