package vm

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/stock"
)

// Summary describes a machine's learnables, work and memory. Print it.
type Summary struct {
	Learnables []Learnable
	Parameters int // elements of all learnables on this rank
	// FLOPs counts the matrix multiplications, convolutions and attention of a run, including
	// gradients: 2 for each product that is added to a sum.
	FLOPs int64
	// Bytes is the memory of the values that the plan computes. ParameterBytes and SolverBytes are
	// the memory of the learnables and of the solver's state for them, on this rank.
	Bytes, ParameterBytes, SolverBytes int64
	// Memory is all memory, by kind.
	Memory Memory
	Graph  *gorgonia.ExprGraph
	Trains bool // false for a machine of Eval
}

// HostTime returns how long the runs so far have spent in operations that a plan does not know and
// that run on the host by their Do. It does not count collectives.
func (m *Machine) HostTime() time.Duration { return m.byDo }

// Learnable is a variable that the machine's solver changes.
type Learnable struct {
	Name  string
	Shape tensor.Shape
	Node  *gorgonia.Node
}

// Summary describes the machine. It costs no run.
func (m *Machine) Summary() Summary {
	s := Summary{Memory: occupied(m.plan, m.solver, m.exec), Graph: m.graph, Trains: m.training}
	s.Bytes, s.ParameterBytes, s.SolverBytes = s.Memory.Values, s.Memory.Learnables, s.Memory.Solver
	if m.solver != nil {
		for _, n := range m.solver.learnables {
			s.Learnables = append(s.Learnables, Learnable{stock.Label(n), n.Shape().Clone(), n})
			s.Parameters += n.Shape().TotalSize()
		}
	}
	for _, step := range m.plan.Steps {
		s.FLOPs += step.FLOPs()
	}
	return s
}

// String returns a table of the learnables, the sums, and the memory by kind.
func (s Summary) String() string {
	var b strings.Builder
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, l := range s.Learnables {
		fmt.Fprintf(table, "%s\t%v\t%d\n", l.Name, l.Shape, l.Shape.TotalSize())
	}
	_ = table.Flush() // a Builder takes everything
	fmt.Fprintf(&b, "parameters=%d parameter_bytes=%d solver_bytes=%d gradient_bytes=%d "+
		"value_bytes=%d flops=%d\n", s.Parameters, s.ParameterBytes, s.SolverBytes,
		s.Memory.Gradients, s.Bytes, s.FLOPs)
	fmt.Fprintln(&b, s.Memory)
	return b.String()
}
