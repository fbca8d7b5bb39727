package layers

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
)

// ErrPlacement is wrapped by errors of a wrong composition: an operand is placed so that the result
// or a gradient would be wrong.
var ErrPlacement = errors.New("wrong placement")

// Group is a kind of group of ranks that shard a node.
type Group int

// The groups.
const (
	Sequence Group = iota // shards the positions of a sequence
	Tensor                // shards weights
)

// String returns "sequence" or "tensor".
func (g Group) String() string { return [...]string{"sequence", "tensor"}[g] }

// Placement is how the ranks of a group hold a node: Replicated, Copied, Partial or [Split] along
// an axis. See the package comment.
type Placement int

// The placements besides Split.
const (
	Replicated Placement = -1 - iota // the same on every rank, and so is the gradient
	// the same on every rank; the gradient is the sum of the ranks'
	Copied
	Partial // the sum of the ranks' values
)

// Split is the placement of parts along an axis.
func Split(axis int) Placement { return Placement(axis) }

// split reports whether the placement is a Split.
func (p Placement) split() bool { return p >= 0 }

// String returns "replicated", "copied", "partial" or "split along axis 1".
func (p Placement) String() string {
	switch p {
	case Replicated:
		return "replicated"
	case Copied:
		return "copied"
	case Partial:
		return "a partial sum"
	}
	return fmt.Sprintf("split along axis %d", int(p))
}

// Node is a node of the graph and its placement.
type Node struct {
	*gorgonia.Node
	place [2]Placement
	parts [2][]int // the ranks' lengths along the axis of a Split
	inner Group    // the group that sharded last, where both shard one axis
}

// Placed returns the placement over a group.
func (n Node) Placed(g Group) Placement { return n.place[g] }

// Place gives a node of another package the placement of like, a node that it was made from. If the
// operation has moved the axis of a Split, so does Place: axes[i] is where axis i was, and nil says
// that no axis has moved. It checks only the lengths.
func Place(n *gorgonia.Node, like Node, axes ...int) Node {
	if like.Node == nil { // without a placement: who uses it has the error
		return Node{}
	}
	like.Node = n
	for g, p := range like.place {
		if !p.split() || axes == nil {
			continue
		}
		for to, from := range axes {
			if from == int(p) {
				like.place[g] = Split(to)
			}
		}
	}
	return like
}

// collective names the collective that leads from one placement to another, "" if none does.
func collective(from, to Placement) string {
	switch {
	case from == Replicated && to == Copied:
		return "a copy whose gradient is all-reduced"
	case (from == Replicated || from == Copied) && to.split():
		return "a split"
	case from.split() && (to == Replicated || to == Copied):
		return "an all-gather"
	case from.split() && to.split():
		return "an all-to-all"
	case from == Partial && (to == Replicated || to == Copied):
		return "an all-reduce"
	case from == Partial && to.split():
		return "a reduce-scatter"
	}
	return ""
}

// expression is how a program writes a placement.
func (p Placement) expression() string {
	switch p {
	case Replicated:
		return "layers.Replicated"
	case Copied:
		return "layers.Copied"
	case Partial:
		return "layers.Partial"
	}
	return fmt.Sprintf("layers.Split(%d)", int(p))
}

// misplaced is the error of an operand that is placed wrongly, with the call that would place it as
// wanted.
func misplaced(operand string, x Node, g Group, want ...Placement) error {
	from := x.place[g]
	var names, missing []string
	for _, to := range want {
		names = append(names, to.String())
		if c := collective(from, to); c != "" {
			missing = append(missing, fmt.Sprintf("%s: To(%s, layers.%s, %s)", c, operand, title(g),
				to.expression()))
		}
	}
	err := fmt.Errorf("%w: %s, of shape %v, is %v over the %v group, and must be %s", ErrPlacement,
		operand, x.Shape(), from, g, strings.Join(names, " or "))
	if missing == nil {
		return fmt.Errorf("%w: no collective leads there: use what it was made from", err)
	}
	return fmt.Errorf("%w: missing %s", err, strings.Join(missing, ", or "))
}

func title(g Group) string { return [...]string{"Sequence", "Tensor"}[g] }

// require checks the placement of an operand over a group.
func require(operand string, x Node, g Group, allowed ...Placement) error {
	for _, p := range allowed {
		if x.place[g] == p {
			return nil
		}
	}
	return misplaced(operand, x, g, allowed...)
}

// summed checks that an operand is not a partial sum, before an operation that is not linear.
func summed(operand string, x Node) error {
	for _, g := range []Group{Sequence, Tensor} {
		if x.place[g] == Partial {
			return misplaced(operand, x, g, Replicated)
		}
	}
	return nil
}

// alike checks that this rank has the same part of y as of x, if both are placed alike: two groups
// can shard one axis in either order.
func alike(operand string, y, x Node) error {
	if p := x.place[Sequence]; p.split() && p == x.place[Tensor] && y.inner != x.inner {
		return fmt.Errorf("%w: %s, of shape %v, was sharded along axis %d by the %v group last, "+
			"and the other operand by the %v group: shard both in one order",
			ErrPlacement, operand, y.Shape(), int(p), y.inner, x.inner)
	}
	for g := range x.parts {
		if x.place[g].split() && !slices.Equal(x.parts[g], y.parts[g]) {
			return fmt.Errorf("%w: the %v group shards %s into lengths of %v, and the other "+
				"operand into %v",
				ErrPlacement, Group(g), operand, y.parts[g], x.parts[g])
		}
	}
	return nil
}

// wholeAxis checks that an axis is not split.
func wholeAxis(operand string, x Node, axis int) error {
	for _, g := range []Group{Sequence, Tensor} {
		if x.place[g] == Split(axis) {
			return misplaced(operand, x, g, Replicated)
		}
	}
	return nil
}

// Whole places a node that is the same on every rank, such as an input: Replicated over both
// groups.
func Whole(n *gorgonia.Node) Node {
	return Node{Node: n, place: [2]Placement{Replicated, Replicated}}
}
