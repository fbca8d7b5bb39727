package sparse

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// past is what a slot was before its last call, on a strict communicator.
type past struct {
	calls, most int
	known       bool
	residual    []float32      // as those of the slot
	onDevice    backend.Buffer // likewise
}

// Undo makes a slot of a strict communicator what it was before its last call, bit for
// bit, so that a training step can be left out as a whole: after a [NotFiniteError] in one
// slot, other slots have sent something that nobody is going to apply. Every rank must do
// it for the same slots at the same place of its program. It waits for the call; a slot
// that has had none since the last Undo stays as it is.
//
// Errors: ErrArgument without [WithStrict], which keeps what this goes back to.
func (c *Communicator) Undo(slot int) error {
	if !c.strict {
		return fmt.Errorf("%w: %s: Undo of sparse slot %d needs WithStrict", backend.ErrArgument, backend.RankOf(c), slot)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.slots[slot]
	if s == nil || !s.past.known {
		return nil
	}
	s.settle()
	p := &s.past
	p.known = false
	s.calls, *s.most.of(p.calls) = p.calls, p.most
	s.residual, p.residual = p.residual, s.residual
	s.onDevice, p.onDevice = p.onDevice, s.onDevice
	return nil
}

// note takes down the counts that the next call of a slot changes.
func (s *slot) note() { s.past.calls, s.past.most, s.past.known = s.calls, *s.most.of(s.calls), true }

// keep copies the residual, before the call changes it.
func (k *call) keep() {
	if k.c.strict && k.slot.residual != nil {
		p := &k.slot.past
		p.residual = grow(&p.residual, k.slot.n)
		copy(p.residual, k.slot.residual)
	}
}

// keepOnDevice is keep in the order of a queue.
func (k *call) keepOnDevice(do deviceKernels) error {
	s := k.slot
	if !k.c.strict || s.onDevice.Len() == 0 {
		return nil
	}
	if s.past.onDevice.Len() == 0 {
		b, err := k.c.Device().Alloc(4 * s.n)
		if err != nil {
			return err
		}
		s.past.onDevice = b.As(backend.F32)
	}
	return do.Copy(s.past.onDevice, s.onDevice)
}
