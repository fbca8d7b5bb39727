package gpu

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

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
	b := block{k: k, scratch: c.scratch.As(k.dtype), held: k.branches()}
	last, before := b.operandsOf(k.P - 1)
	b.n = b.scratch.Len() / (before + last)
	for longest := k.longest(); b.off < longest; b.off += b.n {
		c.steps = b.collect(c.steps[:0])
		if err := c.run(q, c.steps, 0); err != nil {
			return err
		}
		if lo, hi := b.span(k.rank); lo < hi {
			c.operands = b.operands(c.operands[:0])
			if err := b.combine(q, c.operands); err != nil {
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

// combine combines the operands of this rank's span, in the call's association.
func (b *block) combine(q stream, operands []backend.Buffer) error {
	k := b.k
	if !inTree(&k.what, k.P) {
		return q.Reduce(k.what.Op, b.result(), operands...)
	}
	sizes, terms := slices.Concat(b.held...), 0
	open := make([]int, 0, len(operands)) // sums, by their first operand, in whose slot they are
	add := func(dst backend.Buffer) error {
		n := len(open)
		x, y := open[n-2], open[n-1]
		open = open[:n-1]
		err := q.Reduce(backend.Sum, dst, operands[x], operands[y])
		operands[x] = dst
		return err
	}
	for i := range operands {
		open = append(open, i)
		size := 1
		if b.held != nil {
			size = sizes[i]
		}
		for sum := size; terms&sum != 0; sum *= 2 {
			if err := add(b.slot(open[len(open)-2])); err != nil {
				return err
			}
		}
		terms += size
	}
	for len(open) > 1 {
		if err := add(b.slot(open[len(open)-2])); err != nil {
			return err
		}
	}
	if k.what.Op == backend.Avg {
		return q.Divide(b.result(), operands[0], k.P)
	}
	return q.Copy(b.result(), operands[0])
}
