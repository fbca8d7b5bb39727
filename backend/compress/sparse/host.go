package sparse

import (
	"context"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// hostSteps are the steps of a call on memory of the host, in the order of a queue, which may be
// one of a device. Their operands fit: nothing can fail when the steps run.
type hostSteps struct {
	q backend.Queue
	*selector
}

var _ steps = hostSteps{}

// SelectScratch implements [kernels.Sparse]: the selector has its own.
func (hostSteps) SelectScratch(*kernels.Selection) int { return 0 }

// Select implements [kernels.Sparse].
func (h hostSteps) Select(s *kernels.Selection) error {
	own := *s
	return later(h.q, func() { h.selector.run(&own) })
}

// Combine implements [kernels.Sparse].
func (h hostSteps) Combine(dst backend.Buffer, m kernels.Messages, divisor int) error {
	return later(h.q, func() { h.selector.combine(dst, m, divisor) })
}

// NotFinite implements [kernels.Sparse].
func (h hostSteps) NotFinite(note, x backend.Buffer) error {
	return later(h.q, func() { _ = kernels.Host{}.NotFinite(note, x) })
}

// Cast implements [steps].
func (h hostSteps) Cast(dst, src backend.Buffer) error {
	return later(h.q, func() { _ = kernels.Host{}.Cast(dst, src) })
}

// Copy implements [steps].
func (h hostSteps) Copy(dst, src backend.Buffer) error {
	return later(h.q, func() { _ = kernels.Host{}.Copy(dst, src) })
}

// Copy2D implements [steps].
func (h hostSteps) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width,
	rows int) error {
	return later(h.q, func() {
		_ = kernels.Host{}.Copy2D(dst, dstPitch, src, srcPitch, width, rows)
	})
}

// Move implements [steps].
func (h hostSteps) Move(dst, src backend.Buffer) error { return h.Copy(dst, src) }

// later runs f on the host in the order of q. A queue of the host waits for an
// event by joining it, in its turn: that is when f runs.
func later(q backend.Queue, f func()) error {
	before, err := q.Record()
	if err != nil {
		return err
	}
	return q.Wait(&turn{before: before, run: f})
}

// turn is an event that happens by being waited for.
type turn struct {
	before backend.Event
	once   sync.Once
	run    func()
}

// Done implements [backend.Event]: it happens in Join.
func (*turn) Done() bool { return false }

// Join implements [backend.Event].
func (t *turn) Join(context.Context) error {
	t.once.Do(func() {
		_ = t.before.Join(context.Background()) // which never ends, so there is no error
		t.run()
	})
	return nil
}
