package plan

import (
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// backward is the program of exp(x v w), of which it returns the gradients of v and w.
func backward() (p *program, dv, dw ir.ID) {
	p = &program{}
	x, v, w := p.input(0, 4, 4), p.input(1, 4, 4), p.input(2, 4, 4)
	h := p.add(ir.MatMul{}, ir.Of(4, 4), x, v)
	dy := p.unary(fuse.Exp, p.add(ir.MatMul{}, ir.Of(4, 4), h, w))
	dw = p.add(ir.MatMul{TransA: true}, ir.Of(4, 4), h, dy)
	dh := p.add(ir.MatMul{TransB: true}, ir.Of(4, 4), dy, w)
	return p, p.add(ir.MatMul{TransA: true}, ir.Of(4, 4), x, dh), dw
}

// exchanged plans the program with updates of both variables.
func exchanged(t *testing.T, p *program, dv, dw ir.ID, ofV, ofW int) (*Plan, []string) {
	t.Helper()
	planned := require.Value(New(&p.Program,
		lower.Update{Input: 1, Gradient: dv, Kept: 1, Bucket: ofV, Rule: descent},
		lower.Update{Input: 2, Gradient: dw, Kept: 1, Bucket: ofW, Rule: descent}))(t)
	err := Verify(planned)
	require.That(t, err == nil, "%v in\n%v", err, planned)
	var names []string
	for _, s := range planned.Steps {
		names = append(names, s.Op.String())
	}
	return planned, names
}

// TestExchange: buckets leave in their order as soon as their gradients are there, and gradients
// are computed where they are exchanged unless somebody else reads them.
func TestExchange(t *testing.T) {
	const update, both = "update", "update of 2"
	tests := []struct {
		name     string
		ofV, ofW int
		change   func(p *program, dv, dw *ir.ID)
		want     []string
	}{
		{"beside the backward pass", 2, 1, nil, []string{"matmul NN", "matmul NN", "loop exp",
			"matmul TN", "all-reduce bucket 0", "matmul NT", "matmul TN", "all-reduce bucket 1",
			"receive bucket 0", update, "receive bucket 1", update}},
		{"the first bucket's first", 1, 2, nil, []string{"matmul NN", "matmul NN", "loop exp",
			"matmul NT", "matmul TN", "all-reduce bucket 0", "matmul TN", "all-reduce bucket 1",
			"receive bucket 0", update, "receive bucket 1", update}},
		{"one of two", 0, 1, nil, []string{"matmul NN", "matmul NN", "loop exp", "matmul TN",
			"all-reduce bucket 0", "matmul NT", "matmul TN", update, "receive bucket 0", update}},
		{"with a gradient that is wanted", 1, 1, func(p *program, dv, _ *ir.ID) {
			p.Results = []ir.ID{*dv}
		}, []string{"matmul NN", "matmul NN", "loop exp", "matmul TN", "matmul NT", "matmul TN",
			"loop copy", "all-reduce bucket 0", "receive bucket 0", both}},
		{"with a gradient for both", 1, 1, func(_ *program, dv, dw *ir.ID) { *dv = *dw },
			[]string{"matmul NN", "matmul NN", "loop exp", "matmul TN", "loop copy", "loop copy",
				"all-reduce bucket 0", "receive bucket 0", both}},
		{"with gradients that are views", 1, 1, func(p *program, dv, dw *ir.ID) {
			*dv = p.add(ir.Reshape{}, ir.Of(2, 8), *dv)
			*dw = p.add(ir.Permute{Axes: ir.Of(1, 0)}, ir.Of(4, 4), *dw)
		}, []string{"matmul NN", "matmul NN", "loop exp", "matmul TN", "matmul NT", "matmul TN",
			"loop copy", "all-reduce bucket 0", "receive bucket 0", both}},
		{"with a gradient that nothing computes", 2, 1, func(p *program, _, dw *ir.ID) { *dw = 0 },
			[]string{"matmul NN", "loop copy", "all-reduce bucket 0", "matmul NN", "loop exp",
				"matmul NT", "matmul TN", "all-reduce bucket 1", "receive bucket 0", update,
				"receive bucket 1", update}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			p, dv, dw := backward()
			if test.change != nil {
				test.change(p, &dv, &dw)
			}
			planned, names := exchanged(t, p, dv, dw, test.ofV, test.ofW)
			require.Check(t, slices.Equal(names, test.want), "the steps are\n%v, want %q", planned,
				test.want)
		})
	}
}

