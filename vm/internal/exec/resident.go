package exec

import (
	"errors"

	"github.com/euryale-ml/euryale/backend"
)

// resident is a buffer that updates write on a device, where it stays from run to run. Host
// memory has its elements when it is bound and after pull; the device has them from the next run
// on.
type resident struct {
	device, host backend.Buffer
	here         bool // the device has the elements, and the host need not
}

// prepareResident makes room for what updates write.
func (e *Executor) prepareResident() error {
	e.resident = map[int]*resident{}
	for i, b := range e.plan.Buffers {
		if !b.Written {
			continue
		}
		memory, err := e.alloc(b.DType, b.Bytes/b.DType.Size())
		if err != nil {
			return err
		}
		e.buffers[i], e.resident[i] = memory, &resident{device: memory}
	}
	return nil
}

// bind says where the elements are on the host. Other memory than before has the present ones.
func (r *resident) bind(memory backend.Buffer) {
	if r.host != memory {
		r.host, r.here = memory, false
	}
}

// sendResident starts to copy to the device what the host has.
func (e *Executor) sendResident() error {
	for _, r := range e.resident {
		if r.here {
			continue
		}
		if err := e.device.Move(r.device, r.host); err != nil {
			return err
		}
		r.here = true
	}
	return nil
}

// Pull copies buffers that updates have written to the memory that was bound, and gives them to
// the host until the next Run. It does nothing for others.
func (e *Executor) Pull(buffers ...int) error {
	started := false
	for _, i := range buffers {
		r := e.resident[i]
		if r == nil || !r.here {
			continue
		}
		if err := e.device.Move(r.host, r.device); err != nil {
			return errors.Join(err, e.device.Join())
		}
		r.here, started = false, true
	}
	if !started {
		return nil
	}
	return e.device.Join()
}
