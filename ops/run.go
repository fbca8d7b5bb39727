package ops

import (
	"math"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// run applies t to a value of shape in, and returns a new value of shape out.
func (t transform) run(comm backend.Communicator, origin *backend.Origin, v gorgonia.Value,
	dt tensor.Dtype, in, out tensor.Shape) (gorgonia.Value, error) {
	if err := check(v, in, dt); err != nil {
		return nil, err
	}
	return at(comm, func(p onHost) (gorgonia.Value, error) {
		x, err := read(v)
		if err != nil {
			return nil, err
		}
		y, memory, err := fresh(dt, out)
		if err != nil {
			return nil, err
		}
		return y, t.fill(p, origin, operand{memory, out}, x, comm.Rank(), comm.Size())
	})
}

// fill writes the result of rank r to y.
func (t transform) fill(p worker, origin *backend.Origin, y, x operand, r, P int) error {
	if err := t.communicate(p, origin, y, x, r, P); err != nil {
		return err
	}
	if !t.gives(r) {
		return p.kernels().Zero(y.Buffer)
	}
	if t.scale == 1 {
		return nil
	}
	return rescale(p, y.Buffer, t.scale)
}

// rescale multiplies y by scale. A scale of 1/n divides by n, as [Down] and averages do: the
// product with the rounded 1/n has other bits.
func rescale(p worker, y backend.Buffer, scale float64) error {
	return p.apply(0, y, func(p *fuse.Program, x []fuse.Value) fuse.Value {
		t := fuse.Type(y.DType())
		if n := math.Round(1 / scale); math.Abs(n) > 1 && 1/n == scale {
			return p.Do(fuse.Div, x[0], p.Const(t, n))
		}
		if !t.Float() { // the product is truncated
			return p.Cast(t, p.Do(fuse.Mul, p.Cast(backend.F64, x[0]), p.Const(backend.F64, scale)))
		}
		return p.Do(fuse.Mul, x[0], p.Const(t, scale))
	}, y)
}

// communicate cuts x, communicates, and joins the pieces in y.
func (t transform) communicate(p worker, origin *backend.Origin, y, x operand, r, P int) error {
	switch {
	case t.kind == 0 && t.scatter == none:
		return p.kernels().Copy(y.Buffer, x.Buffer)
	case t.kind == 0:
		return piece(p.kernels(), y.Buffer, x, t.scatter, sum(t.cut[:r]), t.cut[r])
	}
	var src, dst backend.Buffer // nothing where the collective ignores them
	var err error
	if t.takes(r) {
		if src, err = t.pack(p, x, r, P); err != nil {
			return err
		}
	}
	if t.gives(r) {
		dst = y.Buffer
		if t.joins(y.shape) {
			if dst, err = p.scratch(y.DType(), y.Len()); err != nil {
				return err
			}
		}
	}
	c := t.collective(x.shape, P)
	c.Origin = origin
	if err := p.run(c, dst, src); err != nil {
		return err
	}
	if !t.joins(y.shape) || !t.gives(r) {
		return nil
	}
	return join(p, y, dst, t.gather, t.received(r, P))
}

// packs and joins report whether pieces of an operand, and of a result, lie apart, and the
// communicator does not take them so. Pieces along the first axis lie one after the other.
func (t transform) packs(x []int) bool {
	return t.rows == nil && t.scatter != none && product(x[:t.scatter]) != 1
}

func (t transform) joins(y []int) bool {
	return t.rows == nil && t.gather != none && product(y[:t.gather]) != 1
}

// pack returns the pieces for all ranks, one after the other.
func (t transform) pack(p worker, x operand, r, P int) (backend.Buffer, error) {
	if !t.packs(x.shape) {
		return x.Buffer, nil
	}
	packed, err := p.scratch(x.DType(), x.Len())
	if err != nil {
		return packed, err
	}
	lengths := t.sent(r, P)
	if exchanges(x.Buffer, lengths) {
		outer, width := product(x.shape[:t.scatter]), lengths[0]*product(x.shape[t.scatter+1:])
		return packed, p.kernels().CopyStrided(packed, x.Buffer, []int{P, outer, width},
			[]int{width, P * width, 1})
	}
	rest, at := packed, 0
	for _, n := range lengths {
		size := n * (x.Len() / max(x.shape[t.scatter], 1))
		if err := piece(p.kernels(), rest.Slice(0, size), x, t.scatter, at, n); err != nil {
			return backend.Buffer{}, err
		}
		rest, at = rest.Slice(size, rest.Len()), at+n
	}
	return packed, nil
}

// piece copies x[..., at:at+n, ...] along an axis to dst.
func piece(k backend.Arithmetic, dst backend.Buffer, x operand, axis, at, n int) error {
	if dst.Len() == 0 {
		return nil
	}
	inner := product(x.shape[axis+1:])
	pitch := x.shape[axis] * inner
	return k.Copy2D(dst, n*inner, x.Slice(at*inner, x.Len()), pitch, n*inner,
		product(x.shape[:axis]))
}

// join is the inverse of pack: src holds pieces of y, of the given lengths along an
// axis, one after the other.
func join(p worker, y operand, src backend.Buffer, axis int, lengths []int) error {
	inner, outer := product(y.shape[axis+1:]), product(y.shape[:axis])
	if exchanges(y.Buffer, lengths) {
		P, width := len(lengths), lengths[0]*inner
		return p.kernels().CopyStrided(y.Buffer, src, []int{outer, P, width},
			[]int{width, outer * width, 1})
	}
	at := 0
	for _, n := range lengths {
		size := n * inner * outer
		if size == 0 {
			continue
		}
		err := p.kernels().Copy2D(y.Slice(at*inner, y.Len()), y.shape[axis]*inner,
			src.Slice(0, size), n*inner, n*inner, outer)
		if err != nil {
			return err
		}
		src, at = src.Slice(size, src.Len()), at+n
	}
	return nil
}

// exchanges reports whether one CopyStrided cuts x into pieces of the given lengths,
// or joins them: pieces of one length are an exchange of two axes. On the host it is
// faster to copy piece by piece.
func exchanges(x backend.Buffer, lengths []int) bool {
	return x.Device() && x.Len() > 0 && slices.Min(lengths) == slices.Max(lengths)
}
