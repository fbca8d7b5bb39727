package rendezvous

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Process is the process of a rank on this rank's machine.
type Process struct{ Rank, PID int }

// ThisProcess identifies this process among the processes of a job, on all machines. Ranks for
// which it is the same are goroutines of one process.
func ThisProcess() string { return self() }

// self identifies this process for the other ranks, in three lines: its machine, its
// PID namespace and its PID. The first line decides whether two ranks share a machine.
func self() string {
	space, _ := os.Readlink("/proc/self/ns/pid") // a PID is meaningless outside its namespace
	return strings.Join([]string{machine(), space, strconv.Itoa(os.Getpid())}, "\n")
}

// readSelves records the processes of this machine and returns the machine of every rank.
func (w *World) readSelves(selves []string) (machines []string) {
	mine := strings.Split(self(), "\n")
	for r, text := range selves {
		theirs := strings.Split(text, "\n")
		machines = append(machines, theirs[0])
		if len(theirs) != len(mine) || theirs[0] != mine[0] || theirs[1] != mine[1] {
			continue
		}
		if pid, err := strconv.Atoi(theirs[2]); err == nil {
			w.processes = append(w.processes, Process{r, pid})
		}
	}
	return machines
}

// Stopped returns the processes of ranks on this machine that a signal such as SIGSTOP has stopped.
// A rank that waits too long may be waiting for one of them, directly or through other waiting
// ranks. A World whose ranks are goroutines of one process returns none.
func (w *World) Stopped() (stopped []Process) {
	for _, p := range w.processes {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID))
		if err != nil {
			continue // it is gone: the failure detector reports it
		}
		// The name before the state is in brackets, and may contain any bytes.
		if i := bytes.LastIndexByte(stat, ')'); i >= 0 &&
			bytes.HasPrefix(bytes.TrimSpace(stat[i+1:]), []byte("T")) {
			stopped = append(stopped, p)
		}
	}
	return stopped
}
