package observe

import (
	"bytes"
	"fmt"
	"io"
	"time"
)

// WriteLast writes the last n collectives as text, the oldest first, a line each,
// in one piece: what was called, on which group, since when, and whether it is
// known to be over.
func (r *Recorder) WriteLast(w io.Writer, n int) error {
	events := r.Events()
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

// what says what was called.
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
