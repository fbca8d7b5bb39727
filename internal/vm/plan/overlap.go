package plan

import (
	"slices"

	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
)

// Operations of the graph that run where their operands are, collectives of layers, run beside
// products which do not need their results: the all-reduce of an input's gradient in a layer whose
// weights are divided, beside the product that is the weights' gradient.

// startEarly moves operations that run where their operands are before what they do not need, if
// there are products among that: up to the operation before, and to the last product but one that
// they need, so that what is moved behind keeps its operands for a product longer alone.
func (g *grouping) startEarly(all []*group) []*group {
	first := 0
	for i, y := range all {
		op, opaque := g.program.Values[y.members[0]].Op.(ir.Opaque)
		if !opaque {
			continue
		}
		needed, products, before := map[*group]bool{y: true}, 0, 0
		from := i
		for ; from >= first && before < 2; from-- {
			z := all[from]
			switch product := multiplies(g.program.Values[z.members[0]].Op); {
			case !needed[z] && product:
				products++
			case needed[z] && product:
				before++
			}
			for other := range g.needsOf(z) {
				needed[other] = needed[other] || needed[z]
			}
		}
		if op.Placed && products > 0 {
			slices.SortStableFunc(all[from+1:i+1], func(a, b *group) int {
				switch {
				case needed[a] == needed[b]:
					return 0
				case needed[a]:
					return -1
				}
				return 1
			})
		}
		first = i + 1
	}
	return all
}

// overlap finds until when operations of the graph run beside the steps behind them.
func (p *Plan) overlap() {
	for i := range p.Steps {
		s := &p.Steps[i]
		s.Until = 0
		if op, ok := s.Op.(ir.Opaque); !ok || !op.Placed {
			continue
		}
		products, until := 0, i
		for j := i + 1; j+1 < len(p.Steps) && p.Steps[j].Runs == s.Runs && p.apart(s, j); j++ {
			switch p.Steps[j].Op.(type) {
			case ir.MatMul, ir.Convolution, ir.Attention, ir.AttentionGrad, ir.LSTM:
				products++
			}
			until = j
		}
		for until > i && p.Steps[until+1].Epilogue { // which may run in the step before it
			if multiplies(p.Steps[until].Op) {
				products--
			}
			until--
		}
		beside := products > 0 || s.Op.(ir.Opaque).Index == lower.Rows
		if beside && until > i && p.Steps[until+1].Runs == s.Runs {
			s.Until = until
		}
	}
}

// apart reports whether a step neither reads nor writes what another one, which is under way,
// writes, nor writes what that reads. Operations of the graph run one after the other.
func (p *Plan) apart(under *Step, step int) bool {
	s := &p.Steps[step]
	if _, opaque := s.Op.(ir.Opaque); opaque {
		return false
	}
	meets := func(x, y []Ref) bool {
		return slices.ContainsFunc(x, func(a Ref) bool {
			return slices.ContainsFunc(y, func(b Ref) bool {
				return p.overlaps(a.Buffer, b.Buffer)
			})
		})
	}
	return !meets(under.Dsts, s.Dsts) && !meets(under.Dsts, s.Args) && !meets(under.Args, s.Dsts)
}

// overlaps reports whether two buffers have memory in common, as far as they have places.
func (p *Plan) overlaps(x, y int) bool {
	a, b := &p.Buffers[x], &p.Buffers[y]
	switch {
	case x == y, !a.placed() && !b.placed() && a.memory() == b.memory() && a.Kind != Scalar:
		return true
	case a.Within == y+1, b.Within == x+1, a.Within > 0 && a.Within == b.Within:
		return true
	}
	return p.ArenaBytes > 0 && a.placed() && b.placed() && a.Offset < b.Offset+b.Bytes &&
		b.Offset < a.Offset+a.Bytes
}