// Gorgonia multiplies the gradient of an operand before that of the weights.
func TestGradientsComeBeforeTheStepsThatGoOnBackwards(t *testing.T) {
	p := &program{}
	x, v, w := p.input(0, 4, 4), p.input(1, 4, 4), p.input(2, 4, 4)
	h := p.add(ir.MatMul{}, ir.Of(4, 4), x, v)
	y := p.add(ir.MatMul{}, ir.Of(4, 4), h, w)
	dy := p.unary(fuse.Exp, y)
	dh := p.add(ir.MatMul{TransB: true}, ir.Of(4, 4), dy, w)
	dw := p.add(ir.MatMul{TransA: true}, ir.Of(4, 4), h, dy)
	dv := p.add(ir.MatMul{TransA: true}, ir.Of(4, 4), x, dh)
	for name, buckets := range map[string][2]int{"exchanged": {2, 1}, "of one rank": {0, 0}} {
		_, names := exchanged(t, p, dv, dw, buckets[0], buckets[1])
		if want := []string{"matmul NN", "matmul NN", "loop exp", "matmul TN"}; !slices.Equal(
			names[:4], want) {
			t.Errorf("%s: the first steps are %q, want %q", name, names[:4], want)
		}
	}
}

// TestVerifyExchanges: between Send and Receive nobody may read a gradient, or write it.
func TestVerifyExchanges(t *testing.T) {
	p, dv, dw := backward()
	planned, names := exchanged(t, p, dv, dw, 2, 1)
	sent := slices.Index(names, "all-reduce bucket 0")
	received := slices.Index(names, "receive bucket 0")
	for what, breaking := range map[string]func(s []Step){
		"has written over it": func(s []Step) { s[sent+1].Args[0] = s[sent].Args[0] },
		"is read, but step":   func(s []Step) { s[received+1].Args[0] = s[sent].Dsts[0] },
		"step 5 has written": func(s []Step) {
			s[sent+1].Dsts[0].Buffer, s[sent+2].Args[1].Buffer = s[sent].Dsts[0].Buffer,
				s[sent].Dsts[0].Buffer
		},
	} {
		broken := *planned
		broken.Steps = slices.Clone(planned.Steps)
		for i := range broken.Steps {
			broken.Steps[i].Dsts, broken.Steps[i].Args = slices.Clone(broken.Steps[i].Dsts),
				slices.Clone(broken.Steps[i].Args)
		}
		breaking(broken.Steps)
		require.Fails(t, "Verify", Verify(&broken), what)
	}
}

// TestAccumulate: each run adds its gradients up, and only the last one exchanges, clips and
// applies them.
func TestAccumulate(t *testing.T) {
	p, dv, dw := backward()
	solver := lower.Solver{Accumulation: lower.Accumulation{Runs: 4}, Limit: 1}
	for i, gradient := range []ir.ID{dv, dw} {
		solver.Updates = append(solver.Updates, lower.Update{Input: 1 + i, Gradient: gradient,
			Kept: 1, Bucket: 2 - i, Rule: descent})
	}
	planned, err := Trained(&p.Program, solver)
	if err == nil {
		err = Verify(planned)
	}
	require.That(t, err == nil, "%v in\n%v", err, planned)
	const sum, squares, update = "loop accumulate", "squares of 2", "update of 2"
	// where the sums are
	first := []string{"matmul NN", "matmul NN", "loop exp", "matmul TN", "matmul NT", "matmul TN"}
	each := []string{"matmul NN", "matmul NN", "loop exp", "matmul TN", sum, "matmul NT",
		"matmul TN", sum}
	last := []string{"matmul NN", "matmul NN", "loop exp", "matmul TN", sum, "all-reduce bucket 0",
		"matmul NT", "matmul TN", sum,
		"all-reduce bucket 1", "receive bucket 0", "receive bucket 1", squares, "loop norm", update}
	products := map[int]int{1: 2, 2: 0} // by bucket: those of the run that exchanges it
	for kind, want := range [][]string{first, each, last} {
		var steps []string
		for _, s := range planned.Steps {
			if s.Runs.Has(kind) {
				steps = append(steps, s.Op.String())
			}
			if send, ok := s.Op.(Send); ok && send.Products != products[send.Bucket] {
				t.Errorf("%v is beside %d products, want %d", send, send.Products,
					products[send.Bucket])
			}
		}
		require.Check(t, slices.Equal(steps, want), "runs of kind %d have the steps %q, want %q",
			kind, steps, want)
	}
}

