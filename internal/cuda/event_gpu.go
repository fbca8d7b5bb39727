//go:build gpu

package cuda

/*
#cgo noescape euryale_event_query
#cgo nocallback euryale_event_query
#cgo noescape euryale_event_record
#cgo nocallback euryale_event_record
#cgo noescape euryale_event_wait
#cgo nocallback euryale_event_wait
#include <stdint.h>
#include <cuda.h>

static int euryale_event_create(uintptr_t *event)
{
	CUevent e = NULL;
	int code = cuEventCreate(&e, CU_EVENT_DISABLE_TIMING);

	*event = (uintptr_t)e;
	return code;
}

static int euryale_event_destroy(uintptr_t event)
{
	return cuEventDestroy((CUevent)event);
}

static int euryale_event_query(uintptr_t event)
{
	return cuEventQuery((CUevent)event);
}

static int euryale_event_record(uintptr_t stream, uintptr_t event)
{
	return cuEventRecord((CUevent)event, (CUstream)stream);
}

static int euryale_event_wait(uintptr_t stream, uintptr_t event)
{
	return cuStreamWaitEvent((CUstream)stream, (CUevent)event, 0);
}
*/
import "C"

import "fmt"

// Events of the driver, as numbers, for communicators: they record the same ones again and again,
// also by libraries, and ask for them in every call. Programs use [Queue.Record].

// NewEvent returns a CUevent, without timing.
func (d *Device) NewEvent() (event uintptr, err error) {
	err = d.on("new event", func() error {
		var e C.uintptr_t
		defer func() { event = uintptr(e) }()
		return failed(C.euryale_event_create(&e))
	})
	return event, err
}

// FreeEvent destroys an event of NewEvent.
func (d *Device) FreeEvent(event uintptr) error {
	return d.on("free an event", func() error {
		return failed(C.euryale_event_destroy(C.uintptr_t(event)))
	})
}

// EventDone reports whether everything before the last record of an event is done. An event
// that was not recorded is.
func (d *Device) EventDone(event uintptr) (bool, error) {
	unbind, err := d.Bind()
	if err != nil {
		return false, err
	}
	defer unbind()
	switch code := C.euryale_event_query(C.uintptr_t(event)); code {
	case C.CUDA_SUCCESS:
		return true, nil
	case C.CUDA_ERROR_NOT_READY:
		return false, nil
	default:
		return false, d.named("look for an event",
			fmt.Errorf("a kernel failed, and this process cannot use the device any more: %w",
				failed(code)))
	}
}

// RecordEvent records an event on a CUstream. The device is bound.
func (d *Device) RecordEvent(stream, event uintptr) error {
	return d.named("record an event",
		failed(C.euryale_event_record(C.uintptr_t(stream), C.uintptr_t(event))))
}

// WaitEvent orders a CUstream after the last record of an event. The device is bound.
func (d *Device) WaitEvent(stream, event uintptr) error {
	return d.named("order a stream",
		failed(C.euryale_event_wait(C.uintptr_t(stream), C.uintptr_t(event))))
}

// failed returns a result of the driver as an error, nil for success.
func failed(code C.int) error {
	if code == C.CUDA_SUCCESS {
		return nil
	}
	return failure(int(code))
}
