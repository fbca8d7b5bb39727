package observe

import (
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// Event is one collective of one rank, or a part of one.
type Event struct {
	Comm   string         // name of the group
	Rank   int            // this rank in the group
	Queue  int            // 0 is the device's default queue, others are numbered as they come
	Header backend.Header // what was called
	Part   string         // of the call, see [backend.Call]; empty for the whole one
	Bytes  int64          // of the larger buffer
	// Algorithm by which the call ran, as far as the communicator says; empty for parts.
	Algorithm string
	Start     time.Time
	End       time.Time // zero while it is not known to be over
	Err       error
}

// settle finds out the times of a call, which then stay: the length of a tick is known better
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
	if r.part != nil {
		e.Part = r.part.name
	} else {
		by, _ := backend.As[backend.Chooser](r.comm)
		e.Algorithm = r.chosen(by)
	}
	if r.to != 0 {
		e.End = epoch.Add(r.to)
	}
	return e
}
