package fakedevice

import (
	"cmp"
	"context"
	"errors"

	"github.com/euryale-ml/euryale/backend"
)

// Capabilities returns what inner can do, with the Rows of kernels on GPUs: types of 2 bytes and
// more.
func (c *Communicator) Capabilities() backend.Capabilities {
	caps := c.Base.Capabilities()
	caps.Rows = func(_ backend.Collective, d backend.DType, _ int) bool { return d.Size()%2 == 0 }
	return caps
}

// permute runs an AllToAll with Rows on the host: it packs pieces, exchanges them and joins those
// received.
func (c *Communicator) permute(q backend.Queue, call backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	count, err := call.Check(c.Rank(), c.Size(), dst, src)
	if err != nil {
		return nil, backend.Refuse(c, err)
	}
	d := call.DType(dst, src)
	if !c.Capabilities().RunsRows(call, d, count) {
		return nil, backend.RefuseRows(c, call)
	}
	q = cmp.Or(q, c.Base.Device().Default())
	plain := call
	plain.Rows = nil
	room := func(n int) backend.Buffer { return backend.Of(make([]byte, n*d.Size())).As(d) }
	packed, received := room(src.Len()), room(dst.Len())
	if err := Pack(q, call, c.Rank(), c.Size(), count, packed, src); err != nil {
		return nil, err
	}
	w, err := c.Base.Start(q, plain, received, packed)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(w.Wait(q), Join(q, call, c.Rank(), c.Size(), count, dst,
		received)); err != nil {
		return nil, err
	}
	end, err := q.Record()
	return joined{w, end, c.Base.Device()}, err
}

// joined is the Work of an exchange behind which a queue joins what was received.
type joined struct {
	exchange backend.Work
	end      backend.Event
	device   backend.Device
}

// Wait implements [backend.Work].
func (w joined) Wait(q backend.Queue) error {
	return errors.Join(w.exchange.Wait(q), cmp.Or(q, w.device.Default()).Wait(w.end))
}

// Join implements [backend.Work].
func (w joined) Join(ctx context.Context) error {
	return errors.Join(w.exchange.Join(ctx), w.end.Join(ctx))
}

// Done implements [backend.Work].
func (w joined) Done() bool { return w.exchange.Done() && w.end.Done() }

// Pack copies the pieces that rank r of P sends in an AllToAll from src, where they lie in rows, to
// dst, one after the other. count is the result of Check.
func Pack(k backend.Arithmetic, call backend.Collective, r, P, count int, dst,
	src backend.Buffer) error {
	var errs []error
	for p := range P {
		n, from, _ := call.Pair(r, p, P, count)
		rows := call.Rows.Src[r]
		if n > 0 {
			errs = append(errs, k.Copy2D(dst.Slice(from, from+n), n/rows,
				src.Slice(from/rows, src.Len()), src.Len()/rows, n/rows, rows))
		}
	}
	return errors.Join(errs...)
}

// Join is the opposite of Pack for what rank r receives.
func Join(k backend.Arithmetic, call backend.Collective, r, P, count int, dst,
	src backend.Buffer) error {
	var errs []error
	for p := range P {
		n, _, to := call.Pair(p, r, P, count)
		rows := call.Rows.Dst[r]
		if n > 0 {
			errs = append(errs, k.Copy2D(dst.Slice(to/rows, dst.Len()), dst.Len()/rows,
				src.Slice(to, to+n), n/rows, n/rows, rows))
		}
	}
	return errors.Join(errs...)
}
