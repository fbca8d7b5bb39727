// Package defects finds the nodes of a graph that Gorgonia v0.9.18 computes wrongly, with the
// exceptions that nn.Defects names.
//
// rules.go has what the operation of a node and its readers show, a rule in each row; twice.go
// finds gradients that lack a share, and overwritten.go results that machines write over operands.
// survey.go is the graph for all of them.
package defects

import (
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/stock"
)

// Defect is a node of a graph whose operation Gorgonia v0.9.18 computes wrongly.
type Defect struct {
	Node    *gorgonia.Node
	What    string // is wrong: "its gradient is divided by p, not by 1-p"
	Instead string // what to use: "nn.Dropout"
	// Tape says that Gorgonia's own machines are wrong, and that a machine of package vm is right.
	// Where it is false, the graph itself is wrong, on every machine.
	Tape bool
}

// String returns "Dropout{training=true}(): its gradient is divided by p, not by 1-p: use
// nn.Dropout".
func (d Defect) String() string {
	if d.Node.Op() == nil {
		return fmt.Sprintf("%s: %s: use %s", stock.Label(d.Node), d.What, d.Instead)
	}
	return fmt.Sprintf("%v: %s: use %s", d.Node.Op(), d.What, d.Instead)
}

// Of returns the defects of a graph.
func Of(g *gorgonia.ExprGraph) (found []Defect) {
	if g == nil {
		return nil
	}
	s := newSurvey(g)
	for _, n := range s.nodes {
		x := suspect{n, stock.Struct(n.Op()), stock.Operands(n), s}
		for _, r := range rules[stock.Name(n.Op())] { // none for operations of other packages
			if show := r.wrong(x); show != nil {
				found = append(found, Defect{n, fmt.Sprintf(r.what, show...), r.instead, r.tape})
			}
		}
	}
	return append(append(found, s.gradTwice()...), s.overwritten()...)
}
