package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/spinwait"
)

// The kinds in the headers of Alloc and Split, which are not collectives but
// must come at the same place on every rank.
const (
	allocKind backend.Kind = 255 - iota
	splitKind
)

// meet runs f once nothing is under way on any rank, as one call of the group.
func (c *comm) meet(kind backend.Kind, f func() error) error {
	c.order.Lock()
	defer c.order.Unlock()
	if err := c.member.Failure(""); err != nil {
		return err
	}
	h := backend.Collective{Kind: kind}.Header(c.seq.Add(1), 0, backend.U8)
	c.post(&h)
	if err := c.quiet(); err != nil {
		return err
	}
	err := f() // the group may be as good as before
	c.state.Lock()
	defer c.state.Unlock()
	if c.member.Err() == nil {
		c.started.Store(h.Seq)
		c.done = h.Seq
	}
	return err
}

// quiet waits until the calls that this rank has started are done.
func (c *comm) quiet() error {
	for wait := (spinwait.Wait{}); ; wait.Pause() {
		if done, err := c.happened(c.started.Load()); done || err != nil {
			return err
		}
		if err := c.member.Failure(""); err != nil {
			return err
		}
	}
}

// Alloc implements [backend.Communicator]: memory of the device like any other.
// It is not registered with NCCL, which then wants every rank to pass registered
// memory of the same place, and waits for ever where one does not; callers may mix.
func (c *comm) Alloc(nbytes int) (backend.Buffer, error) {
	if nbytes < 0 {
		return backend.Buffer{}, fmt.Errorf("%w: %s: alloc of %d bytes", backend.ErrArgument, backend.RankOf(c), nbytes)
	}
	var b backend.Buffer
	err := c.meet(allocKind, func() (err error) {
		b, err = c.alloc(nbytes)
		return err
	})
	if err != nil {
		return backend.Buffer{}, c.ended(err, "alloc")
	}
	return b, nil
}

// Free implements [backend.Communicator]. After a failure of the group, whose kernels
// may still use the memory, it is left to Close.
func (c *comm) Free(b backend.Buffer) error {
	c.order.Lock()
	defer c.order.Unlock()
	if b.Len() == 0 || c.member.Err() != nil {
		return nil
	}
	i := slices.IndexFunc(c.windows, func(w backend.Buffer) bool { return w.Addr() == b.Addr() })
	if i < 0 {
		return fmt.Errorf("%w: %s: free of memory that Alloc has not returned, or that was freed before", backend.ErrArgument, backend.RankOf(c))
	}
	w := c.windows[i]
	c.windows = slices.Delete(c.windows, i, i+1)
	return c.dev.Free(w)
}

// alloc agrees on the size, then takes memory, and succeeds on every rank or on
// none.
func (c *comm) alloc(nbytes int) (backend.Buffer, error) {
	if _, err := c.member.AgreeOnAlloc(c.gather, nbytes, nil); err != nil {
		return backend.Buffer{}, err
	}
	if nbytes == 0 {
		return backend.Of([]byte{}), nil
	}
	b, failed := c.dev.Alloc(nbytes)
	if failed == nil {
		c.windows = append(c.windows, b)
	}
	if err := c.gather.Vote(c.members, failed); err != nil {
		return backend.Buffer{}, fmt.Errorf("%s: alloc of %d bytes: %w", backend.RankOf(c), nbytes, err)
	}
	return b, nil
}

// Split implements [backend.Communicator]. Every rank has the same NCCL, so that one too
// old for it is an error on each, and the group stays usable.
func (c *comm) Split(color, key int) (backend.Communicator, error) {
	if err := c.lib.splits(); err != nil {
		return nil, fmt.Errorf("%s: split: %w", backend.RankOf(c), err)
	}
	var part *comm
	err := c.meet(splitKind, func() (err error) {
		part, err = c.split(color, key)
		return err
	})
	if err != nil {
		if part != nil {
			err = errors.Join(err, part.Close())
		}
		return nil, c.ended(err, "split")
	}
	if part == nil {
		return nil, nil
	}
	return part, nil
}

func (c *comm) split(color, key int) (*comm, error) {
	part, err := c.member.Split(c.gather, color, key)
	if err != nil {
		return nil, err
	}
	leader, nbytes := c.rank, 0 // a rank that takes no part makes nothing, for nobody
	if color >= 0 {
		leader, nbytes = part.Ranks[0], group.MemoryBytes(len(part.Ranks))
	}
	s, err := group.Sharing{Gather: c.gather, Rank: c.rank, Members: c.members, Dir: c.dir}.HandOver(leader, nbytes)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), initTime(c.timeout))
	defer cancel()
	e, err := c.fork(ctx, part.Number, max(part.Rank, 0))
	if color < 0 || err != nil {
		if e != nil {
			err = e.abort()
		}
		if s != nil {
			err = errors.Join(err, s.Unmap())
		}
		return nil, c.member.Broken(err)
	}
	made := newComm(c.base, part.Name, part.Rank, part.Members, s)
	made.part = true
	return made, c.member.Broken(made.connect(ctx, func() (engine, error) { return e, nil }))
}

// fork makes the engine of a part; nil for a rank that takes none.
func (c *comm) fork(ctx context.Context, number, rank int) (e engine, err error) {
	err = c.bound(func() error { e, err = c.engine.fork(number, rank); return err })
	if err != nil {
		return nil, err
	}
	if err := c.await(ctx, e.ready); err != nil {
		return nil, errors.Join(err, e.abort())
	}
	return e, nil
}
