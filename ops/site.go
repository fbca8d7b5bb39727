package ops

import (
	"fmt"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
)

// site is the place of an op in a graph. An op outside of a graph has the zero value.
type site struct {
	origin  *backend.Origin // what ranks compare, nil outside of a graph
	operand string          // the name of its operand, for errors
	loops   *loops          // of a node
}

// communicating is an op that starts collectives.
type communicating interface {
	gorgonia.Op
	// place returns the communicator and the place in the graph.
	place() (backend.Communicator, site)
	// fail adds to an error which operation has failed, and where.
	fail(error) error
}

// next returns the place of an op on x that is about to be added to the graph of x. The
// collectives of a graph on one communicator are numbered in the order in which they are added.
// That order is the same on every rank that runs the same building code, whatever other nodes a
// rank's graph has.
//
// The number is part of an op's hash. Gorgonia merges nodes with equal op and operands, and
// collectives must not be merged: whether two operands are equal can depend on the rank (a slice
// by rank number, a constant), and a rank that merges two calls makes one call too few.
//
// The name of an input node is compared if the ranks' operands are combined. It detects ranks
// that add sums of the same shape in another order. Gathered operands may have different names.
func next(comm backend.Communicator, x *gorgonia.Node, origin backend.Origin, reduces bool) site {
	for _, n := range x.Graph().AllNodes() {
		op, ok := n.Op().(communicating)
		if !ok {
			continue
		}
		if other, at := op.place(); other.Name() == comm.Name() {
			origin.Ordinal = max(origin.Ordinal, at.ordinal())
		}
	}
	origin.Ordinal++
	if reduces && x.Op() == nil {
		origin.Name = backend.MakeName(nameOf(x))
	}
	return site{&origin, describe(x), new(loops)}
}

// gradient returns the place of an op that computes the gradient of the op at s without a node.
func (s site) gradient(origin backend.Origin) site {
	origin.Purpose, origin.Ordinal = backend.ForGradient, s.ordinal()
	return site{&origin, "the gradient", nil}
}

func (s site) ordinal() uint32 {
	if s.origin == nil {
		return 0
	}
	return s.origin.Ordinal
}

// nameOf returns the name that a program has given to a node, "" if it has not. Gorgonia's own
// names consist of operations and node numbers, such as %1f, which may differ between ranks.
func nameOf(n *gorgonia.Node) string {
	if name := n.Name(); !strings.Contains(name, "%") {
		return name
	}
	return ""
}

// describe returns the name of a node, or else which operation's result it is.
func describe(n *gorgonia.Node) string {
	name := nameOf(n)
	if name == "" && n.Op() != nil {
		return fmt.Sprintf("the result of %v", n.Op())
	}
	return name
}
