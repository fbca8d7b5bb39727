package gpu

import (
	"context"
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/spinwait"
)

// The kinds in the headers of Alloc, Split and replays of graphs, which are not collectives but
// must come at the same place on every rank.
const (
	allocKind backend.Kind = 255 - iota
	splitKind
	replayKind
)

// meet runs f once nothing is under way on any rank, as one call of the group.
func (c *Communicator) meet(kind backend.Kind, f func() error) error {
	c.order.Lock()
	defer c.order.Unlock()
	if err := c.unrecorded("Alloc or Split"); err != nil {
		return err
	}
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
func (c *Communicator) quiet() error {
	for wait := (spinwait.Wait{}); ; wait.Pause() {
		if done, err := c.happened(c.started.Load()); done || err != nil {
			return err
		}
		if err := c.member.Failure(""); err != nil {
			return err
		}
	}
}

// Windows returns how many windows Alloc has used, of 63, and the bytes that it has given
// out since without one: they are memory like any other, copied on the way to the others.
func (c *Communicator) Windows() (used, lacking int) {
	if c.why != "" {
		return 0, 0
	}
	return int(c.memory.used.Load()), int(c.memory.lacking.Load())
}

// Alloc implements [backend.Communicator]. Our kernels' calls on the memory need no copy on the
// way to the other ranks if they begin at a multiple of 16 bytes and are one long.
//
// That goes for 63 windows, of which each Alloc of more than 1 MiB takes one; smaller ones
// share them. Later memory works like that of the device, at its speed: take a
// few large pieces rather than many. [Communicator.Windows] and Explain say when windows
// have run out. The memory is there until Free or Close.
//
// It is not registered with NCCL, which then wants every rank to pass registered memory of
// the same place, and waits for ever where one does not; callers may mix.
func (c *Communicator) Alloc(nbytes int) (backend.Buffer, error) {
	if nbytes < 0 {
		return backend.Buffer{}, fmt.Errorf("%w: %s: alloc of %d bytes", backend.ErrArgument,
			backend.RankOf(c), nbytes)
	}
	var b backend.Buffer
	err := c.meet(allocKind, func() (err error) {
		b, err = c.memory.alloc(nbytes)
		return err
	})
	if err == nil {
		return b, nil
	}
	err = c.ended(err, "alloc")
	if !errors.As(err, new(*backend.Error)) && !errors.Is(err, backend.ErrArgument) {
		err = fmt.Errorf("%s: alloc of %d bytes: %w", backend.RankOf(c), nbytes, err)
	}
	return backend.Buffer{}, err
}

// Free implements [backend.Communicator]. A window is free for another Alloc once all
// pieces of it are. After a failure of the group, whose kernels may still use the memory, it
// is left to Close.
func (c *Communicator) Free(b backend.Buffer) error {
	c.order.Lock()
	defer c.order.Unlock()
	if b.Len() == 0 || c.member.Err() != nil {
		return nil
	}
	if err := c.unrecorded("Free"); err != nil {
		return err
	}
	if err := c.memory.release(b); err != nil {
		return backend.Refuse(c, err)
	}
	return nil
}

// Split implements [backend.Communicator]. Every rank has the same NCCL, so that one too
// old for it is an error on each, and the group stays usable.
func (c *Communicator) Split(color, key int) (backend.Communicator, error) {
	if err := c.lib.splits(); err != nil {
		return nil, backend.Refuse(c, fmt.Errorf("split: %w", err))
	}
	var part *Communicator
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

func (c *Communicator) split(color, key int) (*Communicator, error) {
	part, err := c.member.Split(c.gather, color, key)
	if err != nil {
		return nil, err
	}
	board, err := group.Sharing{Gather: c.gather, Rank: c.rank, Members: c.members,
		Dir: c.dir}.Board(c.world, part)
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
		if board != nil {
			err = errors.Join(err, board.Release())
		}
		return nil, c.member.Broken(err)
	}
	infos := make([]rankInfo, len(part.Ranks))
	for i, r := range part.Ranks {
		infos[i] = c.plan.ranks[r]
	}
	made := newComm(c.groupState, part, board, newChoice(decide(c.asked, infos)))
	made.part = true
	return made, c.member.Broken(made.connect(ctx, func() (ncclComm, error) { return e, nil }))
}

// fork makes the engine of a part; nil for a rank that takes none.
func (c *Communicator) fork(ctx context.Context, number, rank int) (e ncclComm, err error) {
	err = c.bound(func() error { e, err = c.engine.fork(number, rank); return err })
	if err != nil {
		return nil, err
	}
	if err := c.await(ctx, e.ready); err != nil {
		return nil, errors.Join(err, e.abort())
	}
	return e, nil
}
