package defects

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/stock"
)

// contributors returns the nodes that have given n a share of its gradient, in a graph that is
// right: differentiated readers, as often as they read it.
func (s *survey) contributors(n *gorgonia.Node) (from gorgonia.Nodes) {
	for _, r := range s.readers[n] {
		op, ok := r.Op().(gorgonia.SDOp)
		if !ok || r.Deriv() == nil {
			continue
		}
		x := stock.Operands(r)
		for i, differentiable := range op.DiffWRT(len(x)) {
			if differentiable && i < len(x) && x[i] == n {
				from = append(from, r)
			}
		}
	}
	return from
}

// gradTwice finds nodes whose gradient lacks a share. gorgonia.Grad skips nodes that have a
// gradient already, and what lies between them and the variables: a later loss, or a loss of
// gradients, that reads such a node gets wrong gradients.
func (s *survey) gradTwice() (found []Defect) {
	for _, n := range s.nodes {
		if n.Deriv() == nil {
			continue
		}
		if from := s.contributors(n); s.summed(n, from) || s.ofOneLoss(n, from) {
			continue
		}
		found = append(found, Defect{
			Node: n,
			What: "a second gorgonia.Grad, for a loss that reads it, takes its gradient from the " +
				"first call: gradients of the second loss by what it depends on are wrong",
			Instead: "one gorgonia.Grad of the sum of the losses, or nn.Grad for each",
		})
	}
	return found
}

// summed reports whether the gradient of n can be the sum of what the given nodes contribute: a
// chain of additions, made after their own gradients.
func (s *survey) summed(n *gorgonia.Node, from gorgonia.Nodes) bool {
	d := n.Deriv()
	for _, r := range from {
		if s.made[shared(r)] > s.made[d] {
			return false
		}
	}
	if len(from) == 1 && len(stock.Operands(d)) == 0 { // the gradient of a loss by itself
		less := stock.Name(from[0].Op()) == "elemBinOp" && from[0].Op().String()[0] == '-'
		return adds(from[0]) || stock.Name(from[0].Op()) == "" || less &&
			stock.Operands(from[0])[0] == n
	}
	_, ok := chain(d, len(from))
	return ok
}

// shared returns what the share that r gives of its gradient is made of: that gradient, or what it
// is the negative of, since Gorgonia makes x of the negative of -x.
func shared(r *gorgonia.Node) *gorgonia.Node {
	d := r.Deriv()
	if stock.Name(d.Op()) == "elemUnaryOp" && d.Op().String() == "neg" {
		return stock.Operands(d)[0]
	}
	return d
}

// chain returns the parts of a sum of n nodes, added one after the other.
func chain(d *gorgonia.Node, n int) (parts gorgonia.Nodes, ok bool) {
	for range n - 1 {
		if !adds(d) {
			return nil, false
		}
		x := stock.Operands(d)
		parts, d = append(parts, x[1]), x[0]
	}
	return append(parts, d), true
}

// ofOneLoss reports whether the gradient of n is the gradient of one loss, and no later call needed
// it. A variable may have one share in each later loss: gorgonia.Grad returns that share, which is
// the gradient of its loss.
func (s *survey) ofOneLoss(n *gorgonia.Node, from gorgonia.Nodes) bool {
	var losses gorgonia.Nodes
	shares := map[*gorgonia.Node]gorgonia.Nodes{}
	for _, r := range from {
		for _, loss := range s.losses(r, map[*gorgonia.Node]bool{}) {
			if !slices.Contains(losses, loss) {
				losses = append(losses, loss)
			}
			shares[loss] = append(shares[loss], r)
		}
	}
	slices.SortFunc(losses, func(a, b *gorgonia.Node) int { return gradCall(a) - gradCall(b) })
	first := -1 // the loss whose gradient it is: the one with most shares that fit
	for i, loss := range losses {
		if (first < 0 || len(shares[loss]) > len(shares[losses[first]])) &&
			s.exactly(n, shares[loss]) {
			first = i
		}
	}
	if first < 0 {
		return false
	}
	for _, later := range losses[first+1:] {
		most := 0
		if n.Op() == nil {
			most = 1
		}
		more := slices.DeleteFunc(slices.Clone(shares[later]), func(r *gorgonia.Node) bool {
			return slices.Contains(shares[losses[first]], r)
		})
		if len(more) > most {
			return false
		}
	}
	return true
}

// gradCall returns when gorgonia.Grad was called for a loss, among other losses of its dtype.
func gradCall(loss *gorgonia.Node) int { return slices.Index(loss.Deriv().DerivOf(), loss) }

// losses returns the differentiated nodes at and above n that no differentiated node reads.
func (s *survey) losses(n *gorgonia.Node, seen map[*gorgonia.Node]bool) (found gorgonia.Nodes) {
	seen[n] = true
	top := true
	for _, r := range s.readers[n] {
		if r.Deriv() != nil {
			top = false
			if !seen[r] {
				found = append(found, s.losses(r, seen)...)
			}
		}
	}
	if top {
		return gorgonia.Nodes{n}
	}
	return found
}

// exactly is summed, with a part of the sum for each of the nodes.
func (s *survey) exactly(n *gorgonia.Node, from gorgonia.Nodes) bool {
	parts, ok := chain(n.Deriv(), len(from))
	if !ok || !s.summed(n, from) {
		return false
	}
	for _, r := range from {
		i := slices.IndexFunc(parts, func(part *gorgonia.Node) bool {
			return s.reads(part, shared(r))
		})
		if i < 0 {
			return false
		}
		parts = slices.Delete(parts, i, i+1)
	}
	return true
}

// reads reports whether n is x, or computed from it.
func (s *survey) reads(n, x *gorgonia.Node) bool {
	seen := map[*gorgonia.Node]bool{}
	var visit func(n *gorgonia.Node) bool
	visit = func(n *gorgonia.Node) bool {
		if n == x || s.made[n] < s.made[x] || seen[n] {
			return n == x
		}
		seen[n] = true
		return slices.ContainsFunc(stock.Operands(n), visit)
	}
	return visit(n)
}
