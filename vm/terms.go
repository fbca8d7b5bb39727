package vm

import (
	"fmt"

	"github.com/euryale-ml/euryale/internal/terms"
)

// checkTerms refuses to train a graph in a way that makes its gradients wrong, as package layers
// says in the graph.
func (m *Machine) checkTerms() error {
	if m.solver == nil || m.ranks > 0 { // of Summarize
		return nil
	}
	use := terms.Use{Option: m.micro.option(), Tree: m.micro.All, Elastic: m.elastic != nil,
		Clips: m.clipping != nil, Tiles: m.limits.Tiles > 1}
	if use.Runs, use.Weight = m.Runs(); m.parallel != nil {
		use.Comm = m.parallel.comm
		use.Parts, _ = m.parallel.parts()
	}
	for _, t := range terms.All(m.graph) {
		if err := t.Check(use); err != nil {
			return fmt.Errorf("vm: %w", err)
		}
	}
	return nil
}
