package check

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/serial"
)

// New returns inner with its calls compared across the ranks. If inner, or
// something it wraps, compares by itself, that is switched on and inner is
// returned; otherwise the result owns inner. Every rank must do the same.
func New(inner backend.Communicator) backend.Communicator {
	if verify := inner.Capabilities().Verify; verify != nil {
		verify(true)
		return inner
	}
	c := &Communicator{Base: backend.Wrap(inner)}
	c.on.Store(true)
	return c
}

// Communicator compares the headers of inner's calls.
type Communicator struct {
	backend.Base
	on  atomic.Bool
	err atomic.Pointer[backend.Error] // the first mismatch, sticky

	mu     sync.Mutex // held while a call is started; guards what follows
	seq    uint64
	sheets []*sheet // not in use
}

var _ backend.Wrapper = (*Communicator)(nil)

// Capabilities implements [backend.Communicator]. Every rank must switch the comparison at
// the same place of its program.
func (c *Communicator) Capabilities() backend.Capabilities {
	caps := c.Base.Capabilities()
	caps.Verify = c.on.Store
	return caps
}

// Start implements [backend.Communicator].
func (c *Communicator) Start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	count, err := what.Check(c.Rank(), c.Size(), dst, src)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", backend.RankOf(c), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.on.Load() {
		return c.Base.Start(q, what, dst, src)
	}
	x, err := c.exchange(q, what.Header(c.seq+1, count, what.DType(dst, src)))
	if err != nil {
		return nil, err
	}
	if !x.over {
		return c.behind(x, q, what, dst, src)
	}
	if x.err != nil {
		return backend.Finished(x.err), nil
	}
	w, err := c.Base.Start(q, what, dst, src)
	return w, c.refused(what, err)
}

// refused ends the communicator if inner finds that the arguments of a call
// which its peers may have begun are wrong, as it does for memory of another
// device: nobody would ever answer them. What inner does not offer (ErrUnsupported)
// it offers no rank, since the headers are the same, and all go on; but for host memory
// that one rank has given to a queue which cannot copy it, whose peers time out.
func (c *Communicator) refused(what backend.Collective, err error) error {
	if errors.Is(err, backend.ErrArgument) {
		c.Base.Abort(fmt.Errorf("rank %d cannot take part in %v: %w", c.Rank(), what, err))
	}
	return err
}

// behind starts a call behind an exchange that is still under way.
func (c *Communicator) behind(x *exchange, q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	w, err := c.Base.Start(q, what, dst, src)
	x.compared = make(serial.Event)
	go x.finish()
	if err != nil {
		return nil, c.refused(what, err)
	}
	return &work{w, x}, nil
}

// Alloc implements [backend.Communicator].
func (c *Communicator) Alloc(nbytes int) (backend.Buffer, error) {
	if nbytes < 0 {
		return backend.Buffer{}, fmt.Errorf("%w: %s: alloc of %d bytes", backend.ErrArgument, backend.RankOf(c), nbytes)
	}
	if err := c.agree(backend.ForAlloc, nbytes); err != nil {
		return backend.Buffer{}, fmt.Errorf("alloc of %d bytes: %w", nbytes, err)
	}
	return c.Base.Alloc(nbytes)
}

// Split implements [backend.Communicator]. The parts are checked too.
func (c *Communicator) Split(color, key int) (backend.Communicator, error) {
	if err := c.agree(backend.ForSplit, 0); err != nil {
		return nil, fmt.Errorf("split: %w", err)
	}
	part, err := c.Base.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return New(part), nil
}

// agree exchanges the header of a call that is no collective. It has that of an all-gather of
// count bytes.
func (c *Communicator) agree(purpose backend.Purpose, count int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.on.Load() {
		return nil
	}
	what := backend.Collective{Kind: backend.AllGather, Origin: &backend.Origin{Purpose: purpose}}
	x, err := c.exchange(nil, what.Header(c.seq+1, count, backend.U8))
	if err != nil {
		return err
	}
	if !x.over {
		x.compared = make(serial.Event)
		x.finish()
	}
	return x.err
}
