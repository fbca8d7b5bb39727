package plan

import (
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// descent is w -= setting * dw, and counts in its vector.
func descent(p *fuse.Program, w, dw fuse.Value, kept []fuse.Value, setting func(i int) fuse.Value) (
	fuse.Value, []fuse.Value, error) {
	step := p.Do(fuse.Mul, setting(0), dw)
	return p.Do(fuse.Sub, w, step), []fuse.Value{p.Do(fuse.Add, kept[0], setting(1))}, nil
}

// TestUpdates: updates come last, in place, and what is wanted of a variable is a copy from
// before. The gradient of each variable is the other one.
func TestUpdates(t *testing.T) {
	p := &program{}
	v, w := p.input(0, 2, 3), p.input(1, 2, 3)
	p.Results = []ir.ID{p.binary(fuse.Mul, v, w), w}
	planned := p.planned(t, lower.Update{Input: 0, Gradient: w, Kept: 1, Rule: descent},
		lower.Update{Input: 1, Gradient: v, Kept: 1, Rule: descent})
	written, states, settings := 0, 0, 0
	for _, b := range planned.Buffers {
		if b.Written {
			written++
		}
		switch b.Kind {
		case State:
			states++
		case Setting:
			settings++
		}
	}
	require.Check(t, written == 4 && states == 2 && settings == 2,
		"%d buffers are written, %d are kept, %d are settings", written, states, settings)
	for i, s := range planned.Steps {
		u, update := s.Op.(Joined)
		require.Check(t, update == (i == len(planned.Steps)-1) && (!update || len(u.Programs) ==
			2 && len(s.Dsts) == 4 && len(s.Args) == 10), "step %d is %v", i, s.Op)
	}
	b := planned.Buffers[planned.Results[1].Buffer]
	require.Check(t, b.Kind == Arena, "the variable is wanted where it is updated")
	planned.Results[1] = planned.Steps[len(planned.Steps)-1].Dsts[0]
	require.Fails(t, "a result that is the updated variable", Verify(planned),
		"result 1 in a run of kind 0 is not input 1")
}

// TestCastsOfVariablesAreOneStep: weights that change are rounded for products at once, before
// everything else, and others where they are read.
func TestCastsOfVariablesAreOneStep(t *testing.T) {
	for _, trained := range []bool{false, true} {
		p := &program{}
		p.Precision = ir.BF16
		x, v, w := p.input(0, 8, 8), p.input(1, 8, 8), p.input(2, 64)
		y := p.product(p.product(x, v), p.add(ir.Reshape{}, ir.Of(8, 8), w))
		p.Results = []ir.ID{y}
		var updates []lower.Update
		want := []string{"loop cast", "loop cast", "matmul NN", "loop cast", "matmul NN"}
		if trained {
			updates = []lower.Update{{Input: 1, Gradient: x, Kept: 1, Rule: descent},
				{Input: 2, Gradient: p.input(3, 64), Kept: 1, Rule: descent}}
			want = []string{"cast of 2", "loop cast", "matmul NN", "matmul NN", "update of 2"}
		}
		planned := p.planned(t, updates...)
		steps := opsOf(planned)
		require.Check(t, slices.Equal(steps, want), "trained %v: %q, want %q", trained, steps, want)
	}
}

// TestUpdateOfAnotherShape: a gradient must have as many elements as its variable.
func TestUpdateOfAnotherShape(t *testing.T) {
	p := &program{}
	w := p.input(0, 2, 3)
	p.Results = []ir.ID{p.unary(fuse.Exp, w)}
	require.Fails(t, "New", require.Err(New(&p.Program, lower.Update{Input: 0,
		Gradient: p.input(1, 3), Kept: 1, Rule: descent})), "gradient of shape")
}
