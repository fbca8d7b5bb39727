//go:build gpu

package cuda

import (
	"errors"
	"time"

	"gorgonia.org/cu"
)

// Timer takes the time between two points of a queue, by the device's clock. It is
// for measurements: events that take the time cost more than others.
type Timer struct {
	queue    *Queue
	from, to cu.Event
}

// NewTimer returns a timer of the queue. Close it before the queue.
func (q *Queue) NewTimer() (*Timer, error) {
	t := &Timer{queue: q}
	err := q.device.on("new timer", func() (err error) {
		if t.from, err = cu.MakeEvent(cu.DefaultEvent); err != nil {
			return err
		}
		if t.to, err = cu.MakeEvent(cu.DefaultEvent); err != nil {
			err = errors.Join(err, cu.DestroyEvent(&t.from))
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}

// Start marks where the time begins: after what is on the queue now.
func (t *Timer) Start() error { return t.record(t.from) }

// Stop marks where it ends.
func (t *Timer) Stop() error { return t.record(t.to) }

func (t *Timer) record(e cu.Event) error {
	return t.queue.device.on("record a time", func() error { return e.Record(t.queue.stream) })
}

// Elapsed returns the time from Start to Stop, to half a microsecond. What is before
// Stop on the queue must be done.
func (t *Timer) Elapsed() (time.Duration, error) {
	var took time.Duration
	err := t.queue.device.on("read a timer", func() error {
		ms, err := t.from.Elapsed(t.to)
		took = time.Duration(ms * float64(time.Millisecond))
		return err
	})
	return took, err
}

// Close frees the timer.
func (t *Timer) Close() error {
	return t.queue.device.on("close a timer", func() error { return errors.Join(cu.DestroyEvent(&t.from), cu.DestroyEvent(&t.to)) })
}
