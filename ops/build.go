package ops

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// Option changes how an operation divides an axis. The default is to divide it evenly.
type Option func(*lengths)

// lengths are the lists given in options.
type lengths struct {
	one             []int // from Splits
	scatter, gather []int // from AllToAllSplits
	single, pair    bool  // which option was given
}

// Splits gives the length of every rank's part along the axis of the operation, in rank order:
// lens[r] is the length of rank r's chunk, or of rank r's x where the ranks' x are concatenated.
// Every rank passes the same list. A length may be 0: see the package comment.
//
// Every operation with one axis takes it; AllToAll takes [AllToAllSplits].
func Splits(lens ...int) Option {
	lens = append([]int{}, lens...) // not nil, which means even
	return func(l *lengths) { l.one, l.single = lens, true }
}

// AllToAllSplits gives the lengths along both axes of an AllToAll, in rank
// order: rank r gets scatter[r] of the scattered axis, and has gather[r] of the
// gathered axis in its x. nil means even. Every rank passes the same lists.
//
// If both axes are the same, only one list can be given: with scatter, rank r gets scatter[r] from
// every rank; with gather, it sends gather[r] to every rank.
func AllToAllSplits(scatter, gather []int) Option {
	scatter, gather = slices.Clone(scatter), slices.Clone(gather)
	return func(l *lengths) { l.scatter, l.gather, l.pair = scatter, gather, true }
}

// builder makes the node of one operation. Errors of its methods do not name the operation.
type builder struct {
	comm    backend.Communicator
	x       *gorgonia.Node
	dtype   tensor.Dtype
	moved   backend.DType // the backend's name for it
	shape   tensor.Shape  // of x
	lengths lengths
}

// build makes the node of the operation. The axes of fwd are as the user gave
// them. backward returns the backward transform of the resolved forward one.
func build(name string, comm backend.Communicator, x *gorgonia.Node, fwd transform, opts []Option,
	backward func(fwd transform, P int) (transform, error)) (*gorgonia.Node, error) {
	y, err := func() (*gorgonia.Node, error) {
		b, err := newBuilder(comm, x, opts)
		if err != nil {
			return nil, err
		}
		return b.node(fwd, backward)
	}()
	if err != nil {
		return nil, fmt.Errorf("ops: %s: %w", name, err)
	}
	return y, nil
}

func newBuilder(comm backend.Communicator, x *gorgonia.Node, opts []Option) (*builder, error) {
	if err := backend.Given("", "comm", comm, "x", x, "opts", opts); err != nil {
		return nil, err
	}
	if x.Graph() == nil {
		return nil, fmt.Errorf("%w: x is not part of a graph", backend.ErrArgument)
	}
	b := &builder{comm: comm, x: x, dtype: x.Dtype(), shape: x.Shape()}
	var err error
	if b.moved, err = bufferDType(b.dtype); err != nil {
		return nil, err
	}
	if t, ok := x.Type().(gorgonia.TensorType); ok && t.Dims != len(b.shape) {
		return nil, fmt.Errorf("%w: x is a %v, but its shape is %v: give it one with "+
			"gorgonia.WithShape", ErrShape, t, b.shape)
	}
	for _, option := range opts {
		option(&b.lengths)
	}
	return b, nil
}

func (b *builder) node(fwd transform, backward func(fwd transform, P int) (transform, error)) (
	*gorgonia.Node, error) {
	op, err := b.op(fwd, backward)
	if err != nil {
		return nil, err
	}
	if b.comm.Size() == 1 && op.bwd.scale == 1 {
		return b.x, nil // nothing moves, forward or backward
	}
	return op.apply(b.x)
}

// op returns the operation of a transform.
func (b *builder) op(fwd transform, backward func(fwd transform, P int) (transform, error)) (
	*collectiveOp, error) {
	fwd, err := b.resolve(fwd)
	if err != nil {
		return nil, err
	}
	r, P := b.comm.Rank(), b.comm.Size()
	bwd, err := backward(fwd, P)
	if err != nil {
		return nil, err
	}
	op := &collectiveOp{comm: b.comm, fwd: fwd, bwd: bwd, dtype: b.dtype, in: b.shape,
		out: fwd.shape(b.shape, r, P)}
	op.fwd.rows, op.bwd.rows = fwd.layout(b.comm, b.moved, op.in), bwd.layout(b.comm, b.moved,
		op.out)
	return op, nil
}

// resolve checks the transform and fills in what follows from the shape of x.
func (b *builder) resolve(t transform) (transform, error) {
	P := b.comm.Size()
	switch {
	case t.kind.Reduces() && !t.op.Valid():
		return t, fmt.Errorf("%w: unknown reduction %v: use one of %v", backend.ErrArgument, t.op,
			backend.ReduceOps())
	case t.kind.Rooted() && (t.root < 0 || t.root >= P):
		return t, fmt.Errorf("%w: root %d is out of range: there are %d ranks, 0 to %d",
			backend.ErrArgument, t.root, P, P-1)
	}
	t.scale = 1
	var err error
	if t.kind == backend.AllToAll {
		err = b.resolvePair(&t)
	} else {
		err = b.resolveAxis(&t)
	}
	return t, err
}

