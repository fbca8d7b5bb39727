package ops

import (
	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
)

// AllReduce combines x of all ranks, element by element, and gives every rank
// the result.
//
//	in   x  [d...]   the same shape on every rank, scalars included
//	out  y  [d...]   y = op over s of x of rank s, bitwise identical on every rank
//
// Gradient: AllReduce by the same op for Sum and Avg. For Max and Min the sum of
// the ranks' gradients goes, for each element, to the lowest rank that holds the
// extremum (a NaN, if the extremum is one). Prod: ErrGradient.
// Cost: 2(P-1)/P of x sent per rank; Max and Min twice that backward.
// Errors: ErrDType; at run time those of [backend.Communicator].
func AllReduce(comm backend.Communicator, op backend.ReduceOp, x *gorgonia.Node) (*gorgonia.Node,
	error) {
	fwd := transform{kind: backend.AllReduce, op: op, scatter: none, gather: none}
	return build("AllReduce", comm, x, fwd, nil, exact)
}

// ReduceScatter combines x of all ranks, element by element, and gives every
// rank its chunk of the result along axis.
//
//	in   x  [d..., n, e...]     the same shape on every rank
//	out  y  [d..., n/P, e...]   chunk r of (op over s of x of rank s)
//
// With [Splits], chunk r has the given length. A negative axis counts from the
// last.
//
// Gradient: AllGather for Sum, divided by P for Avg. Max and Min: each element's
// gradient goes to the lowest rank that holds the extremum. Prod: ErrGradient.
// Cost: (P-1)/P of x sent per rank; a copy of x unless every axis before axis
// has length 1.
// Errors: ErrShape if x is a scalar, has no such axis or n does not divide
// among the ranks; ErrDType; at run time those of [backend.Communicator].
func ReduceScatter(comm backend.Communicator, op backend.ReduceOp, axis int, x *gorgonia.Node,
	opts ...Option) (*gorgonia.Node, error) {
	fwd := transform{kind: backend.ReduceScatter, op: op, scatter: axis, gather: none}
	return build("ReduceScatter", comm, x, fwd, opts, exact)
}

// AllGather returns every rank's x, concatenated along axis in rank order.
//
//	in   x  [d..., n, e...]     the same shape on every rank, unless Splits says otherwise
//	out  y  [d..., P*n, e...]   y[..., s*n:(s+1)*n, ...] is x of rank s
//
// With [Splits], x of rank s has the given length along axis. A negative axis
// counts from the last.
//
// Gradient: ReduceScatter(Sum), which is exact whatever the ranks do with y. For
// other conventions see [GatherForwardSplitBackward].
// Cost: (P-1)/P of y received per rank; a copy of y unless every axis before
// axis has length 1.
// Errors: ErrShape if x is a scalar or has no such axis; ErrDType; at run time
// those of [backend.Communicator].
func AllGather(comm backend.Communicator, axis int, x *gorgonia.Node,
	opts ...Option) (*gorgonia.Node, error) {
	fwd := transform{kind: backend.AllGather, scatter: none, gather: axis}
	return build("AllGather", comm, x, fwd, opts, exact)
}

// AllToAll cuts x along scatterDim into a piece for each rank, and concatenates
// the pieces that every rank sent here along gatherDim, in rank order: what was
// sharded among the ranks along gatherDim is afterwards sharded along
// scatterDim.
//
//	in   x  [..., n (scatterDim), ..., m (gatherDim), ...]       the same shape on every rank
//	out  y  [..., n/P (scatterDim), ..., P*m (gatherDim), ...]
//
//	y = join along gatherDim of (piece r of x of rank s), over s
//
// The axes may be in any order. They may be the same axis: then y has the shape
// of x, and its piece s is piece r of rank s. With [AllToAllSplits] pieces have
// the given lengths. Negative axes count from the last.
//
// gatherDim must be the pure axis that was divided: pieces of an axis that mixes
// it with another one (batch times sequence, say) are joined in the wrong order.
//
// Gradient: AllToAll with the axes exchanged, which is also the inverse.
// Cost: (P-1)/P of x sent per rank; a copy of x and one of y, unless every axis
// before scatterDim, or gatherDim, has length 1, or the communicator permutes on the way: see Rows
// of [backend.Capabilities].
// Errors: ErrShape if x is a scalar, has no such axis or n does not divide
// among the ranks; ErrDType; at run time those of [backend.Communicator].
func AllToAll(comm backend.Communicator, scatterDim, gatherDim int, x *gorgonia.Node,
	opts ...Option) (*gorgonia.Node, error) {
	fwd := transform{kind: backend.AllToAll, scatter: scatterDim, gather: gatherDim}
	return build("AllToAll", comm, x, fwd, opts, exact)
}

