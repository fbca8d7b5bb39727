package plan

import (
	"errors"

	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
)

// prove is the proof, which imports this package: see ProveWith.
var prove Prove

// ProveWith makes tests of the package use a proof.
func ProveWith(p Prove) { prove = p }

// New plans a program and proves the plan.
func New(p *ir.Program, updates ...lower.Update) (*Plan, error) {
	return Trained(p, lower.Solver{Updates: updates})
}

// Trained plans a program with a solver and proves the plan.
func Trained(p *ir.Program, s lower.Solver) (*Plan, error) { return Standard().New(prove, p, s) }

// Plain is the plain plan of a program.
func Plain(p *ir.Program, s lower.Solver) (*Plan, error) {
	refused := errors.New("the first plan")
	plan, err := Standard().New(func(p *Plan) (err error) {
		if err, refused = refused, nil; err == nil {
			err = prove(p)
		}
		return err
	}, p, s)
	if err == nil {
		plan.Doubt = nil
	}
	return plan, err
}

// Verify proves a plan.
func Verify(p *Plan) error { return prove(p) }
