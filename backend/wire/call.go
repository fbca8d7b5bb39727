package wire

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// A long all-reduce on a device goes in parts, so that the casts of one run beside
// the collective of another. Neither number has been measured yet: what is gained are
// the casts of all parts but one, what it costs is that shorter collectives use the
// links less well.
const (
	parts     = 2
	shortPart = 32 << 20 // bytes of 16-bit floats: a shorter part is not worth it
)

// call is one reduction as 16 bits.
type call struct {
	c        *Communicator
	what     backend.Collective
	count    int
	dst, src backend.Buffer
	text     string // for errors

	half backend.Buffer // the operand in 16 bits, reduced in place
}

// innerError is one of inner, of what it was asked for.
type innerError struct{ error }

// run starts the call on q.
func (k *call) run(q backend.Queue) (*work, error) {
	err := k.c.follow(q)
	if err != nil {
		return nil, err
	}
	if k.half, err = k.c.room(k.src.Len()); err != nil {
		return nil, err
	}
	if n := k.partsOn(); n > 1 {
		return k.inParts(q, n)
	}
	if err := q.Kernels().Cast(k.half, k.src); err != nil {
		return nil, err
	}
	lo, hi := k.what.Chunk(k.c.Rank(), k.c.Size(), k.count)
	mine := k.half.Slice(lo, hi)
	w := &work{c: k.c, call: k.text}
	if err := k.reduce(q, w, mine, k.half); err != nil {
		return nil, err
	}
	return w, k.finish(q, w, func() error { return k.widen(q, w.inner[0], k.dst, mine) })
}

// partsOn returns in how many parts the call goes: the same on every rank.
func (k *call) partsOn() int {
	if k.what.Kind != backend.AllReduce || !k.src.Device() {
		return 1
	}
	return max(1, min(k.c.parts, k.half.NBytes()/k.c.short))
}

// inParts casts on q and reduces on a queue of its own.
func (k *call) inParts(q backend.Queue, n int) (*work, error) {
	line, err := k.c.lineOf()
	if err != nil {
		return nil, err
	}
	w := &work{c: k.c, call: k.text}
	at := func(i int) int { return i * k.src.Len() / n }
	for i := range n {
		half := k.half.Slice(at(i), at(i+1))
		if err := q.Kernels().Cast(half, k.src.Slice(at(i), at(i+1))); err != nil {
			return nil, err
		}
		cast, err := q.Record()
		if err != nil {
			return nil, err
		}
		if err := line.Wait(cast); err != nil {
			return nil, err
		}
		if err := k.reduce(line, w, half, half); err != nil {
			return nil, err
		}
	}
	return w, k.finish(q, w, func() error {
		for i, part := range w.inner {
			if err := k.widen(q, part, k.dst.Slice(at(i), at(i+1)), k.half.Slice(at(i), at(i+1))); err != nil {
				return err
			}
		}
		return nil
	})
}

// lineOf returns the queue of collectives in parts.
func (c *Communicator) lineOf() (line backend.Queue, err error) {
	if c.line == nil {
		c.line, err = c.Device().NewQueue()
	}
	return c.line, err
}

// reduce starts the average of what travels.
func (k *call) reduce(q backend.Queue, w *work, dst, src backend.Buffer) error {
	part, err := k.c.inner.Start(q, mark(k.what, k.src.DType()), dst, src)
	if err != nil {
		return &innerError{err}
	}
	w.inner = append(w.inner, part)
	return nil
}

// errOver says that a call has failed already: Join says why.
type errOver struct{}

func (errOver) Error() string { return "the call is over" }

// widen starts to write an average into dst, as what was asked for.
func (k *call) widen(q backend.Queue, part backend.Work, dst, half backend.Buffer) error {
	if part.Wait(q) != nil {
		return errOver{}
	}
	factor := 1.0
	if k.what.Op == backend.Sum {
		factor = float64(k.c.Size())
	}
	return kernels.Widen(q.Kernels(), dst, half, factor)
}

// finish starts what comes behind the collectives, and notes its end.
func (k *call) finish(q backend.Queue, w *work, widen func() error) (err error) {
	switch err := widen(); err {
	case nil:
	case errOver{}:
		return nil
	default:
		return err
	}
	if w.done, err = q.Record(); err == nil {
		k.c.last, k.c.done = q, w.done
	}
	return err
}
