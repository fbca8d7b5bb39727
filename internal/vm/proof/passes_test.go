package proof

import (
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// builder makes programs of F32 values.
type builder struct{ ir.Program }

func (b *builder) add(op ir.Op, shape ir.Dims, args ...ir.ID) ir.ID {
	return b.Add(ir.Value{Op: op, Args: args, Shape: shape, DType: backend.F32, Name: "test"})
}

// centred subtracts from rows their sums, and adds up the columns of a product which nothing else
// reads: one loop, which writes the rows over the product.
func centred() *ir.Program {
	b, square := &builder{}, ir.Of(8, 8)
	x, w := b.add(ir.Input{Index: 0}, square), b.add(ir.Input{Index: 1}, square)
	y := b.add(ir.MatMul{}, square, x, w)
	sum := b.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(1)}, ir.Of(8), x)
	rows := b.add(ir.Broadcast{}, square, b.add(ir.Reshape{}, ir.Of(8, 1), sum))
	less := b.add(ir.Binary{Op: fuse.Sub}, square, x, rows)
	weighted := b.add(ir.Binary{Op: fuse.Mul}, square, x, y)
	b.Results = []ir.ID{less, b.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)}, ir.Of(8), weighted)}
	return &b.Program
}

// TestALoopIsFollowedPassByPass: a result may lie over an operand that a loop reads before, and not
// over one that it reads in a later pass: a plan would be wrong if loops folded columns once they
// have stored the rows.
func TestALoopIsFollowedPassByPass(t *testing.T) {
	p := centred()
	planned, err := plan.Standard().New(Verify, p, lower.Solver{})
	if err != nil || planned.Doubt != nil {
		t.Fatal(err, planned.Doubt)
	}
	last := planned.Steps[len(planned.Steps)-1]
	over := slices.ContainsFunc(last.Args, func(a plan.Ref) bool {
		return a.Buffer == last.Dsts[0].Buffer
	})
	if loop, ok := last.Op.(plan.Loop); !ok || !over || len(loop.Program.Outputs) != 2 {
		t.Fatalf("want a loop that writes over an operand, in\n%v", planned)
	}
	columnsLater := func(p *fuse.Program) (all []pass) {
		for _, of := range passesOf(p) {
			if of.writes == nil {
				all = append(all, of)
				continue
			}
			var now, later pass
			for k, out := range p.Outputs {
				if out.Folded {
					later.reads = append(later.reads, inputsOf(p, out.Value)...)
				} else {
					now.reads = append(now.reads, inputsOf(p, out.Value)...)
					now.writes = append(now.writes, k)
				}
			}
			all = append(all, now, later)
		}
		return all
	}
	require.Fails(t, "verify", verify(planned, columnsLater), "it writes over an operand")
}
