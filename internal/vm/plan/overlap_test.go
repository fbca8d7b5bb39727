package plan

import (
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// divided is a layer whose weights ranks divide, backwards: what its input's gradient is added up
// of comes behind the weights' gradient in the program. A step before it exchanges, too.
func divided(placed bool) *program {
	p := &program{}
	dy, w, x := p.input(0, 8, 4), p.input(1, 4, 4), p.input(2, 8, 4)
	sum := func(x ir.ID, index int) ir.ID {
		return p.add(ir.Opaque{Index: index, Name: "sum", Placed: placed}, ir.Of(8, 4), x)
	}
	first := sum(dy, 0)
	dw := p.add(ir.MatMul{TransA: true}, ir.Of(4, 4), x, first)
	bias := p.add(ir.Reduce{Axes: ir.Of(0)}, ir.Of(4), first)
	dx := sum(p.add(ir.MatMul{TransB: true}, ir.Of(8, 4), first, w), 1)
	p.Results = []ir.ID{dw, bias, p.unary(fuse.Exp, dx)}
	return p
}

// TestSumOfRanksBesideTheWeightsGradient: an operation of the graph begins as soon as its operand
// is there, and what does not need its result runs beside it.
func TestSumOfRanksBesideTheWeightsGradient(t *testing.T) {
	planned, names := ops(t, divided(true))
	want := []string{"sum", "matmul NT", "sum", "matmul TN", "loop reduce-sum over (0)", "loop exp"}
	require.That(t, slices.Equal(names, want) && planned.Doubt == nil,
		"the steps are %q, want %q: %v", names, want, planned.Doubt)
	for i, s := range planned.Steps {
		until := 0
		if i == 2 {
			until = 4
		}
		require.Check(t, s.Until == until, "step %d runs until step %d, want %d", i, s.Until, until)
	}
	if text := planned.String(); !strings.Contains(text, "until step 4") {
		t.Error(text)
	}
	if planned, names = ops(t, divided(false)); planned.Steps[slices.Index(names, "host sum")].
		Until > 0 || slices.Index(names, "matmul TN") > slices.Index(names, "matmul NT") {
		t.Errorf("what runs by its Do runs beside others:\n%v", planned)
	}
}

// TestVerifyFindsAProductBehindWhatReadsIt: as it would be if it was moved too far.
func TestVerifyFindsAProductBehindWhatReadsIt(t *testing.T) {
	planned, names := ops(t, divided(true))
	at := slices.Index(names, "matmul NT")
	broken := *planned
	broken.Steps = slices.Clone(planned.Steps)
	broken.Steps[at], broken.Steps[at+1] = broken.Steps[at+1], broken.Steps[at]
	for i := range broken.Steps { // as planning numbers them
		s := &broken.Steps[i]
		s.Dsts, s.Args = slices.Clone(s.Dsts), slices.Clone(s.Args)
		for k := range s.Dsts {
			s.Dsts[k].Step = i
		}
	}
	require.Fails(t, "Verify", Verify(&broken), "is read")
}

// TestVerifyFindsWhatMeetsASumUnderWay: a step that reads its result, or writes over its operand.
func TestVerifyFindsWhatMeetsASumUnderWay(t *testing.T) {
	planned, _ := ops(t, divided(true))
	for name, test := range map[string]struct {
		change func(p *Plan)
		want   string
	}{
		"its result is read": {func(p *Plan) {
			p.Steps = append(p.Steps, p.Steps[5])
			p.Steps[6].Dsts = slices.Clone(p.Steps[5].Dsts)
			p.Steps[6].Dsts[0].Step = 6
			p.Steps[2].Until = 5
		}, "it meets step 2, "},
		"its operand is written over": {func(p *Plan) {
			operand := p.Buffers[p.Steps[2].Args[0].Buffer]
			p.Buffers[p.Steps[3].Dsts[0].Buffer].Offset = operand.Offset
		}, "it meets step 2, "},
		"nothing waits":           {func(p *Plan) { p.Steps[2].Until = 5 }, "nothing waits for it"},
		"another kind of step":    {func(p *Plan) { p.Steps[1].Until = 3 }, "nothing waits for it"},
		"what waits comes before": {func(p *Plan) { p.Steps[2].Until = 1 }, "nothing waits for it"},
	} {
		broken := *planned
		broken.Steps, broken.Buffers = slices.Clone(planned.Steps), slices.Clone(planned.Buffers)
		test.change(&broken)
		require.Fails(t, name, Verify(&broken), test.want)
	}
}
