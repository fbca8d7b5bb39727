package layers

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
)

// To changes the placement of x over a group: the package comment has the table of collectives and
// their gradients.
//
// If both groups shard one axis, move it first over the group that sharded it last. Every rank
// needs a part: an axis that is shorter than its group is an error.
//
// Cost: that of the collective; none in a group of one rank.
// Errors: [ErrPlacement] if no collective leads from one placement to the other; [ops.ErrShape];
// those of package ops.
func (b *Builder) To(x Node, g Group, to Placement) Node {
	return b.apply("To", func() (Node, error) { return b.convert(x, g, to) }, "x", x)
}

func (b *Builder) convert(x Node, g Group, to Placement) (Node, error) {
	from, other := x.place[g], x.place[1-g]
	switch {
	case from == to:
		return x, nil
	case collective(from, to) == "":
		return Node{}, fmt.Errorf("%w: x, of shape %v, is %v over the %v group: no collective "+
			"makes it %v", ErrPlacement, x.Shape(), from, g, to)
	case from.split() && from == other && x.inner != g:
		return Node{}, fmt.Errorf("%w: axis %d of x was sharded by the %v group after the %v "+
			"group: move it over the %v group first", ErrPlacement, int(from), 1-g, g, 1-g)
	case int(to) >= x.Dims():
		return Node{}, fmt.Errorf("%w: there is no axis %d to split: x has shape %v", ops.ErrShape,
			int(to), x.Shape())
	}
	comm := b.layout.groups[g]
	y := x
	y.place[g], y.parts[g] = to, nil
	if to.split() {
		n, shortest := x.Shape()[to], x.Shape()[to]
		if to == other {
			y.inner = g
			// so that all ranks report an axis that is too short on one
			shortest = slices.Min(x.parts[1-g])
		}
		if shortest < comm.Size() {
			return Node{}, fmt.Errorf("%w: axis %d of x, of shape %v, is sharded among the %d "+
				"ranks of the %v group, and each needs a part: use fewer ranks",
				ops.ErrShape, int(to), x.Shape(), comm.Size(), g)
		}
		y.parts[g] = backend.Even(n, comm.Size())
	}
	if comm.Size() == 1 {
		return y, nil
	}
	var err error
	y.Node, err = exchange(comm, x, y, g)
	return y, err
}

// exchange adds the collective of [Builder.To].
func exchange(comm backend.Communicator, x, y Node, g Group) (*gorgonia.Node, error) {
	from, to := x.place[g], y.place[g]
	had, gets := ops.Splits(x.parts[g]...), ops.Splits(y.parts[g]...)
	switch {
	case from == Replicated && to == Copied:
		return ops.CopyToParallel(comm, x.Node)
	case from == Replicated && to.split():
		return ops.SplitForwardGatherBackward(comm, int(to), ops.Unscaled, x.Node, gets)
	case from == Copied && to.split():
		return own(comm, x.Node, int(to), y.parts[g])
	case from.split() && to == Replicated:
		return ops.GatherForwardSplitBackward(comm, int(from), ops.Unscaled, x.Node, had)
	case from.split() && to == Copied:
		return ops.AllGather(comm, int(from), x.Node, had)
	case from.split() && to.split():
		return ops.AllToAll(comm, int(to), int(from), x.Node, ops.AllToAllSplits(y.parts[g],
			x.parts[g]))
	case to == Replicated:
		return ops.ReduceFromParallel(comm, x.Node)
	case to == Copied:
		return ops.AllReduce(comm, backend.Sum, x.Node)
	}
	return ops.ReduceScatter(comm, backend.Sum, int(to), x.Node, gets)
}

// own returns this rank's part along an axis.
func own(comm backend.Communicator, x *gorgonia.Node, axis int, parts []int) (*gorgonia.Node,
	error) {
	start := 0
	for _, n := range parts[:comm.Rank()] {
		start += n
	}
	return nn.Slice(axis, start, start+parts[comm.Rank()], 1, x)
}
