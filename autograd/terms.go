package autograd

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/terms"
)

// checkTerms returns an error if the gradients would be wrong: as a graph of package layers says,
// or in a tree of micro-batches because of collectives among the ranks.
func checkTerms(params []*param, u terms.Use) error {
	var last *gorgonia.ExprGraph
	for _, p := range params {
		if p.node.Graph() == last {
			continue
		}
		last = p.node.Graph()
		for _, t := range terms.All(last) {
			if err := t.Check(u); err != nil {
				return err
			}
		}
		if err := checkCollectives(last, u); err != nil {
			return err
		}
	}
	return nil
}

// checkCollectives refuses a tree of micro-batches for a graph with collectives among ranks that
// train together: results would depend on which micro-batches run at the same time, and ranks may
// have different numbers of them.
func checkCollectives(g *gorgonia.ExprGraph, u terms.Use) error {
	if u.Tree == 0 {
		return nil
	}
	for _, n := range g.AllNodes() {
		c, ok := n.Op().(interface{ Comm() backend.Communicator })
		if ok && terms.Share(c.Comm(), u.Comm) {
			return fmt.Errorf("%w: WithTree: node %s (%v) is a collective among ranks that train "+
				"together: a micro-batch would depend on those of other ranks: leave out one of "+
				"them", backend.ErrArgument, stock.Label(n), n.Op())
		}
	}
	return nil
}
