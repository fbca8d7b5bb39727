package observe

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"
)

// WriteLast writes the last n collectives as text, the oldest first, one line each, in a single
// write: what was called, on which group, since when, and whether it is known to have ended.
func (r *Recorder) WriteLast(w io.Writer, n int) error {
	events := slices.DeleteFunc(r.Events(), func(e Event) bool { return e.Layer != "" })
	total := r.Dropped() + uint64(len(events))
	events = events[max(len(events)-n, 0):]
	var b bytes.Buffer
	fmt.Fprintf(&b, "rank %d: the last %d of %d collectives:\n", r.rank, len(events), total)
	now := time.Now()
	for _, e := range events {
		fmt.Fprintf(&b, "    %s %s on %s: %s\n", e.Start.Format("15:04:05.000000"), e.what(),
			e.Comm, e.outcome(now))
	}
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	return nil
}

// what describes the call.
func (e Event) what() string {
	if e.Part == "" {
		return e.Header.String()
	}
	return fmt.Sprintf("%v, %s,", e.Header, e.Part)
}

// outcome says how the collective ended, if it has.
func (e Event) outcome(now time.Time) string {
	switch {
	case e.Err != nil:
		return "failed: " + e.Err.Error()
	case e.End.IsZero():
		return fmt.Sprintf("under way for %v", now.Sub(e.Start).Round(time.Millisecond))
	default:
		return fmt.Sprintf("took %v", e.End.Sub(e.Start))
	}
}

// dumpTime bounds the time between SIGQUIT and the signal's default action: a device that hangs
// must not keep the process from printing its stacks.
const dumpTime = time.Second

// WriteLastOnQuit writes the last n collectives to w, as [Recorder.WriteLast] does, when the
// process gets SIGQUIT, and then re-raises it, so the default action runs: a Go program prints
// the stacks of its goroutines and ends. The signal is left alone if n is 0, or if the program
// ignores it. stop ends the watch. Windows has no such signal.
func (r *Recorder) WriteLastOnQuit(w io.Writer, n int) (stop func()) {
	if n <= 0 || signal.Ignored(syscall.SIGQUIT) {
		return func() {}
	}
	quit, over := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(quit, syscall.SIGQUIT)
	go func() {
		select {
		case <-quit:
			late := time.AfterFunc(dumpTime, func() { passOn(quit) })
			r.WriteLast(w, n) // whether it succeeds or not, the stacks come next
			late.Stop()
			passOn(quit)
		case <-over:
		}
	}()
	return func() {
		signal.Stop(quit)
		close(over)
	}
}

// passOn sends SIGQUIT again, to the next receiver: the other ranks in this process, handlers of
// the program, or in the end the Go runtime.
func passOn(quit chan os.Signal) {
	signal.Stop(quit)
	if self, err := os.FindProcess(os.Getpid()); err == nil {
		_ = self.Signal(syscall.SIGQUIT) // Windows does not have it
	}
}
