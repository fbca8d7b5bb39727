package sparse

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// Communicator makes inner's sums and averages of gradients sparse.
type Communicator struct {
	backend.Base
	options

	calls backend.Sequence // its lock comes before mu

	mu        sync.Mutex // guards what follows
	residuals map[int]*residual
	own       int // states that NewState has given out
	sent      map[operand]backend.Buffer
	counters  Counters

	// What follows is used by one call after the other.
	host     selector
	onHost   memory
	onDevice memory
	heads    heads
}

var _ backend.Wrapper = (*Communicator)(nil)

// Counters say what was sent, and what a dense reduction would have sent. Bytes are the bytes that
// cross this rank's link, by [backend.Kind.BusFactor].
type Counters struct {
	Calls      int64 // that were sparse, or would have been
	Dense      int64 // of these, how many were reduced densely, as messages would take more bytes
	Entries    int64 // elements that this rank has sent
	Held       int64 // selected elements that had to wait, for lack of room
	Bytes      int64
	DenseBytes int64
}

// New returns inner, with sparse sums and averages of f32 and f64 for calls that name a State.
// Options must be the same on every rank. The result owns inner.
func New(inner backend.Communicator, how Selection, opts ...Option) (*Communicator, error) {
	if err := backend.Given("sparse.New", "inner", inner, "opts", opts); err != nil {
		return nil, err
	}
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
	return &Communicator{
		Base: backend.Wrap(inner), options: o, residuals: map[int]*residual{},
		sent:     map[operand]backend.Buffer{},
		onDevice: memory{device: func() backend.Device { return inner.Device() }},
	}
}

// Wrap returns [New] as a function of the communicator alone.
func Wrap(how Selection, opts ...Option) func(backend.Communicator) (backend.Communicator, error) {
	return func(inner backend.Communicator) (backend.Communicator, error) {
		c, err := New(inner, how, opts...)
		if err != nil {
			return nil, err
		}
		return c, nil
	}
}

// Describe returns what the bits of results, and the residuals, depend on: all options but
// WithStrict, which changes nothing while operands are finite.
func (c *Communicator) Describe() string {
	return fmt.Sprintf("sparse (%v, values %v, feedback %v)", c.how, c.values, c.feedback)
}

// Resumes reports whether the state of a communicator with this description can be loaded
// here. Descriptions used to end with options that are gone.
func (c *Communicator) Resumes(description string) bool {
	return description == c.Describe() ||
		strings.HasPrefix(description, strings.TrimSuffix(c.Describe(), ")")+", warm-up ")
}

// Close implements [backend.Communicator]. State still works, except for operands on a
// device, whose memory is given back.
func (c *Communicator) Close() error {
	err := c.Base.Close() // ends calls under way
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.heads.pending) > 0 {
		c.heads.settleFirst()
	}
	for _, r := range c.residuals {
		if r.home == &c.onDevice {
			err = errors.Join(err, r.release())
		}
	}
	for of, b := range c.sent {
		if of.device {
			err = errors.Join(err, c.onDevice.free(b.As(backend.U8)))
		}
	}
	clear(c.sent)
	return errors.Join(err, c.onDevice.release(), c.heads.release(c.Device()))
}

// Split implements [backend.Communicator]. The parts are sparse, too, with their own residuals,
// which begin empty.
func (c *Communicator) Split(color, key int) (backend.Communicator, error) {
	part, err := c.Base.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return newCommunicator(part, c.options), nil
}

// Counters returns what was sent so far, by calls that have finished.
func (c *Communicator) Counters() Counters {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heads.reap()
	return c.counters
}

// Capabilities implements [backend.Communicator].
func (c *Communicator) Capabilities() backend.Capabilities {
	caps := c.Base.Capabilities()
	caps.Tree = nil
	return caps
}

// Start implements [backend.Communicator]. With a top-k, the start of a sparse call waits for no
// earlier call. With a threshold, it waits for the end of the last call but one of its state, which
// in training has long finished.
func (c *Communicator) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	return what.Start(c, q, dst, src)
}

// StartChecked implements [backend.CheckedStarter].
func (c *Communicator) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	defer backend.AbortOnPanic(c, &what)
	if what.Association == backend.Tree {
		return nil, backend.RefuseTree(c, what, src.DType())
	}
	thinned := c.thins(what, src)
	if q == nil {
		q = c.Device().Default()
	}
	return c.calls.Start(q, thinned, func() (backend.Work, error) {
		if thinned && backend.Recorded(q) {
			return nil, backend.Refuse(c, fmt.Errorf("%w: a sparse %v cannot be recorded in a "+
				"graph, since its size is known in the middle of it: make it Exact, or start it "+
				"beside the graph", backend.ErrUnsupported, what))
		}
		if thinned {
			return c.start(q, what, dst, src)
		}
		return c.Pass(q, what, count, dst, src)
	})
}

// thins reports whether a call is sparse.
func (c *Communicator) thins(what backend.Collective, src backend.Buffer) bool {
	return c.Size() > 1 && src.Len() > 0 && what.Kind == backend.AllReduce &&
		(what.Op == backend.Sum || what.Op == backend.Avg) &&
		(src.DType() == backend.F32 || src.DType() == backend.F64) &&
		!what.Exact && what.State > 0
}

