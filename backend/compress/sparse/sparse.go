package sparse

import (
	"errors"
	"fmt"
	"hash/fnv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// Communicator makes inner's sums and averages of gradients sparse.
type Communicator struct {
	inner backend.Communicator
	options
	segment int // elements, a multiple of block; see layout
	// always sends messages even where a dense reduction is cheaper: for tests.
	always bool

	calls backend.Sequence

	mu    sync.Mutex // guards what follows
	slots map[int]*slot
	own   int                    // slots that NewSlot has given out
	sent  map[int]backend.Buffer // by slots: see Report

	// scratch is used by one call after the other.
	scratch scratch
	memory  memory

	counters struct{ calls, dense, entries, held, bytes, denseBytes atomic.Int64 }
}

var _ backend.Wrapper = (*Communicator)(nil)

// slot is what is kept of one operand.
type slot struct {
	n        int
	residual []float32      // nil without feedback, or when it is
	onDevice backend.Buffer // memory of the device
	calls    int
	most     counts
	wanted   int     // entries in a message of the last call, if it had messages
	dense    bool    // whether it was reduced densely instead
	last     settler // the last call
	before   settler // the one before it
	past     past    // for Undo
}

// counts are the most elements that a rank has selected in each of the last two calls: in call
// i at i%2, -1 if there was none.
type counts [2]int

// of returns where the count of a call is; until it is over, that of the call two before it.
func (c *counts) of(call int) *int { return &c[call%len(c)] }

// settler is a call under way.
type settler interface {
	backend.Work
	// settle waits for its end, and takes note of what it has sent. The
	// communicator's mutex is held.
	settle() error
}

// Counters say what was sent, and what a dense reduction would have. Bytes are
// those that cross this rank's link, by [backend.Kind.BusFactor].
type Counters struct {
	Calls      int64 // that were sparse, or would have been
	Dense      int64 // of these, how many were reduced densely, as messages would be more bytes
	Entries    int64 // elements that this rank has sent
	Held       int64 // selected elements that had to wait, for lack of room
	Bytes      int64
	DenseBytes int64
}

// New returns inner with the sums and averages of f32 and f64 that name a slot
// made sparse. Options must be the same on every rank. The result owns inner.
func New(inner backend.Communicator, how Selection, opts ...Option) (*Communicator, error) {
	o := options{how: how, values: backend.F32, feedback: true}
	for _, opt := range opts {
		opt(&o)
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	return newCommunicator(inner, o), nil
}

func newCommunicator(inner backend.Communicator, o options) *Communicator {
	c := &Communicator{
		inner: inner, options: o, segment: 1 << 31,
		slots: map[int]*slot{}, sent: map[int]backend.Buffer{},
	}
	c.scratch.rounder = rounder{dtype: o.values, saturate: o.feedback}
	return c
}

// Wrap is [New] as a function of the communicator alone.
func Wrap(how Selection, opts ...Option) func(backend.Communicator) (backend.Communicator, error) {
	return func(inner backend.Communicator) (backend.Communicator, error) {
		c, err := New(inner, how, opts...)
		if err != nil {
			return nil, err
		}
		return c, nil
	}
}

// Name implements [backend.Communicator].
func (c *Communicator) Name() string { return c.inner.Name() }

// Describe returns what the bits of results, and the residuals, depend on: all options but
// WithStrict, which changes nothing while operands are finite.
func (c *Communicator) Describe() string {
	return fmt.Sprintf("sparse (%v, values %v, feedback %v)", c.how, c.values, c.feedback)
}

// Resumes reports whether the state of a communicator with this description can be loaded
// here. Descriptions used to end with options that are gone.
func (c *Communicator) Resumes(description string) bool {
	return description == c.Describe() || strings.HasPrefix(description, strings.TrimSuffix(c.Describe(), ")")+", warm-up ")
}

// Rank implements [backend.Communicator].
func (c *Communicator) Rank() int { return c.inner.Rank() }

// Size implements [backend.Communicator].
func (c *Communicator) Size() int { return c.inner.Size() }

// Device implements [backend.Communicator].
func (c *Communicator) Device() backend.Device { return c.inner.Device() }

// Unwrap implements [backend.Wrapper].
func (c *Communicator) Unwrap() []backend.Communicator { return []backend.Communicator{c.inner} }

// Alloc implements [backend.Communicator].
func (c *Communicator) Alloc(nbytes int) (backend.Buffer, error) { return c.inner.Alloc(nbytes) }

// Free implements [backend.Communicator].
func (c *Communicator) Free(b backend.Buffer) error { return c.inner.Free(b) }

// Abort implements [backend.Communicator].
func (c *Communicator) Abort(cause error) { c.inner.Abort(cause) }

// Close implements [backend.Communicator]. State still works, but for operands on a
// device, whose memory is given back.
func (c *Communicator) Close() error {
	err := c.inner.Close() // ends calls under way
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(err, c.free())
}

// Split implements [backend.Communicator]. The parts are sparse too, with
// residuals of their own, which begin empty.
func (c *Communicator) Split(color, key int) (backend.Communicator, error) {
	part, err := c.inner.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return newCommunicator(part, c.options), nil
}

// Counters returns what was sent so far, by calls that are over.
func (c *Communicator) Counters() Counters {
	c.mu.Lock()
	c.reap()
	c.mu.Unlock()
	n := &c.counters
	return Counters{
		Calls: n.calls.Load(), Dense: n.dense.Load(), Entries: n.entries.Load(), Held: n.held.Load(),
		Bytes: n.bytes.Load(), DenseBytes: n.denseBytes.Load(),
	}
}

// Start implements [backend.Communicator]. A sparse call of host memory waits for the last
// one of its slot, which in training is over long since; on a device, one of a threshold waits
// for the last but one, and one of a top-k for none.
func (c *Communicator) Start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	_, err := what.Check(c.Rank(), c.Size(), dst, src)
	thinned := err == nil && c.thins(what, src)
	if q == nil {
		q = c.Device().Default()
	}
	return c.calls.Start(q, thinned, func() (backend.Work, error) {
		if thinned {
			return c.start(q, what, dst, src)
		}
		return c.inner.Start(q, what, dst, src) // which finds what Check has found
	})
}

// start starts a sparse call.
func (c *Communicator) start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	do, err := c.kernelsFor(q, dst, src)
	if err != nil {
		return nil, fmt.Errorf("%s: a sparse %v: %w", backend.RankOf(c), what, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reap()
	k, err := c.prepare(what, dst, src)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", backend.RankOf(c), err)
	}
	k.slot.note()
	k.slot.calls++
	var w settler
	if do == nil {
		w, err = k.start(q)
	} else {
		w, err = k.startOnDevice(q, do)
	}
	if err != nil {
		k.slot.calls, k.slot.past.known = k.slot.past.calls, false // there was no call
		return nil, fmt.Errorf("%s: a sparse %v: %w", backend.RankOf(c), what, err)
	}
	k.slot.before, k.slot.last = k.slot.last, w
	return w, nil
}

// kernelsFor returns what computes on operands of a device, nil for those of the
// host.
func (c *Communicator) kernelsFor(q backend.Queue, dst, src backend.Buffer) (deviceKernels, error) {
	switch do, ok := q.(deviceKernels); {
	case !dst.Device() && !src.Device():
		return nil, nil
	case dst.Device() != src.Device():
		return nil, fmt.Errorf("%w: source and destination must both be on the device", backend.ErrArgument)
	case !ok:
		return nil, fmt.Errorf("%w: the queues of %s have no kernels for it: keep these operands on the host, or reduce them without package sparse",
			backend.ErrUnsupported, c.Device().Name())
	case src.Len() > kernels.MaxSelect:
		return nil, fmt.Errorf("%w: %d elements on a device, where it is for %d: use smaller buckets", backend.ErrUnsupported, src.Len(), kernels.MaxSelect)
	default:
		return do, nil
	}
}

// thins reports whether a call is sparse.
func (c *Communicator) thins(what backend.Collective, src backend.Buffer) bool {
	return c.Size() > 1 && src.Len() > 0 && what.Kind == backend.AllReduce &&
		(what.Op == backend.Sum || what.Op == backend.Avg) &&
		(src.DType() == backend.F32 || src.DType() == backend.F64) &&
		!what.Exact && what.State > 0
}

// prepare makes the call of an operand, after those calls of its slot that it depends on: of
// host memory after the last one, and a threshold after the one that says how much room there
// must be. If they failed for good, inner says so.
func (c *Communicator) prepare(what backend.Collective, dst, src backend.Buffer) (*call, error) {
	s := c.slots[what.State]
	switch {
	case s == nil:
		s = &slot{n: src.Len(), most: counts{-1, -1}}
		c.slots[what.State] = s
	case s.n != src.Len():
		return nil, fmt.Errorf("%w: %v of %d elements in slot %d, which is for %d: use another slot, or Reset on all ranks",
			backend.ErrArgument, what, src.Len(), what.State, s.n)
	case !src.Device() && s.onDevice.Len() > 0:
		return nil, fmt.Errorf("%w: %v of host memory in slot %d, which is for memory of the device: use another slot, or Reset on all ranks",
			backend.ErrArgument, what, what.State)
	}
	if w, ok := s.last.(*work); ok {
		w.settle()
	}
	if s.before != nil && c.how.density == 0 {
		s.before.settle()
	}
	k := &call{c: c, slot: s, number: s.calls, what: what, dst: dst, src: src, sent: c.sent[what.State]}
	delete(c.sent, what.State)
	if k.sent.Len() > 0 && (k.sent.Len() != src.Len() || k.sent.DType() != src.DType() || k.sent.Device() != src.Device()) {
		return nil, fmt.Errorf("%w: %v of %d %v in slot %d: the buffer of Report has %d %v: it must be like the operand",
			backend.ErrArgument, what, src.Len(), src.DType(), what.State, k.sent.Len(), k.sent.DType())
	}
	k.plan()
	return k, nil
}

// plan decides how a call is sent. It depends on nothing but what the ranks agree
// on: options, lengths, and what all have selected in the slot's last call but one. The last
// one may be under way, and knowing of it would take the host a stop.
func (k *call) plan() {
	c, n, P := k.c, k.slot.n, k.c.Size()
	k.layout = layout{values: c.values, segments: (n + c.segment - 1) / c.segment}
	// Each rank receives P-1 messages, or in a dense reduction 2(P-1)/P of the
	// operand as f32.
	most := k.layout.largest(2 * 4 * n / P)
	if c.always {
		most = n
	}
	switch {
	case c.how.density != 0:
		k.k = topK(c.how.density, n)
		k.capacity = k.k
	case !c.feedback: // a threshold promises no capacity, and nothing may be lost
		k.capacity = n
	case *k.slot.most.of(k.number) < 0:
		k.capacity = max(most, 1)
	default: // some more than then; what does not fit waits in the residual
		selected := *k.slot.most.of(k.number)
		k.capacity = selected + selected/4 + spare
		if selected <= most {
			k.capacity = min(k.capacity, most)
		}
	}
	k.capacity = min(k.capacity, n)
	k.slot.wanted, k.slot.dense = k.capacity, k.capacity > most
	if k.slot.dense {
		k.dense, k.capacity = true, 0
	}
}

// Explain says how the last call of a slot was sent, and why: the bytes that a rank
// receives in either way. All ranks say the same.
func (c *Communicator) Explain(slot int) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.slots[slot]
	if s == nil {
		return fmt.Sprintf("slot %d has had no sparse call", slot)
	}
	P := c.Size()
	l := layout{values: c.values, segments: (s.n + c.segment - 1) / c.segment, capacity: s.wanted}
	chosen := "sparse"
	if s.dense {
		chosen = "dense"
	}
	return fmt.Sprintf("%s: a rank receives %d bytes in messages for %d of %d elements, %d in a dense all-reduce",
		chosen, (P-1)*l.nbytes(), s.wanted, s.n, 2*(P-1)*4*s.n/P)
}

