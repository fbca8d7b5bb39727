package vm

import (
	"fmt"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
)

// leastTable is the size in bytes from which exchanging the rows of a table is worth the calls: two
// all-gathers, and an all-reduce of a separate bucket.
const leastTable = 1 << 20

// findTables finds the embedding tables whose rows this many ranks exchange, if all look up equally
// many, and describes them. A table has at least as many rows as all ranks look up in a step: an
// all-gather of these moves at most half of the bytes that an all-reduce of the table moves. If
// several runs add up gradients, and with shards, there are none. Buckets of tables without another
// term are not exchanged, so they hold no other learnable.
func (m *Machine) findTables(ranks int) (buckets []autograd.Option, description string, err error) {
	if m.solver == nil {
		return nil, "", nil
	}
	m.solver.tables = nil
	if ranks == 1 || m.shards != 0 || m.micro.Tree || m.micro.Several() {
		return nil, "", nil
	}
	if m.read == nil {
		if err := m.readGraph(); err != nil {
			return nil, "", err
		}
	}
	var gradients []ir.ID
	for _, n := range m.solver.learnables {
		gradient, ok := m.read.Value(n.Deriv())
		if !ok {
			return nil, "", nil // updates says what is wrong
		}
		gradients = append(gradients, gradient)
	}
	m.solver.tables = lower.Tables(&m.read.Program, gradients...)
	var early, apart gorgonia.Nodes
	var s strings.Builder
	for i, n := range m.solver.learnables {
		t := &m.solver.tables[i]
		size := n.Shape().TotalSize() * int(n.Dtype().Size())
		if t.Rows == 0 || !m.anyTable && (t.Rows*ranks > t.Of || size < leastTable) {
			*t = lower.Table{}
			continue
		}
		if early = append(early, n); t.Alone {
			apart = append(apart, n)
		}
		fmt.Fprintf(&s, "%d rows of parameter %d are looked up\n", t.Rows, i)
	}
	return []autograd.Option{autograd.WithEarly(early...), autograd.WithApart(apart...)},
		s.String(), nil
}

// lookups returns how ranks exchange what lookups add to the gradient of a learnable, nil where
// they exchange the whole gradient.
func (s *solving) lookups(p *parallel, ranks, learnable int) *lower.Lookups {
	if s.tables == nil || s.tables[learnable].Rows == 0 {
		return nil
	}
	of := &lower.Lookups{Ranks: ranks, Weight: 1, Alone: s.tables[learnable].Alone}
	if p != nil {
		if !p.exchange.Early(learnable) {
			return nil
		}
		of.Ranks, of.Weight = p.comm.Size(), p.exchange.Weight()/p.exchange.Scale()
	}
	return of
}

// rows gives every rank the rows of all ranks.
type rows struct{ *autograd.Buckets }

var _ exec.Placed = rows{}

// Scratch implements [exec.Placed].
func (rows) Scratch() int { return 0 }

// StartOn implements [exec.Placed].
func (r rows) StartOn(q backend.Queue, y, _ backend.Buffer, x ...backend.Buffer) (backend.Work,
	error) {
	return r.Rows(q, y, x[0])
}
