package fakedevice

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
)

// ErrTouched: the host touched memory of a guarded device.
var ErrTouched = errors.New("the host touched memory of a device")

// fault is what the runtime panics with at a bad address.
type fault interface {
	error
	Addr() uintptr
}

// Catch runs f and turns a touch of the device's memory by f's goroutine into an
// error that says where it happened: ErrTouched. Other panics go on.
func (d *Device) Catch(f func()) (err error) {
	before := debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(before)
	defer func() {
		cause := recover()
		if cause == nil {
			return
		}
		at, ok := cause.(fault)
		if !ok || !d.owns(at.Addr()) {
			panic(cause)
		}
		err = fmt.Errorf("fakedevice: %w: %s, in %s: start a kernel, or copy it to the host first", ErrTouched, d.describe(at.Addr()), culprit())
	}()
	f()
	return nil
}

// describe says what is at an address.
func (d *Device) describe(addr uintptr) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := d.find(addr)
	if i < 0 || addr >= d.blocks[i].end() {
		return fmt.Sprintf("address %#x, where nothing is allocated", addr)
	}
	return fmt.Sprintf("byte %d of an allocation of %d bytes", addr-d.blocks[i].addr, d.blocks[i].memory.Len())
}

// culprit is the function that faulted, found while the panic unwinds.
func culprit() string {
	var callers [64]uintptr
	frames := runtime.CallersFrames(callers[:runtime.Callers(0, callers[:])])
	for more, after := true, false; more; {
		var frame runtime.Frame
		frame, more = frames.Next()
		if after {
			return fmt.Sprintf("%s (%s:%d)", frame.Function, frame.File, frame.Line)
		}
		after = frame.Function == "runtime.sigpanic"
	}
	return "an unknown function"
}
