package vm

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/terms"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/read"
	"github.com/euryale-ml/euryale/internal/vm/samples"
)

// Incomplete says what a batch with missing samples has in the rows of those: see
// [Machine.CheckIncomplete].
type Incomplete struct {
	Inputs gorgonia.Nodes // variables of samples, [b, d...]
	// Missing has the row of a missing sample for each input. Rows of integers that are all alike
	// are known to the check: labels that a loss ignores.
	Missing []any
	Weights *gorgonia.Node       // [b], 0 for a missing sample, or [], or nil
	Loss    *gorgonia.Node       // nil for none
	Comm    backend.Communicator // of the ranks that have samples
}

// CheckIncomplete returns an ErrArgument, with a node's name, if samples that a batch lacks would
// change more than their own rows: if a batch norm trains, or if the loss, a cost of
// gorgonia.Grad or a kept node of a row for each sample depends on an operation over several
// samples. A sum over samples is none if it has zeros for missing ones: of products with the
// weights, or of losses whose labels are ignored.
func (m *Machine) CheckIncomplete(c Incomplete) error {
	if len(m.read.Statistics) > 0 {
		return missed(m.read.Statistics[0].Node, "takes mean and variance over all samples")
	}
	batch, given := 0, map[ir.ID]samples.Value{}
	for i, n := range c.Inputs {
		id, ok := m.read.Value(n)
		if !ok {
			continue
		}
		missing, known := same(c.Missing[i])
		batch = n.Shape()[0]
		given[id] = samples.Batch(m.read.Program.Values[id].Shape, missing, known)
	}
	if w := c.Weights; w != nil && !w.IsScalar() {
		if id, ok := m.read.Value(w); ok {
			given[id] = samples.Batch(m.read.Program.Values[id].Shape, 0, true)
		}
	}
	if batch == 0 {
		return nil
	}
	values := samples.Of(&m.read.Program, batch, given, func(opaque int) bool {
		of, ok := m.read.Opaques[opaque].Op.(interface{ Comm() backend.Communicator })
		return ok && terms.Share(of.Comm(), c.Comm)
	})
	for _, n := range slices.Concat(gorgonia.Nodes{c.Loss}, m.read.Computed, m.keep) {
		id, ok := m.read.Value(n)
		if !ok {
			continue
		}
		v, counts := values[id], n == c.Loss || m.training && read.IsCost(n)
		row := slices.Contains(m.keep, n) && n.Dims() > 0 && n.Shape()[0] == batch
		if counts && v.Counts() || row && v.Kind == samples.Mixed {
			return mixes(m.read, n, id, v)
		}
	}
	return nil
}

// mixes is the error of a node that depends on missing samples, with the node that mixes them.
func mixes(g *read.Graph, n *gorgonia.Node, id ir.ID, v samples.Value) error {
	if v.Kind == samples.Mixed {
		for _, cause := range g.Computed {
			if of, ok := g.Value(cause); ok && of >= v.Cause {
				n, id = cause, v.Cause
				break
			}
		}
	}
	return missed(n, fmt.Sprintf("has %v over samples without their weights",
		g.Program.Values[id].Op))
}

func missed(n *gorgonia.Node, does string) error {
	return fmt.Errorf("%w: node %s (%v) %s, so missing samples would count",
		backend.ErrArgument, stock.Label(n), n.Op(), does)
}

// same returns the number that all integers are.
func same(row any) (float64, bool) {
	list, ok := row.([]int)
	for _, x := range list {
		ok = ok && x == list[0]
	}
	if !ok || len(list) == 0 {
		return 0, false
	}
	return float64(list[0]), true
}
