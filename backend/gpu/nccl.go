package gpu

import "github.com/euryale-ml/euryale/backend"

// launchNCCL starts a call by NCCL, and records event behind it.
func (c *Communicator) launchNCCL(q stream, k *call, event uintptr) error {
	unbind, err := c.dev.Bind()
	if err != nil {
		return err
	}
	defer unbind()
	switch k.route() {
	case composed:
		if err := c.compose(q, k); err != nil {
			return err
		}
		return c.run(q, nil, event)
	case divided:
		if err := c.sumAndDivide(q, k); err != nil {
			return err
		}
		return c.run(q, nil, event)
	default:
		c.steps = k.steps(c.steps[:0])
		return c.run(q, c.steps, event)
	}
}

// run hands steps to NCCL, unless the group has ended: whoever ends it waits only so long
// for a call that is being started, and then takes the engine away.
func (c *Communicator) run(q stream, steps []ncclStep, event uintptr) error {
	if c.member.Err() != nil {
		return c.member.Failure("")
	}
	return c.engine.run(q.Stream(), steps, event)
}

// sumAndDivide is Avg where NCCL's has other bits.
func (c *Communicator) sumAndDivide(q stream, k *call) error {
	k.what.Op = backend.Sum
	c.steps = k.steps(c.steps[:0])
	if err := c.run(q, c.steps, 0); err != nil {
		return err
	}
	if k.what.Kind == backend.Reduce && k.rank != k.what.Root || k.dst.Len() == 0 {
		return nil
	}
	return q.Divide(k.dst, k.dst, k.P)
}

// compose is a composed reduction.
func (c *Communicator) compose(q stream, k *call) error {
	n := c.scratch.Len() / k.dtype.Size() / k.P
	for off, longest := 0, k.longest(); off < longest; off += n {
		b := block{k, off, n, c.scratch.As(k.dtype)}
		c.steps = b.collect(c.steps[:0])
		if err := c.run(q, c.steps, 0); err != nil {
			return err
		}
		if lo, hi := b.span(k.rank); lo < hi {
			c.operands = b.operands(c.operands[:0])
			if err := q.Reduce(k.what.Op, b.result(), c.operands...); err != nil {
				return err
			}
		}
		c.steps = b.deliver(c.steps[:0])
		if err := c.run(q, c.steps, 0); err != nil {
			return err
		}
	}
	return nil
}
