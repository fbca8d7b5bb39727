package observe

import (
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// Kind is the key by which calls are counted.
type Kind struct {
	backend.Kind
	Algorithm string // from the communicator (see [backend.Chooser]), else from the call
	Bucket    int    // of an autograd.DataParallel, from 1; 0 for none
}

// Total sums up the calls of a [Kind].
type Total struct {
	Calls, Bytes int64         // Bytes is of the larger buffer
	Exposed      time.Duration // while a goroutine was in the calls, or waited to join them
}

// totals are what a recorder has counted.
type totals struct {
	kinds   map[Kind]*counted // nil without Count
	all     []*counted        // of kinds: only appended to, so that readers hold no lock
	exposed stamp             // of all kinds
	comm    backend.Communicator
	chooser backend.Chooser // of comm, nil if it has none: asking takes as long as all else
}

// counted is a running [Total], with its time in ticks.
type counted struct {
	kind                  Kind
	calls, bytes, exposed atomic.Int64
}

// mostKinds bounds the memory of totals: further kinds are counted together.
const mostKinds = 4096

// Count makes the recorder count calls from now on, which costs a call some 100 ns. It may be
// called again.
func (r *Recorder) Count() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.totals.kinds == nil {
		r.totals.kinds = map[Kind]*counted{}
	}
}

// Join implements [backend.JoinHooks].
func (r *Recorder) Join(id uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.totals.kinds != nil && id >= r.first() {
		if this := r.record(id); this.joined == 0 {
			this.joined = max(r.ticks.now(), 1)
		}
	}
}

// add counts a call that has ended. Parts are counted with their calls.
func (t *totals) add(this *record, exposed stamp) {
	if this.part != nil {
		return
	}
	h := &this.header
	if t.comm != this.comm {
		t.comm = this.comm
		t.chooser, _ = backend.As[backend.Chooser](this.comm)
	}
	kind := Kind{Kind: h.Kind, Algorithm: this.chosen(t.chooser)}
	if kind.Algorithm == "" {
		kind.Algorithm = h.Algorithm.String()
	}
	if o := h.Origin; o != nil && o.Purpose == backend.ForSync {
		kind.Bucket = int(o.Ordinal)
	}
	if t.kinds[kind] == nil && len(t.kinds) >= mostKinds {
		kind.Bucket, kind.Algorithm = 0, "other"
	}
	c := t.kinds[kind]
	if c == nil {
		c = &counted{kind: kind}
		t.kinds[kind], t.all = c, append(t.all, c)
	}
	c.calls.Add(1)
	c.bytes.Add(int64(this.bytes))
	c.exposed.Add(int64(exposed))
	t.exposed += exposed
}

// chosen names the algorithm that a call runs by, if its communicator says so.
func (r *record) chosen(by backend.Chooser) string {
	if by == nil {
		return ""
	}
	h := &r.header
	return by.Chosen(&backend.Collective{Kind: h.Kind, Op: h.Op, Root: int(h.Root),
		Algorithm: h.Algorithm, Association: h.Association}, h.DType, r.bytes)
}

// Totals returns what was counted since Count, nil without Count.
func (r *Recorder) Totals() map[Kind]Total {
	r.mu.Lock()
	t := r.totals
	r.mu.Unlock()
	if t.kinds == nil {
		return nil
	}
	all, tick := make(map[Kind]Total, len(t.all)), r.ticks.scale()
	for _, c := range t.all {
		all[c.kind] = Total{c.calls.Load(), c.bytes.Load(), tick.since(stamp(c.exposed.Load()))}
	}
	return all
}

// exposed returns the time that goroutines spent in calls since Count.
func (r *Recorder) exposed() stamp {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.totals.exposed
}
