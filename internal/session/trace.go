package session

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/observe"
)

// traceFile is where a rank writes its trace: when a rank of the job is lost, which may
// end this process before it gets to Close, and on Close. A nil traceFile writes none.
type traceFile struct {
	file       *os.File
	rank       int
	recorder   *observe.Recorder
	closing    chan struct{}
	background sync.WaitGroup // what ends with closing
}

// openTrace makes the file that EURYALE_TRACE asks for: before the work, so that a place
// where there can be none is known before it.
func openTrace(rank, generation int) (*traceFile, error) {
	to := env.Trace.Read(os.Getenv)
	if to == "" {
		return nil, nil
	}
	if generation >= 0 {
		to += fmt.Sprintf(".g%d", generation)
	}
	file, err := os.Create(fmt.Sprintf("%s.%d.json", to, rank))
	if err != nil && generation > 0 { // training goes on
		(&traceFile{rank: rank}).report(err)
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("rank %d: EURYALE_TRACE: %w", rank, err)
	}
	return &traceFile{file: file, rank: rank, closing: make(chan struct{})}, nil
}

// discard removes the file, of a rank that has not come to work.
func (t *traceFile) discard() error {
	if t == nil {
		return nil
	}
	return errors.Join(t.file.Close(), os.Remove(t.file.Name()))
}

// watch writes what was recorded if down is closed before close is called.
func (t *traceFile) watch(recorder *observe.Recorder, down <-chan struct{}) {
	if t == nil {
		return
	}
	t.recorder = recorder
	t.background.Go(func() {
		select {
		case <-t.closing:
		case <-down:
			t.report(t.write())
		}
	})
}

// close writes what was recorded.
func (t *traceFile) close() {
	if t == nil {
		return
	}
	close(t.closing)
	t.background.Wait()
	t.report(errors.Join(t.write(), t.file.Close()))
}

// write writes the trace in place of an earlier one.
func (t *traceFile) write() error {
	if _, err := t.file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if err := t.file.Truncate(0); err != nil {
		return err
	}
	return t.recorder.WriteChrome(t.file)
}

// report says that the trace cannot be written. The work is done by then, and that is
// no error of the work.
func (t *traceFile) report(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "euryale: rank %d: the trace is lost: EURYALE_TRACE: %v\n",
			t.rank, err)
	}
}
