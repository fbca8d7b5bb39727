//go:build unix

package straggler

import (
	"os"
	"os/signal"
	"syscall"
	"time"
)

// read reads what the process has used.
func (u *usage) read() {
	var r syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &r) == nil {
		u.system = time.Duration(r.Stime.Nano())
		u.cpu = u.system + time.Duration(r.Utime.Nano())
		u.minor, u.major = int64(r.Minflt), int64(r.Majflt)
	}
}

// notifyContinued has c told when the process goes on after it was stopped.
func notifyContinued(c chan os.Signal) { signal.Notify(c, syscall.SIGCONT) }

// NotifyReport has c told when somebody wants a report: by SIGUSR1.
func NotifyReport(c chan os.Signal) { signal.Notify(c, syscall.SIGUSR1) }
