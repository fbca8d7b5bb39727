package stock

import (
	"fmt"
	"hash/fnv"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Averages are the running statistics of a batch norm, by a name that says which it is, wherever it
// is in the graph: that of the variable which scales its result, as PyTorch has bn.running_mean
// beside bn.weight. One that nothing scales, or that shares its scale with others, has the name of
// what it computes, of which variables. Two of the same name compute the same of the same
// variables.
type Averages struct {
	Averaging
	Name string
}

// AveragesOf returns the averages of a graph, in the order of its nodes.
func AveragesOf(g *gorgonia.ExprGraph) (all []Averages) {
	var norms gorgonia.Nodes
	seen := map[tensor.Tensor]bool{}
	for _, n := range g.AllNodes() {
		if a, ok := n.Op().(Averaging); ok && len(Operands(n)) == 1 { // its gradient has more
			if mean, _ := a.Stats(); !seen[mean] {
				seen[mean] = true
				norms, all = append(norms, n), append(all, Averages{Averaging: a})
			}
		}
	}
	if all == nil {
		return nil
	}
	scales, by := scalesOf(g), map[string]int{}
	for i, n := range norms {
		all[i].Name = scales[n]
		by[scales[n]]++
	}
	texts := map[*gorgonia.Node]uint64{}
	for i, n := range norms {
		if by[scales[n]] > 1 || scales[n] == "" {
			name := strings.TrimPrefix(scales[n]+".batchnorm", ".")
			all[i].Name = fmt.Sprintf("%s.%016x", name, computation(n, texts))
		}
	}
	return all
}

// scalesOf returns the name of the variable that scales the result of each batch norm. The forward
// pass, which has it, is built before the gradient.
func scalesOf(g *gorgonia.ExprGraph) map[*gorgonia.Node]string {
	names, first := map[*gorgonia.Node]string{}, map[*gorgonia.Node]int64{}
	for _, n := range g.AllNodes() {
		xs := Operands(n)
		if n.Op() == nil || len(xs) != 2 || !strings.HasPrefix(fmt.Sprint(n.Op()), "⊙") {
			continue
		}
		for i, x := range xs {
			scale := source(xs[1-i])
			_, norm := x.Op().(Averaging)
			if at, there := first[x]; !norm || scale == nil || there && at < n.ID() {
				continue
			}
			names[x], first[x] = scale.Name(), n.ID()
		}
	}
	return names
}

// source returns the named variable that a node repeats or reshapes, nil if it computes. Names that
// Gorgonia makes up for a scale contain node numbers, which depend on the order of building.
func source(n *gorgonia.Node) *gorgonia.Node {
	for n.Op() != nil {
		switch xs := Operands(n); Name(n.Op()) {
		case "repeatOp", "reshapeOp":
			n = xs[0]
		default:
			return nil
		}
	}
	if n.Name() == Unnamed || strings.HasSuffix(n.Name(), "_γ") && strings.Contains(n.Name(), "%") {
		return nil
	}
	return n
}

// computation is the hash of what a node computes, of which variables, for batches of any size.
func computation(n *gorgonia.Node, known map[*gorgonia.Node]uint64) uint64 {
	if of, ok := known[n]; ok {
		return of
	}
	h := fnv.New64a()
	switch {
	case n.Op() != nil:
		fmt.Fprintf(h, "%T", n.Op())
	case n.Name() != Unnamed:
		fmt.Fprint(h, n.Name())
	}
	for _, x := range Operands(n) {
		fmt.Fprintf(h, " %x", computation(x, known))
	}
	known[n] = h.Sum64()
	return known[n]
}
