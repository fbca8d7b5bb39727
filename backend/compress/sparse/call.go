package sparse

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// A call takes the same steps on the host and on a device, started on the queue of the call:
// select, exchange, add. The host must know the heads of its messages: they are copied to it after
// the call, and read when the work is joined or a later call starts. Nothing blocks the host,
// except a threshold that must know how much the last call but one of its state has selected.

// steps are what the calls of a queue are made of.
type steps interface {
	kernels.Sparse
	Cast(dst, src backend.Buffer) error
	Copy(dst, src backend.Buffer) error
	Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width, rows int) error
	Move(dst, src backend.Buffer) error
}

// call is one sparse reduction.
type call struct {
	c           *Communicator
	residual    *residual
	home        *memory
	number      int // of the call, among those with its state
	what        backend.Collective
	dst, src    backend.Buffer
	sent        backend.Buffer // see Sent; empty where nobody asks
	fingerprint int64

	plan

	// Collectives of the call, as far as it has them.
	noting, gathering, reducing backend.Work

	done  backend.Event
	heads backend.Buffer // of the host, there when it is done

	// Guarded by the communicator's mutex:
	seen bool // the heads were looked at
	err  error
}

var _ backend.Work = (*call)(nil)

// start starts the steps of the call on q.
func (k *call) start(q backend.Queue, do steps) (err error) {
	k.count()
	k.fingerprint = k.hash()
	if k.c.feedback && k.residual.kept.Len() == 0 {
		err = k.residual.settleIn(k.home, do)
	}
	if err == nil && k.what.State >= firstOwn {
		err = k.keepSent()
	}
	if err != nil {
		return err
	}
	p, err := k.parts(do)
	if err != nil {
		return err
	}
	k.c.heads.pending = append(k.c.heads.pending, k)
	if err = k.run(q, do, p); err == nil {
		k.done, err = q.Record()
	}
	if err != nil { // it has no end to wait for
		k.endCall(err)
	}
	return err
}

// keepSent finds memory for what is sent.
func (k *call) keepSent() (err error) {
	of := operandOf(k.what.State, k.src)
	if k.sent = k.c.sent[of]; k.sent.Len() > 0 {
		return nil
	}
	if k.sent, err = k.home.alloc(k.src.NBytes()); err == nil {
		k.sent = k.sent.As(k.src.DType())
		k.c.sent[of] = k.sent
	}
	return err
}

// hash is a fingerprint of all that ranks must agree on.
func (k *call) hash() int64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%v %v %d %+v %d %+v", k.what.Op, k.src.DType(), k.residual.n, k.c.options,
		k.number, k.plan)
	return int64(h.Sum64())
}

// parts are where a call works.
type parts struct {
	mine, all backend.Buffer // messages, as U8
	heads     backend.Buffer // of all ranks, then their notes, as I64
	note      backend.Buffer // of this rank
	wide, acc backend.Buffer // F32, where operand and destination are not
	scratch   backend.Buffer
}

// parts finds room for a call, in memory that calls use one after the other.
func (k *call) parts(do steps) (p parts, err error) {
	n, P := k.layout.nbytes(), k.c.Size()
	wide, acc := 0, 0
	if k.src.DType() == backend.F64 {
		wide = k.residual.n
		if k.dense {
			acc = wide
		}
	}
	words := P * (kernels.HeadWords + 1)
	scratch := do.SelectScratch(
		&kernels.Selection{X: backend.OnDevice(backend.F32, 0, k.residual.n), K: k.k})
	sizes := []int{n, P * n, 8 * words, 8, 4 * wide, 4 * acc, scratch}
	at := make([]int, len(sizes)+1)
	const align = 256 // as addresses of a device are
	for i, size := range sizes {
		at[i+1] = at[i] + (size+align-1)/align*align
	}
	room, err := k.home.room(at[len(sizes)])
	if err != nil {
		return p, err
	}
	part := func(i int, d backend.DType) backend.Buffer {
		return room.Slice(at[i], at[i]+sizes[i]).As(d)
	}
	p = parts{
		mine: part(0, backend.U8), all: part(1, backend.U8), heads: part(2, backend.I64),
		note: part(3, backend.I64),
		wide: part(4, backend.F32), acc: part(5, backend.F32), scratch: part(6, backend.U8),
	}
	if k.dense && acc == 0 {
		p.acc = k.dst // f32: reduced in place
	}
	if k.heads, err = k.c.heads.takeHeads(k.c.Device(), words); !k.dst.Device() {
		p.heads = k.heads // nothing needs copying
	}
	return p, err
}

