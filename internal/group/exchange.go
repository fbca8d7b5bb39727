package group

import (
	"context"
	"errors"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/serial"
)

// sheet is the memory of an exchange.
type sheet struct {
	all, mine []byte
	digests   []uint64 // of all, by rank
}

// comparison is the comparison of one call's headers.
type comparison struct {
	c      *compared
	header backend.Header
	sheet  *sheet
	work   backend.Work
	over   bool // err was known when Start looked
	err    error
	// compared is closed when err is known; nil if over is set.
	compared serial.Event
}

// exchange starts the exchange of a header on q. c.mu is held.
func (c *compared) exchange(q backend.Queue, h backend.Header) (*comparison, error) {
	if err := c.failure(h); err != nil {
		return nil, err
	}
	x := &comparison{c: c, header: h, sheet: c.sheet()}
	h.Put((*[backend.HeaderSize]byte)(x.sheet.mine))
	var err error
	x.work, err = c.Base.Start(q, backend.Collective{Kind: backend.AllGather},
		backend.Of(x.sheet.all), backend.Of(x.sheet.mine))
	if err != nil {
		return nil, x.named(err)
	}
	c.seq++
	if !x.work.Done() {
		return x, nil
	}
	x.over, x.err = true, x.outcome(x.work.Join(context.Background()))
	c.sheets = append(c.sheets, x.sheet)
	return x, nil
}

// sheet returns memory for one exchange. c.mu is held.
func (c *compared) sheet() *sheet {
	if n := len(c.sheets); n > 0 {
		s := c.sheets[n-1]
		c.sheets = c.sheets[:n-1]
		return s
	}
	return &sheet{make([]byte, c.Size()*backend.HeaderSize), make([]byte, backend.HeaderSize),
		make([]uint64, c.Size())}
}

// finish waits for the exchange and compares. A mismatch aborts inner, because
// the call itself is behind the exchange already.
func (x *comparison) finish() {
	x.err = x.outcome(x.work.Join(context.Background()))
	if errors.Is(x.err, backend.ErrMismatch) {
		x.c.Base.Abort(x.err)
	}
	close(x.compared)
}

// outcome compares the headers, once the exchange has ended with err.
//
// Every rank receives the same headers. So when two differ every rank finds that, and who is to
// blame, by itself, and nobody needs to be told.
func (x *comparison) outcome(err error) error {
	if err != nil {
		return x.named(err)
	}
	header := func(r int) *[backend.HeaderSize]byte {
		return (*[backend.HeaderSize]byte)(x.sheet.all[r*backend.HeaderSize:])
	}
	for p := range x.sheet.digests {
		x.sheet.digests[p] = backend.Digest(header(p))
	}
	d := Differ(x.sheet.digests, header)
	if d == nil {
		return nil
	}
	members := x.c.Base.Capabilities().Members
	x.c.err.CompareAndSwap(nil, &backend.Error{Comm: x.c.Name(), Members: members,
		Rank: x.c.Rank(), Peer: d.Peer, Cause: d.Differs().Report.Cause(members)})
	return x.c.failure(x.header)
}

// named returns an error of the exchange as one of the call it is for.
func (x *comparison) named(err error) error {
	var e *backend.Error
	if !errors.As(err, &e) {
		return err
	}
	named := *e
	named.Call = x.header.String()
	return &named
}

// failure returns the mismatch as the error of the call with header h, or nil.
func (c *compared) failure(h backend.Header) error {
	err := c.err.Load()
	if err == nil {
		return nil
	}
	named := *err
	named.Call = h.String()
	return &named
}

// work is a call that was started behind its exchange.
type work struct {
	inner backend.Work
	x     *comparison
}

// Wait orders q after the collective; a mismatch comes out of Join, or of the
// next call.
func (w *work) Wait(q backend.Queue) error { return w.inner.Wait(q) }

// Join waits for the comparison, which an abort of the call ends too, and then
// for the call.
func (w *work) Join(ctx context.Context) error {
	if err := w.x.compared.Join(ctx); err != nil {
		return err
	}
	err := w.inner.Join(ctx)
	if stopped := ctx.Err(); w.x.err == nil || stopped != nil && errors.Is(err, stopped) {
		return err
	}
	return w.x.err
}

// Done implements [backend.Work].
func (w *work) Done() bool { return w.x.compared.Done() && w.inner.Done() }
