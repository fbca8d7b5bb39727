package observe

import (
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// chromeEvent is an event of the Trace Event Format. Times are in microseconds.
type chromeEvent struct {
	Name     string         `json:"name"`
	Category string         `json:"cat,omitempty"`
	Phase    string         `json:"ph"`
	Time     json.Number    `json:"ts,omitempty"`
	Duration json.Number    `json:"dur,omitempty"`
	Process  int            `json:"pid"`
	Thread   int            `json:"tid"`
	Args     map[string]any `json:"args,omitempty"`
}

// WriteChrome writes what is kept in the Trace Event Format, for
// chrome://tracing or Perfetto: pid is the rank in the outermost group, tid the
// queue, args hold sizes and the error. A collective that is not known to be
// over begins and does not end.
func (r *Recorder) WriteChrome(w io.Writer) error {
	all := []chromeEvent{label("process_name", r.rank, 0, fmt.Sprintf("rank %d", r.rank))}
	named := map[int]bool{}
	for _, e := range r.Events() {
		if !named[e.Queue] {
			named[e.Queue] = true
			all = append(all, label("thread_name", r.rank, e.Queue, queueName(e.Queue)))
		}
		all = append(all, chrome(e, r.rank))
	}
	file := struct {
		Events []chromeEvent `json:"traceEvents"`
		Unit   string        `json:"displayTimeUnit"`
	}{all, "ns"}
	if err := json.NewEncoder(w).Encode(file); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	return nil
}

// label names a process or a thread.
func label(what string, pid, tid int, name string) chromeEvent {
	return chromeEvent{Name: what, Phase: "M", Process: pid, Thread: tid,
		Args: map[string]any{"name": name}}
}

func queueName(q int) string {
	if q == 0 {
		return "default queue"
	}
	return fmt.Sprintf("queue %d", q)
}

func chrome(e Event, pid int) chromeEvent {
	out := chromeEvent{
		Name: e.Header.Kind.String(), Category: "collective", Phase: "B",
		Time: micros(time.Duration(e.Start.UnixNano())), Process: pid, Thread: e.Queue,
		Args: map[string]any{
			"call": e.Header.String(), "group": e.Comm, "rank": e.Rank,
			"bytes": e.Bytes, "count": e.Header.Count, "dtype": e.Header.DType.String(),
			"seq": e.Header.Seq,
		},
	}
	if e.Header.Kind.Rooted() {
		out.Args["root"] = e.Header.Root
	}
	if e.Algorithm != "" {
		out.Args["algorithm"] = e.Algorithm
	}
	if e.Part != "" {
		out.Name, out.Category = e.Part, "part"
	}
	if !e.End.IsZero() {
		out.Phase, out.Duration = "X", micros(e.End.Sub(e.Start))
	}
	if e.Err != nil {
		out.Args["error"] = e.Err.Error()
	}
	return out
}

// micros writes nanoseconds as microseconds, exactly: a float64 cannot hold the
// nanoseconds of today's date.
func micros(d time.Duration) json.Number {
	return json.Number(fmt.Sprintf("%d.%03d", d/1000, d%1000))
}
