package nn

import (
	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/defects"
)

// Defect is a node of a graph whose operation Gorgonia v0.9.18 computes wrongly: What is wrong with
// the Node, and what to use Instead. Tape says that Gorgonia's own machines are wrong, and that a
// machine of package vm is right; where it is false, the graph itself is wrong, on every machine.
type Defect = defects.Defect

// Defects returns the nodes of a graph whose value is wrong, or whose gradient is wrong and was
// asked for with gorgonia.Grad. A machine that compiles a graph can warn of them; so can a program,
// before it runs one.
//
// It knows the defects in docs/ops.md, with these exceptions. A merged node looks like any other,
// so it reports slices only if their bounds can collide with others, and SoftMax, LogSoftMax and
// norms only if they are read more than once. The functions AveragePool1D, KeepDims and Unconcat
// leave no trace of what they were meant to be. Operations that fail when they run report
// themselves.
func Defects(g *gorgonia.ExprGraph) []Defect { return defects.Of(g) }
