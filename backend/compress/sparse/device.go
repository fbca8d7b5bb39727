package sparse

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// Operands on a device take the same steps as those on the host, by kernels on the
// queue of the call. What the host must know of a call, the heads of its messages,
// is copied to it behind the call, and looked at when the work is joined or a later
// call starts: nothing stops the host, but for a threshold that must know how much
// the last call but one of its slot has selected.

// deviceKernels are what the calls of a queue need.
type deviceKernels interface {
	backend.Arithmetic
	kernels.Sparse
}

// memory is what a communicator keeps on a device, and of it on the host.
type memory struct {
	rooms   []backend.Buffer // for one call after the other; the last one is in use, to be freed
	pinned  backend.Buffer   // host memory for heads
	heads   []backend.Buffer // parts of it that no call uses
	pending []*deviceWork    // whose heads were not looked at yet, in order
}

// mostPending bounds the calls that the host may be ahead.
const mostPending = 64

// pinner is a device that copies to host memory of its own without a stop.
type pinner interface {
	AllocHost(nbytes int) (backend.Buffer, error)
	FreeHost(backend.Buffer) error
}

// startOnDevice starts the steps of a call on q.
func (k *call) startOnDevice(q backend.Queue, do deviceKernels) (*deviceWork, error) {
	k.count()
	k.printed = k.print()
	if err := k.residence(do); err != nil {
		return nil, err
	}
	d, err := k.parts(do)
	if err != nil {
		return nil, err
	}
	w := &deviceWork{call: k, heads: d.host}
	k.c.memory.pending = append(k.c.memory.pending, w)
	if err = k.run(q, do, d); err == nil {
		w.done, err = q.Record()
	}
	if err != nil { // it has no end to wait for
		w.close(err)
		return nil, err
	}
	return w, nil
}

// residence makes the residual of the slot one of the device.
func (k *call) residence(do deviceKernels) (err error) {
	s := k.slot
	if !k.c.feedback || s.onDevice.Len() > 0 {
		return nil
	}
	b, err := k.c.Device().Alloc(4 * s.n)
	if err != nil {
		return err
	}
	if s.onDevice = b.As(backend.F32); s.residual == nil {
		return nil
	}
	restored := backend.Of(s.residual)
	s.residual = nil
	return do.Move(s.onDevice, restored)
}

// parts are where a call works.
type parts struct {
	mine, all backend.Buffer // messages, as U8
	heads     backend.Buffer // of all ranks, then their notes, as I64
	note      backend.Buffer // of this rank
	wide, acc backend.Buffer // F32, where operand and destination are not
	scratch   backend.Buffer
	host      backend.Buffer // for heads
}

// parts finds room for a call, in memory that one call uses after the other.
func (k *call) parts(do deviceKernels) (p parts, err error) {
	c, n, P := k.c, k.layout.nbytes(), k.c.Size()
	wide, acc := 0, 0
	if k.src.DType() == backend.F64 {
		wide = k.slot.n
		if k.dense {
			acc = wide
		}
	}
	words := P * (kernels.HeadWords + 1)
	scratch := do.SelectScratch(&kernels.Selection{X: backend.OnDevice(backend.F32, 0, k.slot.n), K: k.k})
	sizes := []int{n, P * n, 8 * words, 8, 4 * wide, 4 * acc, scratch}
	at := make([]int, len(sizes)+1)
	const align = 256 // as addresses of a device are
	for i, size := range sizes {
		at[i+1] = at[i] + (size+align-1)/align*align
	}
	room, err := c.room(at[len(sizes)])
	if err != nil {
		return p, err
	}
	part := func(i int, d backend.DType) backend.Buffer { return room.Slice(at[i], at[i]+sizes[i]).As(d) }
	p = parts{
		mine: part(0, backend.U8), all: part(1, backend.U8), heads: part(2, backend.I64), note: part(3, backend.I64),
		wide: part(4, backend.F32), acc: part(5, backend.F32), scratch: part(6, backend.U8),
	}
	if k.dense && acc == 0 {
		p.acc = k.dst // f32: reduced in place
	}
	p.host, err = c.hostHeads(words)
	return p, err
}

// room returns memory of the device. A call under way may still use what was too
// small; that is kept until Close, and doubling bounds it.
func (c *Communicator) room(nbytes int) (backend.Buffer, error) {
	m, have := &c.memory, 0
	if k := len(m.rooms); k > 0 {
		have = m.rooms[k-1].Len()
	}
	if nbytes > have {
		b, err := c.Device().Alloc(max(nbytes, 2*have))
		if err != nil {
			return b, err
		}
		m.rooms = append(m.rooms, b)
	}
	return m.rooms[len(m.rooms)-1].Slice(0, nbytes), nil
}

// hostHeads returns host memory of so many words, the same for every call.
func (c *Communicator) hostHeads(words int) (backend.Buffer, error) {
	m := &c.memory
	if m.pinned.Len() == 0 {
		if err := m.pin(c.Device(), words); err != nil {
			return backend.Buffer{}, err
		}
	}
	last := len(m.heads) - 1
	b := m.heads[last]
	m.heads = m.heads[:last]
	return b, nil
}