// start starts a sparse call.
func (c *Communicator) start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	do, home, err := c.stepsFor(q, dst, src)
	if err != nil {
		return nil, backend.Refuse(c, fmt.Errorf("a sparse %v: %w", what, err))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heads.reap()
	k, err := c.prepare(home, what, dst, src)
	if err != nil {
		return nil, backend.Refuse(c, err)
	}
	r := k.residual
	r.countCall()
	if err := k.start(q, do); err != nil {
		r.revoke()
		return nil, backend.Refuse(c, fmt.Errorf("a sparse %v: %w", what, err))
	}
	r.before, r.last = r.last, k
	return k, nil
}

// stepsFor returns what computes on the operands of a call, and where it has memory.
func (c *Communicator) stepsFor(q backend.Queue, dst, src backend.Buffer) (steps, *memory, error) {
	switch do, ok := q.(steps); {
	case dst.Device() != src.Device():
		return nil, nil, fmt.Errorf("%w: source and destination must both be on the device",
			backend.ErrArgument)
	case src.Len() > kernels.MaxSelect:
		return nil, nil, fmt.Errorf("%w: %d elements, where there may be %d: use smaller buckets",
			backend.ErrUnsupported, src.Len(), kernels.MaxSelect)
	case !dst.Device():
		return hostSteps{q, &c.host}, &c.onHost, nil
	case !ok:
		return nil, nil, fmt.Errorf("%w: the queues of %s have no kernels for it: keep these "+
			"operands on the host, or reduce them without package sparse",
			backend.ErrUnsupported, c.Device().Name())
	default:
		return do, &c.onDevice, nil
	}
}

// prepare makes the call of an operand. A call with a threshold waits for the call that says how
// much room there must be. If that failed for good, inner says so.
func (c *Communicator) prepare(home *memory, what backend.Collective, dst,
	src backend.Buffer) (*call, error) {
	r := c.residuals[what.State]
	switch {
	case r == nil:
		r = &residual{n: src.Len(), most: counts{-1, -1}}
		c.residuals[what.State] = r
	case r.n != src.Len():
		return nil, fmt.Errorf("%w: %v of %d elements with state %d, which is for %d: use "+
			"another state, or Reset on all ranks",
			backend.ErrArgument, what, src.Len(), what.State, r.n)
	case r.home != nil && r.home != home:
		return nil, fmt.Errorf("%w: %v with state %d, whose operand was elsewhere before, on the "+
			"host or on the device: use another state, or Reset on all ranks",
			backend.ErrArgument, what, what.State)
	}
	if r.before != nil && c.how.density == 0 {
		r.before.settle()
	}
	k := &call{c: c, residual: r, home: home, number: r.calls, what: what, dst: dst, src: src}
	k.plan = c.planOf(r.n, c.Size(), *r.most.of(k.number))
	r.plan = k.plan
	return k, nil
}

// firstOwn is the first state of NewState: far above those that programs count.
const firstOwn = 1 << 20

// NewState returns a state key that it has not returned before: for a node of a graph, which must
// not share its residual with another one. What calls with it send is kept: see
// [Communicator.Sent]. Every rank must ask for equally many, in the same order of its program, and
// so must a rank that resumes from a checkpoint.
func (c *Communicator) NewState() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.own++
	return firstOwn + c.own - 1
}

// operand is what operands with a state have in common.
type operand struct {
	state, n int
	dtype    backend.DType
	device   bool
}

func operandOf(state int, x backend.Buffer) operand {
	return operand{state, x.Len(), x.DType(), x.Device()}
}

// Sent returns what this rank has sent in the last call with a state of [Communicator.NewState] and
// an operand of the dtype and length of x: each element at its place, and zeros elsewhere (s of the
// package comment). Like that operand, the result is on the host or the device. It is written in
// the order of the call's queue and lives until Close; the next call overwrites it. It is empty
// before the first call.
func (c *Communicator) Sent(state int, x backend.Buffer) backend.Buffer {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := operandOf(state, x)
	if sent, ok := c.sent[of]; ok {
		return sent
	}
	of.device = !of.device
	return c.sent[of]
}

// Explain says how the last call with a state was sent, and why: the bytes that a rank receives
// either way. All ranks say the same.
func (c *Communicator) Explain(state int) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.residuals[state]
	if r == nil {
		return fmt.Sprintf("state %d has had no sparse call", state)
	}
	return r.plan.explain(r.n, c.Size())
}

// NotFiniteError says that an operand of a strict communicator had a NaN or an infinity. All ranks
// get the same error. The call has delivered nothing, the content of its destination means nothing,
// and the residual is unchanged: the communicator can still be used. If calls with other states
// belong to the same training step, [Communicator.Undo] takes back what they have done to
// residuals.
type NotFiniteError struct {
	State, Rank, Index int // the first one
}

// Error names the state, the rank and the element.
func (e *NotFiniteError) Error() string {
	return fmt.Sprintf("sparse: element %d of the operand of rank %d with state %d: an element is "+
		"NaN or infinite: look for a learning rate that is too large",
		e.Index, e.Rank, e.State)
}

// NotFinite returns the state, the rank and the index of the first such element.
func (e *NotFiniteError) NotFinite() (state, rank, index int) { return e.State, e.Rank, e.Index }
