package session

import (
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/rendezvous"
)

// maxReport bounds a report, in bytes, so that it is one write to a pipe.
const maxReport = 1024

// ReportDown tells a launcher when the job has lost a rank, until the session closes. where is
// EURYALE_REPORT. Call it once, before others have the session.
func (s *Session) ReportDown(where string) { s.unreport = reportDown(where, s.world) }

// reportDown tells the launcher when the job of w has lost a rank, until stop is called. Launchers
// of several machines do not know of each other, and this rank may hang in its program, where it
// does not get to a call that fails. where is EURYALE_REPORT, "" for a launcher that does not ask.
func reportDown(where string, w *rendezvous.World) (stop func()) {
	if where == "" {
		return func() {}
	}
	over := make(chan struct{})
	go func() {
		select {
		case <-over:
			return
		case <-w.Down():
		}
		select {
		case <-over: // first
		default:
			report(where, w.Failure().Error())
		}
	}()
	return func() { close(over) }
}

// report writes a line to the pipe FILE:INODE. It does nothing if the file is another by now: a
// script that has started this process may use its number.
func report(where, text string) {
	file, inode, _ := strings.Cut(where, ":")
	fd, err := strconv.Atoi(file)
	if err != nil || !isPipe(fd, inode) {
		return
	}
	line := strings.ReplaceAll(text, "\n", " ")
	write(fd, []byte(line[:min(len(line), maxReport)]+"\n")) // or the launcher is gone
}
