package defects

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/stock"
)

// survey is a graph with what Gorgonia does not keep: who reads each node, and when it was made.
type survey struct {
	graph   *gorgonia.ExprGraph
	nodes   gorgonia.Nodes
	readers map[*gorgonia.Node]gorgonia.Nodes // each reader once
	made    map[*gorgonia.Node]int            // operands before their readers
	// backward are nodes that only gradients read, besides gradients themselves.
	backward map[*gorgonia.Node]bool
	order    map[*gorgonia.Node]int // when the tape machine runs a node
}

func newSurvey(g *gorgonia.ExprGraph) *survey {
	s := &survey{graph: g, nodes: g.AllNodes(), readers: map[*gorgonia.Node]gorgonia.Nodes{},
		made: map[*gorgonia.Node]int{}}
	for i, n := range s.nodes {
		s.made[n] = i
		for _, x := range stock.Operands(n) {
			if r := s.readers[x]; len(r) == 0 || r[len(r)-1] != n {
				s.readers[x] = append(r, n)
			}
		}
	}
	return s
}

// uses returns how many nodes read n in the forward pass, gorgonia.Read among them. Those that ask
// for its size, as broadcasts do, read no element.
func (s *survey) uses(n *gorgonia.Node) (uses int) {
	if s.backward == nil {
		s.findBackward()
	}
	for _, r := range s.readers[n] {
		if !s.backward[r] && stock.Name(r.Op()) != "sizeOp" {
			uses++
		}
	}
	return uses
}

// findBackward finds the nodes that gorgonia.Grad has made: those that it marks, and those that
// only such nodes read.
func (s *survey) findBackward() {
	s.backward = map[*gorgonia.Node]bool{}
	for _, n := range slices.Backward(s.nodes) { // readers come before their operands
		if n.Op() == nil || n.Deriv() != nil {
			continue
		}
		only := len(s.readers[n]) > 0
		for _, r := range s.readers[n] {
			only = only && s.backward[r]
		}
		s.backward[n] = only || len(n.DerivOf()) > 0 ||
			stock.Group(n) == stock.Gradients || stock.Group(n) == stock.Undifferentiated
	}
}

// adds reports whether a node is the sum of two others.
func adds(n *gorgonia.Node) bool {
	return stock.Name(n.Op()) == "elemBinOp" && n.Op().String()[0] == '+'
}
