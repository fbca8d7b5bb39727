package observe

import (
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// Kind is what calls are counted by.
type Kind struct {
	backend.Kind
	Algorithm string // as the communicator says (see [backend.Chooser]), else as the call asks
	Bucket    int    // of an autograd.DataParallel, from 1; 0 for none
}

// Total is what the calls of a [Kind] have come to.
type Total struct {
	Calls, Bytes int64         // Bytes is of the larger buffer
	Exposed      time.Duration // in which a goroutine stood in the calls, or waited to join them
}

// totals are what a recorder has counted, in ticks.
type totals struct {
	kinds   map[Kind]*Total
	exposed stamp // of all kinds
	comm    backend.Communicator
	chooser backend.Chooser // of comm, nil if it does not say
	tick    scale           // for exposed, which is asked often
	asked   int
}

// mostKinds bounds the memory of totals: what a model has more of is counted together.
const mostKinds = 4096

// Count has the recorder count calls from now on, which costs a call some 100 ns. It may be called
// again.
func (r *Recorder) Count() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.totals == nil {
		r.totals = &totals{kinds: map[Kind]*Total{}}
	}
}

// Join implements [backend.JoinHooks].
func (r *Recorder) Join(id uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.totals != nil && id >= r.first() {
		if this := r.record(id); this.joined == 0 {
			this.joined = max(r.ticks.now(), 1)
		}
	}
}

// add counts a call that has ended now. Parts are counted with the calls that they are of.
func (t *totals) add(this *record, now stamp) {
	if this.part != nil {
		return
	}
	h := &this.header
	kind := Kind{Kind: h.Kind, Algorithm: t.algorithm(this)}
	if o := h.Origin; o != nil && o.Purpose == backend.ForSync {
		kind.Bucket = int(o.Ordinal)
	}
	total := t.kinds[kind]
	if total == nil {
		if len(t.kinds) >= mostKinds {
			kind.Bucket, kind.Algorithm = 0, "other"
		}
		if total = t.kinds[kind]; total == nil {
			total = &Total{}
			t.kinds[kind] = total
		}
	}
	from := this.start
	if this.joined != 0 {
		from = this.joined
	}
	total.Calls++
	total.Bytes += int64(this.bytes)
	total.Exposed += time.Duration(now - from)
	t.exposed += now - from
}

// algorithm names what a call runs by.
func (t *totals) algorithm(this *record) string {
	if t.comm != this.comm {
		t.comm = this.comm
		t.chooser, _ = backend.As[backend.Chooser](this.comm)
	}
	h := &this.header
	if t.chooser == nil {
		return h.Algorithm.String()
	}
	return t.chooser.Chosen(&backend.Collective{Kind: h.Kind, Op: h.Op, Algorithm: h.Algorithm,
		Association: h.Association}, h.DType, this.bytes)
}

// Totals returns what was counted since Count, nil without.
func (r *Recorder) Totals() map[Kind]Total {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.totals == nil {
		return nil
	}
	all, tick := make(map[Kind]Total, len(r.totals.kinds)), r.ticks.scale()
	for kind, t := range r.totals.kinds {
		all[kind] = Total{t.Calls, t.Bytes, tick.since(stamp(t.Exposed))}
	}
	return all
}

// scaled is how often a scale is used, which takes ten readings of clocks.
const scaled = 64

// exposed returns the time in which goroutines stood in calls since Count.
func (r *Recorder) exposed() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.totals == nil {
		return 0
	}
	t := r.totals
	if t.asked%scaled == 0 {
		t.tick = r.ticks.scale()
	}
	t.asked++
	return t.tick.since(t.exposed)
}
