package plan

import (
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// gates has a loop whose two results are put side by side, and rounded for a product.
func gates() *program {
	p := &program{Program: ir.Program{Precision: ir.BF16}}
	x, y, w := p.input(0, 8, 8), p.input(1, 8, 8), p.input(2, 16, 8)
	z := p.binary(fuse.Mul, p.product(x, y), p.product(y, x))
	c := p.add(ir.Concat{Axis: 1}, ir.Of(8, 16), p.unary(fuse.Tanh, z), p.unary(fuse.Exp, z))
	p.Results = []ir.ID{p.product(c, w),
		p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)}, ir.Of(16), c)}
	return p
}

// TestVerifyFindsBrokenChainsOfEpilogues: the product before a loop may run it, and the loop may
// store what both steps behind it do. None of them may write over what one before it reads, and
// nothing may come between.
func TestVerifyFindsBrokenChainsOfEpilogues(t *testing.T) {
	whole, names := ops(t, gates())
	const product, loop, concat, cast, other = 3, 4, 5, 6, 7
	want := []string{"loop mul tanh exp", "concat axis 1", "loop cast"}
	require.That(t, slices.Equal(names[loop:other], want) && whole.Steps[loop].Epilogue &&
		whole.Steps[concat].Epilogue && whole.Steps[cast].Epilogue, "%q, want epilogues %q in\n%v",
		names, want, whole)
	over := func(step, before, arg int) func(p *Plan) {
		return func(p *Plan) {
			p.Buffers[p.Steps[step].Dsts[0].Buffer].Offset =
				p.Buffers[p.Steps[before].Args[arg].Buffer].Offset
		}
	}
	to := func(at int) func(p *Plan) {
		return func(p *Plan) {
			s := p.Steps[other]
			p.Steps = slices.Insert(slices.Delete(p.Steps, other, other+1), at, s)
			p.Buffers[s.Dsts[0].Buffer].Offset, p.ArenaBytes = p.ArenaBytes, p.ArenaBytes+256
			renumber(p)
		}
	}
	mark := func(step int) func(p *Plan) {
		return func(p *Plan) { p.Steps[step].Epilogue = true }
	}
	const overwrites, none = "it writes over an operand of step ", "is no epilogue"
	for name, test := range map[string]struct {
		change func(p *Plan)
		want   string
	}{
		"concat over an operand of the loop":  {over(concat, loop, 1), overwrites},
		"cast over an operand of the loop":    {over(cast, loop, 1), overwrites},
		"cast over an operand of the product": {over(cast, product, 0), overwrites},
		"cast over a part of the concat":      {over(cast, concat, 0), overwrites},
		"a step between loop and concat":      {to(concat), none},
		"a step between concat and cast":      {to(cast), none},
		"other runs":                          {func(p *Plan) { p.Steps[loop].Runs = 1 }, none},
		"of another step":                     {mark(other), none},
		"of none":                             {mark(0), none},
	} {
		broken := *whole
		broken.Steps, broken.Buffers = slices.Clone(whole.Steps), slices.Clone(whole.Buffers)
		test.change(&broken)
		require.Fails(t, name, Verify(&broken), test.want)
	}
}

// renumber has values say which steps write them once steps have moved.
func renumber(p *Plan) {
	to := map[int]int{-1: -1}
	for i := range p.Steps {
		s := &p.Steps[i]
		s.Dsts, s.Args = slices.Clone(s.Dsts), slices.Clone(s.Args)
		for k := range s.Dsts {
			to[s.Dsts[k].Step], s.Dsts[k].Step = i, i
		}
		for k := range s.Args {
			s.Args[k].Step = to[s.Args[k].Step]
		}
	}
	p.Results = slices.Clone(p.Results)
	for i := range p.Results {
		p.Results[i].Step = to[p.Results[i].Step]
	}
}

// TestALoopStoresWhatItRoundsOnly: not what a concatenation has rounded, with all digits.
func TestALoopStoresWhatItRoundsOnly(t *testing.T) {
	for _, test := range []struct {
		of, to backend.DType
		want   bool
	}{{backend.F32, backend.BF16, true}, {backend.BF16, backend.F32, false}} {
		p := &program{}
		square := ir.Of(8, 8)
		cast := func(x ir.ID, shape ir.Dims, d backend.DType) ir.ID {
			id := p.add(ir.Cast{}, shape, x)
			p.Values[id].DType = d
			return id
		}
		x := p.unary(fuse.Tanh, p.binary(fuse.Mul, p.input(0, 8, 8), p.input(1, 8, 8)))
		c := p.add(ir.Concat{Axis: 1}, ir.Of(8, 16), cast(p.unary(fuse.Neg, x), square, test.of),
			cast(p.unary(fuse.Exp, x), square, test.of))
		p.Values[c].DType = test.of
		p.Results = []ir.ID{c, cast(c, ir.Of(8, 16), test.to)}
		planned, names := ops(t, p)
		last := len(names) - 1
		require.Check(t, names[last] == "loop cast" && planned.Steps[last-1].Epilogue &&
			planned.Steps[last].Epilogue == test.want, "%v to %v: want an epilogue: %v, in\n%v",
			test.of, test.to, test.want, planned)
	}
}

// TestNothingWaitsInAnEpilogue: an operation of the graph ends before a step that may run the next
// one.
func TestNothingWaitsInAnEpilogue(t *testing.T) {
	p := &program{}
	x, y := p.input(0, 8, 8), p.input(1, 8, 8)
	sum := p.add(ir.Opaque{Name: "sum", Placed: true}, ir.Of(8, 8), x)
	p.Results = []ir.ID{p.product(x, y), p.binary(fuse.Add, p.product(y, x), sum)}
	planned, names := ops(t, p)
	want := []string{"sum", "matmul NN", "matmul NN", "loop add"}
	if !slices.Equal(names, want) || planned.Steps[0].Until != 1 || !planned.Steps[3].Epilogue {
		t.Fatalf("%q until %d, want %q until 1", names, planned.Steps[0].Until, want)
	}
	planned.Steps[0].Until = 2
	require.Fails(t, "Verify", Verify(planned), "nothing waits")
}
