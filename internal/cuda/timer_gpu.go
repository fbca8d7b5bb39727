//go:build gpu

package cuda

/*
#include <cuda.h>

// Makes the record of an event a node of the graph that a stream is recorded into.
static CUresult euryale_record_node(CUevent event, uintptr_t stream)
{
	return cuEventRecordWithFlags(event, (CUstream)stream, CU_EVENT_RECORD_EXTERNAL);
}
*/
import "C"

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
)

// timedEvent is an event at which the device notes the time.
type timedEvent struct {
	device *Device
	event  cu.Event
}

var _ backend.TimedQueue = (*Queue)(nil)

// NewTimedEvent implements [backend.TimedQueue].
func (q *Queue) NewTimedEvent() (backend.TimedEvent, error) {
	s := &timedEvent{device: q.device}
	err := q.device.on("new timed event", func() (err error) {
		s.event, err = cu.MakeEvent(cu.DefaultEvent)
		return err
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// RecordTimed implements [backend.TimedQueue].
func (q *Queue) RecordTimed(s backend.TimedEvent) error {
	own, err := q.device.timedEvent(s)
	if err == nil {
		err = q.usable()
	}
	if err != nil {
		return err
	}
	if q.recording.Load() == nil {
		return q.device.on("record a time", func() error { return own.event.Record(q.stream) })
	}
	q.launcher.Separate() // what comes next is behind no kernel
	return q.device.on("record a time in a graph", func() error {
		return result(C.euryale_record_node(*(*C.CUevent)(unsafe.Pointer(&own.event)),
			C.uintptr_t(q.Stream())))
	})
}

// timedEvent refuses those of other devices.
func (d *Device) timedEvent(s backend.TimedEvent) (*timedEvent, error) {
	own, ok := s.(*timedEvent)
	if !ok || own.device != d {
		return nil, fmt.Errorf("%w: %s: a timed event of another device", backend.ErrArgument,
			d.Name())
	}
	return own, nil
}

// Elapsed implements [backend.TimedEvent].
func (s *timedEvent) Elapsed(since backend.TimedEvent) (t time.Duration, happened bool, err error) {
	from, err := s.device.timedEvent(since)
	if err != nil {
		return 0, false, err
	}
	err = s.device.on("read a time", func() error {
		ms, err := from.event.Elapsed(s.event)
		if errors.Is(err, cu.NotReady) {
			return nil
		}
		t, happened = time.Duration(ms*float64(time.Millisecond)), err == nil
		return err
	})
	return t, happened, err
}

// Close implements [backend.TimedEvent].
func (s *timedEvent) Close() error {
	return s.device.on("free a timed event", func() error { return cu.DestroyEvent(&s.event) })
}
