package ops

import (
	"context"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// run applies t to a value of shape in, and returns a new value of shape out.
func (t transform) run(comm backend.Communicator, v gorgonia.Value, dt tensor.Dtype, in, out tensor.Shape) (gorgonia.Value, error) {
	q := comm.Device().Default()
	k := q.Kernels()
	x, err := read(k, v, in, dt)
	if err != nil {
		return nil, err
	}
	y, memory, err := fresh(dt, out)
	if err != nil {
		return nil, err
	}
	if err := t.move(comm, k, operand{memory, out}, x); err != nil {
		return nil, err
	}
	if t.scale != 1 && t.gives(comm.Rank()) {
		if err := k.Scale(memory, memory, t.scale); err != nil {
			return nil, err
		}
	}
	return y, drain(q)
}

// drain waits for what was started on q.
func drain(q backend.Queue) error {
	done, err := q.Record()
	if err != nil {
		return err
	}
	return done.Join(context.Background())
}

// move cuts x, communicates, and joins the pieces in y, which is zero.
func (t transform) move(comm backend.Communicator, k backend.Kernels, y, x operand) error {
	r, P := comm.Rank(), comm.Size()
	switch {
	case t.kind == 0 && t.scatter == none:
		return k.Copy(y.Buffer, x.Buffer)
	case t.kind == 0:
		return piece(k, y.Buffer, x, t.scatter, sum(t.cut[:r]), t.cut[r])
	}
	var src, dst backend.Buffer // a buffer that the collective ignores stays zero
	if t.takes(r) {
		packed, err := t.pack(k, x, r, P)
		if err != nil {
			return err
		}
		src = packed
	}
	joins := t.gather != none && product(y.shape[:t.gather]) != 1
	if t.gives(r) {
		dst = y.Buffer
		if joins {
			dst = scratch(y.DType(), y.Len())
		}
	}
	if err := backend.Run(comm, t.collective(x.shape, P), dst, src); err != nil {
		return err
	}
	if !joins || !t.gives(r) {
		return nil
	}
	return join(k, y, dst, t.gather, t.received(r, P))
}

// pack returns the pieces for all ranks, one after the other. Pieces along the
// first axis are so already.
func (t transform) pack(k backend.Kernels, x operand, r, P int) (backend.Buffer, error) {
	if t.scatter == none || product(x.shape[:t.scatter]) == 1 {
		return x.Buffer, nil
	}
	packed := scratch(x.DType(), x.Len())
	rest, at := packed, 0
	for _, n := range t.sent(r, P) {
		size := n * (x.Len() / max(x.shape[t.scatter], 1))
		if err := piece(k, rest.Slice(0, size), x, t.scatter, at, n); err != nil {
			return backend.Buffer{}, err
		}
		rest, at = rest.Slice(size, rest.Len()), at+n
	}
	return packed, nil
}

// piece copies x[..., at:at+n, ...] along an axis to dst.
func piece(k backend.Kernels, dst backend.Buffer, x operand, axis, at, n int) error {
	if dst.Len() == 0 {
		return nil
	}
	inner := product(x.shape[axis+1:])
	pitch := x.shape[axis] * inner
	return k.Copy2D(dst, n*inner, x.Slice(at*inner, x.Len()), pitch, n*inner, product(x.shape[:axis]))
}

// join is the inverse of cutting y into pieces of the given lengths: src holds
// the pieces one after the other.
func join(k backend.Kernels, y operand, src backend.Buffer, axis int, lengths []int) error {
	inner, outer := product(y.shape[axis+1:]), product(y.shape[:axis])
	at := 0
	for _, n := range lengths {
		size := n * inner * outer
		if size == 0 {
			continue
		}
		err := k.Copy2D(y.Slice(at*inner, y.Len()), y.shape[axis]*inner, src.Slice(0, size), n*inner, n*inner, outer)
		if err != nil {
			return err
		}
		src, at = src.Slice(size, src.Len()), at+n
	}
	return nil
}
