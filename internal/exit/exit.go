// Package exit has the exit statuses of programs and of euryale run, which docs/running.md lists:
// 0 says to whoever started a program that there is nothing left to do.
package exit

import (
	"context"
	"errors"
	"fmt"
	"syscall"
)

// The exit statuses. A crash of a Go program has that of wrong usage.
const (
	Finished   = 0
	Failed     = 1
	Usage      = 2
	Fault      = 3   // by EURYALE_FAULT
	Unfinished = 75  // EX_TEMPFAIL of sysexits.h: start it again
	Signal     = 128 // and the number of the signal, as in shells
)

// Of returns the exit status of a program that ends with an error: what its method ExitCode says.
func Of(err error) int {
	if err == nil {
		return Finished
	}
	var coded interface{ ExitCode() int }
	if errors.As(err, &coded) && coded.ExitCode() > 0 && coded.ExitCode()&0xff != 0 {
		return coded.ExitCode() // of which Unix keeps 8 bits
	}
	return Failed
}

// ErrStopped is what a [Stopped] is.
var ErrStopped = errors.New("stopped")

// Stopped is the error of a training that was told to end before it was finished, and the exit
// status that says by what.
type Stopped int

// Error names the signal.
func (s Stopped) Error() string {
	if by := SignalOf(int(s)); by > 0 {
		return fmt.Sprintf("stopped by a signal (%v)", by)
	}
	return ErrStopped.Error()
}

// Is reports that it is ErrStopped.
func (Stopped) Is(target error) bool { return target == ErrStopped }

// ExitCode is the exit status.
func (s Stopped) ExitCode() int { return int(s) }

// signals is how many Linux has, and other systems have fewer.
const signals = 64

// SignalOf returns the signal that an exit status is of, 0 for none.
func SignalOf(status int) syscall.Signal {
	if n := status - Signal; n > 0 && n <= signals {
		return syscall.Signal(n)
	}
	return 0
}

// By returns by what a context has ended: 0 if it has not.
func By(ctx context.Context) Stopped {
	why := context.Cause(ctx)
	if why == nil {
		return 0
	}
	for n := range signals {
		if why.Error() == syscall.Signal(n+1).String()+" signal received" { // by NotifyContext
			return Stopped(Signal + n + 1)
		}
	}
	return Stopped(max(Of(why), Unfinished))
}
