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

// self says on which machine this process is and which it is there, as the others
// read it: three lines, of which the first answers whether two ranks share a machine.
func self() string {
	space, _ := os.Readlink("/proc/self/ns/pid") // a number means nothing outside
	return strings.Join([]string{machine(), space, strconv.Itoa(os.Getpid())}, "\n")
}

// meet records what the ranks say of themselves, and returns their machines.
func (w *World) meet(selves []string) (machines []string) {
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

// Stopped returns the processes of ranks of this machine that a signal such as SIGSTOP
// has stopped: a rank that waits too long may be waiting for one of them, through other
// ranks that wait as well. Ranks that are goroutines of one process have none.
func (w *World) Stopped() (stopped []Process) {
	for _, p := range w.processes {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID))
		if err != nil {
			continue // it is gone, which the failure detector tells
		}
		// The name before the state is in brackets, and may have any bytes.
		if i := bytes.LastIndexByte(stat, ')'); i >= 0 && bytes.HasPrefix(bytes.TrimSpace(stat[i+1:]), []byte("T")) {
			stopped = append(stopped, p)
		}
	}
	return stopped
}
