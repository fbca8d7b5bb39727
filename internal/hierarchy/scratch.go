package hierarchy

import "github.com/euryale-ml/euryale/backend"

// slots are scratch memory for several slices at a time, which take turns.
type slots struct {
	memory backend.Buffer
	all    []slot
	turn   int // of the slot to use next
}

// slot is scratch memory for a slice at a time.
type slot struct {
	room  backend.Buffer // a slice; D = 1 takes another one for what comes
	extra backend.Buffer
	half  backend.Buffer // two shards of 16-bit floats, if they are exchanged
	free  backend.Event  // when its last user is done, nil if there was none
}

// maxSize is the size of the largest elements.
const maxSize = 8

// newSlots allocates the slots of a plan.
func newSlots(d backend.Device, p Plan) (s slots, err error) {
	o, D := p.Options, p.Layout.fewest()
	slice := max(p.slotBytes(), 2*maxSize*p.Layout.Size()) // an all-to-all takes two
	slice = (slice + cacheLine - 1) / cacheLine * cacheLine
	extra, half := 0, 0
	if D == 1 {
		extra = slice
	}
	if o.Exchange != 0 {
		half = (slice/D + cacheLine - 1) / cacheLine * cacheLine // two times half of a shard
	}
	per := slice + extra + half
	if s.memory, err = d.Alloc(o.Slots * per); err != nil {
		return slots{}, err
	}
	for i := range o.Slots {
		m := s.memory.Slice(i*per, (i+1)*per)
		s.all = append(s.all, slot{room: m.Slice(0, slice), extra: m.Slice(slice, slice+extra),
			half: m.Slice(slice+extra, per)})
	}
	return s, nil
}

// takeSlot returns the slot whose turn it is.
func (s *slots) takeSlot() *slot {
	next := &s.all[s.turn]
	s.turn = (s.turn + 1) % len(s.all)
	return next
}

// free gives back the memory.
func (s *slots) free(d backend.Device) (err error) {
	if s.memory.Len() > 0 {
		err = d.Free(s.memory)
	}
	*s = slots{}
	return err
}

// scratch is the memory of a slice.
type scratch struct {
	place
	M, D    int            // machines and rails
	locals  int            // ranks of this machine
	whole   backend.Buffer // D shards
	partial backend.Buffer // what this rank's rail exchanges
	slot    *slot          // nil if none is needed
}

// in makes a scratch from existing memory.
func (k *call) in(whole backend.Buffer) *scratch {
	l, here := k.c.plan.Layout, k.c.place
	return &scratch{place: here, M: l.Machines(), D: l.fewest(),
		locals: len(l.machines[here.machine]), whole: whole}
}

// railed reports whether the rank is on a rail.
func (a *scratch) railed() bool { return a.device < a.D }

// takeScratch makes the scratch of a slice, in whole or else in a slot. A slot is free when
// its last user is done; the stream of the slice's first phase waits for that.
func (k *call) takeScratch(whole backend.Buffer, first phase) (*scratch, error) {
	c, a := k.c, k.in(whole)
	if whole.Len() > 0 && (a.D > 1 && k.exchangeType() == 0 || !a.railed()) {
		return a, nil
	}
	a.slot = c.slots.takeSlot()
	if a.locals == 1 && first == reducePhase {
		first = exchangePhase
	}
	if err := k.goOn(first); err != nil || a.slot.free == nil {
		return a, err
	}
	return a, c.queues[first].Wait(a.slot.free)
}

// give frees the slot once what was started so far is done.
func (k *call) give(a *scratch) (err error) {
	if a.slot != nil {
		a.slot.free, err = k.c.queues[k.at.phase].Record()
	}
	return err
}

// resize makes n elements of the slot the scratch.
func (a *scratch) resize(d backend.DType, n int) { a.whole = a.slot.room.As(d).Slice(0, n) }

// mine returns this rank's shard, which is empty if it is on no rail.
func (a *scratch) mine() backend.Buffer {
	if !a.railed() {
		return a.whole.Slice(0, 0)
	}
	return a.shard(a.device)
}

// splits returns the lengths of the machine's shards if some are empty, else nil.
func (a *scratch) splits() []int {
	if a.locals == a.D {
		return nil
	}
	all := make([]int, a.locals)
	for d := range a.D {
		all[d] = a.whole.Len() / a.D
	}
	return all
}

// shard returns the part of a device.
func (a *scratch) shard(device int) backend.Buffer { return equalPart(a.whole, device, a.D) }

// own returns the piece that this rank adds.
func (a *scratch) own() backend.Buffer { return equalPart(a.shard(a.device), a.machine, a.M) }

// pieces returns the parts of a shard, by machine.
func (a *scratch) pieces(shard backend.Buffer) []backend.Buffer {
	all := make([]backend.Buffer, a.M)
	for m := range all {
		all[m] = equalPart(shard, m, a.M)
	}
	return all
}

// staging is the send buffer of the rail.
func (a *scratch) staging() backend.Buffer {
	if a.D > 1 {
		return a.shard((a.device + 1) % a.D)
	}
	return a.slot.extra.As(a.whole.DType()).Slice(0, a.whole.Len())
}

// second returns as much of the slot as cut has, behind it.
func (a *scratch) second() backend.Buffer {
	n := a.whole.Len()
	return a.slot.room.As(a.whole.DType()).Slice(n, 2*n)
}

// rowsOf returns the rows of a run, from the first one on.
func (a *scratch) rowsOf(b backend.Buffer, r run) backend.Buffer {
	row := b.Len() / (a.M * a.D)
	return b.Slice(r.row*row, (r.row+r.rows)*row)
}

// halves are a shard of 16-bit floats to send and one to receive.
type halves struct{ goes, came backend.Buffer }

// half returns memory to exchange d in; false if d is 0.
func (a *scratch) half(d backend.DType) (h halves, ok bool) {
	if d == 0 {
		return h, false
	}
	n := a.whole.Len() / a.D
	both := a.slot.half.As(d)
	return halves{both.Slice(0, n), both.Slice(n, 2*n)}, true
}

// equalPart returns one of n equal parts.
func equalPart(b backend.Buffer, i, n int) backend.Buffer {
	size := b.Len() / n
	return b.Slice(i*size, (i+1)*size)
}