// run starts the steps.
func (k *call) run(q backend.Queue, do steps, p parts) (err error) {
	if k.src.DType() == backend.F64 {
		if err := do.Cast(p.wide, k.src); err != nil {
			return err
		}
	}
	if k.c.strict {
		if err := k.note(q, do, p); err != nil {
			return err
		}
		if err := k.residual.keepPast(do); err != nil {
			return err
		}
	}
	s := k.selection(p)
	if err := do.Select(&s); err != nil {
		return err
	}
	if err := k.report(do, p); err != nil {
		return err
	}
	if k.gathering, err = k.follow(q, k.exchanging(), p.all, p.mine); err != nil {
		return err
	}
	if k.dense {
		err = k.reduce(q, do, p)
	} else {
		err = do.Combine(k.dst, k.messages(p.all, k.c.Size()), k.divisor())
	}
	if err != nil {
		return err
	}
	return k.tell(do, p)
}

// note lets the ranks of a strict communicator know of each other's NaN.
func (k *call) note(q backend.Queue, do steps, p parts) (err error) {
	if err := do.NotFinite(p.note, k.src); err != nil {
		return err
	}
	k.noting, err = k.follow(q, k.exchanging(), k.notesOf(p.heads), p.note)
	return err
}

// notesOf are the notes of all ranks, behind their heads.
func (k *call) notesOf(heads backend.Buffer) backend.Buffer {
	return heads.Slice(k.c.Size()*kernels.HeadWords, heads.Len())
}

