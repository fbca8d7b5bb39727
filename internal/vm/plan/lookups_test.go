package plan

import (
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// lookedUp plans two tables of 8 rows that 2 ranks look up 4 times each: one that multiplies what
// this gives, too, and one with no other use, and a matrix.
func lookedUp(t *testing.T, change func(*lower.Solver)) (*Plan, []lower.Update) {
	t.Helper()
	p := &program{}
	table, other, w := p.input(0, 8, 8), p.input(1, 8, 8), p.input(2, 8, 8)
	list := p.Add(ir.Value{Op: ir.Input{Index: 3}, Shape: ir.Of(4), DType: backend.I64})
	rows := ir.Of(4, 8)
	x := p.binary(fuse.Add, p.add(ir.Gather{}, rows, table, list),
		p.add(ir.Gather{}, rows, other, list))
	y := p.add(ir.MatMul{}, rows, x, w)
	z := p.add(ir.MatMul{TransB: true}, rows, y, table)
	dtable := p.add(ir.MatMul{TransA: true}, ir.Of(8, 8), z, y)
	dy := p.add(ir.MatMul{}, rows, z, table)
	dw := p.add(ir.MatMul{TransA: true}, ir.Of(8, 8), x, dy)
	dx := p.add(ir.MatMul{TransB: true}, rows, dy, w)
	dother := p.add(ir.GatherGrad{}, ir.Of(8, 8), dx, list)
	both := p.binary(fuse.Add, dother, dtable)
	updates := []lower.Update{{Input: 0, Gradient: both, Bucket: 1, Rule: descent, Kept: 1},
		{Input: 1, Gradient: dother, Rule: descent, Kept: 1},
		{Input: 2, Gradient: dw, Bucket: 3, Rule: descent, Kept: 1}}
	tables := lower.Tables(&p.Program, both, dother, dw)
	want := []lower.Table{{Rows: 4, Of: 8}, {Rows: 4, Of: 8, Alone: true}, {}}
	require.That(t, slices.Equal(tables, want), "the tables are %v, want %v", tables, want)
	for i := range updates {
		if tables[i].Rows > 0 {
			updates[i].Lookups = &lower.Lookups{Ranks: 2, Weight: 0.5, Alone: tables[i].Alone}
		}
	}
	solver := lower.Solver{Updates: updates}
	change(&solver)
	planned := p.trained(t, solver)
	require.NoError(t, require.Err(Plain(&p.Program, solver)))
	return planned, updates
}

// TestLookups: the other term of a table leaves at the beginning of the backward pass, and the rows
// of all ranks are on their way while others are updated. A bucket without members is left out.
func TestLookups(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*lower.Solver)
		want   string
	}{
		"updated last": {func(*lower.Solver) {}, "update, gather-grad axis 0, update, update"},
		"clipped": {func(s *lower.Solver) { s.Limit = 1 }, "gather-grad axis 0, squares, " +
			"squares, squares, loop norm, update, update, update"},
	} {
		planned, _ := lookedUp(t, test.change)
		var names []string
		until := 0
		for i, s := range planned.Steps {
			names = append(names, s.Op.String())
			if s.Until > 0 && i > 2 {
				until = s.Until
			}
		}
		got := strings.Join(names, ", ")
		const before = "all-reduce bucket 0, matmul NN, matmul NT, rows of all ranks, matmul TN, " +
			"all-reduce bucket 2, receive bucket 0, receive bucket 2, "
		if _, got, _ = strings.Cut(got, "matmul TN, "); got != before+test.want ||
			planned.Steps[until+1].Op != (ir.GatherGrad{}) {
			t.Errorf("%s: the rows run until step %d of\n%v, want %s", name, until, planned,
				before+test.want)
		}
	}
}

// TestVerifyLookups: what a plan of lookups may not do is found.
func TestVerifyLookups(t *testing.T) {
	planned, _ := lookedUp(t, func(*lower.Solver) {})
	at := func(name string) int {
		return slices.IndexFunc(planned.Steps, func(s Step) bool { return s.Op.String() == name })
	}
	last, sum := len(planned.Steps)-1, at("gather-grad axis 0")
	for what, damage := range map[string]func(p *Plan){
		// the rows with another weight, and of the table that is only looked up
		"is not what it must be": instead(ir.ScalarOf(0.5), 0, ir.ScalarOf(1)),
		"is not what":            instead(ir.ScalarOf(0.5), 1, ir.ScalarOf(1)),
		"is not what it must": func(p *Plan) { // the rows of this rank alone
			p.Steps[sum].Args[0] = p.Steps[at("rows of all ranks")+1].Args[0]
			p.Steps[sum].Args[0].Shape = ir.Of(8, 8)
		},
		"must be": func(p *Plan) { p.Steps[last].Args[1] = p.Steps[last].Args[0] },
		"it comes as number 0": func(p *Plan) {
			p.Updates[1].Bucket = 1
			p.Steps[at("all-reduce bucket 0")].Op = Send{Bucket: 2, Kind: backend.AllReduce}
		},
		"it meets step": func(p *Plan) { p.Steps[at("rows of all ranks")].Until = sum },
	} {
		broken := *planned
		broken.Updates, broken.Steps = slices.Clone(planned.Updates), slices.Clone(planned.Steps)
		for i := range broken.Steps {
			broken.Steps[i].Args = slices.Clone(broken.Steps[i].Args)
		}
		damage(&broken)
		require.Fails(t, "Verify", Verify(&broken), what)
	}
}
