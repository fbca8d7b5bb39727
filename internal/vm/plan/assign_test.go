package plan

import (
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// kept is a cache x of which a run puts some rows, and what it reads of that, and of x if old is
// set.
func kept(old bool) (*program, lower.Update) {
	p := &program{}
	x, list, rows := p.input(0, 6, 5), p.input(1, 2), p.input(2, 2, 5)
	p.Values[list].DType = backend.I64
	next := p.add(ir.Put{}, ir.Of(6, 5), x, list, rows)
	p.Results = []ir.ID{p.unary(fuse.Tanh, next)}
	if old {
		p.Results = append(p.Results, p.unary(fuse.Neg, x))
	}
	return p, lower.Update{Input: 0, Gradient: next}
}

// TestPutIsInPlaceUnlessTheOldValueIsRead: then the new value has memory of its own until all have
// read the old one.
func TestPutIsInPlaceUnlessTheOldValueIsRead(t *testing.T) {
	for _, old := range []bool{false, true} {
		p, u := kept(old)
		planned := p.planned(t, u)
		at := slices.IndexFunc(planned.Steps, func(s Step) bool { return s.Op == ir.Put{} })
		kind := planned.Buffers[planned.Steps[at].Dsts[0].Buffer].Kind
		assigned := planned.Steps[len(planned.Steps)-1].Op.String() == "assign"
		require.Check(t, (kind == Input) != old && assigned == old, "reads the old value: %v\n%v",
			old, planned)
	}
}

// TestOldValueIsNotReadAfterThePut: what reads the variable behind the step that writes over it,
// writes over what it reads itself, or leaves the assignment out, is found.
func TestOldValueIsNotReadAfterThePut(t *testing.T) {
	p, u := kept(false)
	planned, err := New(&p.Program, u)
	require.NoError(t, err)
	at := slices.IndexFunc(planned.Steps, func(s Step) bool { return s.Op == ir.Put{} })
	refused := func(what, why string, change func(p *Plan)) {
		t.Helper()
		other := *planned
		other.Steps = slices.Clone(planned.Steps)
		for i := range other.Steps {
			other.Steps[i].Args = slices.Clone(other.Steps[i].Args)
			other.Steps[i].Dsts = slices.Clone(other.Steps[i].Dsts)
		}
		change(&other)
		require.Fails(t, what, Verify(&other), why)
	}
	refused("the old value", "is read as it was before the run", func(p *Plan) {
		p.Steps[at+1].Args[0].Step = -1
	})
	refused("rows of the cache", "it writes over an operand", func(p *Plan) {
		p.Steps[at].Args[2] = p.Steps[at].Args[0]
		p.Steps[at].Args[2].Shape = ir.Of(2, 5)
	})
	refused("no put", "is not what it must be", func(p *Plan) {
		p.Steps[at].Op = ir.Put{Axis: 1}
	})
	p, u = kept(true)
	if planned, err = New(&p.Program, u); err != nil {
		t.Fatal(err)
	}
	refused("no assignment", "is not what it must be", func(p *Plan) {
		p.Steps = p.Steps[:len(p.Steps)-1]
	})
}