// selection is what is sent of the operand.
func (k *call) selection(p parts) kernels.Selection {
	s := kernels.Selection{
		Out: k.layout.message(p.mine), X: k.src, Residual: k.residual.kept,
		K: k.k, Saturate: k.c.feedback, Fingerprint: k.fingerprint, Scratch: p.scratch,
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

// report writes what this rank sends where Sent finds it.
func (k *call) report(do steps, p parts) error {
	switch {
	case k.sent.Len() == 0:
		return nil
	case k.dense:
		return do.Cast(k.sent, p.acc)
	}
	return do.Combine(k.sent, k.messages(p.mine, 1), 1)
}

// reduce adds up densely what all ranks have selected.
func (k *call) reduce(q backend.Queue, do steps, p parts) (err error) {
	exact := backend.Collective{Kind: backend.AllReduce, Op: k.what.Op, Exact: true,
		State: k.what.State, Origin: k.what.Origin}
	if k.reducing, err = k.follow(q, exact, p.acc, p.acc); err == nil &&
		k.dst.DType() == backend.F64 {
		err = do.Cast(k.dst, p.acc)
	}
	return err
}

// divisor ends an average.
func (k *call) divisor() int {
	if k.what.Op == backend.Avg {
		return k.c.Size()
	}
	return 1
}

// tell copies heads and notes to the host.
func (k *call) tell(do steps, p parts) error {
	n, P := k.layout.nbytes(), k.c.Size()
	told := p.heads.Slice(0, P*kernels.HeadWords)
	if err := do.Copy2D(told, kernels.HeadWords, p.all.As(backend.I64), n/8, kernels.HeadWords,
		P); err != nil {
		return err
	}
	if !k.dst.Device() {
		return nil
	}
	if k.c.strict {
		told = p.heads
	}
	return do.Move(k.heads.Slice(0, told.Len()), told)
}

// exchanging returns the exchange of messages or notes of the call.
func (k *call) exchanging() backend.Collective {
	return backend.Collective{Kind: backend.AllGather, State: k.what.State, Origin: k.what.Origin}
}

// follow starts a collective of the call, and orders q after it.
func (k *call) follow(q backend.Queue, c backend.Collective, dst, src backend.Buffer) (backend.Work,
	error) {
	larger := float64(max(dst.NBytes(), src.NBytes()))
	k.c.counters.Bytes += int64(c.Kind.BusFactor(k.c.Size()) * larger)
	w, err := k.c.Base.Start(q, c, dst, src)
	if err == nil {
		_ = w.Wait(q) // if it has failed already, the call has, and Join says so
	}
	return w, err
}

func (k *call) count() {
	n := &k.c.counters
	n.Calls++
	if k.dense {
		n.Dense++
	}
	n.DenseBytes += int64(k.what.Kind.BusFactor(k.c.Size()) * float64(k.src.NBytes()))
}

// Wait implements [backend.Work].
func (k *call) Wait(q backend.Queue) error {
	if q == nil {
		q = k.c.Device().Default()
	}
	if err := q.Wait(k.done); err != nil {
		return err
	}
	k.c.mu.Lock()
	defer k.c.mu.Unlock()
	if !k.seen && !k.done.Done() {
		return nil // q is ordered after it
	}
	return k.look()
}

// Join implements [backend.Work].
func (k *call) Join(ctx context.Context) error {
	if err := k.done.Join(ctx); err != nil {
		return err
	}
	k.c.mu.Lock()
	defer k.c.mu.Unlock()
	return k.look()
}

// Done implements [backend.Work].
func (k *call) Done() bool { return k.done.Done() }

// settle is Join, where the mutex is held.
func (k *call) settle() error {
	if !k.seen {
		if err := k.done.Join(context.Background()); err != nil {
			return err
		}
	}
	return k.look()
}

// look reads the heads, once, and returns the error of the call.
func (k *call) look() error {
	if k.seen {
		return k.err
	}
	err := joined(k.noting, k.gathering, k.reducing)
	if err == nil {
		err = k.read(backend.View[int64](k.heads))
	}
	k.endCall(err)
	return err
}

// joined returns the error of collectives that have finished.
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

// endCall ends a call, whose heads nobody needs any more.
func (k *call) endCall(err error) {
	k.seen, k.err = true, err
	k.c.heads.done(k)
}

// read notes what the heads say.
func (k *call) read(heads []int64) error {
	c := k.c
	if c.strict {
		notes := heads[c.Size()*kernels.HeadWords:]
		if r := slices.IndexFunc(notes, func(note int64) bool { return note != 0 }); r >= 0 {
			return &NotFiniteError{k.what.State, r, k.residual.n - int(notes[r])}
		}
	}
	most := 0
	for r := range c.Size() {
		head := heads[r*kernels.HeadWords:][:kernels.HeadWords]
		if err := k.judge(r, head); err != nil {
			c.Base.Abort(err)
			return err
		}
		most = max(most, int(head[wordSelected]))
	}
	*k.residual.most.of(k.number) = most
	own := heads[c.Rank()*kernels.HeadWords:]
	sent := own[wordSent]
	if k.dense {
		sent = own[wordSelected]
	}
	c.counters.Entries += sent
	c.counters.Held += own[wordSelected] - sent
	return nil
}

// judge returns what is wrong with the head of rank r.
func (k *call) judge(r int, head []int64) error {
	var cause error
	switch n := head[wordSent]; {
	case head[wordFingerprint] != k.fingerprint:
		cause = fmt.Errorf("%w: %s has other options, another reduction, dtype or length, or has "+
			"made more or fewer calls with this state: they must be the same on every rank",
			backend.ErrMismatch, k.c.Capabilities().Members.Rank(r))
	case n < 0 || n > int64(k.capacity):
		cause = fmt.Errorf("a message with %d entries, where there is room for %d", n, k.capacity)
	default:
		return nil
	}
	text := fmt.Sprintf("sparse %v of %d %v with state %d", k.what, k.residual.n, k.src.DType(),
		k.what.State)
	return &backend.Error{Comm: k.c.Name(), Members: k.c.Capabilities().Members, Rank: k.c.Rank(),
		Peer: r, Call: text, Cause: cause}
}
