package half

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

// Communicator sends inner's sums and averages of floats as 16 bits.
type Communicator struct {
	backend.Base
	half backend.DType
	// transport is inner's.
	transport func(c backend.Collective, d backend.DType, count int) backend.DType

	calls backend.Sequence

	mu       sync.Mutex       // guards what follows
	scratch  []backend.Buffer // in 16 bits, the last one in use, to be freed
	graphs   []backend.Buffer // the same of calls in graphs, each its own
	done     backend.Event    // the end of its last use
	counters Counters
}

var _ backend.Wrapper = (*Communicator)(nil)

// Counters say what was saved, in bytes that cross this rank's link, by
// [backend.Kind.BusFactor].
type Counters struct {
	Calls int64 // that travelled as 16 bits
	Bytes int64 // of these calls
	Dense int64 // the bytes that these calls would have sent without 16 bits
}

// New returns inner with sums and averages of f32 and f64 sent as half, which is
// [backend.F16] or [backend.BF16], the same on every rank. The result owns
// inner.
func New(inner backend.Communicator, half backend.DType) (*Communicator, error) {
	if half != backend.F16 && half != backend.BF16 {
		return nil, fmt.Errorf("%w: half: %v: use f16 or bf16", backend.ErrArgument, half)
	}
	if err := backend.Given("half.New", "inner", inner); err != nil {
		return nil, err
	}
	return over(inner, half), nil
}

func over(inner backend.Communicator, half backend.DType) *Communicator {
	return &Communicator{Base: backend.Wrap(inner), half: half,
		transport: inner.Capabilities().TransportOf}
}

// Wrap returns [New] as a function of the communicator alone.
func Wrap(half backend.DType) func(backend.Communicator) (backend.Communicator, error) {
	return func(inner backend.Communicator) (backend.Communicator, error) {
		c, err := New(inner, half)
		if err != nil {
			return nil, err
		}
		return c, nil
	}
}

// Describe returns what the bits of results depend on.
func (c *Communicator) Describe() string { return fmt.Sprintf("half (%v)", c.half) }

// Resumes reports whether a checkpoint with this description can be loaded here: earlier
// versions of this package were called wire.
func (c *Communicator) Resumes(description string) bool {
	return description == c.Describe() || description == fmt.Sprintf("wire (%v)", c.half)
}

// Err implements [backend.Communicator].
func (c *Communicator) Err() error { return c.restate(c.Base.Err(), "") }

// Alloc implements [backend.Communicator].
func (c *Communicator) Alloc(nbytes int) (backend.Buffer, error) {
	b, err := c.Base.Alloc(nbytes)
	return b, c.restate(err, "")
}

// Split implements [backend.Communicator]. The parts send 16 bits too.
func (c *Communicator) Split(color, key int) (backend.Communicator, error) {
	part, err := c.Base.Split(color, key)
	if err != nil || part == nil {
		return nil, c.restate(err, "")
	}
	return over(part, c.half), nil
}

// Close implements [backend.Communicator].
func (c *Communicator) Close() error {
	err := c.Base.Close() // ends calls under way
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done != nil {
		err = errors.Join(err, c.done.Join(context.Background()))
	}
	for _, b := range append(c.scratch, c.graphs...) {
		err = errors.Join(err, c.Device().Free(b))
	}
	c.scratch, c.graphs, c.done = nil, nil, nil
	return err
}

// Counters returns what was sent so far.
func (c *Communicator) Counters() Counters {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counters
}

// Start implements [backend.Communicator].
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
	shrunk := c.Size() > 1 && shrinks(what, src.DType())
	if q == nil {
		q = c.Device().Default()
	}
	return c.calls.Start(q, shrunk, func() (backend.Work, error) {
		if shrunk {
			return c.start(q, what, count, dst, src)
		}
		return c.pass(q, what, count, dst, src)
	})
}

// Capabilities implements [backend.Communicator].
func (c *Communicator) Capabilities() backend.Capabilities {
	caps := c.Base.Capabilities()
	caps.Transport = c.travels
	caps.Tree = nil
	return caps
}

// travels is the transport dtype of a call.
func (c *Communicator) travels(what backend.Collective, d backend.DType, count int) backend.DType {
	if c.Size() > 1 && shrinks(what, d) {
		return c.half
	}
	return c.transport(what, d, count)
}

// pass starts a call that travels unchanged.
func (c *Communicator) pass(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	w, err := c.Pass(q, what, count, dst, src)
	if err != nil {
		return nil, c.restate(err, "")
	}
	if d := what.Original.DType; d.Valid() && src.DType() == c.half { // the caller has cast
		c.mu.Lock()
		c.count(what.Kind, src.Len(), d)
		c.mu.Unlock()
	}
	if w == backend.Finished(nil) {
		return w, nil
	}
	return &work{c: c, inner: w}, nil
}

// shrinks reports whether a call travels as 16 bits.
func shrinks(what backend.Collective, d backend.DType) bool {
	return (what.Kind == backend.AllReduce || what.Kind == backend.ReduceScatter) &&
		(what.Op == backend.Sum || what.Op == backend.Avg) &&
		(d == backend.F32 || d == backend.F64) && !what.Exact
}

// halves reports whether inner rounds a call on the way.
func (c *Communicator) halves(what backend.Collective, d backend.DType, count int) bool {
	return what.Kind == backend.AllReduce && d == backend.F32 &&
		c.transport(allowHalf(what, c.half), d, count) == c.half
}

// start starts a call that travels as 16 bits: inner casts on the way, or cast, average, cast
// back.
func (c *Communicator) start(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := &call{c: c, what: what, count: count, dst: dst, src: src,
		text: fmt.Sprintf("%v of %d %v, as %v", what, count, dst.DType(), c.half)}
	run := k.run
	if c.halves(what, src.DType(), count) {
		run = k.runInside
	}
	w, err := run(q)
	var inner *innerError
	switch {
	case errors.As(err, &inner):
		return nil, c.restate(inner.error, k.text)
	case err != nil:
		return nil, backend.Refuse(c, fmt.Errorf("%v: %w", what, err))
	}
	c.count(what.Kind, src.Len(), dst.DType())
	return w, nil
}

// count counts a call of n elements that stand for others. mu is held.
func (c *Communicator) count(kind backend.Kind, n int, of backend.DType) {
	c.counters.Calls++
	share := kind.BusFactor(c.Size())
	c.counters.Bytes += int64(share * float64(n*c.half.Size()))
	c.counters.Dense += int64(share * float64(n*of.Size()))
}

// room returns scratch for n elements of a call on q. A call under way may still use scratch that
// was too small; that is kept until Close, and doubling bounds it. A call in a graph has its own
// scratch: other calls, on other queues, may run before a replay has ended.
func (c *Communicator) room(q backend.Queue, n int) (backend.Buffer, error) {
	if backend.Recorded(q) {
		b, err := c.Device().Alloc(n * c.half.Size())
		if err == nil {
			c.graphs = append(c.graphs, b)
		}
		return b.As(c.half), err
	}
	have := 0
	if k := len(c.scratch); k > 0 {
		have = c.scratch[k-1].Len()
	}
	if need := n * c.half.Size(); need > have || len(c.scratch) == 0 {
		b, err := c.Device().Alloc(max(need, 2*have))
		if err != nil {
			return b, err
		}
		c.scratch = append(c.scratch, b)
	}
	return c.scratch[len(c.scratch)-1].As(c.half).Slice(0, n), nil
}