// Broadcast gives every rank x of rank root.
//
//	in   x  [d...]   the same shape on every rank, scalars included; only root's values matter
//	out  y  [d...]   x of rank root
//
// Gradient: Reduce(Sum) to root; zero on other ranks.
// Cost: x received per rank.
// Errors: ErrDType; at run time those of [backend.Communicator].
func Broadcast(comm backend.Communicator, root int, x *gorgonia.Node) (*gorgonia.Node, error) {
	fwd := transform{kind: backend.Broadcast, root: root, scatter: none, gather: none}
	return build("Broadcast", comm, x, fwd, nil, exact)
}

// Reduce combines x of all ranks, element by element, on rank root.
//
//	in   x  [d...]   the same shape on every rank, scalars included
//	out  y  [d...]   op over s of x of rank s on root; zeros on other ranks
//
// Gradient: Broadcast from root for Sum, divided by P for Avg. Max and Min: each
// element's gradient goes to the lowest rank that holds the extremum. Prod:
// ErrGradient. Gradients of y on ranks other than root have no effect.
// Cost: x sent per rank.
// Errors: ErrDType; at run time those of [backend.Communicator].
func Reduce(comm backend.Communicator, op backend.ReduceOp, root int,
	x *gorgonia.Node) (*gorgonia.Node, error) {
	fwd := transform{kind: backend.Reduce, op: op, root: root, scatter: none, gather: none}
	return build("Reduce", comm, x, fwd, nil, exact)
}

// Gather gives rank root every rank's x, concatenated along axis in rank order.
//
//	in   x  [d..., n, e...]     the same shape on every rank, unless Splits says otherwise
//	out  y  [d..., P*n, e...]   y[..., s*n:(s+1)*n, ...] is x of rank s, on root;
//	                            zeros on other ranks
//
// With [Splits], x of rank s has the given length along axis. A negative axis
// counts from the last.
//
// Gradient: Scatter from root. Gradients of y on ranks other than root have no
// effect.
// Cost: x sent per rank, y received on root.
// Errors: ErrShape if x is a scalar or has no such axis; ErrDType; at run time
// those of [backend.Communicator].
func Gather(comm backend.Communicator, root, axis int, x *gorgonia.Node,
	opts ...Option) (*gorgonia.Node, error) {
	fwd := transform{kind: backend.Gather, root: root, scatter: none, gather: axis}
	return build("Gather", comm, x, fwd, opts, exact)
}

// Scatter gives every rank its chunk, along axis, of x of rank root.
//
//	in   x  [d..., n, e...]     the same shape on every rank; only root's values matter
//	out  y  [d..., n/P, e...]   chunk r of x of rank root
//
// With [Splits], chunk r has the given length. A negative axis counts from the
// last.
//
// Gradient: Gather to root; zero on other ranks.
// Cost: y received per rank, x sent by root.
// Errors: ErrShape if x is a scalar, has no such axis or n does not divide
// among the ranks; ErrDType; at run time those of [backend.Communicator].
func Scatter(comm backend.Communicator, root, axis int, x *gorgonia.Node,
	opts ...Option) (*gorgonia.Node, error) {
	fwd := transform{kind: backend.Scatter, root: root, scatter: axis, gather: none}
	return build("Scatter", comm, x, fwd, opts, exact)
}

// Unscaled is the scale of a gradient that is passed on unchanged.
const Unscaled = 1.0

// Up returns P, the scale for leaving a region of divided work when every rank computes the loss
// behind it alike: see "Conventions for divided work" in the package comment.
func Up(comm backend.Communicator) float64 { return float64(comm.Size()) }

// Down returns 1/P, the scale for entering a region of divided work: see "Conventions for divided
// work" in the package comment. Like every scale 1/n of a whole number n, it divides the gradient,
// which rounds once, instead of multiplying it by a rounded 1/n.
func Down(comm backend.Communicator) float64 { return 1 / float64(comm.Size()) }