// spare is how many entries more than were selected a message has always room for: a
// kilobyte or less, so that small operands do not wait.
const spare = 64

// print is a fingerprint of all that ranks must agree on.
func (k *call) print() int64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%v %v %d %+v %d %v %+v", k.what.Op, k.src.DType(), k.slot.n, k.c.options, k.slot.calls, k.dense, k.layout)
	return int64(h.Sum64())
}

// firstOwn is the first slot of NewSlot: far above those that programs count.
const firstOwn = 1 << 20

// NewSlot returns a slot that it has not returned before: for a node of a graph,
// which must not share its residual with another one. Every rank must ask for as many,
// in the same order of its program, also one that resumes from a checkpoint.
func (c *Communicator) NewSlot() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.own++
	return firstOwn + c.own - 1
}

// Report makes the next call in a slot write what this rank sends to a buffer like
// its operand, where it belongs, and zeros elsewhere: s of the package comment. It is
// in use as long as the operand.
func (c *Communicator) Report(slot int, sent backend.Buffer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sent[slot] = sent
}

// Reset forgets all residuals. Every rank must do it at the same place of its program.
func (c *Communicator) Reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settle()
	for _, s := range c.slots {
		c.release(s) // it was allocated, and nothing uses it: there is no error
	}
	clear(c.slots)
}

