package sparse

import (
	"fmt"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// cost is what a top-k call takes beside its messages.
type cost struct {
	call    time.Duration // whatever its size
	element float64       // nanoseconds for each of the operand: reading, selecting, writing the sum
	entry   float64       // for each that a rank sends
}

// costOf returns what was measured, at 2^25 elements of f32 with error feedback, 1 % and
// 5 % of them.
//
// Device: H200, whole calls over NCCL, back to back in four slots: 384 and 614 us among
// two, with earlier kernels, and 439 and 669 among four
// (bench/results/2026-11-21-h200x2-compress.txt and 2026-11-21-h200x4-sparse.txt). The
// constants are fitted to these four, and give 403 and 598, 419 and 682: 5 % is no less
// than the error. At 5 % among four, dense took 660, so that either is as good there.
//
// Host: 32 cores, four processes, 212 and 361 ms.
func costOf(device bool) cost {
	if device {
		return cost{call: 68 * time.Microsecond, element: 0.0085, entry: 0.117}
	}
	return cost{element: 5.2, entry: 105}
}

func (c cost) of(n, k int) time.Duration {
	return c.call + nanoseconds(c.element*float64(n)) + nanoseconds(c.entry*float64(k))
}

// nanoseconds rounds each part of a time, so that sums of them, and what is decided by
// those, are the same on processors that add and multiply in one step. What a Duration
// cannot hold is as long as need be.
func nanoseconds(x float64) time.Duration { return time.Duration(min(x, 1e18)) }

// estimate is how long a top-k call takes, and a plain all-reduce in its place.
type estimate struct {
	k                          int
	link                       float64 // bytes per second
	selecting, messages, plain time.Duration
}

// sooner reports whether the plain one ends first.
func (e estimate) sooner() bool { return e.plain < e.selecting+e.messages }

// String says what the estimate is.
func (e estimate) String() string {
	tenth := func(d time.Duration) time.Duration { return d.Round(100 * time.Nanosecond) }
	return fmt.Sprintf("over links of %.4g GB/s, selecting %d elements and adding up is estimated at %v and messages at %v, a plain all-reduce at %v",
		e.link/1e9, e.k, tenth(e.selecting), tenth(e.messages), tenth(e.plain))
}

// estimate returns the estimate of a call that is planned.
func (k *call) estimate() estimate {
	P, link := k.c.Size(), k.c.link
	l := k.layout
	l.capacity = k.k
	over := func(bytes float64) time.Duration { return nanoseconds(bytes / link * 1e9) }
	return estimate{
		k: k.k, link: link,
		selecting: costOf(k.src.Device()).of(k.slot.n, k.k),
		messages:  over(float64((P - 1) * l.nbytes())),
		plain:     over(k.what.Kind.BusFactor(P) * float64(k.src.NBytes())),
	}
}

// weigh lets a top-k call pass if a plain all-reduce ends sooner. Not if somebody wants to
// know what was selected, or whether it is finite, or if there is a residual to be sent.
func (k *call) weigh() {
	k.slot.passed = false
	if k.c.link == 0 || k.k == 0 {
		return
	}
	k.slot.estimate = k.estimate()
	kept := k.slot.residual != nil || k.slot.onDevice.Len() > 0
	k.slot.passed = k.slot.estimate.sooner() && !kept && !k.c.strict && k.sent.Len() == 0
}

// pass starts a call that passes.
func (k *call) pass(q backend.Queue) (backend.Work, error) {
	k.dense = true
	k.count()
	n := &k.c.counters
	n.bytes.Add(int64(k.what.Kind.BusFactor(k.c.Size()) * float64(k.src.NBytes())))
	n.entries.Add(int64(k.slot.n))
	return k.c.inner.Start(q, k.what, k.dst, k.src)
}
