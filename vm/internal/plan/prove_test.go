package plan

import "github.com/euryale-ml/euryale/vm/internal/ir"

// prove is the proof, which imports this package: see ProveWith.
var prove Prove

// ProveWith makes tests of the package use a proof.
func ProveWith(p Prove) { prove = p }

// New plans a program and proves the plan.
func New(p *ir.Program, updates ...Update) (*Plan, error) {
	return Standard().New(prove, p, updates...)
}

// Plain is the plain plan of a program.
func Plain(p *ir.Program, updates ...Update) (*Plan, error) {
	return Standard().Plain(prove, p, updates...)
}

// Verify proves a plan.
func Verify(p *Plan) error { return prove(p) }
