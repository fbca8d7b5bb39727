package euryale

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/observe"
)

// dumpTime bounds the time between SIGQUIT and what the signal does by default: a
// device that hangs must not keep the process from printing its stacks.
const dumpTime = time.Second

// lastCallsOnQuit writes the last collectives to w when the process gets SIGQUIT,
// and then re-raises it, so the default action runs: a Go program prints the stacks of
// its goroutines and ends. setting is EURYALE_LAST_CALLS, the number of
// collectives; without it the signal is left alone. stop ends the watch.
func lastCallsOnQuit(setting string, recorder *observe.Recorder, w io.Writer) (stop func(), err error) {
	n, err := strconv.Atoi(setting)
	if setting != "" && (err != nil || n < 0) {
		return nil, fmt.Errorf("EURYALE_LAST_CALLS=%q is not a number of collectives", setting)
	}
	if n == 0 || signal.Ignored(syscall.SIGQUIT) {
		return func() {}, nil
	}
	quit, over := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(quit, syscall.SIGQUIT)
	go func() {
		select {
		case <-quit:
			late := time.AfterFunc(dumpTime, func() { passOn(quit) })
			recorder.WriteLast(w, n) // whatever becomes of it, the stacks come next
			late.Stop()
			passOn(quit)
		case <-over:
		}
	}()
	return func() {
		signal.Stop(quit)
		close(over)
	}, nil
}

// passOn sends SIGQUIT again, to whoever still waits for it: the other ranks in
// this process, handlers of the program, or in the end the Go runtime.
func passOn(quit chan os.Signal) {
	signal.Stop(quit)
	syscall.Kill(os.Getpid(), syscall.SIGQUIT)
}
