package defects

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/stock"
)

// overwritten finds operations that Gorgonia's machines compute in the memory of an operand that
// others still need. The machines know when an operand is read for the last time, but not that a
// Reshape shares its memory.
func (s *survey) overwritten() (found []Defect) {
	shared := map[*gorgonia.Node]gorgonia.Nodes{} // by what was reshaped, itself among them
	for _, n := range s.nodes {
		if stock.Name(n.Op()) == "reshapeOp" {
			root := reshaped(n)
			if shared[root] == nil {
				shared[root] = gorgonia.Nodes{root}
			}
			shared[root] = append(shared[root], n)
		}
	}
	for _, n := range s.nodes {
		x := overwrites(n)
		if x == nil || shared[reshaped(x)] == nil || x.Op() == nil {
			continue
		}
		root := reshaped(x)
		if s.lastReader(x) == n && (root.Op() == nil || s.readAfter(n, x, shared[root])) {
			const what = "Gorgonia's machines write its result over its operand, which shares " +
				"the memory of "
			found = append(found, Defect{n, what + stock.Label(root), "package vm", true})
		}
	}
	return found
}

// reshaped returns the node whose memory n has: n itself, unless it is a Reshape.
func reshaped(n *gorgonia.Node) *gorgonia.Node {
	for stock.Name(n.Op()) == "reshapeOp" {
		n = stock.Operands(n)[0]
	}
	return n
}

// overwrites returns the operand over which Gorgonia's machines may write the result of n, nil if
// there is none.
func overwrites(n *gorgonia.Node) *gorgonia.Node {
	if name := stock.Name(n.Op()); name != "elemBinOp" && name != "elemUnaryOp" {
		return nil
	}
	op, x := n.Op(), stock.Operands(n)
	if i := op.OverwritesInput(); i >= 0 && i < len(x) && op.ReturnsPtr() && !op.CallsExtern() {
		return x[i]
	}
	return nil
}

// runs returns when Gorgonia's tape machine computes a node.
func (s *survey) runs(n *gorgonia.Node) int {
	if s.order == nil {
		s.order = map[*gorgonia.Node]int{}
		if sorted, err := gorgonia.Sort(s.graph); err == nil {
			for i, n := range sorted { // the last one runs first
				s.order[n] = len(sorted) - i
			}
		}
	}
	return s.order[n]
}

func (s *survey) lastReader(n *gorgonia.Node) (last *gorgonia.Node) {
	for _, r := range s.readers[n] {
		if last == nil || s.runs(r) > s.runs(last) {
			last = r
		}
	}
	return last
}

// readAfter reports whether one of the nodes that share the memory of x is read after n has run.
func (s *survey) readAfter(n, x *gorgonia.Node, shared gorgonia.Nodes) bool {
	return slices.ContainsFunc(shared, func(other *gorgonia.Node) bool {
		last := s.lastReader(other)
		return other != x && last != nil && s.runs(last) > s.runs(n)
	})
}
