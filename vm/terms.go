package vm

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/terms"
)

// checkTerms refuses to train a graph in a way that makes its gradients wrong: as package layers
// says in the graph, and where a micro-batch would depend on those of other ranks.
func (m *Machine) checkTerms() error {
	if m.solver == nil || m.ranks > 0 { // of Summarize
		return nil
	}
	if err := m.checkCollectives(); err != nil {
		return err
	}
	use := terms.Use{Option: m.severalRuns(), Tree: m.micro.All, Elastic: m.elastic != nil,
		Clips: m.clipping != nil, Tiles: m.limits.Tiles > 1}
	if use.Runs, use.Weight = m.Runs(); m.parallel != nil {
		use.Comm = m.parallel.comm
		use.Parts, _ = m.parts()
	}
	for _, t := range terms.All(m.graph) {
		if err := t.Check(use); err != nil {
			return fmt.Errorf("vm: %w", err)
		}
	}
	return nil
}

// severalRuns names the option by which several runs are one step, "" if there is none.
func (m *Machine) severalRuns() string {
	switch {
	case m.elastic != nil:
		return "WithElastic"
	case m.micro.Tree:
		return "WithTree"
	case m.micro.accumulated:
		return "Accumulate"
	}
	return ""
}

// checkCollectives refuses a tree of micro-batches for a graph with collectives among ranks that
// train together: its results would depend on which micro-batches run at the same time, and ranks
// may have different numbers of them.
func (m *Machine) checkCollectives() error {
	if !m.micro.Tree || m.parallel == nil {
		return nil
	}
	for _, o := range m.read.Opaques {
		c, ok := o.Op.(interface{ Comm() backend.Communicator })
		if !ok || o.Node == nil || !together(c.Comm(), m.parallel.comm) {
			continue
		}
		return fmt.Errorf("vm: %s: %w: node %s (%v) is a collective among ranks that train "+
			"together: a micro-batch would depend on those of other ranks: leave out one of them",
			m.severalRuns(), backend.ErrArgument, stock.Label(o.Node), o.Op)
	}
	return nil
}

// together reports whether two communicators have two ranks in common.
func together(a, b backend.Communicator) bool {
	if a.Size() == 1 || b.Size() == 1 {
		return false
	}
	if a.Name() == b.Name() {
		return true
	}
	of, n := b.Capabilities().Members, 0
	for _, r := range a.Capabilities().Members {
		if slices.Contains(of, r) {
			n++
		}
	}
	return n > 1
}
