package hierarchy

import (
	"context"
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// staged runs a call that was given host memory on copies of it on the device, as
// some inner communicators do, and returns when it is done. Whether a call is
// hierarchical must not depend on where one rank has its operands.
func (c *Communicator) staged(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	if c.onHost {
		return nil, fmt.Errorf("%w: %s: %v was given memory of a device that a queue of %s cannot reach", backend.ErrArgument, backend.RankOf(c), what, c.Device().Name())
	}
	near, err := c.copyOf(dst)
	if err != nil {
		return nil, err
	}
	from, err := c.copyOf(src)
	if err == nil {
		err = errors.Join(
			c.runStaged(q, what, near, from, dst, src),
			c.Device().Free(from))
	}
	err = errors.Join(err, c.Device().Free(near))
	if err != nil {
		return nil, err
	}
	return backend.Finished(nil), nil
}

// copyOf returns memory of the device, as U8, for the elements of b.
func (c *Communicator) copyOf(b backend.Buffer) (backend.Buffer, error) {
	m, err := c.Device().Alloc(b.NBytes())
	if err != nil {
		return m, fmt.Errorf("%s: a copy of %d bytes on %s: %w", backend.RankOf(c), b.NBytes(), c.Device().Name(), err)
	}
	return m, nil
}

func (c *Communicator) runStaged(q backend.Queue, what backend.Collective, near, from, dst, src backend.Buffer) error {
	d := what.DType(dst, src)
	if err := q.Move(from.As(d), src); err != nil {
		return err
	}
	w, err := c.Start(q, what, near.As(d), from.As(d))
	if err != nil {
		return err
	}
	if err := w.Join(context.Background()); err != nil {
		return err
	}
	if err := q.Move(dst, near.As(d)); err != nil {
		return err
	}
	done, err := q.Record()
	if err != nil {
		return err
	}
	return done.Join(context.Background())
}
