package vm

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/kernels"
	"github.com/euryale-ml/euryale/vm/internal/ir"
	"github.com/euryale-ml/euryale/vm/internal/plan"
)

// Summary is what a machine computes with, and how much. Print it.
type Summary struct {
	Learnables []Learnable
	Parameters int // elements of all learnables on this rank
	// FLOPs counts the products, convolutions and attention of a run, with gradients: 2 for each
	// product that is added to a sum.
	FLOPs int64
	// Bytes is the memory of the values that the plan computes, ParameterBytes and SolverBytes that
	// of the learnables and of what the solver keeps for them on this rank. GradientBytes is the
	// memory beside these in which gradients are added up, or exchanged with other ranks.
	Bytes, ParameterBytes, SolverBytes, GradientBytes int64
}

// HostTime returns how long the runs so far have been in operations that a plan does not know and
// that run on the host by their Do, without collectives.
func (m *Machine) HostTime() time.Duration { return m.byDo }

// Learnable is a variable that the machine's solver changes.
type Learnable struct {
	Name  string
	Shape tensor.Shape
}

// Summary returns what a machine computes with. It costs no run.
func (m *Machine) Summary() Summary {
	s := Summary{Bytes: int64(m.plan.ArenaBytes)}
	if m.solver != nil {
		for _, n := range m.solver.learnables {
			s.Learnables = append(s.Learnables, Learnable{stock.Label(n), n.Shape().Clone()})
			s.Parameters += n.Shape().TotalSize()
			own := n.Shape().TotalSize()
			if part := m.divided(n); part != nil {
				own = part.To - part.From
			}
			s.ParameterBytes += int64(own) * int64(n.Dtype().Size())
		}
	}
	for _, b := range m.plan.Buffers {
		switch {
		case b.Kind == plan.State:
			s.SolverBytes += int64(b.Bytes)
		case b.Within == 0 && (b.Kind == plan.Slot || b.Kind == plan.Partial ||
			b.Kind == plan.Whole):
			s.GradientBytes += int64(b.Bytes)
		}
	}
	for _, step := range m.plan.Steps {
		s.FLOPs += flops(step)
	}
	return s
}

// flops returns how many floating-point operations a step does in products.
func flops(s plan.Step) int64 {
	size := func(r plan.Ref) int64 {
		n := int64(1)
		for _, d := range r.Shape.Slice() {
			n *= int64(d)
		}
		return n
	}
	switch op := s.Op.(type) {
	case ir.MatMul:
		a := s.Args[0].Shape
		inner := a.At(a.Len() - 1)
		if op.TransA {
			inner = a.At(a.Len() - 2)
		}
		return 2 * size(s.Dsts[0]) * int64(inner)
	case ir.Convolution:
		y, w := s.Dsts[0], s.Args[1]
		switch op.Pass {
		case kernels.InputGradient:
			y = s.Args[0]
		case kernels.FilterGradient:
			y, w = s.Args[1], s.Dsts[0]
		}
		return 2 * size(y) * size(w) / int64(w.Shape.At(0))
	case ir.Attention:
		return attentionProducts(s, 2, size)
	case ir.AttentionGrad:
		return attentionProducts(s, 5, size)
	}
	return 0
}

// attentionProducts returns the operations of so many products of queries and keys, which are half
// as many where a query sees no later key.
func attentionProducts(s plan.Step, products int64, size func(plan.Ref) int64) int64 {
	all := 2 * products * size(s.Args[0]) * int64(s.Args[1].Shape.At(2))
	if op, ok := s.Op.(ir.Attention); ok && op.Causal {
		return all / 2
	}
	if op, ok := s.Op.(ir.AttentionGrad); ok && op.Causal {
		return all / 2
	}
	return all
}

// String returns a table of the learnables, and the sums.
func (s Summary) String() string {
	var b strings.Builder
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, l := range s.Learnables {
		fmt.Fprintf(table, "%s\t%v\t%d\n", l.Name, l.Shape, l.Shape.TotalSize())
	}
	_ = table.Flush() // a Builder takes everything
	fmt.Fprintf(&b, "parameters=%d parameter_bytes=%d solver_bytes=%d gradient_bytes=%d "+
		"value_bytes=%d flops=%d\n", s.Parameters, s.ParameterBytes, s.SolverBytes,
		s.GradientBytes, s.Bytes, s.FLOPs)
	return b.String()
}
