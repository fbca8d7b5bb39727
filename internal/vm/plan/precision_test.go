package plan

import (
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
)

// TestGradientsInHalfAreRoundedWhereTheyAreComputed: a plan whose gradients are exchanged in BF16
// has the steps of one without, if products of BF16 and sums compute them, a cast more for each
// other one, and gradients of BF16 in any case. Variables and what is kept for them stay F32.
func TestGradientsInHalfAreRoundedWhereTheyAreComputed(t *testing.T) {
	for name, test := range map[string]struct {
		precision ir.Precision
		change    func(p *program, dw *ir.ID)
		casts     int
	}{
		"bf16": {ir.BF16, func(*program, *ir.ID) {}, 0},
		"f32":  {ir.F32, func(*program, *ir.ID) {}, 2},
		"reshaped": {ir.BF16, func(p *program, dw *ir.ID) {
			*dw = p.add(ir.Reshape{}, ir.Of(2, 8), *dw)
		}, 0},
		"wanted, too": {ir.BF16, func(p *program, dw *ir.ID) { p.Results = []ir.ID{*dw} }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var steps [2][]string
			for i, half := range []bool{false, true} {
				p, dv, dw := backward()
				p.Precision = test.precision
				db := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)}, ir.Of(4),
					p.binary(0, p.input(4, 4, 4), p.input(5, 4, 4)))
				test.change(p, &dw)
				update := func(input int, gradient ir.ID) lower.Update {
					return lower.Update{Input: input, Gradient: gradient, Kept: 1, Bucket: 1,
						Half: half, Rule: descent}
				}
				planned, err := Trained(&p.Program, lower.Solver{Limit: 1,
					Updates: []lower.Update{update(1, dv), update(2, dw), update(3, db)}})
				if err == nil {
					err = planned.Doubt
				}
				require.NoError(t, err)
				for _, b := range planned.Buffers {
					want := backend.F32
					if b.Kind == Gradient && half {
						want = backend.BF16
					}
					require.Check(t, b.Kind != Gradient && b.Kind != State && !b.Written ||
						b.DType == want, "half %v: %s is %v", half, b.Name, b.DType)
				}
				for _, s := range planned.Steps {
					steps[i] = append(steps[i], s.Op.String())
				}
			}
			if n := len(steps[1]) - len(steps[0]); n != test.casts ||
				!slices.Contains(steps[1], "all-reduce bucket 0 in bf16") ||
				strings.Contains(strings.Join(steps[0], " "), "in bf16") {
				t.Errorf("%q, in half %q", steps[0], steps[1])
			}
		})
	}
}

// TestVerifyFindsGradientsInAnotherDType: the updates say which gradients ranks exchange in BF16.
func TestVerifyFindsGradientsInAnotherDType(t *testing.T) {
	for _, half := range []bool{false, true} {
		for what, damage := range map[string]func(p *Plan, sent *Step){
			"an update": func(p *Plan, _ *Step) { p.Updates[0].Half = !half },
			"all updates": func(p *Plan, _ *Step) {
				p.Updates[0].Half, p.Updates[1].Half = !half, !half
			},
			"the exchange": func(_ *Plan, sent *Step) {
				sent.Op = Send{Bucket: 1, Kind: backend.AllReduce, Half: !half}
			},
		} {
			p, dv, dw := backward()
			update := func(input int, gradient ir.ID) lower.Update {
				return lower.Update{Input: input, Gradient: gradient, Kept: 1, Bucket: 1,
					Half: half, Rule: descent}
			}
			planned, err := New(&p.Program, update(1, dv), update(2, dw))
			if err == nil {
				err = planned.Doubt
			}
			require.NoError(t, err)
			sent := slices.IndexFunc(planned.Steps, func(s Step) bool {
				_, ok := s.Op.(Send)
				return ok
			})
			damage(planned, &planned.Steps[sent])
			require.Check(t, Verify(planned) != nil, "half %v: it does not find %s in\n%v", half,
				what, planned)
		}
	}
}
