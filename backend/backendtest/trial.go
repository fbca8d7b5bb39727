package backendtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// trial is one call of a group, with its data.
type trial struct {
	what   backend.Collective
	dtype  backend.DType
	count  int
	srcs   [][]byte // by rank; nil where ignored
	wants  [][]byte // by rank; nil where ignored, or all nil if not compared
	offset int      // elements off alignment
	// inPlace asks for the same buffer, or the chunk in the larger one.
	inPlace bool
	// where says where a rank's source and destination live.
	where       func(rank int) (src, dst int)
	unsupported bool
	gots        [][]byte // by rank: the destinations after the call
}

// newTrial generates the data of a trial whose results are not compared.
func newTrial(what backend.Collective, d backend.DType, P, count int, p pattern,
	seed uint64) *trial {
	t := &trial{what: what, dtype: d, count: count, srcs: make([][]byte, P),
		gots:  make([][]byte, P),
		where: func(int) (int, int) { return plain, plain }}
	for r := range P {
		if n, _ := lengths(what, r, P, count); n >= 0 {
			t.srcs[r] = generate(d, p, what.Op, n, seed, uint64(r))
		}
	}
	return t
}

// expect makes the results of a trial compared with what must come of its data.
func (t *trial) expect() *trial {
	t.wants = expected(t.what, len(t.srcs), t.count, t.dtype, t.srcs)
	return t
}

// run runs a trial on every rank, the r-th with memory ms[r], and checks it.
func (t *trial) run(comms []backend.Communicator, ms []*memory, qs []backend.Queue) error {
	err := each(comms, func(c backend.Communicator) error {
		var q backend.Queue
		if qs != nil {
			q = qs[c.Rank()]
		}
		return t.rank(c, ms[c.Rank()], q)
	})
	if err != nil || t.unsupported {
		return err
	}
	switch t.what.Kind {
	case backend.AllReduce, backend.AllGather, backend.Broadcast:
		first := comms[0].Rank()
		for _, c := range comms {
			if !bytes.Equal(t.gots[c.Rank()], t.gots[first]) {
				return fmt.Errorf("rank %d has other bits than rank %d", c.Rank(), first)
			}
		}
	}
	return nil
}

// rank runs a trial on one rank and checks its memory.
func (t *trial) rank(c backend.Communicator, m *memory, q backend.Queue) error {
	m.reset()
	b, err := t.bind(m, c.Rank(), c.Size())
	if err != nil {
		return err
	}
	err = start(c, q, t.what, b.dst, b.src)
	if t.unsupported {
		if !errors.Is(err, backend.ErrUnsupported) {
			return fmt.Errorf("listed as unsupported, but the error is %v", orNone(err))
		}
		return nil
	}
	if err != nil {
		return err
	}
	return t.check(b, c.Rank())
}

// start runs a collective on a queue to its end.
func start(c backend.Communicator, q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) error {
	w, err := c.Start(q, what, dst, src)
	if err != nil {
		return err
	}
	return w.Join(context.Background())
}

// binding is the buffers of one rank, and what may happen to them.
type binding struct {
	src, dst backend.Buffer
	operands []*operand
	out      *operand // where the destination is, nil if it is ignored
	from, to int      // elements of out
	// loose is an operand of which anything may change: in place, the rest of
	// the larger buffer.
	loose *operand
}

// bind puts a rank's data into memory.
func (t *trial) bind(m *memory, r, P int) (*binding, error) {
	nsrc, ndst := lengths(t.what, r, P, t.count)
	atSrc, atDst := t.where(r)
	if t.inPlace && (t.what.Kind != backend.AllToAll || P == 1) {
		return t.bindInPlace(m, r, P, nsrc, ndst, atDst)
	}
	b := &binding{}
	src, err := t.operand(m, b, nsrc, atSrc, t.srcs[r])
	if err != nil {
		return nil, err
	}
	dst, err := t.operand(m, b, ndst, atDst, nil)
	if err != nil {
		return nil, err
	}
	b.src, b.dst = wholeOperand(src), wholeOperand(dst)
	if ndst >= 0 {
		b.out, b.to = dst, ndst
	}
	return b, nil
}

// operand adds an operand to b. A buffer that is ignored is the zero Buffer in
// half of the cases, and else memory that must stay as it is.
func (t *trial) operand(m *memory, b *binding, n, where int, content []byte) (*operand, error) {
	if n < 0 && t.offset%2 == 0 {
		return nil, nil
	}
	if n < 0 {
		n = 3
	}
	o, err := m.operand(t.dtype, n, t.offset, where, content)
	b.operands = append(b.operands, o)
	return o, err
}

func wholeOperand(o *operand) backend.Buffer {
	if o == nil {
		return backend.Buffer{}
	}
	return o.buffer(0, o.len())
}

func (t *trial) bindInPlace(m *memory, r, P, nsrc, ndst, where int) (*binding, error) {
	b := &binding{}
	content := t.srcs[r]
	lo := 0 // of the smaller buffer in the larger
	if nsrc >= 0 && ndst >= 0 && nsrc != ndst {
		lo = t.chunkStart(r)
		if ndst > nsrc { // the source is a chunk of the destination
			content = bytes.Repeat([]byte{staleByte}, ndst*t.dtype.Size())
			copy(content[lo*t.dtype.Size():], t.srcs[r])
		}
	}
	o, err := t.operand(m, b, max(nsrc, ndst), where, content)
	if err != nil {
		return nil, err
	}
	b.src, b.dst = wholeOperand(o), wholeOperand(o)
	switch {
	case ndst < 0: // nothing comes here, so it must stay
	case nsrc > ndst && nsrc >= 0:
		b.out, b.from, b.to, b.loose = o, lo, lo+ndst, o
		b.dst = o.buffer(lo, lo+ndst)
	default:
		b.out, b.to = o, ndst
		if nsrc >= 0 {
			b.src = o.buffer(lo, lo+nsrc)
		}
	}
	return b, nil
}

func (t *trial) chunkStart(r int) int {
	switch {
	case t.what.Kind == backend.AllReduce:
		return 0
	case t.what.Splits != nil:
		return total(t.what.Splits[:r])
	}
	return r * t.count
}

// check compares the destination with what it must be, and everything else
// with what it was.
func (t *trial) check(b *binding, r int) error {
	for _, o := range b.operands {
		now, err := o.fetch()
		if err != nil {
			return err
		}
		lo, hi := 0, 0 // may change
		if o == b.out {
			size := o.dtype.Size()
			lo, hi = o.lo+b.from*size, o.lo+b.to*size
			t.gots[r] = now[lo:hi]
			if t.wants != nil {
				if err := differ(o.dtype, now[lo:hi], t.wants[r]); err != nil {
					return err
				}
			}
		}
		if o == b.loose {
			lo, hi = o.lo, o.hi
		}
		if err := o.untouched(now, lo, hi); err != nil {
			return err
		}
	}
	return nil
}
