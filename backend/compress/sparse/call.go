package sparse

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// call is one sparse reduction.
type call struct {
	c        *Communicator
	slot     *slot
	number   int // of the call, in its slot
	what     backend.Collective
	dst, src backend.Buffer
	sent     backend.Buffer // see Report

	layout
	k     int  // of a top-k, 0 for a threshold
	dense bool // the selected elements are reduced densely, and messages are heads

	mine, all backend.Buffer // messages, as U8
	notes     []int64        // of strict calls: 1 + the first index of each rank
	acc       []float32      // of dense calls: the selected elements, then their reduction
	err       error          // known once the work is done
	printed   int64          // the print of a call on a device, of which several may be under way

	// Collectives of the call: noting is over when send runs, all are when receive
	// does.
	noting, gathering, reducing backend.Work
}

// scratch is memory that one call after the other uses.
type scratch struct {
	rounder
	search
	at     [block]int32
	picked [block]float32
	wide   []float32 // operands of f64 without feedback, and values of messages
	acc    []float32
	memory []int64 // messages
	sums   [block]float32
}

// grow returns n elements of s, or of new memory.
func grow[T any](s *[]T, n int) []T {
	if cap(*s) < n {
		*s = make([]T, n)
	}
	return (*s)[:n]
}

// start starts the steps of the call on q: select, exchange, add. Memory of the
// host is worked on in the order of q, without stopping who starts the call.
func (k *call) start(q backend.Queue) (*work, error) {
	k.count()
	if k.c.feedback && k.slot.residual == nil {
		k.slot.residual = make([]float32, k.slot.n)
	}
	if err := k.exchangeNotes(q); err != nil {
		return nil, err
	}
	n := k.layout.nbytes()
	memory := backend.Of(grow(&k.c.scratch.memory, n/8*(k.c.Size()+1))).As(backend.U8)
	k.mine, k.all = memory.Slice(0, n), memory.Slice(n, memory.Len())
	if k.dense {
		k.acc = k.accumulator()
	}
	if err := later(q, k.send); err != nil {
		return nil, err
	}
	var err error
	if k.gathering, err = k.collect(q, k.gather(), k.all, k.mine); err != nil {
		return nil, err
	}
	if k.dense {
		c := k.exact()
		if k.reducing, err = k.collect(q, c, backend.Of(k.acc), backend.Of(k.acc)); err != nil {
			return nil, err
		}
	}
	if err := later(q, k.receive); err != nil {
		return nil, err
	}
	done, err := q.Record()
	if err != nil {
		return nil, err
	}
	return &work{k, done}, nil
}

// gather returns the exchange of messages or notes of the call.
func (k *call) gather() backend.Collective {
	return backend.Collective{Kind: backend.AllGather, State: k.what.State, Origin: k.what.Origin}
}

// exact returns the dense reduction of the call, which what is below passes exactly.
func (k *call) exact() backend.Collective {
	return backend.Collective{Kind: backend.AllReduce, Op: k.what.Op, Exact: true, State: k.what.State, Origin: k.what.Origin}
}

// accumulator returns where a dense call reduces: in place, if that is f32.
func (k *call) accumulator() []float32 {
	if k.dst.DType() == backend.F32 {
		return backend.View[float32](k.dst)
	}
	return grow(&k.c.scratch.acc, k.slot.n)
}

// collect starts a collective of the call.
func (k *call) collect(q backend.Queue, c backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	larger := float64(max(dst.NBytes(), src.NBytes()))
	k.c.counters.bytes.Add(int64(c.Kind.BusFactor(k.c.Size()) * larger))
	return k.c.inner.Start(q, c, dst, src)
}

func (k *call) count() {
	n := &k.c.counters
	n.calls.Add(1)
	if k.dense {
		n.dense.Add(1)
	}
	n.denseBytes.Add(int64(k.what.Kind.BusFactor(k.c.Size()) * float64(k.src.NBytes())))
}

// exchangeNotes lets the ranks of a strict communicator know of each other's NaN.
func (k *call) exchangeNotes(q backend.Queue) (err error) {
	if !k.c.strict {
		return nil
	}
	mine := make([]int64, 1)
	k.notes = make([]int64, k.c.Size())
	if err := later(q, func() { mine[0] = int64(firstNotFinite(k.src) + 1) }); err != nil {
		return err
	}
	k.noting, err = k.collect(q, k.gather(), backend.Of(k.notes), backend.Of(mine))
	return err
}

// joined returns the error of collectives that are over.
func joined(works ...backend.Work) error {
	for _, w := range works {
		if w == nil {
			continue
		}
		if err := w.Join(context.Background()); err != nil {
			return err
		}
	}
	return nil
}