// resolveAxis resolves a transform with at most one axis.
func (b *builder) resolveAxis(t *transform) (err error) {
	if b.lengths.pair {
		return fmt.Errorf("%w: AllToAllSplits is for AllToAll: use Splits", backend.ErrArgument)
	}
	switch {
	case t.scatter != none:
		if t.scatter, err = b.axis(t.scatter); err != nil {
			return err
		}
		t.cut, err = b.chunks(t.scatter, b.lengths.one, "Splits")
	case t.gather != none:
		if t.gather, err = b.axis(t.gather); err != nil {
			return err
		}
		t.join, err = b.parts(t.gather, b.lengths.one, "Splits")
	}
	return err
}

// resolvePair resolves an AllToAll.
func (b *builder) resolvePair(t *transform) (err error) {
	const option = "AllToAllSplits"
	if b.lengths.single {
		return fmt.Errorf("%w: AllToAll has two axes: use %s in place of Splits",
			backend.ErrArgument, option)
	}
	if t.scatter, err = b.axis(t.scatter); err != nil {
		return err
	}
	if t.gather, err = b.axis(t.gather); err != nil {
		return err
	}
	scatter, gather := b.lengths.scatter, b.lengths.gather
	if t.scatter != t.gather {
		if t.cut, err = b.chunks(t.scatter, scatter, option); err != nil {
			return err
		}
		t.join, err = b.parts(t.gather, gather, option)
		return err
	}
	if gather == nil {
		t.cut, err = b.chunks(t.scatter, scatter, option)
		return err
	}
	if scatter != nil {
		return fmt.Errorf("%w: axis %d is scattered and gathered: give %s one list, and nil for "+
			"the other", ErrShape, t.scatter, option)
	}
	t.join = gather
	return b.checkEqualPieces(t.gather, gather)
}

// axis resolves a negative axis.
func (b *builder) axis(axis int) (int, error) {
	dims := len(b.shape)
	if dims == 0 {
		return 0, fmt.Errorf("%w: x is a scalar and has no axis %d", ErrShape, axis)
	}
	if axis < -dims || axis >= dims {
		return 0, fmt.Errorf("%w: axis %d is out of range: x has shape %v, axes %d to %d", ErrShape,
			axis, b.shape, -dims, dims-1)
	}
	if axis < 0 {
		axis += dims
	}
	return axis, nil
}

// chunks returns the lengths that x is cut into along an axis.
func (b *builder) chunks(axis int, lens []int, option string) ([]int, error) {
	n, P := b.shape[axis], b.comm.Size()
	if lens == nil {
		if n%P != 0 {
			return nil, fmt.Errorf("%w: axis %d of shape %v has length %d, which does not divide "+
				"among %d ranks: pass %s with a length for each rank, such as %v",
				ErrShape, axis, b.shape, n, P, option, backend.Even(n, P))
		}
		return slices.Repeat([]int{n / P}, P), nil
	}
	if err := b.checkLengths(lens, option); err != nil {
		return nil, err
	}
	if total := sum(lens); total != n {
		return nil, fmt.Errorf("%w: %s %v add up to %d, but axis %d of shape %v has length %d",
			ErrShape, option, lens, total, axis, b.shape, n)
	}
	return lens, nil
}

// parts returns the lengths of the ranks' x along an axis.
func (b *builder) parts(axis int, lens []int, option string) ([]int, error) {
	n, r := b.shape[axis], b.comm.Rank()
	if lens == nil {
		return slices.Repeat([]int{n}, b.comm.Size()), nil
	}
	if err := b.checkLengths(lens, option); err != nil {
		return nil, err
	}
	if lens[r] != n {
		return nil, fmt.Errorf("%w: %s %v say that x of rank %d has length %d along axis %d, but "+
			"its shape is %v", ErrShape, option, lens, r, lens[r], axis, b.shape)
	}
	return lens, nil
}

// checkEqualPieces checks x for an AllToAll within one axis where this rank sends
// lens[r] to every rank.
func (b *builder) checkEqualPieces(axis int, lens []int) error {
	const option = "AllToAllSplits"
	if err := b.checkLengths(lens, option); err != nil {
		return err
	}
	r, P := b.comm.Rank(), b.comm.Size()
	if want := P * lens[r]; b.shape[axis] != want {
		return fmt.Errorf("%w: %s %v say that rank %d sends %d to each of %d ranks along axis "+
			"%d, %d together, but the shape of its x is %v",
			ErrShape, option, lens, r, lens[r], P, axis, want, b.shape)
	}
	return nil
}

// checkLengths checks a list by itself.
func (b *builder) checkLengths(lens []int, option string) error {
	if P := b.comm.Size(); len(lens) != P {
		return fmt.Errorf("%w: %s has %d lengths for %d ranks: pass one for each", ErrShape, option,
			len(lens), P)
	}
	for r, n := range lens {
		if n < 0 {
			return fmt.Errorf("%w: %s %v: the length for rank %d is negative", ErrShape, option,
				lens, r)
		}
	}
	return nil
}

// exact is the backward transform of an exact gradient.
func exact(fwd transform, P int) (transform, error) {
	if fwd.kind.Reduces() && fwd.op != backend.Avg {
		fwd.op = backend.Sum // for Max and Min see holderOp; Prod has no gradient
	}
	return fwd.adjoint(P)
}

// checkScale checks the factor of a gradient.
func checkScale(scale float64) error {
	if math.IsNaN(scale) || math.IsInf(scale, 0) {
		return fmt.Errorf("%w: the scale of the gradient is %v: use a number, Up, Down or Unscaled",
			backend.ErrArgument, scale)
	}
	return nil
}
