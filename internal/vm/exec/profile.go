package exec

import (
	"errors"
	"fmt"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// clock notes points of a device's queue.
type clock interface {
	// mark notes the present point, or that its time is not wanted.
	mark(wanted bool) error
	// between returns the times between marks, when everything is done: 0 where one of the two
	// was not wanted.
	between() ([]time.Duration, error)
	close() error
}

// Profile is Run, with steps one by one, and returns the times of all steps of the plan: of those
// that are not timed, 0 or more. It goes by the clock of the device's queue if it has one, which
// counts the time in which the device waits for the next step, too.
func (e *Executor) Profile(kind int, timed func(ir.Op) bool) (times []time.Duration, err error) {
	if err := e.beginRun(); err != nil {
		return nil, err
	}
	c := e.newClock()
	defer func() { err = errors.Join(err, c.close()) }()
	is := func(i int) bool { return i < len(e.steps) && timed(e.steps[i].Op) }
	if err := c.mark(is(0)); err != nil {
		return nil, err
	}
	for i, s := range e.steps {
		var err error
		if s.beside = false; s.Runs.Has(kind) {
			err = s.run()
		}
		if err := errors.Join(err, c.mark(is(i) || is(i+1))); err != nil {
			return nil, fmt.Errorf("vm: step %d, %v of %s: %w", s.number, s.Op, s.Name, err)
		}
	}
	if err := e.device.Join(); err != nil {
		return nil, err
	}
	return c.between()
}

func (e *Executor) newClock() clock {
	if d, ok := e.device.(*queued); ok {
		if q, ok := d.Queue.(backend.TimedQueue); ok {
			return &deviceClock{queue: q}
		}
	}
	return &hostClock{device: e.device}
}

// deviceClock is the clock of a queue.
type deviceClock struct {
	queue backend.TimedQueue
	marks []backend.TimedEvent // nil where not wanted
}

func (c *deviceClock) mark(wanted bool) error {
	if !wanted {
		c.marks = append(c.marks, nil)
		return nil
	}
	event, err := c.queue.NewTimedEvent()
	if err != nil {
		return err
	}
	c.marks = append(c.marks, event)
	return c.queue.RecordTimed(event)
}

func (c *deviceClock) between() ([]time.Duration, error) {
	times := make([]time.Duration, len(c.marks)-1)
	for i := range times {
		if c.marks[i] == nil || c.marks[i+1] == nil {
			continue
		}
		var err error
		if times[i], _, err = c.marks[i+1].Elapsed(c.marks[i]); err != nil {
			return nil, err
		}
	}
	return times, nil
}

func (c *deviceClock) close() error {
	var err error
	for _, event := range c.marks {
		if event != nil {
			err = errors.Join(err, event.Close())
		}
	}
	return err
}

// hostClock waits for the device at each mark.
type hostClock struct {
	device Device
	marks  []time.Time // zero where not wanted
}

func (c *hostClock) mark(wanted bool) error {
	if !wanted {
		c.marks = append(c.marks, time.Time{})
		return nil
	}
	err := c.device.Join()
	c.marks = append(c.marks, time.Now())
	return err
}

func (c *hostClock) between() ([]time.Duration, error) {
	times := make([]time.Duration, len(c.marks)-1)
	for i := range times {
		if from, to := c.marks[i], c.marks[i+1]; !from.IsZero() && !to.IsZero() {
			times[i] = to.Sub(from)
		}
	}
	return times, nil
}

func (c *hostClock) close() error { return nil }
