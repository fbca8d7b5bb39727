package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"

	"github.com/euryale-ml/euryale/internal/exit"
)

// isInit reports whether this is process 1 of a container. The kernel gives it all orphans, and it
// must reap them, which Go programs do not.
func isInit() bool { return os.Getpid() == 1 }

// asInit runs this program again, as a process that is not the first one. It reaps every process
// that ends, passes signals on, and returns the exit code.
func asInit() int {
	signals, stop := jobSignals()
	defer stop()
	ends := make(chan os.Signal, 1)
	signal.Notify(ends, syscall.SIGCHLD)
	signal.Ignore(syscall.SIGTSTP) // nobody could continue what it stops
	self, err := os.Executable()
	if err == nil {
		// On a terminal it is in the foreground, and this process is not: Ctrl-C comes once.
		var p *os.Process
		p, err = os.StartProcess(self, os.Args, &os.ProcAttr{
			Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
			Sys: &syscall.SysProcAttr{Setpgid: true,
				Foreground: term.IsTerminal(int(os.Stdin.Fd())), Ctty: int(os.Stdin.Fd())},
		})
		if err == nil {
			return untilEnded(p, signals, ends)
		}
	}
	fmt.Fprintln(os.Stderr, "euryale: as process 1 of a container, start euryale again as a child:",
		err)
	return exit.Failed
}

// untilEnded is asInit once the process runs.
func untilEnded(p *os.Process, signals, ends <-chan os.Signal) int {
	for {
		select {
		case s := <-signals:
			p.Signal(s) // it may have ended
		case <-ends:
		}
		for {
			var how syscall.WaitStatus
			pid, err := syscall.Wait4(-1, &how, syscall.WNOHANG, nil)
			switch {
			case err == syscall.EINTR:
				continue
			case pid == p.Pid && how.Signaled():
				return exit.Signal + int(how.Signal())
			case pid == p.Pid && how.Exited():
				return how.ExitStatus()
			}
			if pid <= 0 {
				break
			}
		}
	}
}
