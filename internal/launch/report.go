package launch

import (
	"bufio"
	"fmt"
	"os"
)

// reports are messages from ranks that the job has lost a rank, perhaps on another machine. They
// come over a pipe that all ranks inherit. Nothing else would tell this launcher: a rank that hangs
// in its program never gets to the call that would fail.
type reports struct {
	read, write *os.File
	inherited   []*os.File // by ranks
	variable    []string   // tells them of the pipe
}

// reportFile is the number of the pipe's file in ranks: the first that Go passes on.
const reportFile = 3

// openReports opens the pipe, and sets the variable for the ranks, which have not been started yet.
func (w *watch) openReports() error {
	if !canInherit {
		return nil
	}
	read, write, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make a pipe for reports of ranks: %w", err)
	}
	w.reports = reports{read: read, write: write, inherited: []*os.File{write}}
	info, err := write.Stat()
	if err != nil {
		return fmt.Errorf("make a pipe for reports of ranks: %w", err)
	}
	// By its inode, a rank knows that the file is still this pipe and not some file of a script.
	w.reports.variable = []string{fmt.Sprintf("EURYALE_REPORT=%d:%d", reportFile, inodeOf(info))}
	go func() { // ends with the pipe
		lines := bufio.NewScanner(read)
		if lines.Scan() {
			w.pass(reported{lines.Text()})
		}
	}()
	return nil
}

func (r reports) close() {
	if r.read != nil {
		r.read.Close()
		r.write.Close()
	}
}