// TestTreeOfRuns: a plan whose gradients are added in a tree keeps the sums that the kinds of runs
// need, and each run of a kind that adds something has one step for each gradient.
func TestTreeOfRuns(t *testing.T) {
	for runs, kept := range map[int]int{1: 0, 2: 0, 3: 0, 4: 1, 6: 2, 8: 2} {
		p, dv, dw := backward()
		solver := lower.Solver{Accumulation: lower.Accumulation{Runs: runs, Tree: true}, Scale: 0.5,
			Limit: 1}
		for i, gradient := range []ir.ID{dv, dw} {
			solver.Updates = append(solver.Updates, lower.Update{Input: 1 + i, Gradient: gradient,
				Kept: 1, Rule: descent})
		}
		planned, err := Trained(&p.Program, solver)
		if err == nil {
			err = Verify(planned)
		}
		require.That(t, err == nil, "%v in\n%v", err, planned)
		partial := 0
		for _, b := range planned.Buffers {
			if b.Kind == PartialSum {
				partial++
			}
		}
		require.Check(t, partial == 2*kept,
			"%d runs keep %d sums beside the gradients, want %d for each", runs, partial, kept)
		kinds, _ := planned.Accumulation.Sums()
		for kind := range planned.Accumulation.Kinds() {
			steps := 0
			for _, s := range planned.Steps {
				if s.Runs.Has(kind) && s.Op.String() == "loop accumulate" {
					steps++
				}
			}
			if want := 2 * min(1, len(kinds[kind].Add)); runs > 1 && steps != want {
				t.Errorf("of %d runs, those of kind %d have %d steps that add up 2 gradients, "+
					"want %d", runs, kind, steps, want)
			}
		}
	}
}

// TestUpdatesApart: the last run ends with the exchange, whatever it exchanges, and another one has
// the rest. A plan that applies anything before is not proven.
func TestUpdatesApart(t *testing.T) {
	for _, buckets := range []int{0, 1} {
		for _, runs := range []int{1, 3} {
			p, dv, dw := backward()
			solver := lower.Solver{Limit: 1,
				Accumulation: lower.Accumulation{Runs: runs, Tree: true, Apart: true}}
			for i, gradient := range []ir.ID{dv, dw} {
				solver.Updates = append(solver.Updates, lower.Update{Input: 1 + i,
					Gradient: gradient, Kept: 1, Bucket: buckets * (2 - i), Rule: descent})
			}
			planned := require.Value(Trained(&p.Program, solver))(t)
			var steps []string
			for i, s := range planned.Steps {
				if !s.Runs.Has(ir.Apply) {
					continue
				}
				if steps = append(steps, s.Op.String()); i < len(planned.Steps)-3 {
					t.Errorf("step %d is %v", i, s.Op)
				}
			}
			want := []string{"squares of 2", "loop norm", "update of 2"}
			require.Check(t, slices.Equal(steps, want), "the updates are the steps %q, want %q",
				steps, want)
			for _, kinds := range []ir.Runs{1 << (planned.Accumulation.Kinds() - 1), 1 << 0} {
				broken := *planned
				broken.Steps = slices.Clone(planned.Steps)
				broken.Steps[len(broken.Steps)-1].Runs = kinds
				require.Check(t, Verify(&broken) != nil,
					"a step of the solver in runs %b: not noticed", kinds)
			}
		}
	}
}
