package observe

import (
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// dumpTime bounds the time between SIGQUIT and what the signal does by default: a
// device that hangs must not keep the process from printing its stacks.
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
			r.WriteLast(w, n) // whatever becomes of it, the stacks come next
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

// passOn sends SIGQUIT again, to whoever still waits for it: the other ranks in
// this process, handlers of the program, or in the end the Go runtime.
func passOn(quit chan os.Signal) {
	signal.Stop(quit)
	if self, err := os.FindProcess(os.Getpid()); err == nil {
		_ = self.Signal(syscall.SIGQUIT) // Windows has none
	}
}
