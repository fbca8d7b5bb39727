package exec

import (
	"errors"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// What plans get from outside is in the host's memory. A device has the variables, and what is kept
// for them, in copies that machines share where updates write them or several machines use them
// (package residence), and everything else in the executor's uploads.

// sharable reports whether other machines may have the memory of a buffer, too.
func sharable(b plan.Buffer) bool {
	return (b.Kind == plan.Input || b.Kind == plan.State) && b.Bytes > 0
}

// use returns what the plan does with the copy of a buffer.
func use(b plan.Buffer) residence.Use {
	switch {
	case b.Written:
		return residence.Writes
	case b.Frozen:
		return residence.Holds
	}
	return residence.Reads
}

// Bind gives an input, a constant, a vector or a setting the elements in host memory, which are
// in row-major order. On the host, Run reads that memory, and updates write it.
func (e *Executor) Bind(buffer int, memory backend.Buffer) {
	if e.device.Host() {
		if e.buffers[buffer] != memory {
			e.buffers[buffer], e.moved = memory, true
		}
		return
	}
	if sharable(e.plan.Buffers[buffer]) && e.bound[buffer] != memory {
		e.varies[buffer] = e.resident[buffer] != nil
		e.releaseCopy(buffer)
		e.resident[buffer] = e.device.Copies().Enter(memory, use(e.plan.Buffers[buffer]))
	}
	e.bound[buffer] = memory
	stays := e.stays(buffer)
	if stays != e.inCopy(buffer) || !stays && !e.uploads.has(buffer) {
		e.misplaced = true
	} else if !stays && !e.uploads.update(buffer, memory) {
		e.compared += memory.NBytes()
	}
}

// releaseCopy ends the use of a copy.
func (e *Executor) releaseCopy(buffer int) {
	c := e.resident[buffer]
	if c == nil {
		return
	}
	if unused := e.device.Copies().Leave(c, use(e.plan.Buffers[buffer])); unused.Len() > 0 {
		e.unused = append(e.unused, unused)
	}
	if c.Device.Len() > 0 && e.buffers[buffer].Addr() == c.Device.Addr() {
		e.buffers[buffer] = backend.Buffer{}
	}
	e.resident[buffer] = nil
}

// stays reports whether a buffer is to be in a copy. A variable that is given other memory from run
// to run, as batches are, is not, unless its copy is written or held.
func (e *Executor) stays(buffer int) bool {
	c, copies := e.resident[buffer], e.device.Copies()
	return c != nil && copies.Stays(c) && (!e.varies[buffer] || copies.Held(c))
}

// inCopy reports whether a buffer is in its copy.
func (e *Executor) inCopy(buffer int) bool {
	c := e.resident[buffer]
	return c != nil && c.Device.Len() > 0 && e.buffers[buffer].Addr() == c.Device.Addr()
}

// Place gives what was bound its memory on the device. Run does so where it is needed; to call it
// before finds out whether there is enough memory.
func (e *Executor) Place() error {
	if !e.misplaced {
		return nil
	}
	if err := e.discard(); err != nil {
		return err
	}
	for i, c := range e.resident {
		if c == nil || !e.stays(i) {
			continue
		}
		b := e.plan.Buffers[i]
		if c.Device.Len() == 0 {
			var err error
			if c.Device, err = e.device.Alloc(b.Bytes); err != nil {
				return e.lacking(err, b.Bytes, b.Name)
			}
		}
		e.buffers[i] = c.Device.As(b.DType)
	}
	if err := e.upload(); err != nil {
		return err
	}
	e.misplaced, e.moved = false, true
	return nil
}

// discard frees the uploads, and copies that do not stay.
func (e *Executor) discard() error {
	for _, c := range e.resident {
		if c != nil && c.Device.Len() > 0 && !e.device.Copies().Stays(c) { // this is its only user
			e.unused = append(e.unused, c.Device)
			c.Device, c.Fresh = backend.Buffer{}, false
		}
	}
	err := e.uploads.free(e.device)
	for _, b := range e.unused {
		err = errors.Join(err, e.device.Free(b))
	}
	e.unused = nil
	return err
}

// Compared returns how many bytes runs have compared on the host since the last call, only to find
// that the device has them.
func (e *Executor) Compared() int {
	defer func() { e.compared = 0 }()
	return e.compared
}

// refresh starts to copy to the device what the host has written.
func (e *Executor) refresh() error {
	for i, c := range e.resident {
		if c == nil {
			continue
		}
		copies := e.device.Copies()
		if copies.Current(c) {
			continue
		}
		if c.Fresh && !copies.Held(c) && equal(c.Sent, c.Host.Bytes()) {
			e.compared += len(c.Sent)
			continue
		}
		if !e.inCopy(i) {
			continue
		}
		source := copies.Source(c)
		if err := e.device.Move(e.buffers[i], c.Host); err != nil {
			return err
		}
		copies.Send(c, source)
	}
	return nil
}

// Memory returns where a buffer lies that comes from outside.
func (e *Executor) Memory(buffer int) backend.Buffer { return e.buffers[buffer] }

// Main returns the queue of the steps, nil for the host.
func (e *Executor) Main() backend.Queue { return e.device.Main() }

// Outdate marks the host's memory of an input that updates of the plan have written on a device. It
// reports whether who reads the memory is told: not of integers.
func (e *Executor) Outdate(buffer int) bool {
	c := e.resident[buffer]
	return c == nil || c.Outdate()
}

// Newer reports whether the device has newer elements than host memory.
func (e *Executor) Newer(memory backend.Buffer) bool {
	return !e.device.Host() && e.device.Copies().Newer(memory)
}

// Pull copies buffers that updates have written, of this executor or of others, to the memory that
// was bound, and gives them to the host until the next Run. It does nothing for others.
func (e *Executor) Pull(buffers ...int) error {
	copies := make([]*residence.Copy, len(buffers))
	for i, b := range buffers {
		copies[i] = e.resident[b]
		residence.Written(e.given(b)) // the host may write
	}
	return pull(e.device, copies)
}

func pull(d Device, copies []*residence.Copy) error {
	started := false
	for _, c := range copies {
		if c == nil || !c.Fresh || !d.Copies().Written(c) {
			continue
		}
		if err := d.Move(c.Host, c.Device.As(c.Host.DType())); err != nil {
			return errors.Join(err, d.Join())
		}
		c.Fresh, started = false, true
	}
	if !started {
		return nil
	}
	return d.Join()
}

// Kept is what updates have written on a device, without the executor that has. An executor that
// binds the same memory finds it there. Methods of nil do nothing.
type Kept struct {
	device                 Device
	inputs, states, frozen []*residence.Copy
}

// Keep closes an executor, but keeps what its updates have written, and what nothing changes.
func (e *Executor) Keep() (*Kept, error) {
	k := &Kept{device: e.device}
	for i, c := range e.resident {
		switch b := e.plan.Buffers[i]; {
		case c == nil || use(b) == residence.Reads:
		case b.Frozen:
			k.frozen = append(k.frozen, e.device.Copies().Enter(c.Host, use(b)))
		case b.Kind == plan.State:
			k.states = append(k.states, e.device.Copies().Enter(c.Host, use(b)))
		default:
			k.inputs = append(k.inputs, e.device.Copies().Enter(c.Host, use(b)))
		}
	}
	return k, e.free()
}

// Pull brings inputs to the host, and with all what is kept for them, as Pull of an Executor does.
func (k *Kept) Pull(all bool) error {
	switch {
	case k == nil:
		return nil
	case all:
		return pull(k.device, slices.Concat(k.inputs, k.states))
	}
	return pull(k.device, k.inputs)
}

// Unmark makes the host's memory of inputs what it was before updates on the device.
func (k *Kept) Unmark() {
	if k != nil {
		for _, c := range k.inputs {
			c.Unmark()
		}
	}
}

// Outdate marks it again, where the device has the newer elements.
func (k *Kept) Outdate() {
	if k != nil {
		for _, c := range k.inputs {
			if c.Fresh {
				c.Outdate()
			}
		}
	}
}

// Close frees what no executor uses.
func (k *Kept) Close() (err error) {
	if k == nil {
		return nil
	}
	leave := func(all []*residence.Copy, use residence.Use) {
		for _, c := range all {
			if unused := k.device.Copies().Leave(c, use); unused.Len() > 0 {
				err = errors.Join(err, k.device.Free(unused))
			}
		}
	}
	leave(slices.Concat(k.inputs, k.states), residence.Writes)
	leave(k.frozen, residence.Holds)
	return errors.Join(err, k.device.Close())
}

// uploads are the copies of inputs, constants and numbers on a device: one run of memory, with
// a copy of it on the host. A run sends what has changed, in one piece.
type uploads struct {
	host, device backend.Buffer
	offsets      []int // by plan.Buffer, -1 for those that are elsewhere; nil before there are any
	first, last  int   // the bytes that have changed
}

// upload makes room on the device for all buffers that come from outside and have no copy.
func (e *Executor) upload() (err error) {
	offsets, end := make([]int, len(e.plan.Buffers)), 0
	for i, b := range e.plan.Buffers {
		if offsets[i] = -1; b.Outside() && !e.stays(i) && !b.Computed() {
			offsets[i] = end
			end += (b.Bytes + alignment - 1) / alignment * alignment
		}
	}
	u := &e.uploads
	if end > 0 {
		if u.device, err = e.device.Alloc(end); err != nil {
			return e.lacking(err, end, "inputs and constants")
		}
		if u.host, err = e.device.AllocHost(end); err != nil {
			return err
		}
	}
	u.offsets, u.first, u.last = offsets, 0, end
	for i, b := range e.plan.Buffers {
		if !u.has(i) {
			continue
		}
		e.buffers[i] = u.device.Slice(offsets[i], offsets[i]+b.Bytes).As(b.DType)
		copy(u.at(i, b.Bytes), e.bound[i].Bytes())
	}
	return nil
}

// has reports whether a buffer is among the uploads.
func (u *uploads) has(buffer int) bool { return u.offsets != nil && u.offsets[buffer] >= 0 }

// at returns where a buffer is on the host.
func (u *uploads) at(buffer, nbytes int) []byte {
	return u.host.Slice(u.offsets[buffer], u.offsets[buffer]+nbytes).Bytes()
}

// update notes the elements of a buffer for the next run, and reports whether they have changed.
func (u *uploads) update(buffer int, memory backend.Buffer) (changed bool) {
	from := memory.Bytes()
	to := u.at(buffer, len(from))
	if equal(to, from) {
		return false
	}
	copy(to, from)
	first := u.offsets[buffer]
	u.first, u.last = min(u.first, first), max(u.last, first+len(to))
	return true
}

// send starts to copy what has changed to the device.
func (u *uploads) send(d Device) error {
	if u.first >= u.last {
		return nil
	}
	first, last := u.first, u.last
	u.first, u.last = u.host.Len(), 0
	return d.Move(u.device.Slice(first, last), u.host.Slice(first, last))
}

// free gives the memory back.
func (u *uploads) free(d Device) (err error) {
	if u.device.Len() > 0 {
		err = d.Free(u.device)
	}
	if u.host.Len() > 0 {
		err = errors.Join(err, d.FreeHost(u.host))
	}
	*u = uploads{}
	return err
}