// send adds the operand to the residual, and moves what is selected from there to
// the message, or to the accumulator.
func (k *call) send() {
	m := k.layout.view(k.mine)
	clear(m.head)
	clear(k.sent.Bytes())
	m.head[wordPrint] = k.print()
	k.keep()
	if k.err = joined(k.noting); k.err == nil {
		k.err = k.judge()
	}
	if k.err != nil { // the message must still be sent: others wait for it
		clear(k.acc)
		return
	}
	c, v := k.cut()
	room, sent := k.capacity, 0
	if k.dense {
		room = k.slot.n
	}
	for lo := 0; lo < len(v); lo += block {
		hi := min(lo+block, len(v))
		if k.k == 0 {
			k.load(lo, hi)
		}
		picked := k.pick(&c, v[lo:hi])
		if k.dense { // now, because it may be the operand
			clear(k.acc[lo:hi])
		}
		m.head[wordSelected] += int64(picked)
		take := min(picked, room-sent)
		k.move(m, v, lo, take, sent)
		sent += take
	}
	k.c.counters.entries.Add(int64(sent))
	k.c.counters.held.Add(m.head[wordSelected] - int64(sent))
}

// judge returns the error of a strict call.
func (k *call) judge() error {
	r := slices.IndexFunc(k.notes, func(note int64) bool { return note != 0 })
	if r < 0 {
		return nil
	}
	return &NotFiniteError{k.what.State, r, int(k.notes[r] - 1)}
}

// cut returns what is selected, and of which values: those of the residual after
// the operand is added to it, block by block by load. A top-k has to see all of
// them before.
func (k *call) cut() (cut, []float32) {
	v := k.slot.residual
	if v == nil {
		v = k.values()
	}
	if k.k == 0 {
		return atLeast(float32(k.c.how.limit)), v
	}
	for lo := 0; lo < len(v); lo += block {
		hi := min(lo+block, len(v))
		k.load(lo, hi)
		k.c.scratch.see(v[lo:hi])
	}
	return k.c.scratch.kth(v, k.k), v
}

// values returns the operand as f32, where there is no residual.
func (k *call) values() []float32 {
	if k.src.DType() == backend.F32 {
		return backend.View[float32](k.src)
	}
	wide := grow(&k.c.scratch.wide, k.slot.n)
	narrow(backend.Of(wide), k.src)
	return wide
}

// load adds a block of the operand to the residual.
func (k *call) load(lo, hi int) {
	if k.slot.residual == nil {
		return
	}
	residual, x := backend.Of(k.slot.residual[lo:hi]), k.src.Slice(lo, hi)
	if x.DType() == backend.F64 {
		wide := backend.Of(k.c.scratch.sums[:hi-lo])
		narrow(wide, x)
		x = wide
	}
	kernels.Host{}.Reduce(backend.Sum, residual, residual, x) // of one length and dtype: it cannot fail
}

// pick finds the selected elements of a block, and notes their values.
func (k *call) pick(c *cut, v []float32) int {
	at, picked := &k.c.scratch.at, &k.c.scratch.picked
	n := c.pick(at[:], v)
	for j, i := range at[:n] {
		picked[j] = v[i]
	}
	return n
}

// move moves the first n picked elements of the block at lo out of the values.
func (k *call) move(m message, v []float32, lo, n, sent int) {
	if n == 0 {
		return
	}
	at := k.c.scratch.at[:n]
	bytes, seen := k.c.scratch.round(k.c.scratch.picked[:n])
	if k.slot.residual != nil {
		for j, i := range at {
			v[lo+int(i)] = remainder(v[lo+int(i)], seen[j])
		}
	}
	k.report(lo, seen)
	if k.dense {
		for j, i := range at {
			k.acc[lo+int(i)] = seen[j]
		}
		return
	}
	copy(m.values.Slice(sent, sent+n).Bytes(), bytes)
	start := int32(lo % k.c.segment)
	for j, i := range at {
		m.index[sent+j] = start + i
	}
	m.head[wordCounts+lo/k.c.segment] += int64(n)
}

// report notes what is sent of the block at lo.
func (k *call) report(lo int, seen []float32) {
	if k.sent.Len() == 0 {
		return
	}
	at := k.c.scratch.at[:len(seen)]
	if k.sent.DType() == backend.F64 {
		y := backend.View[float64](k.sent)[lo:]
		for j, i := range at {
			y[i] = float64(seen[j])
		}
		return
	}
	y := backend.View[float32](k.sent)[lo:]
	for j, i := range at {
		y[i] = seen[j]
	}
}

// remainder is what stays of v when seen was sent: nothing of what is not a number. The
// difference is exact where seen is v rounded, and where it is the largest number of BF16;
// where it is that of F16, 65504, as long as v is below 2^29: from there on, f32 has only
// every 64th number, and rounds.
func remainder(v, seen float32) float32 {
	if seen-seen != 0 {
		return 0
	}
	return v - seen
}

