package gpu

import (
	"errors"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// A call by copy engines: in an all-reduce each rank adds up one piece of the operands.
//
//	meet                     all have come: their operands are written, their staging is free
//	push piece p to rank p   into its staging, for all p
//	meet                     all pieces have arrived
//	add                      a kernel of a few microseconds, in rank order
//	push the sum to all      to where they want it
//	meet                     all sums have arrived, all staging is free
//
// A reduce-scatter leaves out the push of sums. An all-gather is that push alone, where ranks want
// it in a window. Elsewhere each rank pushes its chunk into the staging of all, and they copy.
//
// Copies cross NVLink at 360 to 390 GB/s, as fast as kernels that keep 24 to 32 multiprocessors
// busy for it. All of it is recorded in the order of one queue: nothing but the devices' memory
// says how far the ranks are: see flags.go.

// launchCopies records a call by copy engines. The destination of an all-reduce is in a window: see
// chooseAgain.
func (c *Communicator) launchCopies(q stream, k *call) error {
	m := c.memory
	size, unit := c.size, align/k.dtype.Size()
	r := copyRound{c: c, q: q, call: k, piece: k.count}
	switch {
	case k.what.Kind == backend.AllReduce:
		r.piece = (k.count + size*unit - 1) / (size * unit) * unit
	case k.what.Splits != nil:
		r.piece = slices.Max(k.what.Splits)
	}
	step := r.piece
	if c.stages(k) {
		step = 2 * c.plan.Staging / (size - 1) / align * unit
	}
	r.room = step
	err := m.meet(q, 0)
	for ; r.lo < r.piece && err == nil; r.lo += step {
		r.hi = min(r.lo+step, r.piece)
		if c.stages(k) {
			err = errors.Join(r.scatter(), m.meet(q, 1), r.combine())
		}
		if c.spreads(k) {
			err = errors.Join(err, r.gatherPieces())
		}
		err = errors.Join(err, m.meet(q, 2))
	}
	return err
}

// stages reports whether copy engines take a call through staging.
func (c *Communicator) stages(k *call) bool {
	return k.what.Kind != backend.AllGather || !c.spreads(k)
}

// spreads reports whether they write results to where all ranks want them.
func (c *Communicator) spreads(k *call) bool {
	return k.what.Kind != backend.ReduceScatter && c.memory.windowOf(k.dst) >= 0
}

// meet waits, in the order of a queue, until all ranks have come so far: by a set of flags, or else
// by the shortest call of a kernel, of a word that is always zero.
func (m *peerMemory) meet(q stream, set int) error {
	if m.c.waits.Load() != nil {
		return m.meetByFlags(q, set)
	}
	x := &m.c.exchange
	word := m.word(m.c.rank, m.c.rank).Slice(0, backend.F32.Size()).As(backend.F32)
	*x = peers.PeerCall{Way: peers.LL, Dst: word, Src: word}
	return m.c.exchanges(q, x)
}

// copyRound is the part of a call that has room in staging: elements lo to hi of each piece.
type copyRound struct {
	c      *Communicator
	q      stream
	call   *call
	piece  int // the longest one
	lo, hi int
	room   int // for each sender in staging
}

// of returns the part of piece p of an operand, which has all pieces or this one alone.
func (r *copyRound) of(b backend.Buffer, p int) backend.Buffer {
	lo, hi := min(p*r.piece, b.Len()), min((p+1)*r.piece, b.Len())
	if r.call.what.Kind != backend.AllReduce {
		lo, hi = r.call.what.Chunk(p, r.c.size, r.call.count)
	}
	if b.Len() == hi-lo {
		lo, hi = 0, b.Len()
	}
	return b.Slice(min(lo+r.lo, hi), min(lo+r.hi, hi))
}

// sent returns what this rank pushes into the staging of rank p.
func (r *copyRound) sent(p int) backend.Buffer {
	if r.call.what.Kind == backend.AllGather {
		p = r.c.rank
	}
	return r.of(r.call.src, p)
}

// staged returns where n elements of rank `from` are in the staging of rank `at`.
func (r *copyRound) staged(at, from, n int) backend.Buffer {
	m, d := r.c.memory, r.call.dtype
	if from > at {
		from--
	}
	return backend.OnDevice(d, m.pad.at[at]+uintptr(padBytes(r.c.size)+from*r.room*d.Size()), n)
}

// scatter pushes to each rank what it combines. Each rank starts with another one, so that links
// are used evenly.
func (r *copyRound) scatter() error {
	for step := 1; step < r.c.size; step++ {
		p := (r.c.rank + step) % r.c.size
		part := r.sent(p)
		if err := r.q.Push(r.staged(p, r.c.rank, part.Len()), part); err != nil {
			return err
		}
	}
	return nil
}

// combine adds up this rank's piece, or takes the pieces of an all-gather out of staging.
func (r *copyRound) combine() error {
	own := r.c.rank
	if r.call.what.Kind == backend.AllGather {
		errs := []error{r.put(own, r.of(r.call.src, own))}
		for step := 1; step < r.c.size; step++ {
			p := (own + step) % r.c.size
			errs = append(errs, r.put(p, r.staged(own, p, r.of(r.call.dst, p).Len())))
		}
		return errors.Join(errs...)
	}
	dst := r.of(r.call.dst, own)
	if dst.Len() == 0 {
		return nil
	}
	srcs := r.c.operands[:0]
	for p := range r.c.size {
		if p == own {
			srcs = append(srcs, r.of(r.call.src, own))
		} else {
			srcs = append(srcs, r.staged(own, p, dst.Len()))
		}
	}
	return r.q.Reduce(r.call.what.Op, dst, srcs...)
}

// put copies piece p to its place on this rank, unless it is there.
func (r *copyRound) put(p int, src backend.Buffer) error {
	dst := r.of(r.call.dst, p)
	if dst.Addr() == src.Addr() {
		return nil
	}
	return r.q.Push(dst, src)
}

// gatherPieces pushes this rank's piece to all others, and puts it where it belongs here.
func (r *copyRound) gatherPieces() error {
	own, dst := r.of(r.call.dst, r.c.rank), r.call.dst
	place := own.Addr()
	if r.call.what.Kind == backend.AllGather {
		own = r.of(r.call.src, r.c.rank)
	}
	w := r.c.memory.windows[r.c.memory.windowOf(dst)]
	for step := 1; step < r.c.size; step++ {
		p := (r.c.rank + step) % r.c.size
		theirs := backend.OnDevice(r.call.dtype, w.at[p]+place-w.own.Addr(), own.Len())
		if err := r.q.Push(theirs, own); err != nil {
			return err
		}
	}
	return r.put(r.c.rank, own)
}
