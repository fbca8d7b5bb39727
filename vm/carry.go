package vm

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/internal/vm/read"
)

// WithState makes each RunAll end by assigning the value of a node of the graph to a variable: the
// state of a recurrent network, or a cache of keys and values. During the run, every reader of the
// variable sees its old value, and every reader of next the new one.
//
// The value is written into the variable's own tensor, which must be contiguous. On a device it
// stays there, like variables that [WithSolver] changes: [Machine.Pull] copies it to the host,
// gorgonia.Let with another tensor starts anew, and machines whose variables have the same tensor
// share it. Integers, which have no value that could say that the device has newer ones, are copied
// to the host after each run. next has no value on the host unless it is passed to [Keep].
//
// If next is nn.IndexCopy of the variable, and nothing else reads the variable, the run writes only
// the rows that it copies. Otherwise the cost is a copy of the variable.
//
// New returns ErrArgument if variable is not a variable of the graph, if it has two states, or if
// next has another shape or dtype; ErrUnsupported with [WithSolver], whose steps take several runs.
func WithState(variable, next *gorgonia.Node) Option {
	return func(m *Machine) {
		m.refuseNil("WithState", "variable", variable)
		m.refuseNil("WithState", "next", next)
		m.carried = append(m.carried, carried{variable, next})
	}
}

// WithFrozen promises that nothing changes the variables: weights that only evaluation reads, or
// that an adapter leaves as they are. Their elements are copied to a device once, and are not
// compared with the host's before each run. gorgonia.Let with another tensor starts anew, and so
// does what machines and package autograd write to the tensor: steps of another machine, Load,
// parameters of rank 0. What the program itself writes there is not noticed. It is not
// [autograd.WithFrozen], which makes variables a part of checkpoints.
//
// What depends on frozen variables and constants alone is computed when these are set, and kept:
// weights in BF16, for example. Machines on a device, or on the host, that have the same tensors
// share it. A device has the variables themselves only if runs read them, too. A value that takes
// more memory than what it is computed of is computed in each run: more than twice as much, if
// something else than loops reads it.
//
// New returns ErrArgument for a node that is not a variable of the graph, or that the machine
// changes.
func WithFrozen(variables ...*gorgonia.Node) Option {
	return func(m *Machine) {
		for _, n := range variables {
			m.refuseNil("WithFrozen", "variables", n)
		}
		m.frozen = append(m.frozen, variables...)
	}
}

// carried is a variable and the node whose value it gets.
type carried struct{ variable, next *gorgonia.Node }

// carriedOver are the variables that are carried from run to run.
type carriedOver []carried

// updates returns those of the variables in a graph, which a solver may train.
func (all carriedOver) updates(g *read.Graph, trains bool) (updates []lower.Update, err error) {
	if all != nil && trains {
		return nil, fmt.Errorf("vm: WithState: %w: with WithSolver, too: run the solver's graph "+
			"on a machine of its own", backend.ErrUnsupported)
	}
	for i, c := range all {
		name, input := stock.Label(c.variable), slices.Index(g.Inputs, c.variable)
		next, ok := g.Value(c.next)
		twice := func(other carried) bool { return other.variable == c.variable }
		switch {
		case input < 0:
			err = fmt.Errorf("%s is not a variable of the machine's graph", name)
		case !ok:
			err = fmt.Errorf("%s is not a node of the machine's graph that has a value",
				stock.Label(c.next))
		case slices.IndexFunc(all, twice) != i:
			err = fmt.Errorf("%s has two states", name)
		case !c.variable.Shape().Eq(c.next.Shape()) || c.variable.Dtype() != c.next.Dtype():
			err = fmt.Errorf("%s is %v %v, and its next value %v %v", name, c.variable.Dtype(),
				c.variable.Shape(), c.next.Dtype(), c.next.Shape())
		}
		if err != nil {
			return nil, fmt.Errorf("vm: WithState: %w: %w", backend.ErrArgument, err)
		}
		updates = append(updates, lower.Update{Input: input, Gradient: next})
	}
	return updates, nil
}

// freeze finds the leaves of the program that no run changes.
func (m *Machine) freeze() error {
	var leaves []ir.Op
	for _, n := range m.frozen {
		changes := m.solver != nil && slices.Contains(m.solver.learnables, n) ||
			slices.ContainsFunc(m.carried, func(c carried) bool { return c.variable == n })
		switch {
		case !slices.Contains(m.read.Inputs, n):
			return fmt.Errorf("vm: WithFrozen: %w: %s is not a variable of the machine's graph",
				backend.ErrArgument, stock.Label(n))
		case changes:
			return fmt.Errorf("vm: WithFrozen: %w: the machine changes %s by WithSolver or "+
				"WithState", backend.ErrArgument, stock.Label(n))
		}
		if !n.IsScalar() { // Gorgonia may write another number to the same place
			leaves = append(leaves, ir.Input{Index: slices.Index(m.read.Inputs, n)})
		}
	}
	for i := range m.read.Constants {
		if !slices.Contains(m.read.Changing, i) {
			leaves = append(leaves, ir.Constant{Index: i})
		}
	}
	m.read.Program.Frozen = leaves
	return nil
}

// keepFrozen marks frozen variables in the plan: they keep their values on the device.
func (m *Machine) keepFrozen() {
	for i, b := range m.plan.Buffers {
		if b.Kind == plan.Input && slices.Contains(m.frozen, m.read.Inputs[b.Index]) {
			m.plan.Buffers[i].Frozen = true
		}
	}
}

// without returns the nodes whose values no variable gets by WithState: the others need no copy
// to the host after each run.
func (all carriedOver) without(nodes []*gorgonia.Node) []*gorgonia.Node {
	return slices.DeleteFunc(slices.Clone(nodes), func(n *gorgonia.Node) bool {
		return slices.ContainsFunc(all, func(c carried) bool { return c.next == n })
	})
}
