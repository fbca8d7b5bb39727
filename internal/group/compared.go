package group

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/serial"
)

// Compared returns inner with its calls compared across the ranks, as Init does for a backend
// of the program's own. If inner, or something it wraps, compares by itself, as those on a
// Board do, that is switched on and inner is returned; otherwise the result owns inner. Every
// rank must do the same.
//
// Before each call the ranks exchange its [backend.Header] by an all-gather of inner. Where
// the headers differ every rank gets a [*backend.MismatchError] that names both sides, now
// and for every later call.
//
// The exchange runs on the queue of the call, just before it. Where the queue has done it by
// the time Start looks, as one that runs on the caller has, the call itself is started only if
// the headers agree. On any other queue Start does not wait: the call is started right behind
// the exchange, a goroutine compares when that has finished, and a mismatch aborts the
// communicator, which ends the call. Its Work then reports the mismatch; what the call has
// left in its destination until then means nothing.
func Compared(inner backend.Communicator) backend.Communicator {
	if verify := inner.Capabilities().Verify; verify != nil {
		verify(true)
		return inner
	}
	c := &compared{Base: backend.Wrap(inner)}
	c.on.Store(true)
	return c
}

// compared is a communicator that compares the headers of inner's calls.
type compared struct {
	backend.Base
	on  atomic.Bool
	err atomic.Pointer[backend.Error] // the first mismatch, sticky

	mu     sync.Mutex // held while a call is started; guards what follows
	seq    uint64
	sheets []*sheet // not in use
}

var _ backend.Wrapper = (*compared)(nil)

// Capabilities implements [backend.Communicator]. Every rank must switch the comparison at
// the same place of its program.
func (c *compared) Capabilities() backend.Capabilities {
	caps := c.Base.Capabilities()
	caps.Verify = c.on.Store
	return caps
}

// Err implements [backend.Communicator].
func (c *compared) Err() error {
	if err := c.err.Load(); err != nil {
		return err
	}
	return c.Base.Err()
}

// Start implements [backend.Communicator].
func (c *compared) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	return what.Start(c, q, dst, src)
}

// StartChecked implements [backend.CheckedStarter].
func (c *compared) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.on.Load() {
		return c.Pass(q, what, count, dst, src)
	}
	x, err := c.exchange(q, what.Header(c.seq+1, count, what.DType(dst, src)))
	if err != nil {
		return nil, err
	}
	if !x.over {
		return c.startAfter(x, q, what, count, dst, src)
	}
	if x.err != nil {
		return backend.Finished(x.err), nil
	}
	w, err := c.Pass(q, what, count, dst, src)
	return w, c.refused(what, err)
}

// refused ends the communicator if inner finds that the arguments of a call
// which its peers may have begun are wrong, as it does for memory of another
// device: nobody would ever answer them. What inner does not offer (ErrUnsupported)
// it offers no rank, since the headers are the same, and all go on; but for host memory
// that one rank has given to a queue which cannot copy it, whose peers time out.
func (c *compared) refused(what backend.Collective, err error) error {
	if errors.Is(err, backend.ErrArgument) {
		c.Base.Abort(fmt.Errorf("rank %d cannot take part in %v: %w", c.Rank(), what, err))
	}
	return err
}

// startAfter starts a call behind an exchange that is still under way.
func (c *compared) startAfter(x *comparison, q backend.Queue, what backend.Collective, count int,
	dst, src backend.Buffer) (backend.Work, error) {
	w, err := c.Pass(q, what, count, dst, src)
	x.compared = make(serial.Event)
	go x.finish()
	if err != nil {
		return nil, c.refused(what, err)
	}
	return &work{w, x}, nil
}

// Alloc implements [backend.Communicator].
func (c *compared) Alloc(nbytes int) (backend.Buffer, error) {
	if nbytes < 0 {
		return backend.Buffer{}, fmt.Errorf("%w: %s: alloc of %d bytes", backend.ErrArgument,
			backend.RankOf(c), nbytes)
	}
	if err := c.agree(backend.ForAlloc, nbytes); err != nil {
		return backend.Buffer{}, fmt.Errorf("alloc of %d bytes: %w", nbytes, err)
	}
	return c.Base.Alloc(nbytes)
}

// Split implements [backend.Communicator]. The parts are checked too.
func (c *compared) Split(color, key int) (backend.Communicator, error) {
	if err := c.agree(backend.ForSplit, 0); err != nil {
		return nil, fmt.Errorf("split: %w", err)
	}
	part, err := c.Base.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return Compared(part), nil
}

// agree exchanges the header of a call that is no collective. It has that of an all-gather of
// count bytes.
func (c *compared) agree(purpose backend.Purpose, count int) error {
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
