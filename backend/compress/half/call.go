package half

import (
	"github.com/euryale-ml/euryale/backend"
)

// call is one reduction as 16 bits.
type call struct {
	c        *Communicator
	what     backend.Collective
	count    int
	dst, src backend.Buffer // src is in 16 bits if it is rounded already
	text     string         // for errors
}

// innerError is one of inner, of what it was asked for.
type innerError struct{ error }

// pass starts the call on q where it does.
func (k *call) pass(q backend.Queue) (*work, error) {
	inner, err := k.c.Base.Start(q, allowHalf(k.what, k.c.half), k.dst, k.src)
	if err != nil {
		return nil, &innerError{err}
	}
	return &work{c: k.c, inner: inner, call: k.text}, nil
}

// run starts the call on q: cast, average, cast back.
func (k *call) run(q backend.Queue) (*work, error) {
	half, err := k.rounded(q)
	if err != nil {
		return nil, err
	}
	lo, hi := k.what.Chunk(k.c.Rank(), k.c.Size(), k.count)
	mine := half.Slice(lo, hi)
	inner, err := k.c.Base.Start(q, mark(k.what, k.dst.DType()), mine, half)
	if err != nil {
		return nil, &innerError{err}
	}
	w := &work{c: k.c, inner: inner, call: k.text}
	return w, k.finish(q, w, mine)
}

// rounded returns the operand in 16 bits, to be reduced in place.
func (k *call) rounded(q backend.Queue) (backend.Buffer, error) {
	if k.src.DType() == k.c.half {
		return k.src, nil
	}
	half, err := k.c.room(k.src.Len())
	if err != nil {
		return half, err
	}
	return half, q.Cast(half, k.src)
}

// finish starts to write the average into dst, as what was asked for, and notes when
// that is over. If the collective has failed already, Join says why.
func (k *call) finish(q backend.Queue, w *work, average backend.Buffer) (err error) {
	if w.inner.Wait(q) != nil {
		return nil
	}
	factor := 1.0
	if k.what.Op == backend.Sum {
		factor = float64(k.c.Size())
	}
	if err := q.CastScale(k.dst, average, factor); err != nil {
		return err
	}
	if w.done, err = q.Record(); err == nil {
		k.c.done = w.done
	}
	return err
}
