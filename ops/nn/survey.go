package nn

import (
	"reflect"
	"slices"

	"gorgonia.org/gorgonia"
)

// survey is a graph with what Gorgonia does not keep: who reads each node, and when it was made.
type survey struct {
	graph   *gorgonia.ExprGraph
	nodes   gorgonia.Nodes
	readers map[*gorgonia.Node]gorgonia.Nodes // each reader once
	made    map[*gorgonia.Node]int            // operands before their readers
	// backward are nodes that only gradients read, besides gradients themselves.
	backward map[*gorgonia.Node]bool
	rules    map[string][]rule      // by the type of the operation
	order    map[*gorgonia.Node]int // when the tape machine runs a node
}

func newSurvey(g *gorgonia.ExprGraph) *survey {
	s := &survey{graph: g, nodes: g.AllNodes(), readers: map[*gorgonia.Node]gorgonia.Nodes{},
		made: map[*gorgonia.Node]int{}, rules: map[string][]rule{}}
	for _, r := range rules() {
		s.rules[r.of] = append(s.rules[r.of], r)
	}
	for i, n := range s.nodes {
		s.made[n] = i
		for _, x := range operandsOf(n) {
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
		if !s.backward[r] && typeName(r) != "sizeOp" {
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
		s.backward[n] = only || len(n.DerivOf()) > 0 || marked(n)
	}
}

// marked reports whether gorgonia.Grad has put a node into one of its groups.
func marked(n *gorgonia.Node) bool {
	group := reflect.ValueOf(n).Elem().FieldByName("group")
	made := []string{"gradients", "undifferentiated nodes"}
	return group.IsValid() && slices.Contains(made, group.String())
}

// typeName returns the name of the type of a node's operation if it is one of Gorgonia's.
func typeName(n *gorgonia.Node) string {
	op := structOf(n.Op())
	if !op.IsValid() || op.Type().PkgPath() != "gorgonia.org/gorgonia" {
		return ""
	}
	return op.Type().Name()
}

// adds reports whether a node is the sum of two others.
func adds(n *gorgonia.Node) bool { return typeName(n) == "elemBinOp" && n.Op().String()[0] == '+' }
