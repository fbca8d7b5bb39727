package observe

import (
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/observe/internal/chrome"
)

// Event is one collective of one rank, or a part of one.
type Event struct {
	Comm   string         // name of the group
	Rank   int            // this rank in the group
	Queue  int            // 0 is the device's default queue; others count from 1 as they appear
	Header backend.Header // what was called
	Part   string         // of the call, see [backend.Call]; empty for the whole one
	Layer  string         // a layer of a recorded step, which is no call
	Busy   time.Duration  // of a layer: without its waits for calls
	Bytes  int64          // of the larger buffer
	// Algorithm is how the call ran, if the communicator says so; empty for parts.
	Algorithm string
	Start     time.Time
	End       time.Time // zero while it is not known to have ended
	Err       error
}

// settle computes the times of a call, which then stay fixed: the length of a tick is known better
// later.
func (r *record) settle(tick scale) {
	if r.from == 0 {
		r.from = tick.since(r.start)
	}
	if r.to == 0 && r.end != 0 {
		r.to = max(tick.since(r.end), r.from, 1)
	}
}

// event returns the event of a call that is settled.
func (r *record) event(epoch time.Time) Event {
	e := Event{
		Comm: r.comm.Name(), Rank: r.comm.Rank(), Queue: r.queue,
		Header: r.header, Bytes: int64(r.bytes), Start: epoch.Add(r.from), Err: r.err,
	}
	switch {
	case r.part != nil && r.part.layer:
		e.Layer, e.Busy = r.part.name, r.part.busy
	case r.part != nil:
		e.Part = r.part.name
	default:
		by, _ := backend.As[backend.Chooser](r.comm)
		e.Algorithm = r.chosen(by)
	}
	if r.to != 0 {
		e.End = epoch.Add(r.to)
	}
	return e
}

// WriteChrome writes the recorded calls in the Trace Event Format, for chrome://tracing or
// Perfetto: pid is the rank in the outermost group, tid the queue, args hold sizes and the error. A
// collective that is not known to have ended has a beginning and no end.
func (r *Recorder) WriteChrome(w io.Writer) error {
	var all []*chrome.Event
	label := func(what string, queue int, name string) {
		e := &chrome.Event{Name: what, Phase: "M", Process: r.rank, Thread: queue}
		e.Args.Label = name
		all = append(all, e)
	}
	label("process_name", 0, fmt.Sprintf("rank %d", r.rank))
	named := map[int]bool{}
	for _, e := range r.Events() {
		if !named[e.Queue] {
			named[e.Queue] = true
			name := "default queue"
			if e.Queue > 0 {
				name = "queue " + strconv.Itoa(e.Queue)
			}
			label("thread_name", e.Queue, name)
		}
		all = append(all, e.chrome(r.rank))
	}
	if err := chrome.Write(w, all); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	return nil
}

func (e *Event) chrome(rank int) *chrome.Event {
	out := &chrome.Event{Name: e.Header.Kind.String(), Category: chrome.Collective, Phase: "B",
		Start: chrome.Nanos(e.Start.UnixNano()), Process: rank, Thread: e.Queue}
	out.Args.Fields = &chrome.Fields{What: e.Header.String(), Group: e.Comm, Rank: e.Rank,
		Bytes: e.Bytes, Count: int64(e.Header.Count), DType: e.Header.DType.String(),
		Seq: e.Header.Seq, Algorithm: e.Algorithm}
	if e.Header.Kind.Rooted() {
		out.Args.Root = new(int(e.Header.Root))
	}
	if e.Part != "" {
		out.Name, out.Category = e.Part, chrome.Part
	}
	if e.Layer != "" {
		out.Name, out.Category = e.Layer, chrome.Layer
		out.Args.What, out.Args.Busy = "layer "+e.Layer, chrome.Nanos(e.Busy)
	}
	if !e.End.IsZero() {
		out.Phase, out.Took = "X", chrome.Nanos(e.End.Sub(e.Start))
	}
	if e.Err != nil {
		out.Args.Error = e.Err.Error()
	}
	return out
}