// pin makes host memory for all calls that may be under way, at once: it takes the
// driver a while.
func (m *memory) pin(d backend.Device, words int) (err error) {
	m.pinned = backend.Of(make([]int64, mostPending*words))
	if p, ok := d.(pinner); ok {
		if m.pinned, err = p.AllocHost(m.pinned.NBytes()); err != nil {
			return err
		}
	}
	all := m.pinned.As(backend.I64)
	for i := range mostPending {
		m.heads = append(m.heads, all.Slice(i*words, (i+1)*words))
	}
	return nil
}

// selection is what is sent of the operand.
func (k *call) selection(p parts) kernels.Selection {
	s := kernels.Selection{
		Out: k.layout.message(p.mine), X: k.src, Residual: k.slot.onDevice,
		K: k.k, Saturate: k.c.feedback, Print: k.printed, Scratch: p.scratch,
	}
	if k.src.DType() == backend.F64 {
		s.X = p.wide
	}
	if k.k == 0 {
		s.Above = atLeast(float32(k.c.how.limit)).above
	}
	if k.dense {
		s.Dense = p.acc
	}
	if k.c.strict {
		s.Notes = k.notesOf(p.heads)
	}
	return s
}

// notesOf are the notes of all ranks, behind their heads.
func (k *call) notesOf(heads backend.Buffer) backend.Buffer {
	return heads.Slice(k.c.Size()*kernels.HeadWords, heads.Len())
}

// message is what kernels see of the memory of a message of one segment.
func (l layout) message(memory backend.Buffer) kernels.Message {
	head, index := l.offsets()
	return kernels.Message{
		Head:   memory.Slice(0, head).As(backend.I64),
		Values: memory.Slice(head, index).As(l.values).Slice(0, l.capacity),
		Index:  memory.Slice(index, memory.Len()).As(backend.I32).Slice(0, l.capacity),
	}
}

// run starts what the device does: select, exchange, add.
func (k *call) run(q backend.Queue, do deviceKernels, p parts) error {
	if k.src.DType() == backend.F64 {
		if err := do.Cast(p.wide, k.src); err != nil {
			return err
		}
	}
	if err := k.note(q, do, p); err != nil {
		return err
	}
	if err := k.keepOnDevice(do); err != nil {
		return err
	}
	s := k.selection(p)
	if err := do.Select(&s); err != nil {
		return err
	}
	if err := k.reportOn(do, p); err != nil {
		return err
	}
	var err error
	if k.gathering, err = k.follow(q, k.gather(), p.all, p.mine); err != nil {
		return err
	}
	if err := k.finish(q, do, p); err != nil {
		return err
	}
	n, P := k.layout.nbytes(), k.c.Size()
	heads := p.heads.Slice(0, P*kernels.HeadWords)
	if err := do.Copy2D(heads, kernels.HeadWords, p.all.As(backend.I64), n/8, kernels.HeadWords, P); err != nil {
		return err
	}
	if !k.c.strict {
		return do.Move(p.host.Slice(0, heads.Len()), heads)
	}
	return do.Move(p.host, p.heads)
}

// reportOn writes what this rank sends where Report has said.
func (k *call) reportOn(do deviceKernels, p parts) error {
	switch {
	case k.sent.Len() == 0:
		return nil
	case k.dense:
		return do.Cast(k.sent, p.acc)
	}
	return do.Combine(k.sent, k.messages(p.mine, 1), 1)
}

// messages is what kernels see of messages.
func (k *call) messages(all backend.Buffer, ranks int) kernels.Messages {
	values, index := k.layout.offsets()
	return kernels.Messages{
		All: all, Ranks: ranks, NBytes: k.layout.nbytes(),
		DType: k.layout.values, Values: values, Index: index, Capacity: k.capacity,
	}
}

// follow starts a collective of the call, and what comes behind it after it.
func (k *call) follow(q backend.Queue, c backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	w, err := k.collect(q, c, dst, src)
	if err == nil {
		w.Wait(q) // if it has failed already, the call has, and Join says so
	}
	return w, err
}

// note lets the ranks of a strict communicator know of each other's NaN.
func (k *call) note(q backend.Queue, do deviceKernels, p parts) (err error) {
	if !k.c.strict {
		return nil
	}
	if err := do.NotFinite(p.note, k.src); err != nil {
		return err
	}
	k.noting, err = k.follow(q, k.gather(), k.notesOf(p.heads), p.note)
	return err
}

// finish adds up what all ranks have sent.
func (k *call) finish(q backend.Queue, do deviceKernels, p parts) (err error) {
	if !k.dense {
		divisor := 1
		if k.what.Op == backend.Avg {
			divisor = k.c.Size()
		}
		return do.Combine(k.dst, k.messages(p.all, k.c.Size()), divisor)
	}
	c := k.exact()
	if k.reducing, err = k.follow(q, c, p.acc, p.acc); err == nil && k.dst.DType() == backend.F64 {
		err = do.Cast(k.dst, p.acc)
	}
	return err
}