// GatherForwardSplitBackward is AllGather forward, and backward takes this
// rank's own chunk of the gradient, times gradScale: [Up], [Down], [Unscaled] or
// any number.
//
//	in   x  [d..., n, e...]     the same shape on every rank, unless Splits says otherwise
//	out  y  [d..., P*n, e...]   y[..., s*n:(s+1)*n, ...] is x of rank s
//
// Gradient: dx = gradScale * (chunk r of dy along axis). This moves no data. It
// is the exact gradient if dy is the same on every rank and gradScale is Up. The
// gradient of the gradient is AllGather.
// Cost: as [AllGather] forward, a copy of dx backward.
// Errors: those of AllGather; [backend.ErrArgument] if gradScale is not finite.
func GatherForwardSplitBackward(comm backend.Communicator, axis int, gradScale float64,
	x *gorgonia.Node, opts ...Option) (*gorgonia.Node, error) {
	fwd := transform{kind: backend.AllGather, scatter: none, gather: axis}
	return build("GatherForwardSplitBackward", comm, x, fwd, opts, func(fwd transform, _ int) (
		transform, error) {
		return transform{scatter: fwd.gather, gather: none, cut: fwd.join, scale: gradScale},
			checkScale(gradScale)
	})
}

// SplitForwardGatherBackward takes this rank's own chunk of x, which is the same on every rank, and
// backward concatenates the ranks' gradients, times gradScale: [Up], [Down], [Unscaled] or any
// number.
//
//	in   x  [d..., n, e...]     the same values on every rank
//	out  y  [d..., n/P, e...]   chunk r of x along axis, a copy
//
// With [Splits], chunk r has the given length. A negative axis counts from the
// last.
//
// Gradient: dx = gradScale * AllGather(dy), the same on every rank. With Unscaled, it is the
// gradient of the sum of the ranks' losses by the x that they share; with Down, the gradient of
// their mean. The gradient of the gradient is the split.
// Cost: a copy of y forward, as [AllGather] backward.
// Errors: those of [Scatter]; [backend.ErrArgument] if gradScale is not finite.
func SplitForwardGatherBackward(comm backend.Communicator, axis int, gradScale float64,
	x *gorgonia.Node, opts ...Option) (*gorgonia.Node, error) {
	fwd := transform{scatter: axis, gather: none}
	return build("SplitForwardGatherBackward", comm, x, fwd, opts, func(fwd transform, _ int) (
		transform, error) {
		return transform{kind: backend.AllGather, scatter: none, gather: fwd.scatter, join: fwd.cut,
			scale: gradScale}, checkScale(gradScale)
	})
}

// CopyToParallel is where x, the same on every rank, enters tensor-parallel
// work: each rank goes on with its own part of the weights.
//
//	in   x  [d...]   the same values on every rank, scalars included
//	out  y  [d...]   a copy of x
//
// Gradient: AllReduce(Sum), so that dx is the same on every rank.
// Cost: a copy of x forward, as [AllReduce] backward.
// Errors: ErrDType; at run time those of [backend.Communicator].
func CopyToParallel(comm backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
	fwd := transform{scatter: none, gather: none}
	return build("CopyToParallel", comm, x, fwd, nil, func(transform, int) (transform, error) {
		return transform{kind: backend.AllReduce, scatter: none, gather: none, scale: 1}, nil
	})
}

// ReduceFromParallel is where tensor-parallel work ends: it adds up the partial
// results of the ranks.
//
//	in   x  [d...]   the same shape on every rank, scalars included
//	out  y  [d...]   sum over s of x of rank s, bitwise identical on every rank
//
// Gradient: dx = dy, which is exact if every rank continues alike from y and the loss is counted
// once.
// Cost: as [AllReduce] forward, a copy of dx backward.
// Errors: ErrDType; at run time those of [backend.Communicator].
func ReduceFromParallel(comm backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
	fwd := transform{kind: backend.AllReduce, scatter: none, gather: none}
	return build("ReduceFromParallel", comm, x, fwd, nil, func(transform, int) (transform, error) {
		return transform{scatter: none, gather: none, scale: 1}, nil
	})
}
