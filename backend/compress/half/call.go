package half

import (
	"context"
	"errors"

	"github.com/euryale-ml/euryale/backend"
)

// call is one reduction as 16 bits.
type call struct {
	c        *Communicator
	what     backend.Collective
	count    int
	dst, src backend.Buffer
	text     string // for errors
}

// innerError is an error of inner, about the collective that it was asked for.
type innerError struct{ error }

// Sums and averages, of f32 and of f64, all travel as averages of 16 bits. Each call says what it
// stands for, so that ranks with different calls are still found out.

// averaged returns the collective that replaces a call on inner, between casts.
func averaged(what backend.Collective, d backend.DType) backend.Collective {
	what.Original.Op, what.Original.DType = what.Op, d
	what.Op = backend.Avg
	return what
}

// allowHalf returns a call of f32 that inner may round itself. It says to which dtype.
func allowHalf(what backend.Collective, half backend.DType) backend.Collective {
	what.Original = backend.Original{Op: what.Op, DType: backend.F32, Transport: half}
	what.AllowHalf = half
	return what
}

// runInside starts the call on q where inner rounds by itself.
func (k *call) runInside(q backend.Queue) (*work, error) {
	inner, err := k.c.Pass(q, allowHalf(k.what, k.c.half), k.count, k.dst, k.src)
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
	inner, err := k.c.Pass(q, averaged(k.what, k.dst.DType()), k.count, mine, half)
	if err != nil {
		return nil, &innerError{err}
	}
	w := &work{c: k.c, inner: inner, call: k.text}
	return w, k.finish(q, w, mine)
}

// rounded returns the operand in 16 bits, to be reduced in place.
func (k *call) rounded(q backend.Queue) (backend.Buffer, error) {
	half, err := k.c.room(q, k.src.Len())
	if err != nil {
		return half, err
	}
	return half, q.Cast(half, k.src)
}

// finish starts to write the requested average or sum into dst, and records an event behind it. If
// the collective has failed already, Join says why.
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
	if w.done, err = q.Record(); err == nil && !backend.Recorded(q) {
		k.c.done = w.done
	}
	return err
}

// work is a call of inner, and what was started after it.
type work struct {
	c     *Communicator
	inner backend.Work
	done  backend.Event // nil if nothing was
	call  string        // for errors; "" for what passed as it was
}

// Wait implements [backend.Work].
func (w *work) Wait(q backend.Queue) error {
	if q == nil {
		q = w.c.Device().Default()
	}
	if err := w.inner.Wait(q); err != nil {
		return w.c.restate(err, w.call)
	}
	if w.done == nil {
		return nil
	}
	return q.Wait(w.done)
}

// Done implements [backend.Work].
func (w *work) Done() bool { return w.inner.Done() && (w.done == nil || w.done.Done()) }

// Join implements [backend.Work].
func (w *work) Join(ctx context.Context) error {
	err := w.inner.Join(ctx)
	if stopped := ctx.Err(); stopped != nil && errors.Is(err, stopped) {
		return err
	}
	if w.done != nil {
		if stopped := w.done.Join(ctx); stopped != nil {
			return stopped
		}
	}
	return w.c.restate(err, w.call)
}

// restate returns an error of inner in terms of the caller's call, if call is not empty.
func (c *Communicator) restate(err error, call string) error {
	var e *backend.Error
	if err == nil || !errors.As(err, &e) {
		return err
	}
	said := *e
	if call != "" {
		said.Call = call
	}
	var m *backend.MismatchError
	if errors.As(e.Cause, &m) {
		both := *m
		both.Mine, both.Theirs = m.Mine.Asked(), m.Theirs.Asked()
		said.Cause = &both
	}
	return &said
}