// deviceWork is a call on a device under way.
type deviceWork struct {
	call  *call
	done  backend.Event
	heads backend.Buffer // of the host, there when it is done

	// Guarded by the communicator's mutex:
	seen bool // the heads were looked at
	err  error
}

// Wait implements [backend.Work].
func (w *deviceWork) Wait(q backend.Queue) error {
	c := w.call.c
	if q == nil {
		q = c.Device().Default()
	}
	if err := q.Wait(w.done); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !w.seen && !w.done.Done() {
		return nil // q is ordered after it
	}
	return w.look()
}

// Join implements [backend.Work].
func (w *deviceWork) Join(ctx context.Context) error {
	if err := w.done.Join(ctx); err != nil {
		return err
	}
	w.call.c.mu.Lock()
	defer w.call.c.mu.Unlock()
	return w.look()
}

// Done implements [backend.Work].
func (w *deviceWork) Done() bool { return w.done.Done() }

// settle is Join, where the mutex is held.
func (w *deviceWork) settle() error {
	if !w.seen {
		if err := w.done.Join(context.Background()); err != nil {
			return err
		}
	}
	return w.look()
}

// look finds out what the heads say, once, and returns the error of the call.
func (w *deviceWork) look() error {
	if w.seen {
		return w.err
	}
	k := w.call
	err := joined(k.noting, k.gathering, k.reducing)
	if err == nil {
		err = k.read(backend.View[int64](w.heads))
	}
	w.close(err)
	return err
}

// close ends a call, whose heads nobody needs any more.
func (w *deviceWork) close(err error) {
	w.seen, w.err = true, err
	m := &w.call.c.memory
	m.heads = append(m.heads, w.heads)
	m.pending = slices.DeleteFunc(m.pending, func(other *deviceWork) bool { return other == w })
}

// read is receive, of what the host sees of it.
func (k *call) read(heads []int64) error {
	c := k.c
	if c.strict {
		notes := heads[c.Size()*kernels.HeadWords:]
		if r := slices.IndexFunc(notes, func(note int64) bool { return note != 0 }); r >= 0 {
			return &NotFiniteError{k.what.State, r, k.slot.n - int(notes[r])}
		}
	}
	most := 0
	for r := range c.Size() {
		head := heads[r*kernels.HeadWords:][:kernels.HeadWords]
		if err := k.judgeHead(r, head); err != nil {
			c.inner.Abort(err)
			return err
		}
		most = max(most, int(head[wordSelected]))
	}
	*k.slot.most.of(k.number) = most
	own := heads[c.Rank()*kernels.HeadWords:]
	sent := own[wordCounts]
	if k.dense {
		sent = own[wordSelected]
	}
	c.counters.entries.Add(sent)
	c.counters.held.Add(own[wordSelected] - sent)
	return nil
}

// judgeHead returns what is wrong with the head of rank r.
func (k *call) judgeHead(r int, head []int64) error {
	if head[wordPrint] != k.printed {
		return k.failed(r, errOthers(backend.MembersOf(k.c), r))
	}
	if n := head[wordCounts]; n < 0 || n > int64(k.capacity) {
		return k.failed(r, fmt.Errorf("a message with %d entries, where there is room for %d", n, k.capacity))
	}
	return nil
}

// reap looks at the heads of calls that are over, and waits if there are too many
// that are not.
func (c *Communicator) reap() {
	m := &c.memory
	for len(m.pending) > 0 && (len(m.pending) >= mostPending || m.pending[0].done.Done()) {
		c.settleFirst()
	}
}

// settleFirst ends the oldest call.
func (c *Communicator) settleFirst() {
	w := c.memory.pending[0]
	if err := w.settle(); !w.seen { // its caller has the error
		w.close(err)
	}
}

// free gives back all memory of the device, when no call is under way.
func (c *Communicator) free() error {
	var errs []error
	for len(c.memory.pending) > 0 {
		c.settleFirst()
	}
	for _, s := range c.slots {
		errs = append(errs, c.release(s))
	}
	for _, b := range c.memory.rooms {
		errs = append(errs, c.Device().Free(b))
	}
	if p, ok := c.Device().(pinner); ok && c.memory.pinned.Len() > 0 {
		errs = append(errs, p.FreeHost(c.memory.pinned))
	}
	c.memory = memory{}
	return errors.Join(errs...)
}

// release gives back a slot's memory of the device.
func (c *Communicator) release(s *slot) (all error) {
	for _, b := range []*backend.Buffer{&s.onDevice, &s.past.onDevice} {
		if b.Len() > 0 {
			all = errors.Join(all, c.Device().Free(b.As(backend.U8)))
			*b = backend.Buffer{}
		}
	}
	return all
}

// download returns the residual of a slot, of which no call is under way.
func (c *Communicator) download(s *slot) ([]float32, error) {
	if s.onDevice.Len() == 0 {
		return slices.Clone(s.residual), nil
	}
	q := c.Device().Default()
	residual := make([]float32, s.n)
	if err := q.Move(backend.Of(residual), s.onDevice); err != nil {
		return nil, err
	}
	done, err := q.Record()
	if err != nil {
		return nil, err
	}
	return residual, done.Join(context.Background())
}