// settle waits for the calls under way.
func (c *Communicator) settle() {
	for _, s := range c.slots {
		s.settle()
	}
}

// settle waits for the slot's calls, whose callers have the errors.
func (s *slot) settle() {
	for _, w := range []settler{s.before, s.last} {
		if w != nil {
			w.settle()
		}
	}
}

// ErrNotFinite is what a [NotFiniteError] is.
var ErrNotFinite = errors.New("an element is NaN or infinite")

// NotFiniteError says that an operand of a strict communicator had a NaN or an
// infinity. All ranks get the same one. The call has delivered nothing, what its
// destination holds means nothing, and the slot's residual is what it was: the
// communicator can be used. Of calls in other slots that belong to the same training
// step, [Communicator.Undo] takes back what they have done to residuals.
type NotFiniteError struct {
	Slot, Rank, Index int // the first one
}

// Error names the slot, the rank and the element.
func (e *NotFiniteError) Error() string {
	return fmt.Sprintf("sparse: element %d of the operand of rank %d in slot %d: %v: look for a learning rate that is too large",
		e.Index, e.Rank, e.Slot, ErrNotFinite)
}

// NotFinite returns the slot, the rank and the index of the first such element.
func (e *NotFiniteError) NotFinite() (slot, rank, index int) { return e.Slot, e.Rank, e.Index }

// Is makes the error match ErrNotFinite.
func (e *NotFiniteError) Is(target error) bool { return target == ErrNotFinite }
