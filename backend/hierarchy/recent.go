package hierarchy

import "github.com/euryale-ml/euryale/backend"

// recent are the calls that may be under way, the last one last.
type recent struct{ calls []earlier }

// earlier is a call that may be under way.
type earlier struct {
	dst, src extent
	flat     bool
	call     *call
}

// extent is where memory begins and ends. It does not keep the memory alive.
type extent struct{ lo, hi uintptr }

func extentOf(b backend.Buffer) extent {
	if b.Len() == 0 {
		return extent{}
	}
	return extent{b.Addr(), b.Addr() + uintptr(b.NBytes())}
}

func (e extent) overlaps(f extent) bool { return e.lo < f.hi && f.lo < e.hi }

// maxRecent is how many calls may overlap: beyond four to eight buckets there is
// no gain (fairring's measurements on 64 GPUs).
const maxRecent = 8

// order orders q after the earlier calls that a call must not overlap. Calls end
// in order, so the last of those will do, and of all others the one that leaves the
// list. The list keeps what q has waited for: other queues have not.
func (r *recent) order(q backend.Queue, dst, src extent, flat bool) error {
	last := len(r.calls) - maxRecent
	for i, e := range r.calls {
		if e.flat != flat || e.dst.overlaps(dst) || e.dst.overlaps(src) || e.src.overlaps(dst) {
			last = max(last, i)
		}
	}
	if last < 0 {
		return nil
	}
	if err := r.calls[last].call.Wait(q); err != nil {
		return err
	}
	r.calls = append(r.calls[:0], r.calls[max(0, len(r.calls)-maxRecent+1):]...)
	return nil
}