// receive checks the messages, and adds them up in rank order.
func (k *call) receive() {
	if err := joined(k.gathering, k.reducing); err != nil {
		k.err = err
	}
	if k.err != nil {
		return
	}
	sources := make([]source, k.c.Size())
	most := 0
	for r := range sources {
		n := k.layout.nbytes()
		if k.err = k.open(&sources[r], r, k.all.Slice(r*n, (r+1)*n)); k.err != nil {
			k.c.inner.Abort(k.err)
			return
		}
		most = max(most, int(sources[r].head[wordSelected]))
	}
	*k.slot.most.of(k.number) = most
	switch {
	case !k.dense:
		if k.err = k.addUp(sources); k.err != nil {
			k.c.inner.Abort(k.err)
		}
	case k.dst.DType() == backend.F64:
		narrow(k.dst, backend.Of(k.acc))
	}
}

// open checks the message of rank r.
func (k *call) open(s *source, r int, memory backend.Buffer) error {
	s.message = k.layout.view(memory)
	if s.head[wordPrint] != k.layout.view(k.mine).head[wordPrint] {
		return k.failed(r, errOthers(backend.MembersOf(k.c), r))
	}
	n, err := s.entries()
	if err != nil {
		return k.failed(r, err)
	}
	s.seen = k.widened(r, s.values.Slice(0, n))
	return nil
}

// errOthers says that rank r has another fingerprint.
func errOthers(of backend.Members, r int) error {
	return fmt.Errorf("%w: %s has other options, another reduction, dtype or length, or has made more or fewer calls in this slot: they must be the same on every rank",
		backend.ErrMismatch, of.Rank(r))
}

// widened returns the values of rank r.
func (k *call) widened(r int, values backend.Buffer) []float32 {
	if k.layout.values == backend.F32 {
		return backend.View[float32](values)
	}
	wide := grow(&k.c.scratch.wide, k.c.Size()*k.capacity)[r*k.capacity:]
	narrow(backend.Of(wide[:values.Len()]), values)
	return wide[:values.Len()]
}

// failed is the error of a call because of rank r.
func (k *call) failed(r int, cause error) error {
	text := fmt.Sprintf("sparse %v of %d %v in slot %d", k.what, k.slot.n, k.src.DType(), k.what.State)
	return &backend.Error{Comm: k.c.Name(), Members: backend.MembersOf(k.c), Rank: k.c.Rank(), Peer: r, Call: text, Cause: cause}
}

// addUp writes the sum of what all ranks have sent, block by block, so that a
// block is cleared, summed, divided and cast while it is in the cache.
func (k *call) addUp(sources []source) error {
	for lo := 0; lo < k.slot.n; lo += block {
		hi := min(lo+block, k.slot.n)
		acc := k.c.scratch.sums[:hi-lo]
		if k.dst.DType() == backend.F32 {
			acc = backend.View[float32](k.dst)[lo:hi]
		}
		clear(acc)
		for r := range sources {
			s := &sources[r]
			if lo%k.c.segment == 0 {
				s.end = s.next + int(s.head[wordCounts+lo/k.c.segment])
			}
			if err := s.add(acc, lo%k.c.segment); err != nil {
				return k.failed(r, err)
			}
		}
		k.divide(acc)
		if k.dst.DType() == backend.F64 {
			narrow(k.dst.Slice(lo, hi), backend.Of(acc))
		}
	}
	return nil
}

// divide ends an average. Most elements are zero.
func (k *call) divide(acc []float32) {
	if k.what.Op != backend.Avg {
		return
	}
	P := float32(k.c.Size())
	for i, x := range acc {
		if x != 0 {
			acc[i] = x / P
		}
	}
}

// work is a sparse call under way.
type work struct {
	call *call
	done backend.Event
}

// Wait implements [backend.Work].
func (w *work) Wait(q backend.Queue) error {
	if q == nil {
		q = w.call.c.Device().Default()
	}
	if err := q.Wait(w.done); err != nil {
		return err
	}
	if !w.done.Done() {
		return nil // q is ordered after it
	}
	return w.call.err
}

// Join implements [backend.Work].
func (w *work) Join(ctx context.Context) error {
	if err := w.done.Join(ctx); err != nil {
		return err
	}
	return w.call.err
}

// Done implements [backend.Work].
func (w *work) Done() bool { return w.done.Done() }

// settle is Join without an end.
func (w *work) settle() error { return w.Join(context.Background()) }

// later runs f on the host in the order of q. A queue of the host waits for an
// event by joining it, in its turn: that is when f runs.
func later(q backend.Queue, f func()) error {
	before, err := q.Record()
	if err != nil {
		return err
	}
	return q.Wait(&step{before: before, run: f})
}

// step is an event that happens by being waited for.
type step struct {
	before backend.Event
	once   sync.Once
	run    func()
}

// Done implements [backend.Event]: it happens in Join.
func (s *step) Done() bool { return false }

// Join implements [backend.Event].
func (s *step) Join(context.Context) error {
	s.once.Do(func() {
		s.before.Join(context.Background()) // which never ends, so there is no error
		s.run()
	})
	return nil
}
